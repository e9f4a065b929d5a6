"""Data set -> what is in it and what would go wrong with it. Decodes all, trains nothing."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from anomaly.datasets import Dataset, Sample, ground_truth
from anomaly.errors import DataError, ImageError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import ASPECT_TOLERANCE, aspect_error, check_shape
from anomaly.imaging.loading import UnusableImage, to_unusable
from anomaly.imaging.read import MAX_PIXELS, Image, read_image
from anomaly.imaging.region import Region


class Severity(StrEnum):
    """What a fault leads to."""

    WRONG = "wrong"  # training or evaluation would be wrong
    UNUSABLE = "unusable"  # some files would be left out, or stop an evaluation
    NOTE = "note"  # worth knowing


@dataclass(frozen=True)
class Fault:
    """Something wrong with a data set.

    Attributes:
        kind: `unreadable`, `unsupported`, `failed`, `region`, `leak`, `duplicate`, `no_masks`,
            `mask_missing`, `mask_empty`, `mask_unusable`, `mask_on_good`, `too_few_images`,
            `few_images`, `aspect` or `bit_depth`.
        severity: what it leads to.
        split: `train`, `validation` or `test`.
        name: of the image; empty where it is about the whole split.
        detail: for a person.
    """

    kind: str
    severity: Severity
    split: str
    name: str
    detail: str


@dataclass(frozen=True)
class SplitSummary:
    """What a split holds.

    Attributes:
        images: all of them, `good` and `defect` ones.
        usable: those that can be decoded and fit where to look.
        with_mask: defective images that have a mask.
        sizes: how many images there are of each `width×height`, in original pixels.
        modes: how many of each kind of colour and bits a sample, as stored.
    """

    images: int
    good: int
    defect: int
    usable: int
    with_mask: int
    sizes: dict[str, int]
    modes: dict[str, int]


def has_16_bits(mode: str) -> bool:
    """Whether samples stored in this mode are whole numbers of 16 bits; floats of 16 aren't."""
    return mode.endswith("16") and "float" not in mode


@dataclass(frozen=True)
class DataReport:
    """Every split, and every fault, the worst first.

    Attributes:
        splits: by name.
        faults: all of them.
        bit_depth: bits that the images seem to have, where these are fewer than their files'.
    """

    splits: dict[str, SplitSummary]
    faults: tuple[Fault, ...]
    bit_depth: int | None = None

    def has(self, severity: Severity) -> bool:
        """Whether there is a fault of this severity."""
        return any(fault.severity is severity for fault in self.faults)


_LEAST_IMAGES = 2  # one to learn from and one for the threshold
_FEW_IMAGES = 20  # below that, one odd image sets both thresholds


@dataclass(frozen=True)
class Reading:
    """How images are read, as in training; see `anomaly.imaging.read.read_image`.

    Attributes:
        region: what of each image counts; None for all of it.
    """

    bit_depth: int | None = None
    max_pixels: int = MAX_PIXELS
    mask_above: int = 0
    region: Region | None = None


@dataclass(frozen=True)
class _Seen:
    """What is kept of an image once it was looked at."""

    split: str
    sample: Sample
    size: tuple[int, int] | None
    mode: str
    brightest: float  # of full scale
    picture: bytes  # hash of the pixels
    faults: tuple[Fault, ...]

    @property
    def usable(self) -> bool:
        """Whether it can be learned from, or scored."""
        return self.size is not None and all(fault.kind != "region" for fault in self.faults)


def check(
    dataset: Dataset,
    reading: Reading,
    *,
    one_grid: bool = False,
    workers: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DataReport:
    """Look at every image and mask of a data set.

    Args:
        dataset: as listed.
        reading: how its images are read.
        one_grid: whether the model needs images of one aspect (PaDiM).
        workers: decoding processes.
        progress: called with (done, total).
    """
    everything = [(split, s) for split, samples in dataset.splits.items() for s in samples]
    seen: list[_Seen] = []
    for one in _look_at_all(everything, reading, workers):
        seen.append(one)
        progress(len(seen), len(everything))
    faults = [fault for one in seen for fault in one.faults]
    faults += _missing_masks(seen) + _repeated(seen) + _too_few(seen)
    bits = _fewer_bits(seen, reading)
    if bits is not None:
        faults.append(_shallow(bits))
    if one_grid:
        faults += _other_aspects(seen)
    order = list(Severity)
    faults.sort(key=lambda fault: order.index(fault.severity))
    splits = {name: _summary([s for s in seen if s.split == name]) for name in dataset.splits}
    return DataReport({n: s for n, s in splits.items() if s.images}, tuple(faults), bits)


def _look_at_all(
    everything: Sequence[tuple[str, Sample]], reading: Reading, workers: int
) -> Iterator[_Seen]:
    with Decoders(min(workers, len(everything))) as decoders:
        found = decoders.map(partial(_look_at, reading), everything)
        for one, (split, sample) in zip(found, everything, strict=True):
            if isinstance(one, _Seen):
                yield one
            else:
                mask = "" if sample.mask_path is None else f", or its mask {sample.mask_path}"
                reason = f"{sample.path}{mask}: {one}"
                yield _unusable(split, sample, UnusableImage(0, one.status, reason))


def _look_at(reading: Reading, one: tuple[str, Sample]) -> _Seen:
    """Look at one image and its mask; called in a decoding process."""
    split, sample = one
    try:
        image = read_image(sample.path, max_pixels=reading.max_pixels, bit_depth=reading.bit_depth)
        check_shape(image.size)
    except Exception as error:  # training goes on without it, too
        return _unusable(split, sample, to_unusable(0, sample.path, error))
    faults = (
        *_region_faults(split, sample, image, reading.region),
        *_mask_faults(split, sample, image, reading.mask_above),
    )
    brightest = float(image.pixels.max()) / image.full_scale
    return _Seen(split, sample, image.size, image.mode, brightest, _picture(image), faults)


def _unusable(split: str, sample: Sample, refused: UnusableImage) -> _Seen:
    fault = Fault(refused.status, Severity.UNUSABLE, split, sample.name, refused.reason)
    return _Seen(split, sample, None, "", 0.0, b"", (fault,))


def _picture(image: Image) -> bytes:
    """Equal for equal pictures, whatever kind of file holds them."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{image.pixels.shape}{image.pixels.dtype}{image.full_scale}".encode())
    digest.update(image.pixels.data)
    return digest.digest()


def _region_faults(
    split: str, sample: Sample, image: Image, region: Region | None
) -> Iterator[Fault]:
    if region is None:
        return
    try:
        region.inside(image.size, slice(0, 1))
    except DataError as error:
        detail = f"{sample.path} doesn't fit where to look: {error}"
        yield Fault("region", Severity.UNUSABLE, split, sample.name, detail)


def _mask_faults(split: str, sample: Sample, image: Image, above: int) -> Iterator[Fault]:
    if sample.mask_path is None:
        return
    try:
        marked = bool(ground_truth(sample, image.size, above).any())
    except (DataError, ImageError) as error:
        yield Fault("mask_unusable", Severity.UNUSABLE, split, sample.name, str(error))
        return
    if sample.is_defect and not marked:
        detail = f"{sample.mask_path} marks no defect, but {sample.path} is said to show one"
        yield Fault("mask_empty", Severity.UNUSABLE, split, sample.name, detail)
    if marked and not sample.is_defect:
        detail = f"{sample.mask_path} marks a defect, but {sample.path} is said to be good"
        yield Fault("mask_on_good", Severity.WRONG, split, sample.name, detail)


def _missing_masks(seen: Sequence[_Seen]) -> list[Fault]:
    """Defects without a mask where others have one; a set without any may be meant to have none."""
    defects = [s for s in seen if s.sample.is_defect]
    if not defects:
        return []
    if all(s.sample.mask_path is None for s in defects):
        detail = (
            f"none of the {len(defects)} defects has a mask, so there will be image figures only; "
            "pixel figures need masks of their own"
        )
        return [Fault("no_masks", Severity.NOTE, "test", "", detail)]
    return [
        Fault(
            "mask_missing",
            Severity.UNUSABLE,
            s.split,
            s.sample.name,
            f"{s.sample.path} has no mask, so it counts for image figures only",
        )
        for s in defects
        if s.sample.mask_path is None
    ]


def _repeated(seen: Sequence[_Seen]) -> list[Fault]:
    first: dict[bytes, _Seen] = {}
    faults = []
    for one in seen:
        if not one.picture:
            continue
        other = first.setdefault(one.picture, one)
        if other is one:
            continue
        leaks = other.split != one.split
        faults.append(
            Fault(
                "leak" if leaks else "duplicate",
                Severity.WRONG if leaks else Severity.NOTE,
                one.split,
                one.sample.name,
                f"{one.sample.path} is the same picture as {other.sample.path}"
                + (f" in {other.split}: remove it from one of them" if leaks else ""),
            )
        )
    return faults


def _too_few(seen: Sequence[_Seen]) -> list[Fault]:
    usable = sum(s.split == "train" and s.usable for s in seen)
    if usable >= _FEW_IMAGES:
        return []
    if usable < _LEAST_IMAGES:
        detail = f"{usable} usable training images; at least {_LEAST_IMAGES} are needed, better 50"
        return [Fault("too_few_images", Severity.WRONG, "train", "", detail)]
    detail = (
        f"{usable} usable training images are few: a single odd one among them sets the "
        f"thresholds, which can promise little; take {_FEW_IMAGES} at least, better 50"
    )
    return [Fault("few_images", Severity.NOTE, "train", "", detail)]


def _fewer_bits(seen: Sequence[_Seen], reading: Reading) -> int | None:
    """Bits of camera data that lies in 16-bit files and uses a quarter of their range or less."""
    brightest = [s.brightest for s in seen if has_16_bits(s.mode) and s.size is not None]
    if reading.bit_depth is not None or not brightest or not 0 < max(brightest) < 0.25:
        return None
    return round(max(brightest) * 65535).bit_length()


def _shallow(bits: int) -> Fault:
    detail = (
        f"no 16-bit image uses more than {bits} bits: if that is what the camera has, say so with "
        f"image.bit_depth={bits}, or they are seen all but black"
    )
    return Fault("bit_depth", Severity.NOTE, "train", "", detail)


def _other_aspects(seen: Sequence[_Seen]) -> list[Fault]:
    sizes = [s.size for s in seen if s.split == "train" and s.size is not None]
    if not sizes:
        return []
    usual = statistics.median(height / width for height, width in sizes)
    faults = []
    for one in seen:
        error = None if one.size is None else aspect_error(one.size, usual)
        if error is not None and error > ASPECT_TOLERANCE:
            detail = (
                f"{one.sample.path} has another shape than the training images by {error:.0%}; "
                "PaDiM needs one: crop it, or use model.kind=patchcore"
            )
            fault = Fault("aspect", Severity.UNUSABLE, one.split, one.sample.name, detail)
            faults.append(fault)
    return faults


def _summary(seen: Sequence[_Seen]) -> SplitSummary:
    defect = sum(s.sample.is_defect for s in seen)
    sizes = Counter(f"{s.size[1]}×{s.size[0]}" for s in seen if s.size is not None)
    return SplitSummary(
        images=len(seen),
        good=len(seen) - defect,
        defect=defect,
        usable=sum(s.usable for s in seen),
        with_mask=sum(s.sample.is_defect and s.sample.mask_path is not None for s in seen),
        sizes=dict(sizes.most_common()),
        modes=dict(Counter(s.mode for s in seen if s.mode).most_common()),
    )
