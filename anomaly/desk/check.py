"""Data set -> counts, faults, and the settings that suit it.

Decodes every image and mask, and trains nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np

from anomaly.datasets.samples import (
    Dataset,
    MaskError,
    Sample,
    contradiction,
    frames,
    ground_truth,
    near_copies_warning,
    none_usable,
    stray_masks_warning,
    too_few_different,
    turned_mask_warning,
)
from anomaly.errors import DataError, ImageError, first_of
from anomaly.imaging.alignment import grey_picture, learn
from anomaly.imaging.geometry import ASPECT_TOLERANCE, Region, check_shape, is_strip
from anomaly.imaging.loading import Look, look_of, to_unusable
from anomaly.imaging.pool import read_all
from anomaly.imaging.read import (
    DEFAULT,
    Decoding,
    Image,
    aspect_error,
    derive,
    read_image,
    unstated_bits_warning,
)
from anomaly.runtime import Progress

_LEAST_IMAGES = 2  # one to learn from and one for the threshold
_HANDFUL = 8  # images; of so few each patch may be the only one of its kind
_SMALL_SET = 50  # images; of fewer the coreset is small at any ratio
_LARGE = 2048  # pixels of the shorter side, from which small defects vanish at 256
_TILE, _LEAST_TILE = 1024, 64  # pixels: side to propose, and the smallest that the settings allow
_POSES = 64  # images that show how parts lie
# Ranges in which good parts may lie, as an angle and in shares of the image, margins included:
# within 15° any angle of a round part matches as well.
_TURNED, _SHIFTED = math.radians(60), 0.1
_COUNTED = 4  # sizes or kinds of images that a line names


class Severity(StrEnum):
    """The consequence of a fault, the worst first; the value is its heading."""

    WRONG = "training or evaluation would be wrong"
    UNUSABLE = "can't be used as it is"  # files would be left out, or stop an evaluation
    NOTE = "worth knowing"


# Kinds of fault by severity; all other kinds are unusable files.
_WRONG = {"leak", "two_labels", "too_few_images", "mask_size", "mask_inverted", "mask_on_good"}
_NOTES = {"duplicate", "near_copies", "no_masks", "mask_maybe_turned", "bit_depth"}


@dataclass(frozen=True)
class Fault:
    """Something wrong with a data set.

    Attributes:
        kind: a key of `_WRONG` or `_NOTES`, `unreadable`, `unsupported`, `failed`, `mask_missing`,
            `mask_empty`, `mask_unusable`, `mask_unused` or `aspect`.
        detail: for a person, with the image's name.
    """

    kind: str
    detail: str

    @property
    def severity(self) -> Severity:
        """The severity of this kind of fault."""
        if self.kind in _WRONG:
            return Severity.WRONG
        return Severity.NOTE if self.kind in _NOTES else Severity.UNUSABLE


@dataclass(frozen=True)
class SplitSummary:
    """Counts of a split's images.

    Attributes:
        good, defect: number of good and of defective images.
        usable: number of images that can be decoded and suit the settings.
        sizes: number of images by `width×height`, in original pixels.
        modes: number of images by colour and bits a sample, as stored.
    """

    good: int
    defect: int
    usable: int
    sizes: Counter[str]
    modes: Counter[str]

    def lines(self, name: str) -> list[str]:
        """Two lines for people, the first with the split's name."""
        images = self.good + self.defect
        fewer = f"; {self.usable} of these {images} can be used" if self.usable < images else ""
        return [
            f"  {name:<12}{self.good} good, {self.defect} defective{fewer}",
            f"  {'':<12}{_counts(self.sizes, 'sizes')}; {_counts(self.modes, 'kinds')}",
        ]


def _counts(counts: Counter[str], noun: str) -> str:
    """The most common values with their numbers, in words; `noun` is a plural for the values."""
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    listed = ", ".join(f"{count} {name}" for name, count in counts.most_common(_COUNTED))
    return f"{len(counts)} {noun}: {listed}" + (" …" if len(counts) > _COUNTED else "")


@dataclass(frozen=True)
class DataReport:
    """Counts of every split, and every fault, the worst first.

    Attributes:
        splits: counts by the split's name.
        faults: all faults, by severity.
        bit_depth: significant bits of the images, where files have more; else None.
        copies: groups of good images, by name, that differ at most in noise or compression.
    """

    splits: dict[str, SplitSummary]
    faults: tuple[Fault, ...]
    bit_depth: int | None = None
    copies: tuple[tuple[str, ...], ...] = ()

    def has(self, severity: Severity) -> bool:
        """True if there is a fault of this severity."""
        return any(fault.severity is severity for fault in self.faults)

    def lines(self, most: int | None = None) -> list[str]:
        """Lines for people: counts, then faults.

        Args:
            most: number of faults of a kind to name; None for all.
        """
        lines = [line for name, split in self.splits.items() for line in split.lines(name)]
        for severity in Severity:
            faults = [fault for fault in self.faults if fault.severity is severity]
            if faults:
                lines += ["", f"{severity}: {len(faults)}"]
            for kind in dict.fromkeys(fault.kind for fault in faults):
                details = [fault.detail for fault in faults if fault.kind == kind]
                shown = first_of(details, " (anomaly check names them)", most)
                lines += [f"  {kind}: {text}" for text in shown]
        return lines if self.faults else [*lines, "", "no faults"]


@dataclass(frozen=True)
class Reading:
    """Preprocessing of images, as in training.

    Attributes:
        decoding: most pixels and significant bits of a file.
        region: the part of each image that counts; None for the whole image.
        tiled: images are cut into tiles, so a strip may have any length.
        one_aspect: the model needs images of one aspect (PaDiM).
    """

    decoding: Decoding = DEFAULT
    region: Region | None = None
    tiled: bool = False
    one_aspect: bool = False


@dataclass(frozen=True)
class _CheckedImage:
    """The facts about an image that outlive its pixels.

    Attributes:
        size: (H0, W0) in original pixels; None if the image is unusable.
        mode: colour and bits a sample, as stored.
        look: hashes and a coarse picture, to find copies; None if the image is unusable.
    """

    split: str
    sample: Sample
    faults: tuple[Fault, ...]
    size: tuple[int, int] | None = None
    mode: str = ""
    look: Look | None = None


def check(
    dataset: Dataset,
    reading: Reading,
    progress: Progress = lambda done, total: None,
) -> DataReport:
    """Decode every image and mask of a data set, and list its faults.

    Args:
        dataset: the samples of all splits.
        reading: preprocessing, as in training.
        progress: called with (done, total) images.
    """
    everything = [(split, s) for split, samples in dataset.splits.items() for s in samples]
    images: list[_CheckedImage] = []
    for image in _check_all(everything, reading):
        images.append(image)
        progress(len(images), len(everything))
    brightest = (image.look.brightest for image in images if image.look is not None)
    bits = reading.decoding.unstated_bits(brightest)
    # A defect may differ from a good part in a small mark only, so it is no copy.
    looks = {i: im.look for i, im in enumerate(images) if im.look and not im.sample.is_defect}
    frame_of = frames(looks)
    faults = [
        *(fault for image in images for fault in image.faults),
        *(Fault("mask_unused", stray_masks_warning([mask])) for mask in dataset.unused_masks),
        *_missing_masks(images),
        *_repeated(images),
        *_nearly_repeated(images, looks, frame_of),
        *_too_few(images),
        *([] if bits is None else [Fault("bit_depth", unstated_bits_warning(bits))]),
        *(_other_aspects(images) if reading.one_aspect else ()),
    ]
    order = list(Severity)
    faults.sort(key=lambda fault: order.index(fault.severity))
    splits = {
        name: _summary([image for image in images if image.split == name])
        for name, samples in dataset.splits.items()
        if samples
    }
    return DataReport(splits, tuple(faults), bits, _copies(images, frame_of))


def _copies(
    images: Sequence[_CheckedImage], frame_of: Mapping[int, int]
) -> tuple[tuple[str, ...], ...]:
    """Names of the images that show one frame, for each frame shown more than once.

    `frame_of` has the number of the first image that shows the same, by an image's number.
    """
    by_frame: dict[int, list[str]] = {}
    for i, frame in frame_of.items():
        by_frame.setdefault(frame, []).append(images[i].sample.name)
    return tuple(tuple(names) for names in by_frame.values() if len(names) > 1)


def _check_all(
    everything: Sequence[tuple[str, Sample]], reading: Reading
) -> Iterator[_CheckedImage]:
    """Facts about all images, given as (split, sample), in order; from decoding processes."""
    results = read_all(partial(_check_image, reading), everything)
    for result, (split, sample) in zip(results, everything, strict=True):
        if isinstance(result, _CheckedImage):
            yield result
        else:  # the decoding process was stopped: too much memory or time
            mask = "" if sample.mask_path is None else f", or its mask {sample.mask_path}"
            fault = Fault(result.status, f"{sample.path}{mask}: {result}")
            yield _CheckedImage(split, sample, (fault,))


def _check_image(reading: Reading, listed: tuple[str, Sample]) -> _CheckedImage:
    """Facts about one image and its mask, given as (split, sample); for a decoding process."""
    split, sample = listed
    try:
        image = read_image(sample.path, reading.decoding)
        if not reading.tiled:
            check_shape(image.size)
        if reading.region is not None:
            reading.region.inside(image.size, slice(0, 1))
    except Exception as error:  # training goes on without it, too
        refused = to_unusable(0, sample.path, error)
        return _CheckedImage(split, sample, (Fault(refused.status, refused.reason),))
    return _CheckedImage(
        split, sample, tuple(_mask_faults(sample, image)), image.size, image.mode, look_of(image)
    )


def _mask_faults(sample: Sample, image: Image) -> Iterator[Fault]:
    """Faults of a mask: unusable, against its image, without a mark, or maybe turned."""
    if sample.mask_path is None:
        return
    try:
        marked = bool(ground_truth(sample, image.size).any())
    except (MaskError, ImageError) as error:
        kind = error.kind if isinstance(error, MaskError) else "mask_unusable"
        yield Fault(kind, str(error))
        return
    if sample.is_defect and not marked:
        detail = f"{sample.mask_path} marks no defect, but {sample.path} is labelled as a defect"
        yield Fault("mask_empty", detail)
    if doubt := turned_mask_warning(sample, image):
        yield Fault("mask_maybe_turned", doubt)


def _missing_masks(images: Sequence[_CheckedImage]) -> Iterator[Fault]:
    """Defects without a mask where others have one; a set without any may be meant to have none."""
    defects = [image for image in images if image.sample.is_defect]
    without = [image for image in defects if image.sample.mask_path is None]
    if defects and len(without) == len(defects):
        detail = (
            f"none of the {len(defects)} defects has a mask, so there will be image figures only; "
            "pixel figures need masks"
        )
        yield Fault("no_masks", detail)
        return
    for image in without:
        detail = f"{image.sample.path} has no mask, so it counts for image figures only"
        yield Fault("mask_missing", detail)


def _repeated(images: Sequence[_CheckedImage]) -> Iterator[Fault]:
    """Pictures that are there twice: with two labels, in two splits, or in one."""
    first: dict[str, _CheckedImage] = {}
    for image in images:
        if image.look is None or (twin := first.setdefault(image.look.picture, image)) is image:
            continue
        if conflict := contradiction(twin.sample, image.sample):
            yield Fault("two_labels", str(conflict))
            continue
        detail = f"{image.sample.path} is the same picture as {twin.sample.path}"
        if leaks := twin.split != image.split:
            detail += f" in {twin.split}: remove it from one of them"
        yield Fault("leak" if leaks else "duplicate", detail)


def _nearly_repeated(
    images: Sequence[_CheckedImage], looks: Mapping[int, Look], frame_of: Mapping[int, int]
) -> Iterator[Fault]:
    """Good images that differ at most in noise or compression.

    Args:
        images: all images.
        looks: looks of the usable good images, by index.
        frame_of: number of the frame that each of these shows; copies share it.
    """
    samples = {i: images[i].sample for i in looks}
    learned = {i: look for i, look in looks.items() if images[i].split == "train"}
    if detail := near_copies_warning(samples, learned):
        yield Fault("near_copies", detail)
    pictures = {look.picture for look in learned.values()}
    in_training = {frame_of[i]: i for i in learned}
    tested = [i for i in looks if i not in learned]
    # Equal pictures are reported as leaks already.
    alike = [i for i in tested if frame_of[i] in in_training and looks[i].picture not in pictures]
    if alike:
        copy, original = samples[alike[0]].path, samples[in_training[frame_of[alike[0]]]].path
        detail = (
            f"{len(alike)} of {len(tested)} other good images are near copies of training images, "
            f"different only in noise or compression ({copy} of {original}), so figures will be "
            "too good; keep all images of one part in one split"
        )
        yield Fault("near_copies", detail)


def _too_few(images: Sequence[_CheckedImage]) -> Iterator[Fault]:
    """Fewer different training images than thresholds need."""
    train = [image for image in images if image.split == "train"]
    pictures = {image.look.picture for image in train if image.look}
    if not pictures:
        refused = [image.faults[0].detail for image in train if image.faults]
        yield Fault("too_few_images", str(none_usable(refused)))
    elif len(pictures) < _LEAST_IMAGES:
        yield Fault("too_few_images", str(too_few_different(len(pictures))))


def _other_aspects(images: Sequence[_CheckedImage]) -> Iterator[Fault]:
    """Images whose aspect is too far from the training images' median."""
    sized = [(image, image.size) for image in images if image.size is not None]
    learned = [height / width for image, (height, width) in sized if image.split == "train"]
    for image, size in sized if learned else ():
        error = aspect_error(size, statistics.median(learned))
        if error > ASPECT_TOLERANCE:
            detail = (
                f"{image.sample.path} has another shape than the training images by {error:.0%}; "
                "PaDiM needs one: crop it, or use model.kind=patchcore"
            )
            yield Fault("aspect", detail)


def _summary(images: Sequence[_CheckedImage]) -> SplitSummary:
    defects = sum(image.sample.is_defect for image in images)
    sizes = [image.size for image in images if image.size is not None]
    return SplitSummary(
        good=len(images) - defects,
        defect=defects,
        usable=len(sizes),
        sizes=Counter(f"{width}×{height}" for height, width in sizes),
        modes=Counter(image.mode for image in images if image.mode),
    )


@dataclass(frozen=True)
class Hint:
    """A setting that suits the data set.

    Attributes:
        key: the setting's name, as in `image.tile`.
        value: the setting's value.
        reason: a sentence or two, for people.
    """

    key: str
    value: float | str
    reason: str


def setting_hints(report: DataReport) -> Iterator[Hint]:
    """Settings that suit a data set with usable training images."""
    usable = report.splits["train"].usable
    ratio = 0.02
    reason = (
        f"{usable} images: keeping 2 % of the patches is nearly as accurate as 10 %, and faster"
    )
    if usable <= _HANDFUL:
        ratio = 1.0
        reason = f"very few images to learn from ({usable}), so all of their patches are kept"
    elif usable < _SMALL_SET:
        ratio = 0.1
        reason = (
            f"few images to learn from ({usable}), so 10 % of the patches are kept instead of 2 %: "
            "rare details survive"
        )
    yield Hint("model.coreset_ratio", ratio, reason)
    yield from _tile_hint(report)
    if report.bit_depth is not None:
        reason = (
            f"no 16-bit image uses more than {report.bit_depth} bits; without this setting they "
            "would look almost black"
        )
        yield Hint("image.bit_depth", report.bit_depth, reason)


def _tile_hint(report: DataReport) -> Iterator[Hint]:
    """Tiles, where the most common size is large or a strip."""
    sizes = sum((split.sizes for split in report.splits.values()), Counter[str]())
    common = sizes.most_common(1)[0][0]
    width, height = (int(side) for side in common.split("×"))
    is_large = min(width, height) >= _LARGE
    if is_large or is_strip((height, width)):
        tile = max(_LEAST_TILE, min(width, height, _TILE))
        tiles = -(-width // tile) * -(-height // tile)  # rounded up
        kind = "strips, too thin to be seen as a whole"
        if is_large:
            kind = "large, and small defects would vanish"
        reason = (
            f"images of {common} are {kind}: each is seen in tiles of {tile} pixels, which takes "
            f"about {tiles} times as long as without"
        )
        yield Hint("image.tile", tile, reason)


def pose_hints(samples: Sequence[Sample], decoding: Decoding, *, one_grid: bool) -> Iterator[Hint]:
    """Alignment, where good parts lie turned, or shifted and each position is learned separately.

    PatchCore compares patches wherever they lie, so shifts cost it little. There is no hint for
    surfaces, nor where too few images show how far parts move.

    Args:
        samples: good images to learn from.
        decoding: most pixels and significant bits of a file.
        one_grid: True if the method learns each position of the image separately (PaDiM).
    """
    sources = [sample.source for sample in samples[:: max(1, len(samples) // _POSES)]]
    pictures = read_all(partial(derive, grey_picture, decoding), sources)
    try:
        greys = [picture for picture in pictures if isinstance(picture, np.ndarray)]
        reference, _ = learn(greys, rigid=True)
    except DataError:  # surfaces have no pose
        return
    low, high = reference.lowest, reference.highest
    if math.isinf(high.x):  # the range is unknown
        return
    if high.turn - low.turn > _TURNED:
        reason = "good parts lie turned, so each is brought into one pose first"
        yield Hint("image.align", "rigid", reason)
    elif one_grid and max(high.x - low.x, high.y - low.y) > _SHIFTED:
        reason = "good parts lie in several places, so each is brought to one place first"
        yield Hint("image.align", "shift", reason)
