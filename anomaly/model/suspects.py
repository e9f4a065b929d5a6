"""Training images that look least like the others, or stand out: perhaps defects among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anomaly.calibration import GoodScores
from anomaly.imaging.geometry import AnyView
from anomaly.scorers.patches import PatchBatch

COUNT = 5
# Robust standard deviations of log scores by which an image stands out, and their least: images
# that are all but equal differ by less.
_FAR = 5.0
_LEAST = 0.02


@dataclass(eq=False)
class Suspect:
    """A training image that differs from the others.

    Attributes:
        image: its index.
        score: its image score by a model that hasn't learned from it; with tiles, the worst one's.
        patch_scores: (h, w) float32; NaN doesn't count. With tiles, the mosaic of their patches.
    """

    image: int
    score: float
    patch_scores: NDArray[np.float32]


class Suspects:
    """Keeps the patch scores of the most suspicious images while all of them pass by.

    Args:
        views: how each image was turned into the network's input, by index.
    """

    def __init__(self, views: Mapping[int, AnyView]) -> None:
        self._views = views
        self._kept: dict[int, Suspect] = {}

    def see(self, batch: PatchBatch, patch_scores: Tensor, image_scores: Tensor) -> None:
        """Take note of a batch; the tiles of an image come one after the other.

        Args:
            batch: of n images or tiles.
            patch_scores: (n, h, w); NaN where they don't count.
            image_scores: (n,).
        """
        height, width = patch_scores.shape[1:]
        corners = batch.corners or ((0, 0),) * len(patch_scores)
        for image, (top, left), patches, score in zip(
            batch.images, corners, patch_scores.cpu().numpy(), image_scores.tolist(), strict=True
        ):
            suspect = self._kept.get(image) or self._empty(image, height, width)
            suspect.patch_scores[top : top + height, left : left + width] = patches
            suspect.score = max(suspect.score, score)
        # The last image may have more tiles to come.
        going_on = {image: self._kept[image] for image in batch.images[-1:]}
        self._kept = {s.image: s for s in self.worst()} | going_on

    def take(self, others: Iterable[Suspect]) -> None:
        """Take note of whole images that another process has seen."""
        self._kept |= {s.image: s for s in others}
        self._kept = {s.image: s for s in self.worst()}

    def worst(self) -> tuple[Suspect, ...]:
        """The most suspicious images, the worst first."""
        return tuple(sorted(self._kept.values(), key=lambda s: -s.score)[:COUNT])

    def _empty(self, image: int, height: int, width: int) -> Suspect:
        rows, columns = (len(pieces) for pieces in self._views[image].axes)
        mosaic = np.full((rows * height, columns * width), np.nan, np.float32)
        self._kept[image] = Suspect(image, -np.inf, mosaic)
        return self._kept[image]


def standing_out(good: GoodScores) -> dict[str, float]:
    """The images that stand out from all the others, the worst first, and their scores.

    The logarithm of each one's score lies five robust standard deviations (1.4826 · the median
    absolute deviation) above the median, both of which a fifth of defects among them hardly moves.

    Args:
        good: scores of images by models that haven't learned from them.
    """
    scores = np.array(good.image)
    logarithms = np.log(np.maximum(scores, np.finfo(np.float32).tiny))
    away = logarithms - np.median(logarithms)
    spread = 1.4826 * float(np.median(np.abs(away)))
    order = np.argsort(-scores, kind="stable").tolist()
    return {good.names[i]: good.image[i] for i in order if away[i] > _FAR * max(spread, _LEAST)}
