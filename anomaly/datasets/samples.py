"""What every layout is turned into: samples, in splits."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.masks import without_masks
from anomaly.errors import DataError, ImageError
from anomaly.imaging.listing import is_folder, list_images, other_files
from anomaly.imaging.read import Image, read_header, read_mask

log = logging.getLogger(__name__)

GOOD = "good"
SPLITS = ("train", "validation", "test")
_TEST_SHARE = 5  # one good image in five
# A mask that marks as much of its image is inverted, or has a background that isn't 0.
NEARLY_ALL = 0.98
_UPRIGHT, _SIDEWAYS = 1, 5  # EXIF orientations; from 5 on the sides are swapped


@dataclass(frozen=True)
class Sample:
    """One image of a data set.

    Attributes:
        path: the image file; a mere name where the pixels are in memory.
        name: its path relative to the data set's folder, with forward slashes.
        defect_type: `good`, or the kind of defect (the name of its folder).
        mask_path: the ground-truth mask, or a folder of masks that hold a part of it each; None
            for good images and where there is none.
        group: what joins several views of one part; None where each image is a part.
        image: the pixels, where they are in memory; None for a file.
    """

    path: Path
    name: str
    defect_type: str = GOOD
    mask_path: Path | None = None
    group: str | None = None
    image: Image | None = field(default=None, compare=False, repr=False)

    @property
    def source(self) -> Path | Image:
        """What is to be loaded: the file, or the pixels that are in memory."""
        return self.path if self.image is None else self.image

    @property
    def is_defect(self) -> bool:
        """Whether this image shows a defect."""
        return self.defect_type != GOOD


@dataclass(frozen=True, repr=False)
class Dataset:
    """Good images to learn from, and a test split that nothing is ever tuned on.

    Attributes:
        folder: where it is: a folder, or a list of images.
        train: good images.
        test: good and defective images.
        validation: further good images, where the data set sets some apart: not learned from.
        unused_masks: files among the masks that are no image's.
        drawn: whether nobody has said which of the good images to test with.
    """

    folder: Path
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]
    validation: tuple[Sample, ...] = ()
    unused_masks: tuple[Path, ...] = ()
    drawn: bool = False

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(some)} {name}" for name, some in self.splits.items() if some)
        return f"<Dataset {self.folder}: {counts} images>"

    @property
    def splits(self) -> dict[str, tuple[Sample, ...]]:
        """The splits by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


class MaskError(DataError):
    """A mask contradicts its image.

    Args:
        message: what is wrong with which mask, and what to do.
        kind: `mask_size`, `mask_inverted`, `mask_on_good` or `mask_unusable`.
    """

    def __init__(self, message: str, kind: str = "mask_unusable") -> None:
        super().__init__(message)
        self.kind = kind


def ground_truth(sample: Sample, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Where a sample's defect is.

    Args:
        sample: a good image, or a defect with a mask.
        size: (H0, W0) of its image.

    Returns:
        (H0, W0); all False for an image without a mask.

    Raises:
        MaskError: a mask has another size than its image, marks nearly all of it, or a defect on a
            good image; or a folder holds no masks.
        ImageError: a mask can't be read.
    """
    whole = np.zeros(size, dtype=bool)
    if sample.mask_path is None:
        return whole
    files = mask_files(sample.mask_path)
    if not files:
        raise MaskError(f"{sample.mask_path} holds no masks; add them or remove the folder")
    for file in files:
        mask = read_mask(file)
        if mask.shape != size:
            raise MaskError(
                f"mask {file} is {mask.shape[1]}×{mask.shape[0]} pixels, but its image "
                f"{sample.path} is {size[1]}×{size[0]}; {_fitting_size(sample, size, mask.shape)}",
                "mask_size",
            )
        whole |= mask
    if sample.is_defect and (marked := float(whole.mean())) >= NEARLY_ALL:
        raise MaskError(
            f"{sample.mask_path} marks {marked:.1%} of {sample.path} as defect. If the defect is "
            "black in it, invert it (magick MASK -negate MASK); if its background isn't 0, write "
            "it anew with 0; if all of the part is defective, remove the mask",
            "mask_inverted",
        )
    if not sample.is_defect and whole.any():
        raise MaskError(
            f"{sample.mask_path} marks a defect, but {sample.path} is labelled good; remove the "
            "mask, or move the image to the defects",
            "mask_on_good",
        )
    return whole


def mask_files(mask: Path) -> list[Path]:
    """A mask's file, or the files of a folder of masks."""
    return list_images(mask) if is_folder(mask) else [mask]


def _fitting_size(sample: Sample, image: tuple[int, int], mask: tuple[int, int]) -> str:
    """What to do about a mask whose size (H, W) isn't its image's."""
    height, width = image
    if mask == (width, height) and _orientation(sample.path) >= _SIDEWAYS:
        return (
            "the image is turned by its EXIF orientation, and the mask fits its pixels as they are "
            "stored. Turn the mask upright as well: draw it on the image as a viewer shows it"
        )
    return (
        "masks must have the size of their images: draw it on the image itself, or scale it "
        f"(magick MASK -sample {width}x{height}! MASK)"
    )


def maybe_turned(sample: Sample, image: Image) -> str:
    """That nobody can say whether a mask is upright as its image is; empty where it surely is.

    Args:
        sample: whose mask, if it has one, is of the size of its image.
        image: its image.
    """
    orientation, (height, width) = image.orientation, image.size
    told_by_size = orientation >= _SIDEWAYS and height != width
    if sample.mask_path is None or orientation == _UPRIGHT or told_by_size:
        return ""
    if any(_orientation(file) != _UPRIGHT for file in mask_files(sample.mask_path)):
        return ""
    return (
        f"{sample.path} is turned by its EXIF orientation ({orientation}), but its mask "
        f"{sample.mask_path} isn't; draw the mask on the image as a viewer shows it, or it will "
        "mark the wrong place"
    )


def _orientation(path: Path) -> int:
    """EXIF orientation of a picture, 1 to 8; 1 where it can't be read."""
    try:
        return read_header(path).orientation
    except ImageError:
        return _UPRIGHT


def listed(folder: Path, root: Path, defect_type: str = GOOD) -> list[Sample]:
    """The images of a folder but masks beside them; none where there is no such folder."""
    if not is_folder(folder):
        return []
    files = list_images(folder)
    images = without_masks(files)
    if defect_type == GOOD and len(images) < len(files):
        mask = next(file for file in files if file not in images)
        log.warning(
            "%s: skipped %d masks that lie beside their images (%s)",
            folder, len(files) - len(images), mask.name,
        )  # fmt: skip
    return [Sample(p, p.relative_to(root).as_posix(), defect_type) for p in images]


def set_apart(good: Iterable[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Good images to learn from and, a fifth, to test with, where nobody has said which.

    The draw hangs on the names alone, so that images added later hardly move the others. Views of
    one part stay together; those of a part with more views than a fifth of all are learned from.
    """
    samples = list(good)
    draw = {
        part: zlib.crc32(part.encode("utf-8", "surrogateescape")) for part in map(_part, samples)
    }
    views = Counter(map(_part, samples))
    left, test = len(samples) // _TEST_SHARE, set[str]()
    for part in sorted(draw, key=lambda part: (draw[part], part)):
        if views[part] <= left:
            test.add(part)
            left -= views[part]
    return [s for s in samples if _part(s) not in test], [s for s in samples if _part(s) in test]


def in_splits(where: Path, samples: Sequence[tuple[str, Sample]], hint: str) -> Dataset:
    """Samples as the splits that each is in; those with none are drawn, all defects are tested."""
    train, validation, test = ([s for n, s in samples if n == split] for split in SPLITS)
    undecided = [s for n, s in samples if not n]
    # Of a part with a defect all views are tested with, and so are those of a part that is tested.
    parts = {s.group for s in [*test, *(s for s in undecided if s.is_defect)]} - {None}
    test += [s for s in undecided if not s.is_defect and s.group in parts]
    learned, tested = set_apart(s for s in undecided if not s.is_defect and s.group not in parts)
    train += learned
    test += [*tested, *(s for s in undecided if s.is_defect)]
    if not train:
        raise no_training_images(where, hint)
    drawn = len(undecided) == len(samples)
    return Dataset(where, tuple(train), tuple(test), tuple(validation), drawn=drawn)


def no_training_images(where: Path, hint: str) -> DataError:
    """The error of a data set without good images."""
    missing = other_files(where) if where.exists() else " (that folder doesn't exist)"
    return DataError(f"no training images in {where}{missing}. {hint}")


def _part(sample: Sample) -> str:
    return sample.name if sample.group is None else sample.group
