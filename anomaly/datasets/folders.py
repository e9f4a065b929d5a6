"""Data sets whose folders say what an image is."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.datasets.samples import (
    GOOD,
    Dataset,
    Sample,
    listed,
    no_training_images,
    set_apart,
)
from anomaly.errors import DataError
from anomaly.images import is_folder
from anomaly.own_outputs import own_outputs

_MASK_NAMES = ("{}_mask.png", "{}.png", "{}.bmp", "{}.tif", "{}.tiff", "{}.webp", "{}")


@dataclass(frozen=True)
class _Layout:
    """Where a published data set keeps what.

    Attributes:
        name: of the data set.
        train, validation: folders of good images.
        test: holds a folder for each kind of image.
        good: the name that good images' folders have in there.
        masks: holds a folder for each kind of defect: `<stem>_mask.png`, `<stem>.png` or a
            folder `<stem>` with several masks.
    """

    name: str
    train: str = "train/good"
    validation: str = "validation/good"
    test: str = "test"
    good: str = GOOD
    masks: str = "ground_truth"

    def __call__(self, folder: Path) -> Dataset:
        train = listed(folder / self.train, folder)
        if not train:
            raise no_training_images(
                folder / self.train,
                f"{self.name} layout keeps good images in {self.train}; for a plain folder of "
                "good images use --set data.format=folder",
            )
        validation = listed(folder / self.validation, folder)
        return Dataset(folder, tuple(train), tuple(self._tested(folder)), tuple(validation))

    def _tested(self, folder: Path) -> list[Sample]:
        test, masks = folder / self.test, folder / self.masks
        found: list[Sample] = []
        for kind in folders_in(test):
            if kind == self.good:
                found += listed(test / kind, folder)
            elif test / kind != masks:
                found += _with_masks(listed(test / kind, folder, kind), masks / kind)
        return found


def _good_only(folder: Path) -> Dataset:
    train = listed(folder, folder)
    if not train:
        raise DataError(f"no images in {folder}; data.root must hold good images to learn from")
    return Dataset(folder, tuple(train), ())


def _good_and_defect(folder: Path) -> Dataset:
    """`good/`, `defect/` or `defect/<type>/`, and masks of the same names below `masks/`."""
    train, test = set_apart(listed(folder / "good", folder))
    if not train:
        hint = "Put good images in good/, defective ones in defect/ or defect/<type>/."
        raise no_training_images(folder / "good", hint)
    defects = folder / "defect"
    for sample in listed(defects, folder, "defect"):
        inner = sample.path.relative_to(defects)
        kind = inner.parts[0] if len(inner.parts) > 1 else "defect"
        mask = _mask_of(sample.path, folder / "masks" / inner.parent)
        test.append(replace(sample, defect_type=kind, mask_path=mask))
    return Dataset(folder, tuple(train), tuple(test))


def _with_masks(samples: list[Sample], folder: Path) -> list[Sample]:
    return [replace(s, mask_path=_mask_of(s.path, folder)) for s in samples]


def _mask_of(image: Path, folder: Path) -> Path | None:
    for name in _MASK_NAMES:
        path = folder / name.format(image.stem)
        if _exists(path):
            return path
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise DataError(f"{path} can't be looked at ({error.strerror})") from None


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in one; none where there is no such folder.

    Raises:
        DataError: it can't be listed.
    """
    if not is_folder(folder):
        return []
    try:
        inside = list(folder.iterdir())
        own = own_outputs(folder, [inner.name for inner in inside])
        return sorted(one.name for one in inside if one.is_dir() and one.name not in own)
    except OSError as error:
        raise DataError(f"{folder}: can't list this folder ({error.strerror})") from None


FOLDERS: dict[str, Callable[[Path], Dataset]] = {
    "mvtec": _Layout("MVTec AD"),
    "mvtec_ad_2": _Layout("MVTec AD 2", test="test_public", masks="test_public/ground_truth"),
    "mvtec_loco": _Layout("MVTec LOCO AD"),
    "btad": _Layout("BTAD", train="train/ok", validation="validation/ok", good="ok"),
    "folder": _good_only,
    "good_defect": _good_and_defect,
}
