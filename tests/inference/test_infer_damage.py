"""What `infer` can't score has a row with the reason; tests/imaging/formats has cut files."""

import json
import os
from pathlib import Path

import pytest
from conftest import Command, write_part


def test_whatever_a_list_names_has_its_row(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path / "parts" / "1.png", seed=1)
    entries = {
        **dict.fromkeys(("..", ".", "//", "parts"), "it is a folder"),
        "/dev/zero": "it is a device or pipe",
        "x" * 5000: "too long",
        "a\0b.png": "null character",
        "~/a.png": "~ stands for no folder here",
        "https://host/a.png": "it is a URL: download the images first",
        "file:///none.png": "No such file",
        r"C:\parts\1.png": "it is a Windows path, write it as this system has it",
        os.fsdecode(b"caf\xe9.png"): "No such file",
        r"parts\1.png": "",
    }
    (tmp_path / "l.txt").write_text("\n".join(entries), "utf-8", "surrogateescape")
    arguments = ["--model", run_folder, "--input", "l.txt", "--output", "out"]
    code, out, err = command("infer", [*arguments, "--write", "heatmaps", "masks"])
    assert (code, err.count("error")) == (3, 0)
    assert f"1 of {len(entries)} images scored" in out
    lines = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
    rows = {row["path"]: row for row in map(json.loads, lines)}
    for entry, reason in entries.items():
        path = str(Path(entry.removeprefix("file://")))
        row = rows.pop("parts/1.png" if not reason else path)
        assert reason in row["reason"], entry
        assert row["status"] == ("unreadable" if reason else "ok")
    assert rows == {}
    assert {file.name for file in tmp_path.iterdir()} == {"parts", "l.txt", "out"}


def test_a_run_that_scores_nothing_says_why_in_a_line(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\nb.png").write_text("no picture")
    output = tmp_path / "out"
    arguments = ["--model", run_folder, "--input", tmp_path / "in", "--output", output]
    code, out, _ = command("infer", arguments)
    first, why, *_, last = out.splitlines()
    assert (code, first) == (2, "0 of 1 images scored: 1 unsupported")
    assert "a\\nb.png" in why
    said = f"rows in {output / 'results.csv'}, all shown in {output / 'results.html'}"
    assert last == said
