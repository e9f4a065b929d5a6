"""Figures of images and of pixels: how well scores tell good from defective.

An image or pixel counts as flagged when its score is *greater than* the threshold, here and
everywhere else. Metrics only measure; no threshold in use is ever taken from them. Curves are
scikit-learn's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

NO_GOOD = "no good images"
NO_DEFECTS = "no defective images"
NO_MASKS = "no image with a ground-truth mask"
NO_DEFECT_MASKS = "no defective image with a ground-truth mask"
NO_DEFECT_PIXELS = "no defect pixels where the anomaly maps have values"
NO_GOOD_PIXELS = "no defect-free pixels where the anomaly maps have values"

FALSE_REJECT_RATES = (0.01, 0.05)
_RECALLS = tuple(f"recall_at_frr_{rate:g}" for rate in FALSE_REJECT_RATES)
_IMAGE_NAMES = ("image_auroc", "image_ap", "image_f1_max", *_RECALLS)
# Random numbers drawn at once: as many as fit the processor's outer cache.
_DRAWN_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Metrics:
    """Named figures of one evaluation.

    Attributes:
        values: the figures; None where the data leave one undefined.
        reasons: for each None in `values`, the reason.
    """

    values: dict[str, float | None]
    reasons: dict[str, str] = field(default_factory=dict)

    def __or__(self, other: Metrics) -> Metrics:
        """Two sets of figures, with no name in both."""
        return Metrics(self.values | other.values, self.reasons | other.reasons)

    def subset(self, *names: str) -> Metrics:
        """The figures of these names."""
        reasons = {name: why for name, why in self.reasons.items() if name in names}
        return Metrics({name: self.values[name] for name in names}, reasons)

    @classmethod
    def undefined(cls, names: Iterable[str], reason: str) -> Metrics:
        """Figures of these names, all undefined for one reason."""
        return cls(dict.fromkeys(names), dict.fromkeys(names, reason))


@dataclass(frozen=True)
class _Roc:
    """A receiver operating characteristic.

    Attributes:
        false: (n,) false-positive rates, rising from 0 to 1.
        recalls: (n,) recall at each rate.
    """

    false: Floats
    recalls: Floats

    @classmethod
    def of(cls, labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None) -> _Roc:
        """The curve of n scores: labels (n,) bool, scores (n,), weights (n,) or None for 1 each."""
        # scikit-learn takes a second to import, which only evaluations shall wait for.
        from sklearn.metrics import roc_curve

        curve = roc_curve(labels, scores, sample_weight=weights, drop_intermediate=False)
        return cls(*curve[:2])

    def recall(self, rate: float) -> float:
        """Highest recall at a false-positive rate of at most `rate`."""
        return float(self.recalls[self.false <= rate].max())

    def area(self, limit: float = 1.0) -> float:
        """Mean recall over false-positive rates up to `limit`, interpolated there."""
        inside = self.false <= limit
        false = np.append(self.false[inside], limit)
        recalls = np.append(self.recalls[inside], np.interp(limit, self.false, self.recalls))
        return float(_area(false, recalls)) / limit


def _ap_and_f1(
    labels: ArrayLike, scores: ArrayLike, weights: ArrayLike | None = None
) -> tuple[float, float]:
    """Average precision, and the highest F1 of any threshold; both in [0, 1].

    Args:
        labels: (n,) bool, True for defective ones.
        scores: (n,) scores.
        weights: (n,) weights of the scores; None for 1 each.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve

    precision, recall, _ = precision_recall_curve(labels, scores, sample_weight=weights)
    total = precision + recall
    f1 = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    average = average_precision_score(labels, scores, sample_weight=weights)
    return float(average), float(f1.max())


def _area(x: Floats, y: Floats) -> Floats:
    """Areas under polylines.

    Args:
        x: (..., n) places of the corners, rising.
        y: (..., n) heights of the corners.

    Returns:
        (...) areas, by trapezoids.
    """
    return np.asarray((np.diff(x) * (y[..., 1:] + y[..., :-1]) / 2).sum(axis=-1))


def image_metrics(scores: ArrayLike, labels: ArrayLike) -> Metrics:
    """AUROC, average precision, the best F1, and recall at two false-reject rates.

    The thresholds behind recall and F1 are taken from the test images, so these figures are the
    best that the scores allow, not what the model's own threshold reaches. With n good images a
    rate below 1/n allows no false reject at all.

    Args:
        scores: (n,) finite image scores, higher is more anomalous.
        labels: (n,) bool, True for defective images.

    Returns:
        `image_auroc`, `image_ap`, `image_f1_max`, `recall_at_frr_0.01` and `recall_at_frr_0.05`,
        each in [0, 1]. All are undefined without defective images, and without good ones:
        precision would be 1 whatever the scores.
    """
    values, defective = _arrays(scores, labels)
    if not defective.any():
        return Metrics.undefined(_IMAGE_NAMES, NO_DEFECTS)
    if defective.all():
        return Metrics.undefined(_IMAGE_NAMES, NO_GOOD)
    roc = _Roc.of(defective, values)
    figures = [roc.area(), *_ap_and_f1(defective, values), *map(roc.recall, FALSE_REJECT_RATES)]
    return Metrics(dict(zip(_IMAGE_NAMES, figures, strict=True)))


def metrics_by_type(
    scores: ArrayLike, labels: ArrayLike, types: Sequence[str]
) -> dict[str, Metrics]:
    """Each type of defect by itself against all good images.

    Args:
        scores: (n,) finite image scores.
        labels: (n,) bool, True for defective images.
        types: n names, as the data set gives them.

    Returns:
        By type, in order of first appearance: `image_auroc` and the two recalls.
    """
    values, defective = _arrays(scores, labels)
    named = np.array(types, object)
    of_types = {name: ~defective | (named == name) for name in dict.fromkeys(named[defective])}
    return {
        name: image_metrics(values[of], defective[of]).subset("image_auroc", *_RECALLS)
        for name, of in of_types.items()
    }


def image_intervals(
    scores: ArrayLike, labels: ArrayLike, *, draws: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float] | None]:
    """95 % confidence intervals of the image figures, for parts still to come.

    Of all good parts, the share that scores between two neighbouring ones of n images is unknown:
    it is distributed like one of n + 1 pieces of a stick that is broken at random (Dirichlet with
    parameters 1), whatever the scores' distribution; and so for defective parts. Where a piece lies
    in its gap isn't known either. So the lower end is the 2.5 % quantile of figures with each good
    piece at the upper end of its gap and each defective one at the lower, and the upper end is the
    97.5 % quantile the other way round. For the recall at a fixed threshold these are the
    Clopper–Pearson bounds, and like them they err to the safe side; docs/coverage.md counts how
    often they hold.

    Args:
        scores: (n,) finite image scores.
        labels: (n,) bool, True for defective images.
        draws: number of random sets of pieces.
        seed: the same seed gives the same intervals.

    Returns:
        (low, high) of the figures of `image_metrics`, by name; None without good or without
        defective images. Those of AP and F1 are for as many good and defective parts as are in the
        data.
    """
    values, defective = _arrays(scores, labels)
    if not defective.any() or defective.all():
        return dict.fromkeys(_IMAGE_NAMES)
    distinct, group = np.unique(values, return_inverse=True)
    # (2, K): numbers of good and of defective images at each score, highest score first.
    places = (group[~defective], group[defective])
    counts = [np.bincount(place, minlength=len(distinct))[::-1] for place in places]
    weights = np.array(counts, np.float64)
    rng = np.random.default_rng(seed)
    flagged, caught = np.cumsum(weights, axis=1)
    # Scores flagged for the best F1 = 2 · caught / (false rejects + caught + defects)
    best = 1 + int(np.argmax(caught / (flagged + caught + caught[-1])))
    at_once = max(1, _DRAWN_AT_ONCE // weights.shape[1])
    ends = [
        _drawn_figures(weights, best, min(at_once, draws - done), rng)
        for done in range(0, draws, at_once)
    ]
    lowest, highest = np.concatenate(ends, axis=2)
    tail = 0.025
    low, high = np.quantile(lowest, tail, axis=1), np.quantile(highest, 1 - tail, axis=1)
    return dict(zip(_IMAGE_NAMES, zip(low.tolist(), high.tolist(), strict=True), strict=True))


def _drawn_figures(weights: Floats, best: int, count: int, rng: np.random.Generator) -> Floats:
    """Figures of `count` draws, at their lower and at their upper end: (2, figures, count).

    Args:
        weights: (2, K) numbers of good and defective images at each score, highest score first.
        best: number of distinct scores above the threshold with the data's best F1. The lower end
            of F1 is taken there: a maximum over each draw would choose by chance once more.
        count: number of draws.
        rng: source of the draws.
    """
    (good, good_rest), (defect, defect_rest) = (_pieces(row, count, rng) for row in weights)
    nothing = np.zeros_like(good_rest)
    n_good = weights[0].sum()
    ends = []
    for low in (True, False):
        # Columns from the highest score to the lowest: the rest of a class lies above or below all.
        parts = [(good_rest, good, nothing), (nothing, defect, defect_rest)]
        if not low:
            parts = [(nothing, good, good_rest), (defect_rest, defect, nothing)]
        # (count, K + 3), from no image flagged to all; scikit-learn takes one draw at a time.
        false, true = (np.cumsum(np.concatenate([nothing, *p], axis=1), axis=1) for p in parts)
        recall = true / true[:, -1:]
        flagged = false + true
        precision = np.divide(true, flagged, out=np.ones_like(true), where=flagged > 0)
        f1 = 2 * true / (flagged + true[:, -1:])
        ends.append(
            [
                _area(false / false[:, -1:], recall),
                (np.diff(recall) * precision[:, 1:]).sum(axis=1),
                f1[:, best + 1] if low else f1.max(axis=1),
                *(np.where(false <= r * n_good, recall, 0).max(axis=1) for r in FALSE_REJECT_RATES),
            ]
        )
    return np.array(ends)


def _pieces(weights: Floats, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Random weights of K scores (count, K), and of the piece beyond the last score (count, 1).

    Args:
        weights: (K,) numbers of images at each score; the weights of each draw have their sum.
        count: number of draws.
        rng: source of the draws.
    """
    pieces = rng.standard_gamma(np.append(weights, 1.0), size=(count, len(weights) + 1))
    pieces *= weights.sum() / pieces.sum(axis=1, keepdims=True)
    return pieces[:, :-1], pieces[:, -1:]


def _arrays(scores: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    return np.asarray(scores, np.float64), np.asarray(labels, bool)


@dataclass(frozen=True)
class VerdictCounts:
    """Number of images with each verdict."""

    good: int = 0
    review: int = 0
    reject: int = 0

    @property
    def total(self) -> int:
        """Number of images with any verdict."""
        return self.good + self.review + self.reject


@dataclass(frozen=True)
class Confusion:
    """Verdicts against the truth.

    Attributes:
        good: verdicts on good images.
        defective: verdicts on defective images.
        by_type: verdicts by type, in order of first appearance; good images have a type, too.
    """

    good: VerdictCounts
    defective: VerdictCounts
    by_type: dict[str, VerdictCounts]

    @property
    def escapes(self) -> int:
        """Number of defective images that were called good."""
        return self.defective.good

    @property
    def caught(self) -> int:
        """Number of defective images that were rejected or are for review."""
        return self.defective.reject + self.defective.review

    @property
    def false_rejects(self) -> int:
        """Number of good images that were rejected; those for review don't count."""
        return self.good.reject


def confusion(rows: Iterable[tuple[str, bool, str]]) -> Confusion:
    """Count verdicts by truth and by defect type.

    Args:
        rows: for each image its verdict (`good`, `review` or `reject`), True if it is defective,
            and its defect type as the data set names it.
    """
    rows = list(rows)

    def counts(verdicts: Iterable[str]) -> VerdictCounts:
        return VerdictCounts(**Counter(verdicts))

    return Confusion(
        good=counts(verdict for verdict, defective, _ in rows if not defective),
        defective=counts(verdict for verdict, defective, _ in rows if defective),
        by_type={
            name: counts(verdict for verdict, _, kind in rows if kind == name)
            for name in dict.fromkeys(kind for *_, kind in rows)
        },
    )


_SIGN = np.uint32(1 << 31)
# The keys of the lowest and the highest finite float32.
_LEAST, _MOST = np.uint64(0x0080_0000), np.uint64(0xFF7F_FFFF)


class ScoreHistogram:
    """Histograms of scores over the same bins, in bounded memory: 8 · rows · max_bins bytes.

    Widening bins takes twice that for a moment. Bins are as fine as `max_bins` allows over the
    range of the scores so far: single float32 values at first, then runs of 2, 4, 8 … values. They
    depend on the lowest and highest score alone, not on the order of the calls.

    Args:
        rows: number of histograms.
        max_bins: largest number of bins.
    """

    def __init__(self, rows: int, max_bins: int) -> None:
        self._max_bins = max_bins
        # Column i holds the keys (`_ordered_keys`) from (first + i) << shift on.
        self._shift = self._first = 0
        self._weights: Floats = np.zeros((rows, 0))

    def add(self, scores: NDArray[np.float32], weights: Mapping[int, Floats | None]) -> None:
        """Add scores to some of the histograms.

        Args:
            scores: (n,) finite.
            weights: by row of a histogram, the weights (n,) of the scores; None weighs each 1.
        """
        if not len(scores):
            return
        keys = _ordered_keys(scores)
        low, high = int(keys.min()), int(keys.max())
        self._make_room(low, high)
        start = low >> self._shift
        bins = (keys >> self._shift).astype(np.intp)
        bins -= start
        columns = slice(start - self._first, int(bins.max()) + 1 + start - self._first)
        for row, weight in weights.items():
            self._weights[row, columns] += np.bincount(bins, weights=weight)

    def weighted(self) -> tuple[Floats, Floats]:
        """Lowest scores (K,) of the K bins that aren't empty, and these bins' weights (rows, K)."""
        occupied = np.flatnonzero(self._weights.any(axis=0))
        keys = (occupied + self._first).astype(np.uint64) << np.uint64(self._shift)
        return _scores_of(keys), self._weights[:, occupied]

    def _make_room(self, low: int, high: int) -> None:
        """Widen the bins to the keys from `low` to `high`; coarser bins where they wouldn't fit."""
        if self._weights.shape[1]:
            low = min(low, self._first << self._shift)
            high = max(high, ((self._first + self._weights.shape[1]) << self._shift) - 1)
        # Twice as wide until they fit; a coarser bin is the sum of whole finer ones.
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
    """Integers (n,) that order like finite scores (n,); both zeros get the same."""
    # Adding 0 turns -0.0 into 0.0. Bits of floats order like integers, of negative ones backwards.
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def _scores_of(keys: NDArray[np.uint64]) -> Floats:
    """The scores (n,) of keys from `_ordered_keys`; keys past a finite score give the last one."""
    bits = np.clip(keys, _LEAST, _MOST).astype(np.uint32)
    bits = np.where(bits & _SIGN, bits ^ _SIGN, ~bits)
    return bits.view(np.float32).astype(np.float64)


# Three histograms: a defect-free pixel weighs 1 in the first. A defect pixel weighs 1 in the second
# and, so that all regions weigh alike, 1 / (inspected pixels of its region) in the third.
_GOOD, _DEFECT, _REGION = range(3)
_PIXEL_NAMES = ("pixel_auroc", "pixel_ap", "pixel_f1_max", "aupro_30", "aupro_05")
_LOST = "lost_defect_share"


class PixelAccumulator:
    """Pixel AUROC, average precision, best F1 and AUPRO of images that are added one by one.

    Args:
        max_bins: largest number of bins of scores; memory is 24 bytes a bin.
    """

    def __init__(self, max_bins: int = 1 << 20) -> None:
        self._scores = ScoreHistogram(3, max_bins)
        self._images = self._defect_pixels = self._lost_defect_pixels = 0

    def update(self, anomaly_map: ArrayLike, mask: ArrayLike) -> None:
        """Add one image.

        An image counts as good when its mask is empty: leave out defective images without one.

        Args:
            anomaly_map: (H, W), compared as float32; NaN where nothing was inspected, which
                leaves the pixel out of every metric but `lost_defect_share`.
            mask: (H, W) bool, True on defects.
        """
        scores, defect = np.asarray(anomaly_map, dtype=np.float32), np.asarray(mask, dtype=bool)
        self._images += 1
        inspected = ~np.isnan(scores)
        self._scores.add(scores[inspected & ~defect], {_GOOD: None})
        inspected_defect = inspected & defect
        self._defect_pixels += int(defect.sum())
        self._lost_defect_pixels += int((defect & ~inspected).sum())
        # 8-connected, over the whole mask: a region cut in two by a crop is still one region.
        _, regions = cv2.connectedComponents(defect.astype(np.uint8), connectivity=8)
        region = regions[inspected_defect]
        share = 1.0 / np.bincount(region)[region]  # AUPRO: the pixels of a region weigh 1 together
        self._scores.add(scores[inspected_defect], {_DEFECT: None, _REGION: share})

    def result(self) -> Metrics:
        """The figures of all images added.

        AUPRO as in Bergmann et al., "The MVTec Anomaly Detection Dataset", IJCV 2021, section
        4.3.2: the mean recall over all defect regions against the false-positive rate over all
        defect-free pixels.

        Returns:
            `pixel_auroc`, `pixel_ap`, `pixel_f1_max`; `aupro_30` and `aupro_05`, the area up to a
            false-positive rate of 0.3 and 0.05 divided by that rate; `lost_defect_share`, the
            share of defect pixels that lie where nothing was inspected. All are in [0, 1]; a
            figure that is undefined comes with its reason.
        """
        if not self._defect_pixels:
            missing = NO_DEFECT_MASKS if self._images else NO_MASKS
            return Metrics.undefined((*_PIXEL_NAMES, _LOST), missing)
        lost = Metrics({_LOST: self._lost_defect_pixels / self._defect_pixels})
        if self._lost_defect_pixels == self._defect_pixels:
            return Metrics.undefined(_PIXEL_NAMES, NO_DEFECT_PIXELS) | lost
        scores, (good, defect, region) = self._scores.weighted()
        if not good.any():
            return Metrics.undefined(_PIXEL_NAMES, NO_GOOD_PIXELS) | lost
        labels, values = np.repeat([False, True], len(scores)), np.tile(scores, 2)
        of_pixels = np.concatenate([good, defect])
        of_regions = _Roc.of(labels, values, np.concatenate([good, region]))
        figures = [
            _Roc.of(labels, values, of_pixels).area(),
            *_ap_and_f1(labels, values, of_pixels),
            of_regions.area(0.30),
            of_regions.area(0.05),
        ]
        return Metrics(dict(zip(_PIXEL_NAMES, figures, strict=True))) | lost
