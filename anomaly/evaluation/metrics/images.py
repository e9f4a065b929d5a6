"""Metrics of whole images: does the image score tell good parts from defective ones?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anomaly.evaluation.metrics import curves
from anomaly.evaluation.metrics.curves import Floats, Metrics, Tally

NO_GOOD = "no good images"
NO_DEFECTS = "no defective images"
FALSE_REJECT_RATES = (0.01, 0.05)

# Draws of this many numbers fit the processor's outer cache.
_DRAWN_AT_ONCE = 1 << 20


def image_metrics(scores: ArrayLike, labels: ArrayLike) -> Metrics:
    """AUROC, average precision and the best F1 over all thresholds.

    Args:
        scores: (n,) finite image scores, higher is more anomalous.
        labels: (n,) bool, True for defective images.

    Returns:
        `image_auroc`, `image_ap`, `image_f1_max` in [0, 1] and `image_f1_max_threshold`. All are
        undefined without good images: precision would be 1 whatever the scores.

    Raises:
        ValueError: shapes differ, or a score isn't finite.
    """
    names = ("image_auroc", "image_ap", "image_f1_max", "image_f1_max_threshold")
    tally = _tally(scores, labels)
    if missing := _missing_class(tally):
        return Metrics.undefined(names, missing)
    good, defect = tally.weights
    f1 = curves.f1_scores(good, defect)
    best = int(np.argmax(f1))
    return Metrics(
        {
            "image_auroc": float(curves.auroc(good, defect)),
            "image_ap": float(curves.average_precision(good, defect)),
            "image_f1_max": float(f1[best]),
            "image_f1_max_threshold": float(tally.thresholds()[best]),
        }
    )


def recall_at_false_reject_rates(
    scores: ArrayLike, labels: ArrayLike, rates: Sequence[float] = FALSE_REJECT_RATES
) -> Metrics:
    """The share of defective images found while at most so many good ones are flagged.

    The thresholds behind these figures come from the test images: they say what the scores could
    do, not what the model's own threshold does. With n good images a rate below 1/n allows no
    false reject at all.

    Args:
        scores: (n,) finite image scores.
        labels: (n,) bool, True for defective images.
        rates: shares of the good images, each in [0, 1].

    Returns:
        `recall_at_frr_0.01` and so on, each in [0, 1].

    Raises:
        ValueError: shapes differ, a score isn't finite, or a rate is out of range.
    """
    if any(not 0 <= rate <= 1 for rate in rates):
        raise ValueError(f"false-reject rates must be from 0 to 1, not {list(rates)}")
    names = _recall_names(rates)
    tally = _tally(scores, labels)
    if missing := _missing_class(tally):
        return Metrics.undefined(names, missing)
    good, defect = tally.weights
    # A little slack: 0.07 of 100 images is seven, though 0.07 · 100 > 7 in floating point.
    recalls = [float(_recall(good, defect, np.floor(r * good.sum() + 1e-9))) for r in rates]
    return Metrics(dict(zip(names, recalls, strict=True)))


def metrics_by_type(
    scores: ArrayLike, labels: ArrayLike, types: Sequence[str]
) -> dict[str, Metrics]:
    """Each type of defect by itself against all good images.

    Args:
        scores: (n,) finite image scores.
        labels: (n,) bool, True for defective images.
        types: n names, as the data set gives them.

    Returns:
        By type, in order of first appearance: `image_auroc` and the recalls at false-reject rates.

    Raises:
        ValueError: shapes differ, or a score isn't finite.
    """
    values, defective, named = np.asarray(scores), np.asarray(labels, bool), np.array(types, object)
    by_type = {}
    for name in dict.fromkeys(named[defective]):
        chosen = ~defective | (named == name)
        pair = values[chosen], defective[chosen]
        by_type[name] = image_metrics(*pair).only("image_auroc") | recall_at_false_reject_rates(
            *pair
        )
    return by_type


def _recall_names(rates: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"recall_at_frr_{rate:g}" for rate in rates)


def _recall(good: Floats, defect: Floats, allowed: float) -> Floats:
    """Recall (...,) with at most so much weight of good images flagged."""
    false, recall = curves.cumulative(good), curves.cumulative_share(defect)
    return np.asarray(np.where(false <= allowed, recall, 0.0).max(axis=-1))


def image_intervals(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, tuple[float, float] | None]:
    """Intervals of the figures that parts still to come would show, with 95 % confidence.

    What n images leave open: of all good parts, those between two neighbouring scores have the
    share of one of n + 1 pieces of a stick broken at random (Dirichlet with parameters 1, whatever
    the scores' distribution), and so have defective ones. Where in its gap a piece lies isn't
    known. So the lower end is the 2.5 % quantile of figures for which each good piece
    lies at the upper end of its gap, and each defective one at the lower; the upper end is the
    97.5 % quantile with good pieces at the lower ends and defective ones at the upper. For the
    recall at a fixed threshold these are the Clopper–Pearson bounds, and like them they err to the
    safe side: how often they hold is in docs/coverage.md.

    Args:
        scores: (n,) finite image scores.
        labels: (n,) bool, True for defective images.
        draws: of pieces.
        seed: the same seed gives the same intervals.

    Returns:
        (low, high) of `image_auroc`, `image_ap`, `image_f1_max` and the recalls at false-reject
        rates; None without good or without defective images. Those of AP and F1 are for as many
        good and defective parts to come as are in the data.

    Raises:
        ValueError: shapes differ, or a score isn't finite.
    """
    names = ("image_auroc", "image_ap", "image_f1_max", *_recall_names(FALSE_REJECT_RATES))
    tally = _tally(scores, labels)
    if _missing_class(tally):
        return dict.fromkeys(names)
    rng = np.random.default_rng(seed)
    best = int(np.argmax(curves.f1_scores(*tally.weights)))
    at_once = max(1, _DRAWN_AT_ONCE // tally.weights.shape[1])
    ends = [
        _drawn_figures(tally.weights, best, min(at_once, draws - done), rng)
        for done in range(0, draws, at_once)
    ]
    lowest, highest = np.concatenate(ends, axis=2)
    tail = 0.025
    low, high = np.quantile(lowest, tail, axis=1), np.quantile(highest, 1 - tail, axis=1)
    return dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True))


def _drawn_figures(weights: Floats, best: int, count: int, rng: np.random.Generator) -> Floats:
    """Figures of `count` draws, at their lower and at their upper end: (2, figures, count).

    The lower end of the best F1 is that of the threshold which is best for the data, after `best`
    groups: a maximum over all of them would be taken by chance, once more than it was already.
    """
    (good, good_rest), (defect, defect_rest) = (_pieces(row, count, rng) for row in weights)
    nothing = np.zeros_like(good_rest)
    ends = []
    for low in (True, False):
        parts = [(good_rest, good, nothing), (nothing, defect, defect_rest)]
        if not low:
            parts = [(nothing, good, good_rest), (defect_rest, defect, nothing)]
        flagged, caught = (np.concatenate(part, axis=1) for part in parts)
        f1 = curves.f1_scores(flagged, caught)
        ends.append(
            [
                curves.auroc(flagged, caught),
                curves.average_precision(flagged, caught),
                f1[:, best + 1] if low else f1.max(axis=-1),
                *(_recall(flagged, caught, rate * weights[0].sum()) for rate in FALSE_REJECT_RATES),
            ]
        )
    return np.array(ends)


def _pieces(weights: Floats, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Random weights at K scores (count, K), and of the piece beyond them (count, 1).

    Together they weigh as much as `weights` (K,), which say how many images each score has.
    """
    pieces = rng.standard_gamma(np.append(weights, 1.0), size=(count, len(weights) + 1))
    pieces *= weights.sum() / pieces.sum(axis=1, keepdims=True)
    return pieces[:, :-1], pieces[:, -1:]


def _tally(scores: ArrayLike, labels: ArrayLike) -> Tally:
    """Good and defective images at each score."""
    values = np.asarray(scores, np.float64)
    defective: NDArray[np.bool_] = np.asarray(labels, dtype=bool)
    if values.ndim != 1 or values.shape != defective.shape:
        raise ValueError(f"scores {values.shape} and labels {defective.shape} must be (n,) both")
    if not np.isfinite(values).all():
        raise ValueError("every image score must be finite")
    return Tally.of(values, [~defective, defective])


def _missing_class(tally: Tally) -> str:
    """Why image figures are undefined; empty where there are good and defective images."""
    if not tally.weights[1].any():
        return NO_DEFECTS
    return "" if tally.weights[0].any() else NO_GOOD


@dataclass(frozen=True)
class VerdictCounts:
    """How many images got each verdict."""

    good: int = 0
    review: int = 0
    reject: int = 0

    @property
    def total(self) -> int:
        """Images with any verdict."""
        return self.good + self.review + self.reject


@dataclass(frozen=True)
class Confusion:
    """Verdicts against the truth.

    Attributes:
        good: verdicts on good images.
        defective: verdicts on defective images.
        by_type: verdicts by defect type, in the order of first appearance; good images have the
            type they were given.
    """

    good: VerdictCounts
    defective: VerdictCounts
    by_type: dict[str, VerdictCounts]

    @property
    def escapes(self) -> int:
        """Defective images that were called good."""
        return self.defective.good

    @property
    def caught(self) -> int:
        """Defective images that were rejected or are for review."""
        return self.defective.reject + self.defective.review

    @property
    def false_rejects(self) -> int:
        """Good images that were rejected; those for review don't count."""
        return self.good.reject

    @property
    def good_to_review(self) -> int:
        """Good images that are for review."""
        return self.good.review


def confusion(
    verdicts: Sequence[str], labels: Sequence[bool], defect_types: Sequence[str]
) -> Confusion:
    """Count verdicts by truth and by defect type.

    Args:
        verdicts: n of `good`, `review`, `reject`.
        labels: n, True for defective images.
        defect_types: n names, as the data set gives them.
    """
    rows = list(zip(map(bool, labels), defect_types, verdicts, strict=True))

    def counted(chosen: Iterable[str]) -> VerdictCounts:
        return VerdictCounts(**Counter(chosen))

    return Confusion(
        good=counted(verdict for defect, _, verdict in rows if not defect),
        defective=counted(verdict for defect, _, verdict in rows if defect),
        by_type={
            name: counted(verdict for _, kind, verdict in rows if kind == name)
            for name in dict.fromkeys(defect_types)
        },
    )
