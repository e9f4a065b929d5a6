"""Samples in splits, as every layout gives them; the samples' masks, and their copies."""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.names import folded
from anomaly.errors import DataError, counted, some
from anomaly.files.writing import sha256_of
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
_NEARLY_ALL = 0.98
_UPRIGHT, _SIDEWAYS = 1, 5  # EXIF orientations; from 5 on the sides are swapped


@dataclass(frozen=True)
class Sample:
    """One image of a data set.

    Attributes:
        path: the image file; a mere name for pixels in memory.
        name: its path relative to the data set's folder, with forward slashes.
        defect_type: `good`, or the kind of defect (name of a folder, or a list's label).
        mask_path: the mask, or a folder of masks that each hold a part of it; None without.
        group: name of the part that several images show; None for a part of its own.
        image: the pixels in memory; None for a file.
    """

    path: Path
    name: str
    defect_type: str = GOOD
    mask_path: Path | None = None
    group: str | None = None
    image: Image | None = field(default=None, compare=False, repr=False)

    @property
    def source(self) -> Path | Image:
        """The file, or the pixels in memory, for loading."""
        return self.path if self.image is None else self.image

    @property
    def sha256(self) -> str:
        """Hash of the file or of the pixels in memory; empty for an unreadable file."""
        with suppress(OSError):
            return self.image.sha256 if self.image else sha256_of(self.path)
        return ""

    @property
    def part(self) -> str:
        """Name that all views of one part share: the group's, or else the image's own."""
        return self.name if self.group is None else self.group

    @property
    def is_defect(self) -> bool:
        """True if this image shows a defect."""
        return self.defect_type != GOOD


@dataclass(frozen=True, repr=False)
class Dataset:
    """Good images to learn from, and a test split that nothing is ever tuned on.

    Attributes:
        folder: the data set's folder or list.
        train: good images.
        test: good and defective images.
        validation: further good images, not learned from.
        unused_masks: masks that belong to no image.
        drawn: True if nothing names a split, so that `set_apart` drew the good test images.
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

    @property
    def samples(self) -> list[Sample]:
        """Images of all splits, in the order of `splits`."""
        return [sample for split in self.splits.values() for sample in split]


class MaskError(DataError):
    """A mask contradicts its image.

    Args:
        message: the mask, its fault and the remedy.
        kind: `mask_size`, `mask_inverted`, `mask_on_good` or `mask_unusable`.
    """

    def __init__(self, message: str, kind: str = "mask_unusable") -> None:
        super().__init__(message)
        self.kind = kind


def ground_truth(sample: Sample, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Ground truth (H0, W0) of a sample: True where its masks, if any, mark a defect.

    Args:
        sample: a good image, or a defect with a mask.
        size: (H0, W0) of its image.

    Raises:
        MaskError: a mask has another size than its image; masks mark nearly all of a defective
            image, or anything on a good one; or a folder holds no masks.
        ImageError: a mask can't be read.
    """
    marked = np.zeros(size, dtype=bool)
    if sample.mask_path is None:
        return marked
    files = _mask_files(sample.mask_path)
    if not files:
        raise MaskError(f"{sample.mask_path} holds no masks; add them or remove the folder")
    for file in files:
        mask = read_mask(file)
        if mask.shape != size:
            raise MaskError(
                f"mask {file} is {mask.shape[1]}×{mask.shape[0]} pixels, but its image "
                f"{sample.path} is {size[1]}×{size[0]}; draw it on the image as a viewer shows it "
                "(turned by its EXIF orientation, if it has one), or scale it (magick MASK "
                f"-sample {size[1]}x{size[0]}! MASK)",
                "mask_size",
            )
        marked |= mask
    share = float(marked.mean())
    if sample.is_defect and share >= _NEARLY_ALL:
        raise MaskError(
            f"{sample.mask_path} marks {share:.1%} of {sample.path} as defect. If the defect is "
            "black in it, invert it (magick MASK -negate MASK); if its background isn't 0, write "
            "it anew with 0; if all of the part is defective, remove the mask",
            "mask_inverted",
        )
    if not sample.is_defect and share:
        raise MaskError(
            f"{sample.mask_path} marks a defect, but {sample.path} is labelled good; remove the "
            "mask, or move the image to the defects",
            "mask_on_good",
        )
    return marked


def turned_mask_warning(sample: Sample, image: Image) -> str:
    """A warning that a mask may not be turned as its image is; empty where there is no doubt.

    The mask, if there is one, has passed `ground_truth`.
    """
    height, width = image.size
    # Where the sides are swapped, a mask that isn't turned has another size.
    size_tells = image.orientation >= _SIDEWAYS and height != width
    if sample.mask_path is None or image.orientation == _UPRIGHT or size_tells:
        return ""
    if any(read_header(file).orientation != _UPRIGHT for file in _mask_files(sample.mask_path)):
        return ""
    return (
        f"{sample.path} is turned by its EXIF orientation ({image.orientation}), but its mask "
        f"{sample.mask_path} isn't; draw the mask on the image as a viewer shows it, or it will "
        "mark the wrong place"
    )


def _mask_files(mask: Path) -> list[Path]:
    return list_images(mask) if is_folder(mask) else [mask]


def samples_in(folder: Path) -> list[Sample]:
    """Samples of a folder's images; none without a folder. Masks beside them cause a warning."""
    files = list_images(folder) if is_folder(folder) else []
    images = without_masks(files)
    if masks := sorted({*files} - {*images}):
        say = "%s: skipped %d masks that lie beside their images (%s)"
        log.warning(say, folder, len(masks), masks[0].name)
    return [Sample(path, path.relative_to(folder).as_posix()) for path in images]


def set_apart(good: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Good images drawn: those to learn from, and at most one fifth to test with.

    The draw depends on the names alone, so that images added later hardly move the others. Views of
    one part stay together; a part with more views than are still to be drawn is learned from.
    """

    def order(part: str) -> tuple[int, str]:
        return zlib.crc32(part.encode("utf-8", "surrogateescape")), part

    views = Counter(sample.part for sample in good)
    drawn = set[str]()
    remaining = len(good) // _TEST_SHARE
    for part in sorted(views, key=order):
        if views[part] <= remaining:
            drawn.add(part)
            remaining -= views[part]
    return [s for s in good if s.part not in drawn], [s for s in good if s.part in drawn]


def in_splits(where: Path, samples: Sequence[tuple[str, Sample]], hint: str) -> Dataset:
    """A data set of samples with the names of their splits, which may be empty.

    Of those without a split, `set_apart` draws the good ones, and defects test.

    Raises:
        DataError: there is no sample to learn from; the message ends with `hint`.
    """
    train, validation, test = ([s for n, s in samples if n == split] for split in SPLITS)
    undecided = [s for n, s in samples if not n]
    good, defects = ([s for s in undecided if s.is_defect is bad] for bad in (False, True))
    # Views that have no split follow a view of the same part that tests, or shows a defect.
    tested = {s.part for s in [*test, *defects]}
    learned, drawn = set_apart([s for s in good if s.part not in tested])
    train += learned
    test += [*(s for s in good if s.part in tested), *drawn, *defects]
    if not train:
        raise DataError(f"no training images in {where}{other_files(where)}. {hint}")
    is_drawn = len(undecided) == len(samples)
    return Dataset(where, tuple(train), tuple(test), tuple(validation), drawn=is_drawn)


_MASK_WORDS = "masks?|labels?|gt|ground_?truth|truth|seg|segm|segmentation|annotations?|anno"
_MASK_NAME = re.compile(rf"(?:{_MASK_WORDS})[-_. ](.+)|(.+?)[-_. ](?:{_MASK_WORDS})")


class Masks:
    """Search for images' masks among all pictures of a data set, by folded names."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._owners: dict[Path, Path] = {}  # images by their masks
        # Files and folders by folder and folded name: their own (False), or that of the image whose
        # mask they are by their name (True).
        self._named = defaultdict[tuple[str, str, bool], list[Path]](list)
        for entry in dict.fromkeys(entry for file in files for entry in (file, file.parent)):
            folder, stem = folded(str(entry.parent)), _stem(entry)
            self._named[folder, stem, False].append(entry)
            self._named[folder, _masked_by(stem), True].append(entry)

    def of(self, image: Path, folders: Iterable[Path]) -> Path | None:
        """The mask of an image `1.jpg`: `1_mask.png` or similar, `1.png` or a folder `1`; or None.

        The given folders are searched in their order, and then the image's own, where only names
        such as `1_mask.png` count.

        Raises:
            DataError: another image has this mask.
        """
        mask = next(self._candidates(image, folders), None)
        if mask and (owner := self._owners.setdefault(mask, image)) != image:
            raise DataError(
                f"{mask} would be the mask of both {owner} and {image}; give each image its own "
                "mask, with one subfolder of masks for each folder of images"
            )
        return mask

    def _candidates(self, image: Path, folders: Iterable[Path]) -> Iterator[Path]:
        """Files and folders that may be an image's mask, the likeliest first."""
        beside, stem = folded(str(image.parent)), _stem(image)
        for folder in map(folded, map(str, folders)):
            # `1_mask.png` is the mask of an image `1_mask.jpg` where there is one.
            of_name = self._named[folder, stem, True]
            yield from (m for m in of_name if not self._named[beside, _stem(m), False])
            yield from self._named[folder, stem, False]
        yield from filter(_lossless, self._named[beside, stem, True])

    def has(self, file: Path) -> bool:
        """True if `of` has found this file, or a folder that it is in, to be an image's mask."""
        return not self._owners.keys().isdisjoint((file, *file.parents))


def without_masks(images: Sequence[Path]) -> list[Path]:
    """Images without masks beside them: files named like `1_mask.png` beside `1.jpg`.

    A JPEG is no mask.
    """
    beside = {(image.parent, _stem(image)) for image in images}
    masks = {i for i in images if _lossless(i) and (i.parent, _masked_by(_stem(i))) in beside}
    return [image for image in images if image not in masks]


def _stem(entry: Path) -> str:
    """Name of an image without its suffix, or of a folder, folded."""
    return folded(entry.stem if is_image(entry) else entry.name)


def _masked_by(stem: str) -> str:
    """Name of the image whose mask a file of this folded name is; empty for other names."""
    match = _MASK_NAME.fullmatch(stem)
    return match[1] or match[2] if match else ""


def _lossless(file: Path) -> bool:
    """True for the suffix of an image format without losses, as masks need."""
    return is_image(file) and file.suffix.lower() not in JPEG.suffixes


def stray_masks_warning(masks: Sequence[Path]) -> str:
    """A warning of masks that belong to no image; empty without any."""
    if not masks:
        return ""
    return (
        f"no image belongs to {counted(len(masks), 'mask')} ({some([*map(str, masks)])}); name "
        "masks like their images, 1_mask.png or 1.png for 1.jpg, or remove them"
    )


def contradiction(first: Sample, second: Sample) -> DataError | None:
    """The error of two samples of one picture, one good and one a defect; else None."""
    if first.is_defect == second.is_defect:
        return None
    good, defect = (second, first) if first.is_defect else (first, second)
    return DataError(
        f"{defect.path} is labelled as a defect ({defect.defect_type}), but is the same picture as "
        f"{good.path}, which is labelled good; look at them and remove the wrong one"
    )


# Root mean square of the difference of two thumbnails, in levels of 255. JPEG of a quality of 40
# and more and noise of 5 levels stay below; the closest different parts of 8 data sets are at 0.87.
_NEAR = 0.6


def frames(looks: Mapping[int, Look]) -> dict[int, int]:
    """For each image, by number, the lowest number among the images of its frame.

    Thumbnails of a frame are within `_NEAR` of that of one image.
    """
    if not looks:
        return {}
    images = np.array(sorted(looks))
    rows = np.stack([looks[image].thumbnail for image in images.tolist()]).astype(np.float32)
    rows -= rows.mean(axis=0)
    # Sorted along the direction in which thumbnails differ most, near ones are neighbours, so that
    # each is compared with few others.
    along = rows @ np.linalg.eigh(rows.T @ rows)[1][:, -1]
    order = np.argsort(along, kind="stable")
    rows, along, images = rows[order], along[order], images[order]
    squares = np.square(rows).sum(axis=1)
    most = float(_NEAR * rows.shape[1] ** 0.5)  # from a root mean square to a distance
    shown = np.full(len(rows), -1)  # -1: in no frame yet
    for place in range(len(rows)):
        if shown[place] < 0:
            beyond = int(np.searchsorted(along, along[place] + most, side="right"))
            near = slice(place, max(beyond, place + 1))
            apart = squares[near] + squares[place] - 2 * (rows[near] @ rows[place])  # |a - b|²
            frame = place + np.flatnonzero((apart < most**2) & (shown[near] < 0))
            shown[frame] = images[frame].min()
    return dict(zip(images.tolist(), shown.tolist(), strict=True))


def near_copies_warning(samples: Mapping[int, Sample], looks: Mapping[int, Look]) -> str:
    """A warning that counts near copies among training images; empty without any.

    Both arguments have the images' numbers as keys. Exact copies aren't counted.
    """
    shown = frames(looks)
    pictures: dict[int, dict[str, int]] = {}
    for i, look in sorted(looks.items()):
        pictures.setdefault(shown[i], {}).setdefault(look.picture, i)
    alike = [[*frame.values()] for frame in pictures.values() if len(frame) > 1]
    if not alike:
        return ""
    count = sum(map(len, alike)) - len(alike)
    original, copy = alike[0][:2]
    return (
        f"{count} of {len(looks)} training images are near copies of others, different only in "
        f"noise or compression ({samples[copy].path} of {samples[original].path}), which leaves "
        f"{len(pictures)} different images. Copies teach nothing and make thresholds too "
        "optimistic: photograph more parts instead"
    )


def too_few_different(count: int) -> DataError:
    """The error of a training with too few different images (0 or 1) for thresholds."""
    return DataError(
        f"calibration needs at least 2 different training images, not {count}; "
        "add some, or train with --no-calibrate (and without model.leave_out_suspects, if set)"
    )


def none_usable(reasons: Sequence[str]) -> DataError:
    """The error of images that can't be used, with the first three reasons: path and fault."""
    listed = "\n  ".join(reasons[:3])
    return DataError(f"none of the {len(reasons)} images can be used:\n  {listed}")
