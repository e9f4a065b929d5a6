"""What every layout is turned into: samples, in splits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError
from anomaly.imaging.listing import is_folder, list_images
from anomaly.imaging.read import Image, read_mask

GOOD = "good"
_TEST_SHARE = 5  # one good image in five


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
    """

    folder: Path
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]
    validation: tuple[Sample, ...] = ()

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(some)} {name}" for name, some in self.splits.items() if some)
        return f"<Dataset {self.folder}: {counts} images>"

    @property
    def splits(self) -> dict[str, tuple[Sample, ...]]:
        """The splits by name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}


def ground_truth(sample: Sample, size: tuple[int, int], above: int = 0) -> NDArray[np.bool_]:
    """Where a sample's defect is.

    Args:
        sample: a good image, or a defect with a mask.
        size: (H0, W0) of its image.
        above: mask values above this are defect.

    Returns:
        (H0, W0); all False for an image without a mask.

    Raises:
        DataError: a mask has another size than its image, or a folder holds no masks.
        ImageError: a mask can't be read.
    """
    whole = np.zeros(size, dtype=bool)
    if sample.mask_path is None:
        return whole
    whole_folder = is_folder(sample.mask_path)
    files = list_images(sample.mask_path) if whole_folder else [sample.mask_path]
    if not files:
        raise DataError(f"{sample.mask_path} holds no masks; add them or remove the folder")
    for file in files:
        mask = read_mask(file, above=above)
        if mask.shape != size:
            raise DataError(
                f"mask {file} is {mask.shape[1]}×{mask.shape[0]} pixels, but its image "
                f"{sample.path} is {size[1]}×{size[0]}; masks must have the size of their images"
            )
        whole |= mask
    return whole


def listed(folder: Path, root: Path, defect_type: str = GOOD) -> list[Sample]:
    """The images of a folder; none where there is no such folder."""
    if not is_folder(folder):
        return []
    return [Sample(p, p.relative_to(root).as_posix(), defect_type) for p in list_images(folder)]


def set_apart(good: Iterable[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Good images to learn from and, a fifth, to test with, where nobody has said which.

    The draw hangs on the names alone, so that images added later hardly move the others. Views of
    one part stay together.
    """
    samples = list(good)
    draw = {
        part: zlib.crc32(part.encode("utf-8", "surrogateescape")) for part in map(_part, samples)
    }
    parts = sorted(draw, key=lambda part: (draw[part], part))
    test = set(parts[: len(parts) // _TEST_SHARE])
    return [s for s in samples if _part(s) not in test], [s for s in samples if _part(s) in test]


def no_training_images(where: Path, hint: str) -> DataError:
    """The error of a data set without good images."""
    missing = "" if where.exists() else " (that folder doesn't exist)"
    return DataError(f"no training images in {where}{missing}. {hint}")


def _part(sample: Sample) -> str:
    return sample.name if sample.group is None else sample.group
