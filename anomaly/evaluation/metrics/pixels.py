"""Metrics of pixels at the masks' own resolution, one image at a time.

Whatever the number of images, all a pixel metric needs is how much weight lies at each score, and
five kinds of weight serve them all. They are kept in bins so narrow that the figures hardly
differ from exact ones; how much they can differ is reported beside them.
"""

from __future__ import annotations

import math
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

    def add(self, scores: NDArray[np.float32], weights: Mapping[int, float | Floats]) -> None:
        """Add scores to some of the rows.

        Args:
            scores: (n,) finite.
            weights: by row, the weight of each score, (n,), or one for all.
        """
        if not len(scores):
            return
        keys = _ordered_keys(scores)
        low, high = int(keys.min()), int(keys.max())
        self._make_room(low, high)
        start = low >> self._shift
        bins = (keys >> self._shift).astype(np.intp)
        bins -= start
        counts = np.bincount(bins)
        here = slice(start - self._first, start - self._first + len(counts))
        for row, weight in weights.items():
            single = isinstance(weight, float)
            self._weights[row, here] += (
                counts * weight if single else np.bincount(bins, weights=weight)
            )

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


AUPRO_LIMITS = {"aupro_30": 0.30, "aupro_05": 0.05}
AUPIMO_RANGE = (1e-5, 1e-4)
_CLASSIFIED = ("pixel_auroc", "pixel_ap", "pixel_f1_max", "pixel_f1_max_threshold")

NO_MASKS = "no image with a ground-truth mask"
NO_DEFECT_MASKS = "no defective image with a ground-truth mask"
NO_DEFECT_PIXELS = "no defect pixels where the anomaly maps have values"
NO_GOOD_PIXELS = "no defect-free pixels where the anomaly maps have values"
NO_GOOD_IMAGES = "no good images with a ground-truth mask"


class Weight(IntEnum):
    """The rows of the histogram: what one pixel adds at its score."""

    GOOD = 0  # 1 for a defect-free pixel
    DEFECT = 1  # 1 for a defect pixel
    REGION = 2  # 1 / size of its defect region, for a defect pixel
    GOOD_IMAGE = 3  # 1 / size of its image, for a pixel of a good image
    DEFECT_IMAGE = 4  # 1 / defect pixels of its image, for a defect pixel


class PixelAccumulator:
    """Pixel AUROC, average precision and best F1, AUPRO and AUPIMO, streamed.

    Args:
        max_bins: the most bins of scores to keep; memory is 40 bytes a bin.
    """

    def __init__(self, max_bins: int = 1 << 20) -> None:
        self._scores = ScoreHistogram(len(Weight), max_bins)
        self._images = 0
        self._good_image_pixels = 0
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
        if defect.any():
            self._add_defective(scores, defect)
        else:
            self._add_good(scores)

    def _add_good(self, scores: NDArray[np.float32]) -> None:
        seen = scores[~np.isnan(scores)]
        self._good_image_pixels += len(seen)
        self._scores.add(seen, {Weight.GOOD: 1.0, Weight.GOOD_IMAGE: 1.0 / max(len(seen), 1)})

    def _add_defective(self, scores: NDArray[np.float32], defect: NDArray[np.bool_]) -> None:
        seen = ~np.isnan(scores)
        self._scores.add(scores[seen & ~defect], {Weight.GOOD: 1.0})
        inspected = seen & defect
        n_inspected = int(inspected.sum())
        self._defect_pixels += int(defect.sum())
        self._lost_defect_pixels += int(defect.sum()) - n_inspected
        # 8-connected, over the whole mask: a region cut in two by a crop is still one region.
        _, regions = cv2.connectedComponents(defect.astype(np.uint8), connectivity=8)
        region = regions[inspected]
        weights: dict[int, float | Floats] = {
            Weight.DEFECT: 1.0,
            Weight.REGION: 1.0 / np.bincount(region)[region],
            Weight.DEFECT_IMAGE: 1.0 / max(n_inspected, 1),
        }
        self._scores.add(scores[inspected], weights)

    def result(self) -> Metrics:
        """The figures of all images added.

        Returns:
            `pixel_auroc`, `pixel_ap`, `pixel_f1_max`, `pixel_f1_max_threshold`; `aupro_30` and
            `aupro_05`; `aupimo`; `lost_defect_share`, the share of defect pixels that lie where
            nothing was inspected. All but the threshold are in [0, 1].
        """
        tally = self._scores.tally()
        lost = Metrics(
            {"lost_defect_share": self._lost_defect_pixels / max(self._defect_pixels, 1)}
        )
        metrics = _classification(tally) | _aupro(tally) | self._aupimo(tally) | lost
        if self._defect_pixels:
            return metrics
        return Metrics.undefined(
            tuple(metrics.values), NO_DEFECT_MASKS if self._images else NO_MASKS
        )

    def _aupimo(self, tally: Tally) -> Metrics:
        if not self._good_image_pixels:
            return Metrics.undefined(("aupimo",), NO_GOOD_IMAGES)
        if not tally.weights[Weight.DEFECT].any():
            return Metrics.undefined(("aupimo",), NO_DEFECT_PIXELS)
        if self._good_image_pixels < 1 / AUPIMO_RANGE[0]:
            reason = (
                f"the good images have {self._good_image_pixels:,} pixels; a false-positive rate "
                f"of {AUPIMO_RANGE[0]:g} needs {1 / AUPIMO_RANGE[0]:,.0f}"
            )
            return Metrics.undefined(("aupimo",), reason)
        return _aupimo(tally)


def _classification(tally: Tally) -> Metrics:
    """AUROC, average precision and F1 of defect pixels against all others."""
    good, defect = tally.weights[Weight.GOOD], tally.weights[Weight.DEFECT]
    if not defect.any():
        return Metrics.undefined(_CLASSIFIED, NO_DEFECT_PIXELS)
    f1 = curves.f1_scores(good, defect)
    best = int(np.argmax(f1))
    values: dict[str, float | None] = {
        "pixel_ap": float(curves.average_precision(good, defect)),
        "pixel_f1_max": float(f1[best]),
        "pixel_f1_max_threshold": float(tally.thresholds()[best]),
    }
    errors = {
        "pixel_ap": curves.average_precision_error(good, defect),
        "pixel_f1_max": curves.f1_max_error(good, defect),
    }
    metrics = Metrics(values, {}, {} if tally.exact else errors)
    return _area("pixel_auroc", tally, defect, 1.0) | metrics


def _aupro(tally: Tally) -> Metrics:
    """Area under the per-region overlap curve up to a false-positive rate, divided by that rate.

    Bergmann et al., "The MVTec Anomaly Detection Dataset", IJCV 2021, section 4.3.2: the mean
    recall over all defect regions against the false-positive rate over all defect-free pixels.
    """
    overlap = tally.weights[Weight.REGION]
    if not overlap.any():
        return Metrics.undefined(tuple(AUPRO_LIMITS), NO_DEFECT_PIXELS)
    parts = [_area(name, tally, overlap, limit) for name, limit in AUPRO_LIMITS.items()]
    return parts[0] | parts[1]


def _area(name: str, tally: Tally, recalled: Floats, limit: float) -> Metrics:
    """Mean of a recall over false-positive rates up to `limit`."""
    good = tally.weights[Weight.GOOD]
    if not good.any():
        return Metrics.undefined((name,), NO_GOOD_PIXELS)
    x, y = curves.cumulative_share(good), curves.cumulative_share(recalled)
    error = {} if tally.exact else {name: curves.area_error(x, y, 0.0, limit) / limit}
    return Metrics({name: float(curves.area(x, y, 0.0, limit)) / limit}, {}, error)


def _aupimo(tally: Tally) -> Metrics:
    """Mean per-image recall over the logarithm of the good images' false-positive rate.

    Bertoldo et al., "AUPIMO: Redefining Anomaly Localization Benchmarks", 2024, equations 4–6,
    averaged over the defective images. The area is linear in the recalls, so the mean of the
    images' areas is the area under the mean recall, and no image's own curve has to be kept.
    Where one score alone passes the lower bound, the recall short of it is the one without any
    false positive: a logarithmic axis offers nothing to interpolate from.
    """
    low, high = map(math.log, AUPIMO_RANGE)
    rate = curves.cumulative_share(tally.weights[Weight.GOOD_IMAGE])
    recall = curves.cumulative_share(tally.weights[Weight.DEFECT_IMAGE])
    first = int(np.searchsorted(rate, 0.0, side="right"))
    log_rate = np.log(rate[first:])
    start = min(low, float(log_rate[0]))
    x = np.concatenate([[start, log_rate[0]], log_rate])
    y = np.concatenate([[recall[first - 1]] * 2, recall[first:]])
    value = float(curves.area(x, y, low, high)) / (high - low)
    if tally.exact:
        return Metrics({"aupimo": value})
    # The first group of good scores may hold any path, up to its own recall.
    jump = (min(float(log_rate[0]), high) - start) * float(recall[first] - recall[first - 1])
    error = (curves.area_error(x, y, low, high) + max(jump, 0.0)) / (high - low)
    return Metrics({"aupimo": value}, {}, {"aupimo": error})
