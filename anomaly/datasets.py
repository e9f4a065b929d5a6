"""Folders of images as samples. Lists files only; nothing is decoded here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anomaly.errors import DataError, nearest
from anomaly.images import list_images

GOOD = "good"

HOW_TO_GET_MVTEC = (
    "Get MVTec AD from mvtec.com/company/research/datasets/mvtec-ad (free for non-commercial use), "
    "unpack it, and point data.root at the folder that holds the categories "
    "(--set data.root=/path/to/mvtec_ad). `anomaly sample-data` makes a data set to try things on."
)


@dataclass(frozen=True)
class Sample:
    """One image of a data set.

    Attributes:
        path: the image file.
        name: its path relative to the data set's folder, with forward slashes.
        defect_type: `good`, or the kind of defect (the name of its folder).
        mask_path: the ground-truth mask; None for good images and where there is none.
    """

    path: Path
    name: str
    defect_type: str = GOOD
    mask_path: Path | None = None

    @property
    def is_defect(self) -> bool:
        """Whether this image shows a defect."""
        return self.defect_type != GOOD


@dataclass(frozen=True)
class Dataset:
    """Good images to learn from, and a test split that nothing is ever tuned on."""

    folder: Path
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]


def open_dataset(layout: str, root: Path | None, category: str | None) -> Dataset:
    """List a data set.

    Args:
        layout: `mvtec` (train/good, test/<type>, ground_truth/<type>/<stem>_mask.png) or
            `folder` (good images only; no test split).
        root: the folder of the data set, or of its categories.
        category: a folder inside `root`; None for `root` itself.

    Raises:
        DataError: a folder is missing or holds no training images.
    """
    if root is None:
        raise DataError(
            "data.root isn't set: name the folder with your images, "
            "e.g. --set data.root=/path/to/images"
        )
    folder = root.expanduser() / (category or "")
    if not folder.is_dir():
        raise DataError(_missing(layout, root.expanduser(), category))
    return _open_mvtec(folder) if layout == "mvtec" else _open_folder(folder)


def _missing(layout: str, root: Path, category: str | None) -> str:
    if not root.is_dir():
        text = f"data.root {root} doesn't exist (looked in {Path.cwd()}). "
    else:
        known = [f.name for f in root.iterdir() if f.is_dir()]
        text = f"{root} has no folder {category!r}; {nearest(str(category), known)} "
    return text + HOW_TO_GET_MVTEC if layout == "mvtec" else text + "Correct data.root."


def _open_folder(folder: Path) -> Dataset:
    train = _samples(folder, folder)
    if not train:
        raise DataError(f"no images in {folder}; data.root must hold good images to learn from")
    return Dataset(folder, tuple(train), ())


def _open_mvtec(folder: Path) -> Dataset:
    good = folder / "train" / GOOD
    train = _samples(good, folder) if good.is_dir() else []
    if not train:
        hint = "" if good.is_dir() else " (that folder doesn't exist)"
        raise DataError(
            f"no training images in {good}{hint}. MVTec AD layout keeps good images in train/good; "
            "for a plain folder of good images use --set data.format=folder"
        )
    return Dataset(folder, tuple(train), tuple(_mvtec_test(folder)))


def _mvtec_test(folder: Path) -> list[Sample]:
    test = folder / "test"
    kinds = sorted(f.name for f in test.iterdir() if f.is_dir()) if test.is_dir() else []
    samples = []
    for kind in kinds:
        masks = folder / "ground_truth" / kind
        for sample in _samples(test / kind, folder, kind):
            mask = None if kind == GOOD else _mask_of(sample.path, masks)
            samples.append(Sample(sample.path, sample.name, kind, mask))
    return samples


def _mask_of(image: Path, folder: Path) -> Path | None:
    for name in (f"{image.stem}_mask.png", f"{image.stem}.png"):
        if (folder / name).is_file():
            return folder / name
    return None


def _samples(folder: Path, root: Path, defect_type: str = GOOD) -> list[Sample]:
    return [Sample(p, p.relative_to(root).as_posix(), defect_type) for p in list_images(folder)]
