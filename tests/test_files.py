"""Outputs that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from anomaly.errors import OutputError
from anomaly.files import claim, write


def test_write_makes_folders_and_leaves_no_draft(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b.txt", "größer")
    write(tmp_path / "a" / "b.txt", b"second")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"second"
    assert os.listdir(tmp_path / "a") == ["b.txt"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "b.txt", "old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match=r"b\.txt can't be written: No space left"):
        write(tmp_path / "b.txt", "new")
    assert (tmp_path / "b.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["b.txt"]


def test_claim_refuses_or_clears_only_its_own_names(tmp_path: Path) -> None:
    claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=False)
    write(tmp_path / "out" / "rows.csv", "x")
    write(tmp_path / "out" / "pictures" / "1.png", "x")
    write(tmp_path / "out" / "mine.txt", "x")
    with pytest.raises(OutputError, match="exists already"):
        claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=False)
    claim(tmp_path / "out", ("rows.csv", "pictures"), overwrite=True)
    assert os.listdir(tmp_path / "out") == ["mine.txt"]
    with pytest.raises(OutputError, match="can't be used"):
        claim(tmp_path / "out" / "mine.txt", (), overwrite=False)
