"""Training images are found again, known by their content."""

from dataclasses import replace
from pathlib import Path

import pytest

from anomaly.evaluation.evaluate import TrainingImages
from anomaly.files.writing import sha256_of
from anomaly.scoring.model import Model
from anomaly.storage.models import load_model

NAMES = ("train/good/0.png", "train/good/1.png", "train/good/2.png")


@pytest.fixture
def model(run_folder: Path, tmp_path: Path) -> Model:
    """A model that has learned three files, and doesn't know where they are."""
    for i, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"image {i}")
    images = {name: sha256_of(tmp_path / name) for name in NAMES}
    return replace(load_model(run_folder), manifest={"training_images": images}, folder=None)


def found(model: Model, *folders: Path) -> list[Path | None]:
    samples = map(TrainingImages(model, *folders).find, NAMES)
    return [sample and sample.path for sample in samples]


def test_in_any_folder_that_holds_them(model: Model, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "train", tmp_path / "train" / "good"):
        assert found(model, folder) == [tmp_path / name for name in NAMES]
    assert found(model) == [None] * 3


def test_others_are_not_taken_for_them(model: Model, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in NAMES)
    there = TrainingImages(model, tmp_path)
    first.write_text("another")
    second.unlink()
    third.unlink()
    third.mkdir()
    assert [there.find(name) for name in NAMES] == [None] * 3


def test_all_are_found_under_other_names_too(model: Model, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in NAMES)
    moved = first.rename(tmp_path / "train" / "moved.png")
    third.write_text(second.read_text())
    assert found(model, tmp_path) == [moved, second, None]
