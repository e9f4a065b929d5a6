"""Shards: one job by many processes ends with the same table, whatever happens to them."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fsspec
import pyarrow.parquet
import pytest
from conftest import REPOSITORY, Command, write_part

from anomaly.cluster.parts import Shard
from anomaly.errors import DataError
from anomaly.files import storage
from anomaly.files.tables import csv_rows

_IMAGES, _CHUNK = 300, 32
_BROKEN, _TEXT, _GONE = 3, 2, 1


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in folders: some cut short, some no images, one that a list names and isn't there."""
    folder = tmp_path_factory.mktemp("archive") / "images"
    for i in range(_IMAGES - _BROKEN - _TEXT):
        file = folder / f"{i % 5}" / f"{i:03}.png"
        write_part(file, i, mark=(30, 50) if i % 9 == 0 else None)
    data = (folder / "0" / "000.png").read_bytes()
    for i in range(_BROKEN):
        (folder / "1" / f"cut{i}.png").write_bytes(data[: 300 + 100 * i])
    for i in range(_TEXT):
        (folder / "2" / f"text{i}.jpg").write_text("no picture")
    (folder / "notes.txt").write_text("passed over")
    return folder


@pytest.fixture(scope="module")
def manifest(archive: Path) -> Path:
    from anomaly.cli import main

    file = archive.parent / "manifest.parquet"
    (archive.parent / "more.csv").write_text(f"path\n{archive}/0/gone.png\n{archive}/0/000.png\n")
    arguments = ["--input", archive, "--list", archive.parent / "more.csv", "--chunk", _CHUNK]
    assert main(["manifest", *map(str, arguments), "--output", str(file)]) == 0
    return file


def _infer(manifest: object, run: Path, output: object, *more: object) -> list[str]:
    arguments = ["--model", run, "--manifest", manifest, "--output", output, *more]
    return [*map(str, arguments), "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def one(manifest: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process has written."""
    from anomaly.cli import main

    output = tmp_path_factory.mktemp("one") / "out"
    assert main(["infer", *_infer(manifest, run_folder, output)]) == 0
    return output


def _joined(command: Command, manifest: object, output: object, folder: Path) -> dict[str, bytes]:
    tables = {}
    for kind in ("csv", "parquet"):
        table = folder / f"results.{kind}"
        code, _, err = command(
            "merge-results", [manifest, output, "--output", table, "--overwrite"]
        )
        assert (code, err.count("error")) == (3, 0), err
        tables[kind] = table.read_bytes()
    return tables


def _pictures(output: Path) -> dict[str, bytes]:
    folder = output / "heatmaps"
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*.png")}


def test_four_shards_write_what_one_process_does(
    archive: Path, manifest: Path, one: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    four = tmp_path / "four"
    for i in (2, 0, 3, 1):
        code, out, err = command("infer", _infer(manifest, run_folder, four, "--shard", f"{i}/4"))
        assert (code, err.count("error")) == (0, 0), err
        assert f"shard {i}/4" in out
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tables = _joined(command, manifest, one, tmp_path / "a")
    assert _joined(command, manifest, four, tmp_path / "b") == tables
    assert _pictures(four) == _pictures(one)

    header, *lines = csv_rows(tables["csv"].decode())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    expected = {str(f) for f in archive.rglob("*.*") if f.suffix != ".txt"}
    assert {row["path"] for row in rows} == expected | {f"{archive}/0/gone.png"}
    assert len(rows) == _IMAGES + _GONE
    bad = [row for row in rows if row["status"] != "ok"]
    assert len(bad) == _BROKEN + _TEXT + _GONE
    assert all(row["path"] in row["reason"] for row in bad)
    for row in rows:  # a picture of what isn't good, and of nothing else
        assert bool(row["heatmap"]) == (row["verdict"] in ("review", "reject"))
        assert not row["heatmap"] or (one / row["heatmap"]).is_file()
    assert {row["verdict"] for row in rows} >= {"good", "reject"}
    table = pyarrow.parquet.read_table(tmp_path / "a" / "results.parquet").to_pylist()
    assert [row["path"] for row in table] == [row["path"] for row in rows]
    assert [row["image_score"] for row in table if row["image_score"] is not None] == [
        float(row["image_score"]) for row in rows if row["image_score"]
    ]


def test_scores_are_those_of_a_plain_run(
    archive: Path, one: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    """Batches differ, and with them the last digits of a score."""
    command("infer", ["--model", run_folder, "--input", archive, "--output", tmp_path / "plain",
                      "--heatmap", "none", "--no-page"])  # fmt: skip
    header, *lines = csv_rows((tmp_path / "plain" / "results.csv").read_text())
    plain = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    parts = pyarrow.parquet.read_table(one / "results.parts").to_pylist()
    for row in parts:
        other = plain.get(row["path"])
        if other is None:
            assert row["path"].endswith("gone.png")
        else:
            assert (row["status"], row["verdict"], row["image_sha256"]) == (
                other["status"], other["verdict"], other["image_sha256"],
            )  # fmt: skip
            if row["status"] == "ok":
                assert row["image_score"] == pytest.approx(float(other["image_score"]), rel=1e-4)
            else:
                assert row["reason"] == other["reason"]


def test_goes_on_where_parts_are_missing_with_any_number_of_shards(
    manifest: Path, one: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    output = tmp_path / "out"
    shutil.copytree(one, output)
    lost = sorted((output / "results.parts").iterdir())[1:4]
    for part in lost:
        part.unlink()
    kept = {f: f.stat().st_mtime_ns for f in (output / "results.parts").iterdir()}
    code, _, err = command("merge-results", [manifest, output, "--output", tmp_path / "r.csv"])
    assert code == 2
    assert f"{3 * _CHUNK} of {_IMAGES + 1} images have no row" in err
    first = pyarrow.parquet.ParquetFile(manifest).read_row_group(1).column("path")[0].as_py()
    assert f"chunk 1 ({_CHUNK} images, the first is {first})" in err
    assert not (tmp_path / "r.csv").exists()
    again = [*_infer(manifest, run_folder, output), "--shard"]
    code, _, err = command("infer", [*again, "0/3"])
    assert code == 2
    assert "add --resume" in err
    for i in range(3):
        assert command("infer", [*again, f"{i}/3", "--resume"])[0] == 0
    assert {f: f.stat().st_mtime_ns for f in kept} == kept
    assert command("infer", [*again, "0/1", "--resume"])[0] == 0  # nothing left
    assert _joined(command, manifest, output, tmp_path) == _joined(command, manifest, one, tmp_path)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.setattr(storage, "_PAUSES", (0.0, 0.0))
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_object_storage_all_through(
    archive: Path,
    one: Path,
    run_folder: Path,
    tmp_path: Path,
    command: Command,
    memory: fsspec.AbstractFileSystem,
) -> None:
    for file in archive.rglob("*.*"):
        memory.pipe_file(f"/bucket/{file.relative_to(archive)}", file.read_bytes())
    listed, output = "memory://bucket/lists/m.parquet", "memory://bucket/out"
    arguments = ["--input", "memory://bucket", "--chunk", _CHUNK, "--output", listed]
    code, out, err = command("manifest", arguments)
    assert (code, out.split(" images")[0]) == (0, str(_IMAGES)), err
    assert "is skipped" in err
    for i in range(2):
        code, _, err = command("infer", _infer(listed, run_folder, output, "--shard", f"{i}/2"))
        assert (code, err.count("error")) == (0, 0), err
    tables = _joined(command, listed, output, tmp_path)
    header, *lines = csv_rows(tables["csv"].decode())
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    local = {
        row["path"]: row for row in pyarrow.parquet.read_table(one / "results.parts").to_pylist()
    }
    for row in rows:
        other = local[row["path"].replace("memory:///bucket", str(archive))]
        assert row["image_sha256"] == other["image_sha256"]
        assert row["verdict"] == other["verdict"]
        assert row["reason"] == other["reason"].replace(other["path"], row["path"])
        assert not row["heatmap"] or memory.cat_file(f"/bucket/out/{row['heatmap']}")[1:4] == b"PNG"
    assert sum(row["heatmap"] != "" for row in rows) == sum(
        r["heatmap"] != "" for r in local.values()
    )
    # Listed again, what the shards have written isn't an image of the archive.
    assert command("manifest", [*arguments, "--overwrite"])[1].startswith(f"{_IMAGES} images")
    # A table may go to storage, too.
    code, _, _ = command("merge-results", [listed, output, "--output", "memory://bucket/r.csv"])
    assert code == 3
    assert memory.cat_file("/bucket/r.csv") == tables["csv"]


Broken = Callable[[str], None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, memory: fsspec.AbstractFileSystem) -> list[Broken]:
    """What happens when an object of `memory` is opened or written."""
    acts: list[Broken] = []
    system = type(memory)
    opened = system._open

    def _open(self: object, path: str, *arguments: object, **options: object) -> object:
        for act in acts:
            act(path)
        return opened(self, path, *arguments, **options)

    monkeypatch.setattr(system, "_open", _open)
    return acts


@pytest.fixture
def bucket_manifest(archive: Path, memory: fsspec.AbstractFileSystem, command: Command) -> str:
    """The manifest of 40 images in a storage."""
    for file in sorted((archive / "0").iterdir())[:40]:
        memory.pipe_file(f"/b/{file.name}", file.read_bytes())
    arguments = ["--input", "memory://b/*.png", "--chunk", 25, "--output", "memory://m.parquet"]
    assert command("manifest", arguments)[0] == 0
    return "memory://m.parquet"


def test_storage_that_refuses_for_a_while(
    bucket_manifest: str,
    run_folder: Path,
    command: Command,
    broken: list[Broken],
) -> None:
    calls: dict[str, int] = {}

    def now_and_then(path: str) -> None:
        calls[path] = calls.get(path, 0) + 1
        if calls[path] < 3:
            raise ConnectionResetError(104, "reset")

    broken.append(now_and_then)
    code, out, err = command("infer", _infer(bucket_manifest, run_folder, "memory://o"))
    assert (code, err.count("error")) == (0, 0), err
    assert "40 of 40 images scored" in out
    assert max(calls.values()) >= 3


def test_storage_that_goes_away_is_said_and_the_shard_goes_on_later(
    bucket_manifest: str,
    run_folder: Path,
    command: Command,
    memory: fsspec.AbstractFileSystem,
    broken: list[Broken],
) -> None:
    count = 0

    def gone(path: str) -> None:
        nonlocal count
        count += path.startswith("/b/")
        if count > 30:
            raise TimeoutError

    broken.append(gone)
    code, out, err = command("infer", _infer(bucket_manifest, run_folder, "memory://o"))
    assert (code, out) == (2, "")
    assert "the storage doesn't answer, after 3 attempts (TimeoutError)" in err
    assert len(memory.ls("/o/results.parts")) == 1  # the chunk before it is kept
    broken.clear()
    code, out, _ = command("infer", _infer(bucket_manifest, run_folder, "memory://o", "--resume"))
    assert code == 0
    assert "15 of 15 images scored" in out


@pytest.mark.parametrize("readable", [0, 10])
def test_access_that_ends_is_no_fault_of_the_images(
    bucket_manifest: str,
    run_folder: Path,
    command: Command,
    memory: fsspec.AbstractFileSystem,
    broken: list[Broken],
    readable: int,
) -> None:
    seen: list[str] = []

    def denied(path: str) -> None:
        if path.startswith("/b/"):
            seen.append(path)
            if len(seen) > readable:
                raise PermissionError(13, "denied", path)

    broken.append(denied)
    code, out, err = command("infer", _infer(bucket_manifest, run_folder, "memory://o"))
    assert (code, out) == (2, "")
    assert "access is denied" in err
    assert "continue with --resume" in err
    assert "o/results.parts" not in " ".join(memory.store)


def test_an_image_that_may_not_be_read_is_one_row(
    bucket_manifest: str,
    archive: Path,
    run_folder: Path,
    tmp_path: Path,
    command: Command,
    broken: list[Broken],
) -> None:
    secret = "/b/" + sorted(f.name for f in (archive / "0").iterdir())[7]

    def denied(path: str) -> None:
        if path == secret:
            raise PermissionError(13, "denied", path)

    broken.append(denied)
    assert command("infer", _infer(bucket_manifest, run_folder, "memory://o"))[0] == 0
    code, out, _ = command(
        "merge-results", [bucket_manifest, "memory://o", "--output", tmp_path / "r.csv"]
    )
    assert code == 3
    assert "39 of 40 images scored" in out
    said = f"memory://{secret}: it can't be read (access is denied)"
    assert said in (tmp_path / "r.csv").read_text()


def test_a_folder_that_is_not_mounted_is_no_fault_of_the_images(
    archive: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(archive / "0", tmp_path / "drive")
    manifest = tmp_path / "m.parquet"
    assert command("manifest", ["--input", tmp_path / "drive", "--output", manifest])[0] == 0
    (tmp_path / "drive").rename(tmp_path / "elsewhere")
    code, _, err = command("infer", _infer(manifest, run_folder, tmp_path / "out"))
    assert code == 2
    assert "images of chunk 0 can be read" in err
    assert not (tmp_path / "out" / "results.parts").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "drive")
    assert command("infer", _infer(manifest, run_folder, tmp_path / "out"))[0] == 0


@pytest.mark.parametrize(("missing", "expected"), [(19, 0), (20, 2)])
def test_so_many_missing_images_that_the_storage_must_be_gone(
    missing: int, expected: int, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    names = [f"{tmp_path}/{i}.png" for i in range(missing)]
    (tmp_path / "list.csv").write_text("\n".join(["path", *names]))
    manifest = tmp_path / "m.parquet"
    arguments = ["--list", tmp_path / "list.csv", "--output", manifest]
    assert command("manifest", arguments)[0] == 0
    code, _, err = command("infer", _infer(manifest, run_folder, tmp_path / "out"))
    assert (code, f"none of the {missing} images" in err) == (expected, expected == 2)
    assert (tmp_path / "out" / "results.parts").exists() == (expected == 0)


def _rewritten(part: Path, change: Callable[[list[dict[str, object]]], None]) -> None:
    table = pyarrow.parquet.read_table(part)
    rows = table.to_pylist()
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), part)


def _double(rows: list[dict[str, object]]) -> None:
    rows[1] = rows[0]


def _strange(rows: list[dict[str, object]]) -> None:
    rows[3]["path"] = "strange.png"


def _turned(rows: list[dict[str, object]]) -> None:
    rows.reverse()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_double, ["no row for ", "more than one row for "]),
        (_strange, ["no row for ", "a row that the manifest doesn't know: strange.png"]),
        (_turned, ["its rows are in another order"]),
    ],
)
def test_merging_counts_rows(
    manifest: Path,
    one: Path,
    tmp_path: Path,
    command: Command,
    change: Callable[[list[dict[str, object]]], None],
    said: Sequence[str],
) -> None:
    shutil.copytree(one, tmp_path / "out")
    part = tmp_path / "out" / "results.parts" / "000000002.parquet"
    _rewritten(part, change)
    table = tmp_path / "r.csv"
    code, _, err = command("merge-results", [manifest, tmp_path / "out", "--output", table])
    assert code == 2
    assert all(text in err for text in (*said, str(part), "--resume")), err
    assert not table.exists()


def test_merging_refuses_what_is_not_of_the_job(
    archive: Path, manifest: Path, one: Path, tmp_path: Path, command: Command
) -> None:
    shutil.copytree(one, tmp_path / "out")
    parts = tmp_path / "out" / "results.parts"
    base = [manifest, tmp_path / "out", "--output", tmp_path / "r.csv"]

    table = pyarrow.parquet.read_table(parts / "000000001.parquet")
    said = json.loads(table.schema.metadata[b"anomaly"])
    said["job"]["model"] = "another"
    about = {"anomaly": json.dumps(said)}
    pyarrow.parquet.write_table(table.replace_schema_metadata(about), parts / "000000001.parquet")
    code, _, err = command("merge-results", base)
    assert code == 2
    assert "000000001.parquet is of another model than the job" in err

    shutil.copy(parts / "000000000.parquet", parts / "000000001.parquet")
    code, _, err = command("merge-results", base)
    assert code == 2
    assert "000000001.parquet is of another chunk" in err

    (parts / "000000001.parquet").write_bytes(b"PAR1 torn")
    code, _, err = command("merge-results", base)
    assert code == 2
    assert "is damaged; delete it" in err

    shutil.copy(one / "results.parts" / "000000001.parquet", parts)
    shutil.copy(one / "results.parts" / "000000001.parquet", parts / "000000999.parquet")
    code, _, err = command("merge-results", base)
    assert code == 2
    assert "000000999.parquet belongs to no chunk" in err

    other = tmp_path / "other.parquet"
    assert command("manifest", ["--input", archive / "0", "--output", other])[0] == 0
    code, _, err = command("merge-results", [other, *base[1:]])
    assert code == 2
    assert f"holds results of another manifest than {other}" in err
    code, _, err = command("merge-results", [other, tmp_path, *base[2:]])
    assert code == 2
    assert "holds no results" in err


def test_a_destination_is_of_one_job(
    archive: Path,
    manifest: Path,
    one: Path,
    run_folder: Path,
    padim_folder: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    before = {f: f.read_bytes() for f in one.rglob("*") if f.is_file()}
    other = tmp_path / "other.parquet"
    assert command("manifest", ["--input", archive / "0", "--output", other])[0] == 0
    for arguments, what in (
        (_infer(other, run_folder, one, "--resume"), "list of images"),
        (_infer(manifest, padim_folder, one, "--resume"), "model"),
        (_infer(manifest, run_folder, one, "--resume", "--heatmap", "all"), "set of outputs"),
    ):
        code, _, err = command("infer", arguments)
        assert code == 2
        assert f"{one} holds a run with another {what}" in err
        assert "give another --output\n" in err
    assert {f: f.read_bytes() for f in one.rglob("*") if f.is_file()} == before
    plain = ["--model", run_folder, "--input", archive / "0" / "000.png", "--output"]
    code, _, err = command("infer", [*plain, one])  # nor does a plain run write there
    assert code == 2
    assert "results.parts exist already" in err
    assert command("infer", [*plain, tmp_path / "plain"])[0] == 0
    code, _, err = command("infer", _infer(manifest, run_folder, tmp_path / "plain"))
    assert code == 2
    assert "holds other results (heatmap" in err


def test_listing_and_joining_need_no_torch(manifest: Path, one: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from anomaly.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for arguments, expected in (
        (["merge-results", manifest, one, "--output", tmp_path / "r.csv"], 3),
        (["manifest", "--input", manifest, "--output", tmp_path / "m.parquet"], 0),
    ):
        ran = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], text=True)
        assert ran.returncode == expected


def test_more_shards_than_chunks(manifest: Path, run_folder: Path, command: Command) -> None:
    arguments = _infer(manifest, run_folder, "nowhere", "--shard", "10/12")
    code, out, _ = command("infer", arguments)
    assert (code, out) == (
        0,
        "shard 10/12: nothing to do, the manifest has 10 chunks for 12 shards\n",
    )
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    "text",
    [
        "4/4",
        "5/4",
        "-1/4",
        "0/0",
        "1",
        "a/b",
        "/",
        "1/4/2",
        "½/2",
        "",
        pytest.param("0/" + 5000 * "9", id="long"),
    ],
)
def test_shards_out_of_range(text: str) -> None:
    with pytest.raises(DataError, match="it must be i/n with i from 0 to n - 1"):
        Shard.of(text)


def test_impossible_options(
    manifest: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    base = _infer(manifest, run_folder, tmp_path / "out")
    code, _, err = command("infer", [*base, "--overwrite", "--regions", "--watch"])
    assert code == 2
    assert "--watch, --overwrite, --regions can't be given with --manifest" in err
    code, _, err = command("infer", ["--model", run_folder, "--input", manifest, "--shard", "0/2",
                                     "--output", tmp_path / "out"])  # fmt: skip
    assert code == 2
    assert "give --manifest" in err
    code, _, err = command("infer", [*base, "--shard", ""])  # a variable that isn't set
    assert code == 2
    assert "--shard is ''; it must be i/n" in err
    assert not (tmp_path / "out").exists()


def test_a_model_without_thresholds_draws_nothing(
    archive: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    from conftest import train_arguments

    run = tmp_path / "run"
    assert command("train", [*train_arguments(product, run), "--no-calibrate"])[0] == 0
    manifest = tmp_path / "m.parquet"
    assert command("manifest", ["--input", archive / "0/00*.png", "--output", manifest])[0] == 0
    code, out, err = command("infer", _infer(manifest, run, tmp_path / "out"))
    assert (code, err.count("error")) == (0, 0), err
    assert "images scored: no verdicts, because the model has no thresholds; parts in" in out
    assert not (tmp_path / "out" / "heatmaps").exists()


def _start(*arguments: str) -> "subprocess.Popen[bytes]":
    script = REPOSITORY / "scripts" / "infer.py"
    return subprocess.Popen(
        [sys.executable, script, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_unfinished_pictures_of_killed_processes_go(
    archive: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    manifest, output = tmp_path / "m.parquet", tmp_path / "out"
    assert command("manifest", ["--input", archive / "0/00*.png", "--output", manifest])[0] == 0
    more = ("--resume", "--heatmap", "all", "--masks", "--maps", "float32")
    arguments = _infer(manifest, run_folder, output, *more)
    assert command("infer", arguments)[0] == 0
    pictures = {file for file in output.rglob("*") if file.is_file()}
    (output / "results.parts" / "000000000.parquet").unlink()
    for kind in ("heatmaps", "masks", "maps"):
        (output / kind / "000000000" / ".anomaly-0123456789abcdef.part").write_bytes(b"half")
    assert command("infer", arguments)[0] == 0
    assert {file for file in output.rglob("*") if file.is_file()} == pictures


def test_a_worker_of_a_cluster_leaves_no_folder_behind(
    manifest: Path,
    one: Path,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is ended without a word, and can't delete anything then."""
    from anomaly.cluster.infer import RayJob, _Scorer

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    destinations = [str(tmp_path / "out"), "memory://worker/out"]
    system = fsspec.filesystem("memory")
    # Which images a chunk holds depends on their folder's name: not each has one to draw.
    drawn = min((one / "heatmaps").iterdir())
    for dest in destinations:
        worker = _Scorer(RayJob(str(run_folder), str(manifest), dest, device="cpu"))
        assert sum(worker.score(int(drawn.name), worker.about(), {}).values())
        worker._decoders.__exit__()
    names = [f"{drawn.name}/{file.name}" for file in drawn.iterdir()]
    there = system.glob("/worker/out/heatmaps/*/*")
    assert sorted(n.partition("heatmaps/")[2] for n in there) == sorted(names)
    system.rm("/worker", recursive=True)
    assert {each.name for each in tmp_path.iterdir()} == {"out"}


def test_a_table_is_not_written_over_its_manifest(
    manifest: Path, one: Path, tmp_path: Path, command: Command
) -> None:
    listed = tmp_path / "m.parquet"
    shutil.copy(manifest, listed)
    for name in (listed, f"file://{listed}", tmp_path / "." / ".." / tmp_path.name / listed.name):
        code, _, err = command("merge-results", [listed, one, "--output", name, "--overwrite"])
        assert code == 2
        assert "is the manifest; give the table another name" in err
    assert listed.read_bytes() == manifest.read_bytes()


@pytest.mark.slow
def test_killed_shards_go_on(
    manifest: Path, one: Path, run_folder: Path, tmp_path: Path, command: Command
) -> None:
    """Two shards side by side, each killed as often as it has written a part more."""
    output = tmp_path / "out"
    parts = output / "results.parts"
    arguments = [
        _infer(manifest, run_folder, output, "--resume", "--shard", f"{i}/2") for i in (0, 1)
    ]
    kills = 0
    for _ in range(10):
        processes = [_start(*each) for each in arguments]
        before = len(list(parts.glob("*.parquet"))) if parts.exists() else 0
        end = time.monotonic() + 300
        while any(p.poll() is None for p in processes):
            assert time.monotonic() < end
            now = len(list(parts.glob("*.parquet"))) if parts.exists() else 0
            if now > before:
                time.sleep(0.02 * kills)
                for process in processes:
                    process.kill()
                    kills += process.wait() == -signal.SIGKILL
            time.sleep(0.005)
        if all(process.returncode == 0 for process in processes):
            break
    else:
        for process in [_start(*each) for each in arguments]:
            assert process.wait(300) == 0
    assert kills >= 4
    joined = _joined(command, manifest, output, tmp_path)
    assert joined == _joined(command, manifest, one, tmp_path)
    assert _pictures(output) == _pictures(one)
