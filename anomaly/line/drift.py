"""Does the stream still look like the good images that the thresholds stand on? Imports no torch.

Four levels divide the scores of the good calibration images: their median, their upper quartile,
and the review and the reject threshold. Of new good parts no larger share should lie above a level
than the calibration images support, and of all parts, no more than that and the defective ones. A
cumulative sum of log-likelihood ratios (binomial CUSUM: Page 1954; Reynolds & Stoumbos 1999,
"A CUSUM chart for monitoring a proportion when inspecting continuously") watches each level.

The chance of a false alarm doesn't hang on the scores' distribution: whether a part lies above a
level is a coin's throw, and the sum's way a Markov chain whose chance to reach a limit within so
many parts is computed. A smaller share than the promised one only makes it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from anomaly.calibration.model_thresholds import Thresholds
from anomaly.calibration.rates import percent, rate_of

HORIZON = 2000  # parts that the false-alarm rate is stated for
FALSE_ALARMS = 0.05
DEFECTS = 0.01
_CELLS = 300  # of the Markov chain, at least
_LEAST_JUMP = 10  # cells that a part above the level adds


@dataclass(frozen=True)
class Level:
    """A score that only so many parts should lie above.

    Attributes:
        name: of the level, for people.
        value: the score.
        promised: the share of parts above it that nobody need be surprised at.
        limit: the cumulative sum that raises the alarm.
    """

    name: str
    value: float
    promised: float
    limit: float

    def gain(self, above: bool) -> float:
        """What a part adds to the sum: the logarithm of its likelihood ratio."""
        return _gains(self.promised)[above]


def levels_of(
    thresholds: Thresholds, *, defects: float = DEFECTS, false_alarms: float = FALSE_ALARMS
) -> list[Level]:
    """The levels to watch, the highest first.

    Args:
        thresholds: of the model, with the scores behind them.
        defects: share of parts that are usually defective.
        false_alarms: chance that `HORIZON` parts, of which as many are defective and the others
            are like the calibration images, raise an alarm on any level. Half of it is for what
            so few calibration images leave open, half for the sums.

    Raises:
        ValueError: a share outside 0 to 1, or no room for any alarm.
    """
    if not 0 <= defects < 0.5 or not 0 < false_alarms < 1:
        raise ValueError("defects must be 0 to 0.5, and false_alarms more than 0 and less than 1")
    good = np.sort(np.array(thresholds.good.image))
    values = {"reject threshold": thresholds.image, "review threshold": thresholds.review}
    values |= {
        "upper quartile": float(np.quantile(good, 0.75, method="higher")),
        "median": float(np.quantile(good, 0.5, method="higher")),
    }
    distinct: dict[float, str] = {}
    for name, value in values.items():
        distinct.setdefault(value, name)
    each = false_alarms / 2 / len(distinct)
    found = []
    for value, name in distinct.items():
        above = int((good > value).sum())
        share = rate_of(above, len(good), above / len(good), 1 - each).at_most
        promised = share + defects * (1 - share)
        if promised < 1:
            found.append(Level(name, value, promised, _limit(promised, each)))
    return sorted(found, key=lambda level: -level.value)


def _gains(promised: float) -> tuple[float, float]:
    """What a part below the level and one above it add: tuned to twice the odds."""
    after = 2 * promised / (1 + promised)
    return math.log((1 - after) / (1 - promised)), math.log(after / promised)


@lru_cache(maxsize=64)
def _limit(promised: float, chance: float) -> float:
    """The sum that `HORIZON` parts of the promised share reach with so small a chance, at most."""
    down, up = _gains(promised)
    # The sum that starts anew at each part is a martingale, and there are as many as parts (Ville).
    highest = math.log(HORIZON / chance)
    # A cell of the chain is a fraction of `down`, one by which `up` is little more than a number of
    # cells: that is rounded up, so that the chance is never told too small.
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
    """One level and what has come.

    Attributes:
        level: the level.
        sum: the cumulative sum now.
        above: parts above it so far.
        alarm: the part that has raised the alarm, counted from 0; None while none has.
        since: the part from which on there were more than promised, as the sum tells.
        sums: the sum after each part; None where they aren't kept.
    """

    level: Level
    sum: float = 0.0
    above: int = 0
    alarm: int | None = None
    since: int = 0
    sums: list[float] | None = None

    def add(self, score: float, number: int) -> None:
        """Take one more part."""
        above = bool(score > self.level.value)
        self.above += above
        if self.sum == 0.0 and self.alarm is None:
            self.since = number
        self.sum = max(0.0, self.sum + self.level.gain(above))
        if self.sums is not None:
            self.sums.append(self.sum)
        if self.alarm is None and self.sum >= self.level.limit:
            self.alarm = number


class Drift:
    """Watches a stream of scores, and remembers the first alarm of each level.

    Args:
        levels: as `levels_of` gives them.
        keep: whether to keep the sums, which a chart needs and a stream without end can't.
    """

    def __init__(self, levels: Sequence[Level], *, keep: bool = False) -> None:
        self.watched = [Watched(level, sums=[] if keep else None) for level in levels]
        self.parts = 0

    def add(self, score: float) -> None:
        """Take the next part's image score."""
        for watched in self.watched:
            watched.add(score, self.parts)
        self.parts += 1

    def add_all(self, scores: Iterable[float]) -> Drift:
        """Take several, in order."""
        for score in scores:
            self.add(score)
        return self

    @property
    def alarm(self) -> Watched | None:
        """The level that has raised the first alarm; None where none has."""
        raised = [one for one in self.watched if one.alarm is not None]
        return min(raised, key=lambda one: one.alarm or 0, default=None)

    def lines(self) -> list[str]:
        """What was seen, for people."""
        said = []
        for one in self.watched:
            share = percent(one.above / self.parts) if self.parts else "–"
            told = (
                f"above the {one.level.name} ({one.level.value:.4g}): {share} of {self.parts} "
                f"parts, expected at most {percent(one.level.promised)}"
            )
            if one.alarm is not None:
                told += f". Alarm at part {one.alarm + 1}; the rise began at part {one.since + 1}"
            said.append(told)
        return said
