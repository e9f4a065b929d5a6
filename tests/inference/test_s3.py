"""A job on a real S3 server: manifest, shards and join, and storage that goes away or refuses."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, write_part

_NEEDED = "moto's server and s3fs aren't installed: pip install 'moto[server]' s3fs"
pytest.importorskip("moto.server", reason=_NEEDED)
s3fs = pytest.importorskip("s3fs", reason=_NEEDED)


_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class _Server:
    """Moto's S3 behind a door that can be shut, or deny reading some objects.

    Attributes:
        url: what clients are told.
        shut: connections are closed without a word.
        denied: what a request begins with whose answer is 403.
        turned_away: connections and requests that got nothing.
    """

    def __init__(self) -> None:
        self.shut, self.denied, self.turned_away = False, b"", 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **silent)
        end = time.monotonic() + 60
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._admit, daemon=True).start()

    def stop(self) -> None:
        self._door.close()
        self._process.kill()
        self._process.wait()

    def _admit(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as s3, suppress(OSError):
            threading.Thread(target=_pour, args=(s3, client), daemon=True).start()
            while data := client.recv(1 << 16):
                if self.shut:
                    self.turned_away += 1
                    break
                if self.denied and data.startswith(self.denied):
                    self.turned_away += 1
                    head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(_DENIED)}\r\n\r\n"
                    client.sendall(head.encode() + _DENIED)
                    break
                s3.sendall(data)


def _pour(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    server = _Server()
    yield server
    server.stop()


@pytest.fixture
def store(server: _Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system with an empty bucket, as the environment names it to any process."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    import fsspec

    settings = {"endpoint_url": server.url, "config_kwargs": {"retries": {"max_attempts": 1}}}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    fs = s3fs.S3FileSystem(**settings, use_listings_cache=False, skip_instance_cache=True)
    fs.mkdir("archive")
    yield fs
    fs.rm("archive", recursive=True)


def _fill(store: Any, folder: Path) -> None:
    """Thirty images in two folders of the bucket, one of them cut short."""
    for i in range(30):
        file = folder / f"{i:03}.png"
        write_part(file, i, mark=(30, 50) if i % 9 == 0 else None)
        data = file.read_bytes()[: 300 if i == 7 else None]
        store.pipe_file(f"archive/images/{'a' if i < 20 else 'b #1'}/{i:03}.png", data)


def _run(command: Command, name: str, *arguments: object) -> tuple[int, str]:
    code, out, err = command(name, [str(a) for a in arguments])
    return code, out + err


def _listed(command: Command) -> str:
    place = "s3://archive/list.parquet"
    arguments = ["--input", "s3://archive/images", "--chunk", 8, "--output", place]
    code, said = _run(command, "manifest", *arguments)
    assert code == 0, said
    return place


def _shards(command: Command, run: Path, manifest: str, count: int, dest: str) -> None:
    for i in range(count):
        more = ["--shard", f"{i}/{count}", "--output", dest, "--device", "cpu", "--threads", 1]
        code, said = _run(command, "infer", "--model", run, "--manifest", manifest, *more)
        assert code == 0, said


def test_a_job_from_bucket_to_bucket_has_the_rows_of_local_files(
    store: Any, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    _fill(store, tmp_path / "images")
    manifest = _listed(command)
    _shards(command, run_folder, manifest, 2, "s3://archive/out")
    _shards(command, run_folder, manifest, 3, str(tmp_path / "here"))
    tables = []
    for name, dest in ("a", "s3://archive/out"), ("b", str(tmp_path / "here")):
        table = f"s3://archive/{name}.csv"
        code, said = _run(command, "merge-results", manifest, dest, "--output", table)
        assert code == 3, said
        assert "29 of 30 images scored" in said
        tables.append(store.cat_file(f"archive/{name}.csv"))
    assert tables[0] == tables[1]
    assert tables[0].count(b"s3://archive/images/") >= 30
    drawn = store.find("archive/out/heatmaps")
    assert sorted(name.rpartition("/")[2] for name in drawn) == sorted(
        file.name for file in (tmp_path / "here" / "heatmaps").rglob("*.png")
    )
    # What is in the bucket by then isn't taken for images.
    again = "s3://archive/again.parquet"
    code, said = _run(command, "manifest", "--input", "s3://archive/out", "--output", again)
    assert code == 2
    assert "no images" in said or "holds no" in said, said


def test_storage_that_goes_away_for_a_while_is_waited_for(
    store: Any, server: _Server, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    _fill(store, tmp_path / "images")
    manifest = _listed(command)
    server.turned_away, server.shut = 0, True
    threading.Timer(3.0, setattr, (server, "shut", False)).start()
    _shards(command, run_folder, manifest, 1, "s3://archive/out")
    assert server.turned_away > 1
    code, said = _run(
        command, "merge-results", manifest, "s3://archive/out", "--output", tmp_path / "t.csv"
    )
    assert code == 3
    assert "29 of 30 images scored" in said


def test_storage_that_is_gone_or_refuses_is_named(
    store: Any,
    server: _Server,
    run_folder: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from anomaly.files import storage

    monkeypatch.setattr(storage, "_PAUSES", (0.01, 0.01))
    _fill(store, tmp_path / "images")
    manifest = _listed(command)
    where = ["--output", "s3://archive/out", "--device", "cpu", "--threads", 1]
    shard = ["--model", run_folder, "--manifest", manifest, *where]

    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        for name in ("AWS_EC2_METADATA_DISABLED", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, "true")
        s3fs.S3FileSystem.clear_instance_cache()
        code, said = _run(command, "infer", *shard)
        s3fs.S3FileSystem.clear_instance_cache()
        assert code == 2
        assert "s3://archive/list.parquet: no way to sign in" in said
    server.denied = b"GET /archive/images/"
    code, said = _run(command, "infer", *shard)
    server.denied = b""
    assert code == 0, said  # in chunks of eight, it may well be these images alone
    assert "0 of 30 images scored" in said
    server.denied = b"GET /archive/list.parquet"
    code, said = _run(command, "infer", *shard, "--resume")
    server.denied = b""
    assert code == 2
    assert "s3://archive/list.parquet can't be read: access is denied" in said
    missing = ["--input", "s3://nowhere/images", "--output", tmp_path / "m.parquet"]
    code, said = _run(command, "manifest", *missing)
    assert code == 2
    assert "s3://nowhere/images" in said
    assert "Traceback" not in said
    server.shut = True
    try:
        code, said = _run(command, "infer", *shard, "--resume")
    finally:
        server.shut = False
    assert code == 2
    assert "the storage doesn't answer, after 3 attempts" in said
    assert "Traceback" not in said


def test_what_the_parts_say_is_read_back(
    store: Any, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    """A second model is refused, and a shard goes on with the chunks that have no part."""
    _fill(store, tmp_path / "images")
    manifest = _listed(command)
    _shards(command, run_folder, manifest, 1, "s3://archive/out")
    parts = sorted(store.ls("archive/out/results.parts", detail=False))
    before = store.info(parts[0])["LastModified"]
    store.rm_file(parts[2])
    more = ["--output", "s3://archive/out", "--device", "cpu", "--threads", 1]
    arguments = ["--model", run_folder, "--manifest", manifest, *more]
    code, said = _run(command, "infer", *arguments)
    assert (code, "add --resume to " in said) == (2, True)
    code, said = _run(command, "infer", *arguments, "--resume")
    assert code == 0
    assert store.info(parts[0])["LastModified"] == before
    job = json.loads(store.cat_file("archive/out/results.job.json"))
    store.pipe_file("archive/out/results.job.json", json.dumps({**job, "model": "other"}).encode())
    code, said = _run(command, "infer", *arguments, "--resume")
    assert code == 2
    assert "give another --output" in said
