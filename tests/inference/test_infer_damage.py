"""Damaged files in `infer`: a row for each, nothing crashes, and no half picture has a score."""

import csv
import json
import os
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, write_part
from picture_files import chunk, encoded, jpegs, mutated, others, picture, pngs

_SUFFIXES = (".png", ".jpg", ".tif", ".bmp", ".webp")


def _infer(run: Path, inputs: Path, output: Path, command: Command) -> list[dict[str, str]]:
    code, _, err = command("infer", ["--model", run, "--input", inputs, "--output", output])
    assert code in (0, 2, 3)
    assert err == ""
    with (output / "results.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_two_thousand_mutated_files_have_two_thousand_rows(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    rng = np.random.default_rng(11)
    rgb = picture()
    whole = [data for group in (jpegs, pngs, others) for _, data in group(rgb)]
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for i in range(2000):
        data, foreign = (whole[k] for k in rng.integers(0, len(whole), 2))
        (inputs / f"{i:04}{rng.choice(_SUFFIXES)}").write_bytes(mutated(data, rng, foreign))
    rows = _infer(run_folder, inputs, tmp_path / "out", command)
    assert len({row["path"] for row in rows}) == len(rows) == 2000
    counts = Counter(row["status"] for row in rows)
    assert set(counts) == {"ok", "unreadable", "unsupported"}
    for row in rows:
        assert bool(row["image_score"]) == (row["status"] == "ok")
        assert (tmp_path / "out" / row["heatmap"]).is_file() == (row["status"] == "ok")
        assert row["status"] == "ok" or row["reason"]


def _cuts(rgb: np.ndarray) -> dict[str, tuple[bytes, int, bytes]]:
    """For each format a file, where its pixel data starts, and what stands at a file's end."""
    jpeg, progressive = encoded(rgb, "JPEG"), encoded(rgb, "JPEG", progressive=True)
    png, webp = encoded(rgb, "PNG"), encoded(rgb, "WEBP", lossless=True)
    found = {
        "jpg": (jpeg, jpeg.index(b"\xff\xda") + 14, b"\xff\xd9"),
        "progressive.jpg": (progressive, progressive.index(b"\xff\xda") + 14, b"\xff\xd9"),
        "png": (png, png.index(b"IDAT") + 8, chunk(b"IEND", b"")),
        "webp": (webp, 40, webp[-4:]),
        "bmp": (encoded(rgb, "BMP"), 60, b"\0\0"),
    }
    for compression in (None, "tiff_lzw", "tiff_deflate"):
        tiff = encoded(rgb, "TIFF", compression=compression)
        (first,) = struct.unpack_from("<I", tiff, 4)
        start = 8 if first > 200 else first + 400  # the directory may stand before the pixels
        found[f"{compression}.tif"] = (tiff, start, b"\0\0\0\0")
    return found


def test_whatever_a_list_names_has_its_row(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path / "parts" / "1.png", seed=1)
    entries = {
        "..": "it is a folder",
        "../..": "it is a folder",
        ".": "it is a folder",
        "/": "it is a folder",
        "//": "it is a folder",
        "parts": "it is a folder",
        "/dev/zero": "it is a device or pipe",
        "x" * 5000: "too long",
        "x/" * 3000: "too long",
        "a\0b.png": "null character",
        "~/a.png": "~ stands for no folder here",
        "https://host/a.png": "it is a URL, which `anomaly manifest` takes",
        "file:///none.png": "No such file",
        r"C:\parts\1.png": "it is a Windows path, write it as this system has it",
        r"\\nas\parts\1.png": "it is a Windows path",
        r"parts\2.png": "it is a Windows path",
        os.fsdecode(b"caf\xe9.png"): "No such file",
        r"parts\1.png": "",
    }
    (tmp_path / "l.txt").write_text("\n".join(entries), "utf-8", "surrogateescape")
    code, out, err = command(
        "infer", ["--model", run_folder, "--list", "l.txt", "--output", "out", "--masks"]
    )
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


def test_no_score_for_a_file_cut_inside_its_pixels(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for name, (data, start, end) in _cuts(picture()).items():
        (inputs / f"whole.{name}").write_bytes(data)
        for share in (0.02, 0.5, 0.97):
            cut = start + int((len(data) - len(end) - start) * share)
            (inputs / f"{share}.{name}").write_bytes(data[:cut])
            (inputs / f"{share}.ended.{name}").write_bytes(data[:cut] + end)
    rows = _infer(run_folder, inputs, tmp_path / "out", command)
    assert len(rows) == 8 * 7
    for row in rows:
        expected = "ok" if Path(row["path"]).name.startswith("whole") else "unreadable"
        assert row["status"] == expected, row


def test_a_file_name_breaks_no_printed_line(
    run_folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a\nb.png").write_text("no picture")
    arguments = ["--model", run_folder, "--input", tmp_path / "in", "--output", tmp_path / "out"]
    printed = command("infer", arguments)[1]
    assert "a\\nb.png" in printed
    assert not any(line.startswith("b.png") for line in printed.splitlines())
