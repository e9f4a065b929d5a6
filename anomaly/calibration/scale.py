"""Scores on a scale that means the same for every model."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from anomaly.calibration.rates import Floats, sorted_scores


class ScoreScale:
    """Scores as rarities: how unusual a score would be for a good part, in powers of ten.

    A rarity of 1 is exceeded by one good part in 10, 2 by one in 100, 3 by one in 1,000. At the
    k-th highest of n good scores it is −log10(k / (n + 1)), the rate to expect of a threshold
    there; in between it is linear in the score. Past the highest good score it goes on, strictly
    rising and without end, along an exponential tail (the generalised Pareto distribution of
    shape 0) with the mean excess of the top tenth. Scores with a lighter tail are rarer still
    than it says. Below the lowest score it falls towards 0 in the same way. What lies beyond the
    good scores is an ordering to sort and compare by, not a measured rate.

    Args:
        good_scores: (n,) finite scores of good images the model hasn't learned from.

    Raises:
        DataError: no scores.
        ValueError: a score isn't finite.
    """

    def __init__(self, good_scores: ArrayLike) -> None:
        good = sorted_scores(good_scores, "a calibrated score")
        self._knots, first = np.unique(good, return_index=True)
        above = len(good) - np.append(first[1:], len(good))
        self._rarities = -np.log10((above + 1) / (len(good) + 1))
        tail = max(len(good) // 10, 1)
        # Equal scores have no excess; the tail is then as steep as single precision can show.
        steepest = float(np.finfo(np.float32).eps) * max(float(np.abs(good).max()), 1.0)
        self._upper_excess = max(float((good[-tail:] - good[-tail - 1 :][0]).mean()), steepest)
        self._lower_excess = max(float((good[: tail + 1][-1] - good[:tail]).mean()), steepest)

    def __call__(self, scores: ArrayLike) -> Floats:
        """Rarity of each score, same shape, at least 0; NaN stays NaN."""
        values = np.asarray(scores, dtype=np.float64)
        inside = np.interp(values, self._knots, self._rarities)
        beyond = np.maximum(values - self._knots[-1], 0.0) / (self._upper_excess * np.log(10))
        short = np.maximum(self._knots[0] - values, 0.0) / self._lower_excess
        lowest = -np.expm1(-self._rarities[0] * np.log(10)) * np.exp(-short)
        below = -np.log1p(-lowest) / np.log(10)
        rarities: Floats = np.where(short > 0, np.minimum(below, inside), inside + beyond)
        return rarities
