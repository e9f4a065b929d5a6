"""Shares of images, and what a count says about the true share behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anomaly.errors import DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rate:
    """A share of images, with what can be said about the true share behind it.

    Attributes:
        count: images that were flagged.
        images: images there were.
        expected: the estimate.
        low: lower end of the two-sided Clopper–Pearson interval.
        high: its upper end.
        at_most: the one-sided upper bound, at the same confidence.
    """

    count: int
    images: int
    expected: float
    low: float
    high: float
    at_most: float


def rate_of(count: int, images: int, expected: float, confidence: float) -> Rate:
    """An estimate with the Clopper–Pearson bounds of `count` out of `images`."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = betaincinv(count, images - count + 1, tail) if count else 0.0
    high, at_most = (
        betaincinv(count + 1, images - count, [1 - tail, confidence])
        if count < images
        else (1.0, 1.0)
    )
    return Rate(count, images, expected, float(low), float(high), float(at_most))


def supported_rate(images: int, confidence: float = 0.95) -> float:
    """The lowest false-reject rate that so many good images can vouch for: 7.2 % for 40."""
    return float(-np.expm1(np.log1p(-confidence) / images))


def images_needed(target: float, confidence: float = 0.95) -> int:
    """How many good images it takes to vouch for a false-reject rate: 299 for 1 %."""
    # Less a trifle, so that supported_rate(n) needs n and not, by rounding, n + 1.
    return math.ceil(math.log1p(-confidence) / math.log1p(-target) - 1e-9)


def beta_binomial_interval(n_cal: int, k: int, n_test: int, level: float = 0.95) -> tuple[int, int]:
    """How many of `n_test` new good images to expect above the k-th highest of `n_cal`.

    The count follows a beta-binomial distribution with α = k, β = n_cal − k + 1.

    Returns:
        The lowest and the highest count of the central interval that holds at least `level`.

    Raises:
        ValueError: k isn't one of 1 … n_cal.
    """
    from scipy.special import betaln

    if not 1 <= k <= n_cal:
        raise ValueError(f"there is no {k}-th highest of {n_cal} scores")
    count = np.arange(n_test + 1)
    ways = -np.log(n_test + 1) - betaln(count + 1, n_test - count + 1)
    rest = n_cal - k + 1
    log_chances = ways + betaln(count + k, n_test - count + rest) - betaln(k, rest)
    reached = np.cumsum(np.exp(log_chances))
    tail = (1 - level) / 2
    low, high = np.searchsorted(reached, [tail, (1 - tail) * reached[-1]])
    return int(low), int(high)


def sorted_scores(scores: ArrayLike, purpose: str) -> Floats:
    """The scores (n,) in rising order, float64.

    Raises:
        DataError: there are none.
        ValueError: the shape isn't (n,), or one isn't finite.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"scores must be (n,), not {values.shape}")
    if not len(values):
        raise DataError(f"{purpose} takes the scores of at least one image; there are none")
    if not np.isfinite(values).all():
        raise ValueError("every score must be finite")
    return np.sort(values)


def percent(share: float) -> str:
    """A share for people, to two digits: `0.48 %`."""
    return f"{float(f'{100 * share:.2g}'):g} %"
