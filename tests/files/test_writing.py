"""Outputs that appear whole or not at all."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import Command, Says, train_arguments
from kit import table

from anomaly.errors import AnomalyError, OutputError
from anomaly.files.writing import (
    as_json,
    at_home,
    claim,
    clear,
    from_json,
    remove_drafts,
    share,
    short_name,
    write,
)


def test_a_file_appears_whole_or_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in ("größer", b"second"):
        write(tmp_path / "a" / "b.txt", content)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match=r"b\.txt can't be written: No space left"):
        write(tmp_path / "a" / "b.txt", "new")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"second"
    assert os.listdir(tmp_path / "a") == ["b.txt"]


def test_a_disk_that_refuses_has_an_exit_code_of_its_own(
    run_folder: Path,
    product: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    output = tmp_path / "out"
    train = train_arguments(product, output)
    evaluate = ["--model", run_folder, "--output", output]
    for name, arguments, number in (
        ("evaluate", evaluate, errno.ENOSPC),
        ("train", train, errno.ENOSPC),
        *(("evaluate", evaluate, n) for n in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)),
    ):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number), "a draft's name")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", fail)
            patched.setattr(Path, "write_text", fail)
            code, _, err = command(name, arguments)
        assert code == 4
        reason = os.strerror(number)
        if number == errno.EROFS:
            reason = "the folder is read-only; choose another --output"
        assert f"can't be written: {reason}" in err
        assert ("MB are free in" in err) == (number == errno.ENOSPC)
        assert str(tmp_path) in err
        assert "a draft's name" not in err


def test_only_our_own_drafts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # as if killed before the file had its name
        patched.setattr(Path, "replace", lambda *_: None)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        write(tmp_path / "sub" / "a.png", "ours")
    (draft,) = os.listdir(tmp_path / "sub")
    foreign = [".camera.png.part", "b.part", ".part", ".anomaly-notes.txt"]
    for name in foreign:
        (tmp_path / "sub" / name).write_text("another program's")
    remove_drafts(tmp_path)  # of a folder inside that somebody else may be at work in
    assert draft in os.listdir(tmp_path / "sub")
    remove_drafts(tmp_path, ["sub"])
    assert draft not in foreign
    assert sorted(os.listdir(tmp_path / "sub")) == sorted(foreign)


def test_nobodys_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert at_home(Path("~/a")) == Path("/home/me/a")
    assert at_home(Path("a/~")) == Path("a/~")
    with pytest.raises(AnomalyError, match="~nobody-here/a: no home folder is known"):
        at_home(Path("~nobody-here/a"))


def test_long_names_are_cut_between_characters() -> None:
    assert short_name("ä" * 115) == "ä" * 115
    long = {short_name(prefix + "検" * n) for n in (80, 81) for prefix in ("", "a", "ab")}
    assert len(long) == 6
    for name in long:
        assert 200 < len(os.fsencode(name)) <= 230
        assert name.encode()  # no half character
    assert len(os.fsencode(short_name("\udcff" * 255))) <= 230


def test_claim_refuses_and_clear_deletes_only_ones_own_names(
    tmp_path: Path, run_folder: Path
) -> None:
    with pytest.raises(OutputError, match="is a model folder, where nothing else can be written"):
        claim(run_folder / "model", ("rows.csv",), overwrite=True)
    assert not (run_folder / "model" / "rows.csv").exists()
    claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=False)
    write(tmp_path / "out" / "rows.csv", "x")
    write(tmp_path / "out" / "pictures" / "1.png", "x")
    write(tmp_path / "out" / "mine.txt", "x")
    with pytest.raises(OutputError, match="exist already"):
        claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=False)
    with pytest.raises(OutputError, match="pictures isn't from an earlier run"):
        claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=True)
    (tmp_path / "out" / "pictures" / "1.png").unlink()
    claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["mine.txt", "pictures", "rows.csv"]
    clear(tmp_path / "out", ("rows.csv", "pictures", "absent"))
    assert os.listdir(tmp_path / "out") == ["mine.txt"]
    with pytest.raises(OutputError, match=r"mine\.txt is a file, but results need a folder"):
        claim(tmp_path / "out" / "mine.txt", (), overwrite=False)
    with pytest.raises(OutputError, match="can't be used"):
        claim(tmp_path / "out" / "mine.txt" / "below", (), overwrite=False)


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    for mask in (0o022, 0o027, 0o077):
        folder = tmp_path / str(mask)
        folder.mkdir()
        before = os.umask(mask)
        try:
            write(folder / "a.json", "{}")
            made = folder / "b.safetensors"
            made.touch(0o600)  # as a library that lets nobody else read it
            share(made)
        finally:
            os.umask(before)
        modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
        assert modes == dict.fromkeys(("a.json", "b.safetensors"), 0o666 & ~mask)


def test_json_is_read_as_it_was_written_and_nothing_that_nobody_can_mean() -> None:
    with pytest.raises(ValueError, match="JSON"):
        as_json({"score": float("nan")})
    values = [2**63, -1, 0, -0.0, 1e-300, 0.1, 1.7976931348623157e308, None, True, "1e400"]
    assert repr(from_json(as_json(values))) == repr(values)
    name = os.fsdecode(b"\xff.png")
    assert json.loads(as_json([name])) == [name]
    deep = "[" * 100_000, '{"a":' * 100_000
    for text in (*deep, "[NaN]", "-Infinity", "1e400", "9" * 400, "9" * 9000, "{"):
        for data in (text, text.encode()):
            with pytest.raises(ValueError, match=r"too deep|the impossible number|Expecting"):
                from_json(data)


def test_overwriting_spares_folders_that_no_run_has_made(
    product: Path, tmp_path: Path, says: Says
) -> None:
    photo = tmp_path / "model" / "photo.png"
    write(photo, "somebody's")
    said = says(2, "train", ["--overwrite", *train_arguments(product, tmp_path)])
    assert "isn't from an earlier run" in said
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [photo]


def test_overwriting_spares_what_somebody_has_put_among_a_runs_files(
    run_folder: Path, inferred: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    shutil.copytree(inferred, out)
    image = product / "test" / "good" / "000.png"
    given = ["--model", run_folder, "--input", image, "--output", out, "--overwrite"]

    def spares(name: str) -> None:
        before = sorted(out.rglob("*"))
        write(out / name, "somebody's")
        code, _, err = command("infer", given)
        assert (code, f"{out / name} isn't from an earlier run" in err) == (2, True), err
        assert (out / name).read_text() == "somebody's"
        (out / name).unlink()
        assert {*before} <= {*out.rglob("*")}

    write(out / "heatmaps" / ".DS_Store", "a file manager's")
    for name in ("masks/mine.xcf", "maps/a/mine.npy", "heatmaps/notes.txt"):
        spares(name)
    assert command("infer", given)[0] == 0
    assert [row["path"] for row in table(out)] == [str(image)]
    spares("masks/mine.png")  # a run made no masks
