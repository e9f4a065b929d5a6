"""Why a model called a defect good: its score among good images, where it looks, what helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.calibration import Thresholds
from anomaly.calibration.rates import Rate, percent, rate_above
from anomaly.datasets.masks import Masks
from anomaly.errors import DataError
from anomaly.explain.evidence import patch_box
from anomaly.explain.score import Explanation, explained
from anomaly.imaging.decoder_pool import read_mask
from anomaly.scoring.pipeline import Model
from anomaly.storage.golden import learned_as_good

_NEAREST = 3  # good patches that are named
_AFFORDABLE = 0.2  # share of good parts above a threshold up to which it is worth proposing


@dataclass(frozen=True, eq=False)
class MissedDefect:
    """Why a model called a defect good.

    Attributes:
        image: its file.
        explanation: what the model makes of it.
        mask: (H0, W0) bool, where the defect is; None where nobody says so.
        thresholds: the model's.
    """

    image: Path
    explanation: Explanation
    mask: NDArray[np.bool_] | None
    thresholds: Thresholds

    @property
    def score(self) -> float:
        """Its image score."""
        return self.explanation.prediction.score

    @property
    def caught(self) -> str:
        """Why it isn't missed: it is rejected, or for review; empty for a missed one."""
        prediction, limits = self.explanation.prediction, self.thresholds
        if prediction.verdict == "reject":
            return (
                f"This image is rejected already: score {self.score:.5g}, above the reject "
                f"threshold {limits.image:.5g}"
            )
        why = prediction.reason or (
            f"score {self.score:.5g}, above the review threshold {limits.review:.5g}"
        )
        return "" if prediction.verdict == "good" else f"This image is for review already: {why}"

    @property
    def catching_threshold(self) -> float:
        """The highest threshold of five digits that would catch it."""
        step = 10.0 ** (math.floor(math.log10(max(self.score, 1e-30))) - 4)
        return float(f"{(math.ceil(self.score / step) - 1) * step:.5g}")

    @property
    def cost(self) -> Rate:
        """The good images above `catching_threshold`, and their share with a 95 % interval."""
        good = self.thresholds.good
        return rate_above(good.image, self.catching_threshold, good.groups)

    @property
    def affordable(self) -> bool:
        """Whether the threshold that catches it leaves most good parts good."""
        return self.cost.expected <= _AFFORDABLE

    def lines(self) -> list[str]:
        """All of it, for people."""
        if self.caught:
            return [f"{self.image}: {self.caught}"]
        limits, cost = self.thresholds, self.cost
        rank = int((np.array(limits.good.image) < self.score).sum())
        return [
            f"{self.image}: called good, score {self.score:.5g} (review threshold "
            f"{limits.review:.5g}, reject threshold {limits.image:.5g}); {rank} of {cost.images} "
            "good images score lower",
            f"A threshold of {self.catching_threshold:.5g} would catch it; of {cost.images} good "
            f"images, {cost.count} ({percent(cost.expected)}, {cost.interval} with 95 % "
            "confidence) score higher",
            *self._place(),
        ]

    def _place(self) -> list[str]:
        """Where the map is highest, what that was compared with, and how high it is at the mask."""
        prediction, patch = self.explanation.prediction, self.explanation.patches[0]
        grid = prediction.patch_scores.shape[0], prediction.patch_scores.shape[1]
        box = patch_box(prediction.view, grid, patch["row"], patch["column"])
        near = ", ".join(map(_named, patch["compared_with"][:_NEAREST]))
        lines = [
            f"highest patch: x {box.left:.0f} to {box.right:.0f}, y {box.top:.0f} to "
            f"{box.bottom:.0f}, score {patch['score']:.4g}; nearest good patches: {near}"
        ]
        if self.mask is not None:
            lines.append(_inside(prediction.anomaly_map, self.mask))
        return lines


def explain_missed(
    model: Model, image: Path, *, mask: Path | None = None, good: Sequence[Path] = ()
) -> MissedDefect:
    """Why a model called a defect good.

    Args:
        model: trained.
        image: a file that shows a defect.
        mask: a picture that says where; by default one beside the image, or in `ground_truth/`.
        good: further folders with training images.

    Raises:
        DataError: the model has no thresholds or has learned from the image, or the mask doesn't
            fit.
        ImageError: the image can't be scored.
    """
    if model.thresholds is None:
        raise DataError(
            "the model has no scores of good images, so the threshold that would catch a defect "
            "can't be judged; find scores with anomaly calibrate --good"
        )
    explanation = explained(model, image, *good)
    for name, sha256 in model.manifest["training_images"].items():
        if sha256 == explanation.prediction.sha256:
            raise learned_as_good(image, name)
    mask = mask or _mask_of(image.absolute())
    marked = None if mask is None else _read(mask, explanation.prediction.view.source)
    return MissedDefect(image, explanation, marked, model.thresholds)


def _read(mask: Path, size: tuple[int, int]) -> NDArray[np.bool_]:
    """The mask (H0, W0) of an image of this size."""
    pixels = read_mask(mask)
    if pixels.shape != size:
        height, width = pixels.shape
        raise DataError(
            f"{mask} is {height}×{width} where its image is {size[0]}×{size[1]}; give the image's "
            "own mask with --mask"
        )
    if not pixels.any():
        raise DataError(f"{mask} marks nothing; give the image's own mask with --mask")
    return pixels


def _mask_of(image: Path) -> Path | None:
    around = image.parents[2:0:-1]
    return Masks().of(image, [place / "ground_truth" / image.parent.name for place in around])


def _inside(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> str:
    """How high the map (H0, W0) is where the defect is."""
    held = np.where(mask, values, np.nan)
    if np.isnan(held).all():
        return "the defect lies outside what the model looks at (image.region, image.crop)"
    top, inside = np.nanmax(values), np.nanmax(held)
    y, x = np.unravel_index(np.nanargmax(held), held.shape)
    where = "the highest of all" if inside == top else f"elsewhere up to {top:.4g}"
    return f"where the mask is, the map reaches {inside:.4g} (x {x}, y {y}); {where}"


def _named(patch: dict[str, Any]) -> str:
    where = f"{patch['image']} row {patch['row']} column {patch['column']}"
    return where if patch["distance"] is None else f"{where} ({patch['distance']:.4g})"
