"""Training images are found again, known by their content."""

from pathlib import Path

import pytest

from anomaly.datasets.samples import samples_in
from anomaly.evaluation.evaluate import TrainingImages
from anomaly.files.writing import sha256_of

NAMES = ("train/good/0.png", "train/good/1.png", "train/good/2.png")


@pytest.fixture
def learned(tmp_path: Path) -> dict[str, str]:
    """sha256 of three files, by name."""
    for i, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"image {i}")
    return {name: sha256_of(tmp_path / name) for name in NAMES}


def test_in_any_folder_that_holds_them(learned: dict[str, str], tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "train", tmp_path / "train" / "good"):
        there = TrainingImages(learned, samples_in(folder))
        paths = [sample.path for sample in map(there.find, NAMES) if sample]
        assert paths == [tmp_path / name for name in NAMES]


def test_others_are_not_taken_for_them(learned: dict[str, str], tmp_path: Path) -> None:
    there = TrainingImages(learned, samples_in(tmp_path))
    (tmp_path / NAMES[0]).write_text("another")
    (tmp_path / NAMES[1]).unlink()
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).mkdir()
    assert [there.find(name) for name in NAMES] == [None] * 3


def test_all_are_found_under_other_names_too(learned: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).rename(tmp_path / "train" / "moved.png")
    (tmp_path / NAMES[2]).write_text((tmp_path / NAMES[1]).read_text())
    files = samples_in(tmp_path)
    assert TrainingImages(learned, files).find(NAMES[0]) is None
    there = TrainingImages(learned, files, renamed=files)
    found = [sample and sample.path.name for sample in map(there.find, NAMES)]
    assert found == ["moved.png", "1.png", None]
