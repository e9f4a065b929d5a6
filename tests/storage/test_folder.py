"""A model folder is replaced by another one as a whole, or not at all."""

import logging
import os
import shutil
from pathlib import Path

import pytest

import anomaly
from anomaly.errors import OutputError
from anomaly.storage.folder import appearing


def _replace(folder: Path, content: str = "new") -> None:
    with appearing(folder) as draft:
        (draft / "file").write_text(content)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_whatever_comes_between_two_names_leaves_the_old_folder(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace(tmp_path / "model", "old")
    rename = Path.rename

    def stopped(self: Path, target: Path) -> Path:
        if target.name == "model" and (self / "file").read_text() == "new":
            raise stop
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises((KeyboardInterrupt, OutputError)):
        _replace(tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    _replace(tmp_path / "real", "old")
    (tmp_path / "current").symlink_to("real")
    _replace(tmp_path / "current")
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["current", "real"]


def test_an_old_folder_that_stays_is_only_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _replace(tmp_path / "model", "old")

    def denied(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(shutil, "rmtree", denied)
    with caplog.at_level(logging.WARNING):
        _replace(tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "new"
    assert "can't be deleted: Permission denied" in caplog.text


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(OutputError, match="can't be written"):
        _replace(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"
    assert os.listdir(tmp_path) == ["model"]


def test_a_model_is_written_over_a_model_alone(run_folder: Path, tmp_path: Path) -> None:
    detector = anomaly.load(run_folder, "cpu")
    (tmp_path / "mine").mkdir()
    detector.save(tmp_path / "mine", overwrite=True)  # an empty folder is as good as none
    detector.save(tmp_path / "mine", overwrite=True)
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "precious.png").write_bytes(b"mine")
    for place in (photos, photos / "precious.png"):
        with pytest.raises(OutputError, match="isn't a model, so it isn't replaced"):
            detector.save(place, overwrite=True)
    with pytest.raises(OutputError, match="overwrite=True"):
        detector.save(photos)
    assert (photos / "precious.png").read_bytes() == b"mine"
