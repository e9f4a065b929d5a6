"""What a data set looks like -> the settings that suit it, each with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from anomaly.datasets.check import DataReport, has_16_bits

_HANDFUL = 8  # images of which each patch may be the only one of its kind
_FEW = 50  # images whose coreset is small at any ratio
_LARGE = 2048  # original pixels of the shorter side from which small defects vanish at 256
_TILE = 1024
_OBLONG = 1.2


@dataclass(frozen=True)
class Advice:
    """A setting, or only a remark.

    Attributes:
        key: dotted, as in a config; empty for a remark.
        value: as YAML has it.
        reason: a sentence or two, for people.
    """

    key: str
    value: str
    reason: str


def advice(report: DataReport) -> tuple[Advice, ...]:
    """Settings that suit a data set.

    Args:
        report: what `anomaly.datasets.check.check` found.
    """
    return (*_bank(report), *_shape(report), *_bits(report))


def _bank(report: DataReport) -> Iterator[Advice]:
    usable = report.splits["train"].usable if "train" in report.splits else 0
    if 0 < usable <= _HANDFUL:
        reason = (
            f"a handful of images to learn from ({usable}): all of their patches are kept; "
            "thresholds can promise little with fewer than 50"
        )
        yield Advice("model.coreset_ratio", "1.0", reason)
    elif usable < _FEW:
        reason = (
            f"few images to learn from ({usable}): 10 % of the patches are kept instead of 2 %, so "
            "that rare details survive; thresholds can promise little with fewer than 50"
        )
        yield Advice("model.coreset_ratio", "0.1", reason)
    else:
        reason = (
            f"{usable} images: keeping 2 % of the patches is nearly as accurate as 10 %, and faster"
        )
        yield Advice("model.coreset_ratio", "0.02", reason)


def _shape(report: DataReport) -> Iterator[Advice]:
    sizes: Counter[str] = Counter()
    for split in report.splits.values():
        sizes.update(split.sizes)
    if not sizes:
        return
    common = sizes.most_common(1)[0][0]
    width, height = (int(side) for side in common.split("×"))
    if len(sizes) > 1:
        reason = f"images have {len(sizes)} sizes: each keeps its aspect, at about the same area"
        yield Advice("", "", reason)
    elif max(width, height) > _OBLONG * min(width, height):
        shape = "tall" if height > width else "wide"
        yield Advice("", "", f"images are {shape} ({common}): their aspect is kept, never squashed")
    if min(width, height) >= _LARGE:
        tiles = -(-width // _TILE) * -(-height // _TILE)
        reason = (
            f"images are large ({common}): each is seen in tiles of {_TILE} pixels, or small "
            f"defects would vanish; an image takes about {tiles} times as long as without"
        )
        yield Advice("image.tile", str(_TILE), reason)


def _bits(report: DataReport) -> Iterator[Advice]:
    if report.bit_depth is not None:
        reason = (
            f"no image with 16 bits is brighter than {report.bit_depth} bits allow: without this "
            "they would be seen all but black"
        )
        yield Advice("image.bit_depth", str(report.bit_depth), reason)
        return
    modes: Counter[str] = Counter()
    for split in report.splits.values():
        modes.update(split.modes)
    if deep := sum(count for mode, count in modes.items() if has_16_bits(mode)):
        images = "images" if deep == modes.total() else f"{deep} of {modes.total()} images"
        yield Advice("", "", f"{images} have 16 bits, all of which are used")
