"""Cumulative sums that notice when more parts than promised lie above a level (binomial CUSUM).

Page 1954; Reynolds & Stoumbos 1999, "A CUSUM chart for monitoring a proportion when inspecting
continuously". Each part is a coin's throw and the sum's way a Markov chain, whose chance to reach a
limit is computed whatever the values' distribution. A smaller share only makes it smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

HORIZON = 2000  # parts that the false-alarm rate is stated for
_CELLS = 300  # of the Markov chain, at least
_LEAST_JUMP = 10  # cells that a part above the level adds


@dataclass(frozen=True)
class Level:
    """A score level with the share of parts expected above it.

    Attributes:
        name: of the level, for people.
        value: a score.
        promised: the share of parts above it that nobody need be surprised at.
        limit: the cumulative sum that raises the alarm.
    """

    name: str
    value: float
    promised: float
    limit: float

    def gain(self, above: bool) -> float:
        """The log-likelihood ratio that a part adds to the sum."""
        return gains(self.promised)[above]


def gains(promised: float) -> tuple[float, float]:
    """The sum's increments for a part below and a part above the level; tuned to twice the odds."""
    after = 2 * promised / (1 + promised)
    return math.log((1 - after) / (1 - promised)), math.log(after / promised)


@lru_cache(maxsize=64)
def limit_of(promised: float, chance: float) -> float:
    """The alarm limit: the sum that `HORIZON` normal parts reach with a given chance at most."""
    down, up = gains(promised)
    # The sum that starts anew at each part is a martingale, and there are as many as parts (Ville).
    highest = math.log(HORIZON / chance)
    # A cell of the chain is a fraction of `down`, one by which `up` is little more than a number of
    # cells: that is rounded up, so that the stated chance is never too small.
    least = math.ceil(max(-down * _CELLS / highest, -down * _LEAST_JUMP / up))
    steps = min(range(least, 2 * least), key=lambda n: math.ceil(up * n / -down) / n)
    cell = -down / steps
    jump = math.ceil(up / cell)
    low, high = 0, math.ceil(highest / cell)  # reached too often, and seldom enough
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        if _reached(promised, middle, steps, jump) <= chance:
            high = middle
        else:
            low = middle
    return high * cell


def _reached(promised: float, cells: int, steps: int, jump: int) -> float:
    """The chance that the chain reaches a cell within `HORIZON` parts."""
    chances = np.zeros(cells)
    chances[0] = 1.0
    for _ in range(HORIZON):
        after = np.zeros(cells)
        after[0] = (1 - promised) * chances[: steps + 1].sum()
        after[1 : cells - steps] = (1 - promised) * chances[steps + 1 :]
        after[jump:] += promised * chances[: max(cells - jump, 0)]
        chances = after
    return float(1 - chances.sum())


@dataclass
class Watched:
    """A level and the parts counted against it.

    Attributes:
        level: the level.
        sum: the cumulative sum now.
        above: parts above it so far.
        alarm: the part that has raised the alarm, counted from 0; None while none has.
        since: the part from which on there were more than promised, as the sum tells.
    """

    level: Level
    sum: float = 0.0
    above: int = 0
    alarm: int | None = None
    since: int = 0

    def add(self, value: float, number: int) -> None:
        """Count one more part."""
        above = bool(value > self.level.value)
        self.above += above
        if self.sum == 0.0 and self.alarm is None:
            self.since = number
        self.sum = max(0.0, self.sum + self.level.gain(above))
        if self.alarm is None and self.sum >= self.level.limit:
            self.alarm = number
