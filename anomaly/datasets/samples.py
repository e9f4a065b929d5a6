"""Samples, in splits: what every layout is turned into; their masks, and their copies."""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.names import entries_of, folded
from anomaly.errors import DataError, ImageError, some
from anomaly.files.writing import left_by_system
from anomaly.imaging.formats import JPEG
from anomaly.imaging.loading import Look
from anomaly.imaging.read import (
    Image,
    is_folder,
    is_image,
    list_images,
    other_files,
    read_header,
    read_mask,
)

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


class Masks:
    """Finds the masks of images in folders: each folder is read once."""

    def __init__(self) -> None:
        self._listed: dict[Path, tuple[_Named, _Named]] = {}
        self._owners: dict[Path, Path] = {}  # each mask is one image's

    def of(self, image: Path, folders: Iterable[Path] = ()) -> Path | None:
        """`1_mask.png`, another of the usual names, `1.png` or a folder `1`, for `1.jpg`.

        Suffixes are any that can be read; capitals and forms of Unicode don't matter.

        Args:
            image: its file.
            folders: where its mask may be, the likeliest first; then the image's own, for masks
                that aren't called as the image.

        Raises:
            DataError: another image has this mask.
        """
        mask = next(filter(None, (self._in(image, f) for f in (*folders, image.parent))), None)
        if mask and (owner := self._owners.setdefault(mask, image)) != image:
            raise DataError(
                f"{mask} would be the mask of both {owner} and {image}; give each image its own "
                "mask, with one subfolder of masks for each folder of images"
            )
        return mask

    def _in(self, image: Path, folder: Path) -> Path | None:
        same, named = self._names_in(folder)
        stem = folded(image.stem)
        if folder == image.parent:
            return next(filter(_lossless, named.get(stem, ())), None)
        # `1_mask.png` is the mask of an image `1_mask.jpg` where there is one.
        beside, _ = self._names_in(image.parent)
        found = [mask for mask in named.get(stem, ()) if folded(mask.stem) not in beside]
        return next(iter((*found, *same.get(stem, ()))), None)

    def left_in(self, folder: Path) -> tuple[Path, ...]:
        """The files in a folder of masks, and below it, that are no image's."""
        files = list_images(folder) if is_folder(folder) else []
        return tuple(f for f in files if not {f, *f.parents} & self._owners.keys())

    def _names_in(self, folder: Path) -> tuple[_Named, _Named]:
        """Pictures and folders by their own names, and by those of the images they are masks of."""
        if folder not in self._listed:
            same, named = self._listed[folder] = {}, {}
            place = _found(folder)
            for entry in sorted(entries_of(place)) if is_folder(place) else ():
                if left_by_system(entry.name) or not (is_image(entry) or entry.is_dir()):
                    continue
                stem = folded(entry.stem if is_image(entry) else entry.name)
                same.setdefault(stem, []).append(entry)
                if of := _MASK_NAME.fullmatch(stem):
                    named.setdefault(of["behind"] or of["before"], []).append(entry)
        return self._listed[folder]


_Named = dict[str, list[Path]]  # by a name without suffix, folded
_MASK_WORDS = "masks?|labels?|gt|ground_?truth|truth|seg|segm|segmentation|annotations?|anno"
_MASK_NAME = re.compile(
    rf"(?:{_MASK_WORDS})[-_. ](?P<behind>.+)|(?P<before>.+?)[-_. ](?:{_MASK_WORDS})"
)


def without_masks(images: Sequence[Path]) -> list[Path]:
    """Those that aren't masks of one beside them by their names: not `1_mask.png` beside `1.jpg`.

    A JPEG is never taken for a mask.
    """
    beside = {(image.parent, folded(image.stem)) for image in images}

    def is_mask(image: Path) -> bool:
        of = _MASK_NAME.fullmatch(folded(image.stem)) if _lossless(image) else None
        return of is not None and (image.parent, of["behind"] or of["before"]) in beside

    return [image for image in images if not is_mask(image)]


def _lossless(file: Path) -> bool:
    return is_image(file) and file.suffix.lower() not in JPEG.suffixes


def _found(folder: Path) -> Path:
    """A folder, or the one whose name differs in capitals or in the form of Unicode only."""
    if is_folder(folder) or folder == folder.parent:
        return folder
    around = _found(folder.parent)
    beside = entries_of(around) if is_folder(around) else []
    same = (place for place in beside if folded(place.name) == folded(folder.name))
    return next(same, folder)


def strays(masks: Sequence[Path]) -> str:
    """That masks belong to no image; empty without any."""
    if not masks:
        return ""
    these = "this mask" if len(masks) == 1 else f"these {len(masks)} masks"
    return (
        f"no image has the name of {these}: {some([str(mask) for mask in masks])}; name masks like "
        "their images, 1_mask.png or 1.png for 1.jpg, or remove them"
    )


# Root mean square of the difference of two thumbnails, in levels of 255. JPEG of a quality of 40
# and more and noise of 5 levels stay below; the closest different parts of 8 data sets are at 0.87.
_NEAR = 0.6
_AT_ONCE = 1024


def contradiction(one: Sample, other: Sample) -> DataError | None:
    """The error that two samples of one picture can't both be right; None where they can.

    Args:
        one: of a picture.
        other: of the same picture.
    """
    if one.is_defect == other.is_defect:
        return None
    good, defect = (other, one) if one.is_defect else (one, other)
    return DataError(
        f"{defect.path} is labelled as a defect ({defect.defect_type}), but is the same picture as "
        f"{good.path}, which is labelled good; look at them and remove the wrong one"
    )


def frames(looks: Mapping[int, Look]) -> dict[int, int]:
    """The image that stands for the frame that each one shows, whatever its compression and noise.

    Args:
        looks: of images by their numbers.

    Returns:
        By image the lowest number of those that show its frame; its own where no other does.
    """
    # Exact copies are of one frame however rounding goes.
    first: dict[str, int] = {}
    for image in sorted(looks):
        first.setdefault(looks[image].picture, image)
    distinct = [*first.values()]
    groups: dict[int, list[int]] = {}
    for place, leader in enumerate(_leaders([looks[i].thumbnail for i in distinct])):
        groups.setdefault(leader, []).append(distinct[place])
    shown = {image: min(group) for group in groups.values() for image in group}
    return {image: shown[first[look.picture]] for image, look in looks.items()}


def _leaders(thumbnails: Sequence[NDArray[np.float16]]) -> list[int]:
    """The place of a thumbnail, for each one, that it is close to: its own for the first.

    Along the direction in which they differ most, close ones are neighbours. Only these are
    compared, so that hundreds of thousands take seconds.
    """
    if not thumbnails:
        return []
    rows = np.stack(thumbnails).astype(np.float32)
    rows -= rows.mean(axis=0)
    along = rows @ np.linalg.eigh(rows.T @ rows)[1][:, -1]
    order = np.argsort(along, kind="stable")
    rows, along = rows[order], along[order]
    squares, most = np.square(rows).sum(axis=1), float(_NEAR * rows.shape[1] ** 0.5)
    leader = np.arange(len(rows))
    for start in range(0, len(rows), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(rows))
        until = int(np.searchsorted(along, along[stop - 1] + most, side="right"))
        products = rows[start:stop] @ rows[start:until].T
        close = squares[start:stop, None] + squares[start:until] - 2 * products < most**2
        for place in range(start, stop):
            if leader[place] == place:
                others = place + 1 + np.flatnonzero(close[place - start, place + 1 - start :])
                leader[others[leader[others] == others]] = place
    found = np.empty_like(leader)
    found[order] = order[leader]
    return [int(place) for place in found]


def near_copies(samples: Mapping[int, Sample], looks: Mapping[int, Look]) -> str:
    """That some training images are near copies of others; empty where none is.

    Exact copies aren't counted.

    Args:
        samples: by their numbers.
        looks: of the same numbers.
    """
    shown = frames(looks)
    met: dict[int, dict[str, int]] = {}
    for i, look in sorted(looks.items()):
        met.setdefault(shown[i], {}).setdefault(look.picture, i)
    alike = [[*pictures.values()] for pictures in met.values() if len(pictures) > 1]
    if not alike:
        return ""
    one, other = (samples[i].path for i in alike[0][:2])
    return (
        f"{sum(map(len, alike)) - len(alike)} of {len(looks)} training images are near copies of "
        f"others, different only in noise or compression ({other} of {one}), which leaves "
        f"{len(met)} different images. Copies teach nothing and make thresholds too optimistic: "
        "photograph more parts instead"
    )


def too_few_different(count: int) -> DataError:
    """The error of so many different images, none or one: too few to find thresholds with."""
    return DataError(
        f"calibration needs at least 2 different training images, not {count}; "
        "add some, or train with --no-calibrate (and without model.leave_out_suspects, if set)"
    )


def none_usable(reasons: Sequence[str]) -> DataError:
    """The error to raise if no image can be used.

    Args:
        reasons: of each, beginning with its path.
    """
    listed = "\n  ".join(reasons[:3])
    return DataError(f"none of the {len(reasons)} images can be used:\n  {listed}")
