"""Shares of images: counts, with estimates and confidence bounds of the true share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anomaly.errors import DataError

Floats = NDArray[np.float64]

CONFIDENCE = 0.95  # confidence of all bounds, unless another is asked for


@dataclass(frozen=True)
class Rate:
    """A counted share of images, with estimate and bounds of the true share, all in [0, 1].

    Attributes:
        count: number of images flagged.
        images: number of images.
        expected: estimate of the true share.
        low: lower end of the two-sided interval.
        high: upper end of the two-sided interval.
        at_most: one-sided upper bound, at the same confidence.
    """

    count: int
    images: int
    expected: float
    low: float
    high: float
    at_most: float

    @property
    def interval(self) -> str:
        """The two-sided interval for people: `3 to 12 %`."""
        return f"{percent(self.low).removesuffix(' %')} to {percent(self.high)}"


def rate_of(
    count: int,
    images: int,
    expected: float,
    confidence: float = CONFIDENCE,
    groups: int | None = None,
) -> Rate:
    """An estimate with the Clopper–Pearson bounds of `count` out of `images`.

    The bounds hold for a threshold that wasn't chosen by these images, or that is the score of a
    fixed rank among them.

    Args:
        count: number of images flagged.
        images: number of images.
        expected: estimate of the true share.
        confidence: confidence of the bounds.
        groups: number of groups (lots, parts) that the images come from; None if each image is a
            group. Images of one group may be alike, so the bounds count groups.
    """
    return _rate(count, images, expected, (1 - confidence) / 2, 1 - confidence, groups)


def rate_above(
    scores: ArrayLike, limit: float, groups: int | None = None, *, chosen: bool = False
) -> Rate:
    """The share of image scores above a limit, with 95 % bounds; 0 without scores.

    Args:
        scores: image scores (n,).
        limit: a score above it counts.
        groups: number of groups that the images come from, see `rate_of`.
        chosen: the limit may have been chosen by these scores; the bounds are then wider.
    """
    above = np.asarray(scores) > limit
    count = int(above.sum())
    bounds = rate_anywhere if chosen else rate_of
    return bounds(count, above.size, count / max(above.size, 1), groups=groups)


def rate_anywhere(count: int, images: int, expected: float, groups: int | None = None) -> Rate:
    """The rate of `rate_of`, with 95 % bounds that hold at all thresholds at once.

    So they hold for any threshold, even one set by a person who has seen the scores. They are
    Clopper–Pearson bounds at a level so strict that, with 95 % confidence, the count above no
    threshold breaks its bound ("equal local levels": Berk & Jones 1979, Aldor-Noiman et al.
    2013). If none of 209 images lies above, the share is at most 3 %, not the 1.4 % of `rate_of`.
    """
    log_images = np.log(independent_images(images, groups))
    tails = [float(np.exp(np.interp(log_images, np.log(_SIZES), np.log(x)))) for x in _LEVELS]
    return _rate(count, images, expected, two_sided=tails[1], one_sided=tails[0], groups=groups)


# Levels at which all bounds of so many images hold together with 95 % and with 97.5 % confidence,
# from `python -m benchmarks.coverage --levels`; interpolated between in the logarithms of both.
_SIZES = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 200, 500, 1000, 2000, 5000, 20000)
_LEVELS = (
    (
        *(0.05, 0.02716, 0.01933, 0.01294, 0.01012, 0.007943, 0.005217, 0.004201, 0.003287),
        *(0.002840, 0.002461, 0.001920, 0.001456, 0.001217, 0.001039, 0.0008641, 0.0006825),
    ),
    (
        *(0.025, 0.01324, 0.009295, 0.006119, 0.004739, 0.003682, 0.002378, 0.001900, 0.001474),
        *(0.001268, 0.001094, 0.0008481, 0.0006393, 0.0005329, 0.0004540, 0.0003772, 0.0002934),
    ),
)


def _rate(
    count: int, images: int, expected: float, two_sided: float, one_sided: float, groups: int | None
) -> Rate:
    """An estimate with exact binomial bounds, as in `rate_of`, for given chances of failure.

    Each end of the interval fails with the chance `two_sided`, `at_most` with that of `one_sided`.
    """
    units = independent_images(images, groups)
    # With fewer groups than images the count becomes a fraction of them, rounded outwards.
    least, most = count * units // max(images, 1), -(-count * units // max(images, 1))
    low = rate_showing(least, units, two_sided) if least else 0.0
    high, at_most = (
        rate_showing(most + 1, units, 1 - tail) if most < units else 1.0
        for tail in (two_sided, one_sided)
    )
    return Rate(count, images, expected, low, high, at_most)


def independent_images(images: int, groups: int | None) -> int:
    """Number of images that bounds count: at most one a group."""
    return images if groups is None else min(groups, images)


@lru_cache(maxsize=1024)
def rate_showing(count: int, images: int, chance: float) -> float:
    """The true rate, in (0, 1), at which `count` of `images` or more are flagged with this chance.

    Inverts the binomial tail, which is the regularised incomplete beta function
    I_x(count, images − count + 1), by bisection.
    """
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no number lies in between
        if binomial(images, middle)[count:].sum() < chance:
            low = middle
        else:
            high = middle
    return middle


def binomial(trials: int, rate: float) -> Floats:
    """The chances (trials + 1,) of 0, 1, … successes, for a rate in (0, 1)."""
    # In logarithms, because the binomial coefficients overflow from about 1,000 trials on.
    hits, factorials = np.arange(trials + 1), _log_factorials(trials)
    log_ways = factorials[trials] - factorials - factorials[::-1]
    return np.asarray(np.exp(log_ways + hits * np.log(rate) + (trials - hits) * np.log1p(-rate)))


@lru_cache(maxsize=4)
def _log_factorials(most: int) -> Floats:
    """The logarithms of 0!, 1!, … (most + 1,)."""
    return np.array([math.lgamma(n + 1) for n in range(most + 1)])


def supported_rate(images: int) -> float:
    """The lowest false-reject rate that so many good images can guarantee: 0.072 for 40."""
    return float(-np.expm1(np.log1p(-CONFIDENCE) / images))


def images_needed(target: float) -> int:
    """The number of good images needed to guarantee a false-reject rate: 299 for 0.01."""
    # 1e-9 less, so that `supported_rate(n)` needs n images and not, by rounding, n + 1.
    return math.ceil(math.log1p(-CONFIDENCE) / math.log1p(-target) - 1e-9)


def sorted_scores(scores: ArrayLike) -> Floats:
    """The scores (n,) in rising order, float64.

    Raises:
        DataError: there are no scores.
        ValueError: the shape isn't (n,), or a score isn't finite.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"scores must be (n,), not {values.shape}")
    if not len(values):
        raise DataError("a threshold takes the scores of at least one image; there are none")
    if not np.isfinite(values).all():
        raise ValueError("every score must be finite")
    return np.sort(values)


def percent(share: float) -> str:
    """A share as text in per cent, to two significant digits: `0.48 %` for 0.00481."""
    return f"{float(f'{100 * share:.2g}'):g} %"


class ScoreScale:
    """Rarity of scores among good parts, in powers of ten.

    A rarity of 1 is exceeded by one good part in 10, 2 by one in 100, 3 by one in 1,000. At the
    k-th highest of n good scores it is −log10(k / (n + 1)), the rate to expect of a threshold
    there; between two scores it is linear. Above the highest good score it rises without end
    along an exponential tail (the generalised Pareto distribution of shape 0) with the mean excess
    of the top tenth; scores with a lighter tail are rarer still. Below the lowest score it falls
    towards 0 in the same way. Outside the good scores it only sorts and compares; it isn't a
    measured rate.

    Args:
        good_scores: (n,) finite scores of good images that the model hasn't learned from.

    Raises:
        DataError: there are no scores.
        ValueError: a score isn't finite.
    """

    def __init__(self, good_scores: ArrayLike) -> None:
        good = sorted_scores(good_scores)
        self._knots, first = np.unique(good, return_index=True)
        above = len(good) - np.append(first[1:], len(good))
        self._rarities = -np.log10((above + 1) / (len(good) + 1))
        tail = max(len(good) // 10, 1)
        # Equal scores have no excess; their tail falls within single precision of the score.
        steepest = float(np.finfo(np.float32).eps) * max(float(np.abs(good).max()), 1.0)
        self._upper_excess = max(float((good[-tail:] - good[-tail - 1 :][0]).mean()), steepest)
        self._lower_excess = max(float((good[: tail + 1][-1] - good[:tail]).mean()), steepest)

    def __call__(self, scores: ArrayLike) -> Floats:
        """Rarity of each score, same shape, at least 0; NaN stays NaN."""
        values = np.asarray(scores, dtype=np.float64)
        inside = np.interp(values, self._knots, self._rarities)
        beyond = np.maximum(values - self._knots[-1], 0.0) / (self._upper_excess * np.log(10))
        short = np.maximum(self._knots[0] - values, 0.0) / self._lower_excess
        share_below = -np.expm1(-self._rarities[0] * np.log(10)) * np.exp(-short)
        below = -np.log1p(-share_below) / np.log(10)
        rarities: Floats = np.where(short > 0, np.minimum(below, inside), inside + beyond)
        return rarities

    def score_of(self, share: float) -> float:
        """The score that a share (0 to 1) of good parts exceeds, at least the lowest good score."""
        rarity = -math.log10(share)
        inside = float(np.interp(rarity, self._rarities, self._knots))
        beyond = max(rarity - float(self._rarities[-1]), 0.0)
        return inside + beyond * self._upper_excess * math.log(10)


# Distances as shares of the score. Another machine changes a score by about 1e-4, the noise.
# Least gap to put a threshold into: half of it is one and a half times the noise.
GAP = 3e-4
# Distance of a threshold from the score below it in a wider gap: ten times the noise, and little
# beside the width of a distribution of scores.
ROOM = 1e-3
# Distance of a threshold beyond the highest or the lowest score: no precision moves scores so far.
OUTSIDE = 1e-2
# Farthest that a threshold moves to find such a gap: among many thousands of scores there may be
# none near by.
REACH = 1e-2


def in_gap(value: float, scores: Floats) -> float:
    """A threshold in a gap between scores, at or above a value.

    Gaps may begin up to `REACH` above the highest score that `value` doesn't flag. The lowest gap
    of at least `GAP` is taken, else the widest. The threshold lies `ROOM` above the gap's lower
    end, at most in its middle, so it flags as many scores as `value` does, or some fewer. Outside
    the scores it lies `OUTSIDE` away from the nearest. All four are shares of a score's magnitude.

    Args:
        value: scores above it are to be flagged.
        scores: (n,) finite, at least one, in any order.

    Returns:
        The threshold; exact as float32 if the gap holds a float32.
    """
    known = np.unique(scores)
    reached = int(np.searchsorted(known, value, side="right"))
    if reached == 0:
        return _single(known[0] - OUTSIDE * _size(known[0]), -np.inf, known[0])
    start = known[reached - 1]
    last = int(np.searchsorted(known, start + REACH * _size(start), side="right"))
    below = known[reached - 1 : last]
    above = known[reached : last + 1]
    if len(above) < len(below):  # the highest score is within reach
        above = np.append(above, np.inf)
    widths = (above - below) / np.maximum(np.abs(below), 1e-30)
    wide = widths >= GAP
    at = int(np.argmax(wide) if wide.any() else np.argmax(widths))
    size = _size(below[at])
    step = OUTSIDE * size if np.isinf(above[at]) else min((above[at] - below[at]) / 2, ROOM * size)
    return _single(below[at] + step, below[at], above[at])


def _size(score: float) -> float:
    """Magnitude of a score; above 0 even for 0, so that a distance can be a share of it."""
    return max(abs(float(score)), 1e-30)


def _single(value: float, below: float, above: float) -> float:
    """A value between two others, rounded to float32 if it then still lies between them."""
    single = float(np.float32(value))
    return single if below < single < above else float(value)
