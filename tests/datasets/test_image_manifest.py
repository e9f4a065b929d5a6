"""Manifests: what they list, in which order, and how much memory that takes."""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from conftest import REPOSITORY, Command
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.cluster.commands import Listing
from anomaly.datasets import image_manifest
from anomaly.datasets.image_manifest import read_manifest, write_manifest
from anomaly.errors import AnomalyError, DataError
from anomaly.files import storage


def _lines(file: object) -> list[str]:
    manifest = read_manifest(str(file))
    return [line for chunk in range(len(manifest.sizes)) for line in manifest.chunk(chunk)]


def _reference(names: list[str]) -> list[str]:
    def key(name: str) -> tuple[bytes, bytes]:
        data = name.encode()
        return hashlib.blake2b(data, digest_size=8).digest(), data

    return sorted(set(names), key=key)


@settings(max_examples=8)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), min_size=1
    ),
    st.integers(1, 7),
    st.integers(1, 9),
)
def test_any_names_once_in_the_order_of_their_hash(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], chunk: int, held: int
) -> None:
    file = tmp_path_factory.mktemp("lists") / "m.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_manifest, "_HELD", held)
        written = write_manifest(names, str(file), chunk)
    expected = _reference(names)
    assert written == (len(expected), len(names) - len(expected))
    assert _lines(file) == expected
    manifest = read_manifest(str(file))
    assert manifest.images == len(expected)
    assert all(size == chunk for size in manifest.sizes[:-1])
    assert [file.name] == os.listdir(file.parent)


def test_the_order_of_listing_makes_no_difference(tmp_path: Path) -> None:
    names = [f"s3://bucket/{i % 17}/{i}.png" for i in range(2500)]
    turned = random.Random(0).sample(names, len(names))
    for name, listed, chunk in (("a", names, 100), ("b", turned, 100), ("c", names, 200)):
        write_manifest(listed, str(tmp_path / name), chunk)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    ids = {read_manifest(str(tmp_path / name)).id for name in "abc"}
    assert len(ids) == 2
    write_manifest(names[1:], str(tmp_path / "d"), 100)
    assert read_manifest(str(tmp_path / "d")).id not in ids


_MEMORY = """
import resource, sys
from anomaly.datasets.image_manifest import read_manifest, write_manifest

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

count = int(sys.argv[1])
names = (f"s3://an-archive/line-{i % 50:02}/2026/{i:012}.png" for i in range(count))
write_manifest(names, sys.argv[2])
written = peak()
manifest = read_manifest(sys.argv[2])
assert sum(len(manifest.chunk(i)) for i in range(len(manifest.sizes))) == count
print(written, peak())
"""


@pytest.mark.slow
def test_memory_is_flat_to_a_million_lines(tmp_path: Path) -> None:
    peaks = []
    for count in (200_000, 1_000_000):
        ran = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(count), tmp_path / f"{count}.parquet"],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append([float(number) for number in ran.stdout.split()])
    (written, read), (written_more, read_more) = peaks
    assert written_more < written + 15, peaks  # MB
    assert read_more < read + 15, peaks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.JPG", "deep/c.tif", "deep/er/d.png", "notes.txt", ".hidden.png"):
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_bytes(b"")
    return tmp_path / "f"


def _manifest(command: Command, tmp_path: Path, *arguments: object) -> list[str]:
    output = tmp_path / "m.parquet"
    code, _, err = command("manifest", [*arguments, "--output", output, "--overwrite"])
    assert code == 0, err
    return sorted(_lines(output))


def test_folders_patterns_and_files(folder: Path, tmp_path: Path, command: Command) -> None:
    every = [str(folder / name) for name in ("a.png", "b.JPG", "deep/c.tif", "deep/er/d.png")]
    assert _manifest(command, tmp_path, "--input", folder) == every
    assert _manifest(command, tmp_path, "--input", folder / "*.png") == every[:1]
    assert _manifest(command, tmp_path, "--input", folder / "**" / "*.png") == [every[0], every[3]]
    assert _manifest(command, tmp_path, "--input", folder / "**" / "*", folder) == every
    assert _manifest(command, tmp_path, "--input", folder / "notes.txt") == [
        str(folder / "notes.txt")
    ]
    url = f"file://{folder}"
    assert _manifest(command, tmp_path, "--input", url) == every
    # One image under several names.
    again = (f"{url}/a.png", f"{folder}//deep/./c.tif", f"{folder}/notes.txt", f"{url}/./notes.txt")
    found = _manifest(command, tmp_path, "--input", folder, *again)
    assert found == sorted([*every, str(folder / "notes.txt")])
    output = tmp_path / "m.parquet"
    code, out, err = command("manifest", ["--input", folder, folder, "--output", output])
    assert (code, out) == (2, "")
    assert "exists already; add --overwrite" in err
    arguments = ["--input", folder, folder, "--output", output, "--overwrite", "--chunk", 3]
    code, out, err = command("manifest", arguments)
    assert out == f"4 images, 4 named more than once in 2 chunks: {output}\n"
    assert "2 files are skipped" in err


def test_lists(tmp_path: Path, command: Command) -> None:
    names = ["s3://bucket/a, b.png", "/ä/c.png", "d.png"]
    table = pyarrow.table({"size": [1, 2, 3], "path": names})
    pyarrow.parquet.write_table(table, tmp_path / "l.parquet")
    (tmp_path / "l.csv").write_text('size,path\n1,"s3://bucket/a, b.png"\n2,/ä/c.png\n3,d.png\n')
    (tmp_path / "l16.csv").write_text(
        "path;size\ns3://bucket/a, b.png;1\n/ä/c.png;2\nd.png;3\n", "utf-16"
    )
    (tmp_path / "l.txt").write_text("\n".join(names) + "\n\n", "utf-8-sig")
    for name in ("l.parquet", "l.csv", "l16.csv", "l.txt"):
        assert _manifest(command, tmp_path, "--list", tmp_path / name) == sorted(names), name


def test_a_list_with_windows_paths(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (tmp_path / "l.txt").write_text("deep\\c.tif\ndeep\\none.tif\nC:\\c.tif\ns3://b/a\\b.png\n")
    pyarrow.parquet.write_table(pyarrow.table({"path": ["deep\\c.tif"]}), tmp_path / "l.parquet")
    found = _manifest(command, tmp_path, "--list", tmp_path / "l.txt", tmp_path / "l.parquet")
    assert found == ["C:\\c.tif", "deep/c.tif", "deep\\none.tif", "s3://b/a\\b.png"]


def test_object_storage(command: Command, tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    try:
        for name in ("a.png", "x/b.jpg", "x/.thumb/c.png", "x/notes.txt", "out/heatmaps/1/2.png"):
            system.pipe_file(f"/bucket/{name}", b"")
        system.pipe_file("/bucket/out/results.job.json", b"{}")
        system.pipe_file("/lists/l.csv", b"path\nmemory://bucket/q.png\n")
        found = _manifest(command, tmp_path, "--input", "memory://bucket")
        assert found == ["memory:///bucket/a.png", "memory:///bucket/x/b.jpg"]
        found = _manifest(command, tmp_path, "--input", "memory://bucket/x/*")
        assert found == ["memory:///bucket/x/b.jpg"]
        found = _manifest(command, tmp_path, "--input", "memory://bucket/a.png")
        assert found == ["memory:///bucket/a.png"]
        odd = ["a[1].png", "c::d.png", "f[2]/e.png", "q?.png"]
        for name in (*odd, "c", "qa.png"):  # what these would mean otherwise
            system.pipe_file(f"/odd/{name}", name.encode())
        found = _manifest(command, tmp_path, "--input", "memory://odd")
        assert found == [f"memory:///odd/{name}" for name in sorted([*odd, "qa.png"])]
        for name in odd:
            assert storage.read(f"memory://odd/{name}") == name.encode()
            given = f"memory://odd/{name.partition('/')[0]}"
            found = _manifest(command, tmp_path, "--input", given)
            assert found == [f"memory:///odd/{name}"]
        found = _manifest(command, tmp_path, "--list", "memory://lists/l.csv")
        assert found == ["memory://bucket/q.png"]
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def _refusals(folder: Path) -> Iterator[tuple[list[object], str]]:
    missing, empty = folder / "deeq", folder / "empty"
    empty.mkdir()
    (folder / "bad.parquet").write_bytes(b"PAR1 and no more")
    pyarrow.parquet.write_table(pyarrow.table({"file": ["a"]}), folder / "column.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"path": ["a", None]}), folder / "null.parquet")
    (folder / "latin.csv").write_bytes("path\nä.png\n".encode("latin-1"))
    (folder / "none.csv").write_text("path\n")
    (folder / "bare.csv").write_text("file,size\na.png,3\n")
    yield [], "give --input, --list, or both"
    yield ["--input", missing], f"--input {missing} doesn't exist"
    yield ["--input", missing], "did you mean 'deep'"
    yield ["--input", empty], f"no images in --input {empty}"
    yield ["--input", folder / "*.bmp"], "no images in --input"
    yield ["--input", folder, "--chunk", 0], "--chunk is 0; it must be from 1 to 1,000,000"
    yield ["--list", folder / "nowhere.csv"], "can't be read: it doesn't exist"
    yield ["--list", folder / "bad.parquet"], "is a damaged Parquet file"
    yield ["--list", folder / "column.parquet"], "lacks the column 'path'"
    yield ["--list", folder / "null.parquet"], "None in the column 'path' isn't text"
    yield ["--list", folder / "latin.csv"], r"latin.csv line 2: \udce4.png: its name isn't UTF-8"
    (folder / "odd.txt").write_bytes(b"a.png\nb\0.png\n")
    yield ["--list", folder / "odd.txt"], r"odd.txt line 2: 'b\x00.png' is empty or holds a null"
    yield ["--list", folder / "none.csv"], "there are no images to list"
    yield ["--list", folder / "bare.csv"], "lacks the column 'path'"
    yield ["--input", "nope://bucket"], "nope:// isn't known"


def test_refusals(folder: Path, tmp_path: Path, command: Command) -> None:
    output = tmp_path / "m.parquet"
    for arguments, said in _refusals(folder):
        code, out, err = command("manifest", [*arguments, "--output", output])
        assert (code, out) == (2, ""), (arguments, out)
        assert said in err
        assert err.count("error") == 1
        assert os.listdir(tmp_path) == ["f"]  # nothing half made
    (tmp_path / "f" / os.fsdecode(b"\xff.png")).write_bytes(b"")
    code, _, err = command("manifest", ["--input", folder, "--output", output])
    assert code == 2
    assert r"\udcff.png: its name isn't UTF-8" in err


def test_what_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no Parquet")
    pyarrow.parquet.write_table(pyarrow.table({"path": ["a"]}), tmp_path / "table")
    for name in ("text", "table"):
        with pytest.raises(DataError, match="isn't a manifest of images; make one with"):
            read_manifest(str(tmp_path / name))
    with pytest.raises(DataError, match="can't be read: it doesn't exist"):
        read_manifest(str(tmp_path / "nowhere"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # where another test has used it
    with pytest.raises(DataError, match=r"^s3://bucket/m needs another package: Install s3fs"):
        read_manifest("s3://bucket/m")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"needs fsspec: pip install 'anomaly\[remote\]'"):
        read_manifest("memory://bucket/m")
    monkeypatch.setattr(image_manifest.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnomalyError, match=r"needs pyarrow: pip install 'anomaly\[parquet\]'"):
        write_manifest(["a.png"], str(tmp_path / "m.parquet"))
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_read_again_when_storage_has_hiccups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.0))
    system = fsspec.filesystem("memory")
    try:
        write_manifest([f"{i}.png" for i in range(10)], "memory://m.parquet", 4)
        manifest = read_manifest("memory://m.parquet")
        first = manifest.chunk(0)
        manifest._file.close(force=True)  # what a broken connection comes to
        assert manifest.chunk(0) == first
        system.rm_file("/m.parquet")
        manifest._file.close(force=True)
        with pytest.raises(DataError, match=r"m\.parquet can't be read"):
            manifest.chunk(1)
    finally:
        system.store.clear()


def test_a_damaged_manifest_is_told_at_once(tmp_path: Path) -> None:
    place = tmp_path / "m.parquet"
    write_manifest((f"/x/{i:04}.png" for i in range(3000)), str(place))
    data = bytearray(place.read_bytes())
    whole = bytes(data)
    data[100:400] = bytes(300)
    place.write_bytes(data)
    begun = time.monotonic()
    with pytest.raises(DataError, match="is damaged; make it again"):
        read_manifest(str(place)).chunk(0)
    rng = random.Random(0)
    for _ in range(200):  # in its footer most of all, which is read first
        data = bytearray(whole)
        at = [len(data) - 1 - rng.randrange(600) for _ in range(rng.randrange(1, 20))]
        for byte in at:
            data[byte] = rng.randrange(256)
        place.write_bytes(data)
        with suppress(DataError):
            manifest = read_manifest(str(place))
            list(map(manifest.chunk, range(len(manifest.sizes))))
        with suppress(DataError):
            list(Listing([], [str(place)]))
    assert time.monotonic() - begun < 10  # storage elsewhere is asked again for 15 s each
