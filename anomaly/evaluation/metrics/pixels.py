"""Metrics of pixels at the masks' own resolution, one image at a time.

Whatever the number of images, all a pixel metric needs is how much weight lies at each score, and
three kinds of weight serve them all. They are kept in bins so narrow that the figures differ from
exact ones by less than 10⁻⁵.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from anomaly.errors import DataError
from anomaly.evaluation.metrics import curves
from anomaly.evaluation.metrics.curves import Floats, Metrics, Tally

_SIGN = np.uint32(1 << 31)
# The keys of the lowest and the highest finite float32.
_LEAST, _MOST = np.uint64(0x0080_0000), np.uint64(0xFF7F_FFFF)


class ScoreHistogram:
    """Rows of weights over bins of scores, in bounded memory.

    Bins are as fine as `max_bins` allows over the range seen so far: single float32 values at
    first, then runs of 2, 4, 8 … of them. Which bins result depends only on the lowest and
    highest score, not on the order of the calls. Takes 8 · rows · max_bins bytes at most.

    Args:
        rows: how many kinds of weight to keep.
        max_bins: the most bins to keep.
    """

    def __init__(self, rows: int, max_bins: int) -> None:
        self._max_bins = max_bins
        self._shift = 0
        self._first = 0
        self._weights: Floats = np.zeros((rows, 0))

    def add(self, scores: NDArray[np.float32], weights: Mapping[int, Floats | None]) -> None:
        """Add scores to some of the rows.

        Args:
            scores: (n,) finite.
            weights: by row, the weight of each score, (n,), or None for 1 each.
        """
        if not len(scores):
            return
        keys = _ordered_keys(scores)
        low, high = int(keys.min()), int(keys.max())
        self._make_room(low, high)
        start = low >> self._shift
        bins = (keys >> self._shift).astype(np.intp)
        bins -= start
        here = slice(start - self._first, int(bins.max()) + 1 + start - self._first)
        for row, weight in weights.items():
            self._weights[row, here] += np.bincount(bins, weights=weight)

    def tally(self) -> Tally:
        """The occupied bins; their borders are the extreme scores a bin can hold."""
        occupied = np.flatnonzero(self._weights.any(axis=0))[::-1]
        bins = (occupied + self._first).astype(np.uint64)
        shift = np.uint64(self._shift)
        lowest = _scores_of(bins << shift)
        highest = _scores_of(((bins + np.uint64(1)) << shift) - np.uint64(1))
        return Tally(lowest, highest, self._weights[:, occupied])

    def _make_room(self, low: int, high: int) -> None:
        """Widen the range to the keys `low` … `high`, coarsening where the bins wouldn't fit."""
        if self._weights.shape[1]:
            low = min(low, self._first << self._shift)
            high = max(high, ((self._first + self._weights.shape[1]) << self._shift) - 1)
        shift = self._shift
        while (high >> shift) - (low >> shift) >= self._max_bins:
            shift += 1
        first, count = low >> shift, (high >> shift) - (low >> shift) + 1
        if (shift, first, count) == (self._shift, self._first, self._weights.shape[1]):
            return
        widened = np.zeros((len(self._weights), count))
        old = (np.arange(self._weights.shape[1]) + self._first) >> (shift - self._shift)
        for new_row, row in zip(widened, self._weights, strict=True):
            new_row += np.bincount(old - first, weights=row, minlength=count)
        self._shift, self._first, self._weights = shift, first, widened


def _ordered_keys(scores: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Integers in the order of the scores; both zeros get the same."""
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _scores_of(keys: NDArray[np.uint64]) -> Floats:
    """The scores of `_ordered_keys`; a bin's border past the finite ones becomes the last."""
    bits = np.clip(keys, _LEAST, _MOST).astype(np.uint32)
    bits = np.where(bits & _SIGN, bits ^ _SIGN, ~bits)
    return bits.view(np.float32).astype(np.float64)


NO_MASKS = "no image with a ground-truth mask"
NO_DEFECT_MASKS = "no defective image with a ground-truth mask"
NO_DEFECT_PIXELS = "no defect pixels where the anomaly maps have values"
NO_GOOD_PIXELS = "no defect-free pixels where the anomaly maps have values"


class Weight(IntEnum):
    """The rows of the histogram: what one pixel adds at its score."""

    GOOD = 0  # 1 for a defect-free pixel
    DEFECT = 1  # 1 for a defect pixel
    REGION = 2  # 1 / size of its defect region, for a defect pixel


# Whose shares count as found, and up to which false-positive rate.
_AREAS = {
    "pixel_auroc": (Weight.DEFECT, 1.0),
    "aupro_30": (Weight.REGION, 0.30),
    "aupro_05": (Weight.REGION, 0.05),
}
_NAMES = (*_AREAS, "pixel_ap", "pixel_f1_max", "pixel_f1_max_threshold", "lost_defect_share")


class PixelAccumulator:
    """Pixel AUROC, average precision and best F1, and AUPRO, streamed.

    Args:
        max_bins: the most bins of scores to keep; memory is 24 bytes a bin.
    """

    def __init__(self, max_bins: int = 1 << 20) -> None:
        self._scores = ScoreHistogram(len(Weight), max_bins)
        self._images = 0
        self._defect_pixels = 0
        self._lost_defect_pixels = 0

    def update(self, anomaly_map: ArrayLike, mask: ArrayLike) -> None:
        """Add one image.

        An image counts as good when its mask is empty: leave out defective images without one.

        Args:
            anomaly_map: (H, W), compared as float32; NaN where nothing was inspected, which
                leaves the pixel out of every metric but `lost_defect_share`.
            mask: (H, W) bool, True on defects.

        Raises:
            DataError: the mask and the map differ in size.
            ValueError: a score is infinite.
        """
        scores, defect = np.asarray(anomaly_map, dtype=np.float32), np.asarray(mask, dtype=bool)
        if scores.shape != defect.shape or scores.ndim != 2:
            raise DataError(
                f"a mask of {defect.shape} (height, width) doesn't fit its image of "
                f"{scores.shape}: masks must have the size of the original image"
            )
        if np.isinf(scores).any():
            raise ValueError("an anomaly map holds an infinite score")
        self._images += 1
        seen = ~np.isnan(scores)
        self._scores.add(scores[seen & ~defect], {Weight.GOOD: None})
        inspected = seen & defect
        self._defect_pixels += int(defect.sum())
        self._lost_defect_pixels += int((defect & ~seen).sum())
        # 8-connected, over the whole mask: a region cut in two by a crop is still one region.
        _, regions = cv2.connectedComponents(defect.astype(np.uint8), connectivity=8)
        region = regions[inspected]
        of_region = 1.0 / np.bincount(region)[region]
        self._scores.add(scores[inspected], {Weight.DEFECT: None, Weight.REGION: of_region})

    def result(self) -> Metrics:
        """The figures of all images added.

        Returns:
            `pixel_auroc`, `pixel_ap`, `pixel_f1_max`, `pixel_f1_max_threshold`; `aupro_30` and
            `aupro_05`; `lost_defect_share`, the share of defect pixels that lie where nothing was
            inspected. All but the threshold are in [0, 1].
        """
        if not self._defect_pixels:
            return Metrics.undefined(_NAMES, NO_DEFECT_MASKS if self._images else NO_MASKS)
        lost: dict[str, float | None] = {
            "lost_defect_share": self._lost_defect_pixels / self._defect_pixels
        }
        if self._lost_defect_pixels == self._defect_pixels:
            return Metrics.undefined(_NAMES, NO_DEFECT_PIXELS) | Metrics(lost)
        tally = self._scores.tally()
        good, defect = tally.weights[Weight.GOOD], tally.weights[Weight.DEFECT]
        f1 = curves.f1_scores(good, defect)
        best = int(np.argmax(f1))
        values: dict[str, float | None] = {
            "pixel_ap": float(curves.average_precision(good, defect)),
            "pixel_f1_max": float(f1[best]),
            "pixel_f1_max_threshold": float(tally.thresholds()[best]),
        }
        return _areas(tally) | Metrics(values | lost)


def _areas(tally: Tally) -> Metrics:
    """Means of the share found over false-positive rates up to a limit: AUROC and AUPRO.

    AUPRO as in Bergmann et al., "The MVTec Anomaly Detection Dataset", IJCV 2021, section 4.3.2:
    the mean recall over all defect regions against the false-positive rate over all defect-free
    pixels.
    """
    good = tally.weights[Weight.GOOD]
    if not good.any():
        return Metrics.undefined(tuple(_AREAS), NO_GOOD_PIXELS)
    false = curves.cumulative_share(good)
    values: dict[str, float | None] = {}
    for name, (row, limit) in _AREAS.items():
        found = curves.cumulative_share(tally.weights[row])
        values[name] = float(curves.area(false, found, limit)) / limit
    return Metrics(values)
