"""Folders as samples."""

from pathlib import Path

import pytest
from conftest import write_part, write_product

from anomaly.datasets import open_dataset
from anomaly.errors import DataError


def test_mvtec_layout(tmp_path: Path) -> None:
    folder = write_product(tmp_path / "disc")
    write_part(folder / "test" / "unmasked" / "000.png", seed=1)
    for dataset in (open_dataset("mvtec", tmp_path, "disc"), open_dataset("mvtec", folder, None)):
        assert dataset.folder == folder
        assert [s.name for s in dataset.train] == [f"train/good/{i:03}.png" for i in range(12)]
        kinds = [(s.name, s.defect_type, s.mask_path is not None) for s in dataset.test]
        assert kinds == [
            *[(f"test/good/{i:03}.png", "good", False) for i in range(3)],
            *[(f"test/spot/{i:03}.png", "spot", True) for i in range(3)],
            ("test/unmasked/000.png", "unmasked", False),
        ]
        assert [s.is_defect for s in dataset.test] == [False] * 3 + [True] * 4


def test_a_folder_of_good_images(tmp_path: Path) -> None:
    for name in ("b/2.png", "a/1.png", "3.bmp"):
        write_part(tmp_path / name, seed=0)
    (tmp_path / "notes.txt").write_text("no image")
    dataset = open_dataset("folder", tmp_path, None)
    assert [s.name for s in dataset.train] == ["3.bmp", "a/1.png", "b/2.png"]
    assert dataset.test == ()


@pytest.mark.parametrize(
    ("root", "category", "says"),
    [
        (None, None, "data.root isn't set"),
        ("nowhere", None, "doesn't exist"),
        ("here", "disk", "did you mean 'disc'"),
        ("here", None, "no training images"),
    ],
)
def test_missing_folders(tmp_path: Path, root: str | None, category: str | None, says: str) -> None:
    write_product(tmp_path / "here" / "disc")
    with pytest.raises(DataError, match=says):
        open_dataset("mvtec", None if root is None else tmp_path / root, category)
