"""What is said of a data set: what its splits hold, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
