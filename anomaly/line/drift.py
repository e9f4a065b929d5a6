"""Drift: are scores still like those of the calibration images? Imports no torch.

Four levels divide the scores of the good calibration images: their median, their upper quartile,
and the review and the reject threshold. Among new good parts, the share above a level should be no
larger than the calibration images support; among all parts, no larger than that plus the share of
defects. A cumulative sum watches each level (binomial CUSUM: Page 1954; Reynolds & Stoumbos 1999,
"A CUSUM chart for monitoring a proportion when inspecting continuously").

Of independent parts the sum is a Markov chain, so its chance to reach a limit can be computed,
whatever the distribution of the scores; a smaller share above the level only lowers it. Parts of a
lot resemble each other: k of them say as much as one, and the limit rises k-fold. k is the variance
of the share above the level between blocks of parts, divided by that of independent parts (design
effect: Kish 1965).
"""

from __future__ import annotations

import math
import sqlite3
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from anomaly.calibration.rates import Rate, percent, rate_of
from anomaly.calibration.thresholds import Threshold, Thresholds
from anomaly.desk.advice import DEFECT_SHARE, Comparison, compare_flagged
from anomaly.errors import DataError
from anomaly.line.record import JUDGED, open_to_read

FALSE_ALARMS = 0.05  # chance of an alarm on any level in `HORIZON` parts that haven't drifted
HORIZON = 2000  # parts that the false-alarm rate is stated for
_CELLS = 300  # least number of states of the Markov chain
_LEAST_JUMP = 10  # least number of cells that a part above the level adds
_BLOCK = 100  # parts; longer than most lots
# The first blocks say little of k: _ALIKE weighs as much as 6 of them. Blocks cut lots in two, so
# the variance between them is too small by _CUT. By simulation: lots of 50 seldom raise an alarm,
# a shift of one standard deviation does within 200 parts.
_ALIKE, _WEIGHT, _CUT = 3.0, 6, 1.6


@dataclass(frozen=True)
class Level:
    """A score level with the share of parts expected above it.

    Attributes:
        value: the score.
        promised: largest share of parts above the level that is no news.
        limit: the cumulative sum of independent parts that raises the alarm.
    """

    name: str
    value: float
    promised: Annotated[float, Field(gt=0, lt=1)]
    limit: float


def gains(promised: float) -> tuple[float, float]:
    """Increments of the sum for a part below and above the level.

    They are log-likelihood ratios: twice the promised odds against these odds.
    """
    after = 2 * promised / (1 + promised)
    return math.log((1 - after) / (1 - promised)), math.log(after / promised)


@lru_cache(maxsize=64)
def limit_of(promised: float, chance: float) -> float:
    """The alarm limit: the sum that `HORIZON` normal parts reach with this chance at most.

    `promised` is the chance that a normal part lies above the level.
    """
    down, up = gains(promised)
    # By Ville's inequality the likelihood ratio since any one part exceeds HORIZON / chance with a
    # probability of chance / HORIZON at most.
    highest = math.log(HORIZON / chance)
    # A cell is 1 / n of `down`. `up` is rounded up to whole cells, so that the chance is never too
    # small; the n that rounds least is taken.
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
    """The chance that the sum, which never falls below 0, reaches `cells` in `HORIZON` parts.

    Args:
        promised: chance that a part lies above the level.
        cells: the limit.
        steps: cells that a part below the level takes away.
        jump: cells that a part above the level adds.
    """
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
    """A level with its cumulative sum.

    Attributes:
        sum: the cumulative sum after the latest part; never below 0.
        above: number of parts above the level.
        alarm: index of the part that has raised the alarm; None without an alarm.
        since: index of the part at which the sum began to rise from 0.
        alike: number of parts that say as much as one independent part, as of `since`.
    """

    level: Level
    sum: float = 0.0
    above: int = 0
    alarm: int | None = None
    since: int = 0
    alike: float = _ALIKE
    _latest: float = _ALIKE
    _blocks: list[int] = field(default_factory=list)  # parts above the level in each

    def add(self, score: float, index: int) -> None:
        """Count a part, by its image score and its index in the stream."""
        above = bool(score > self.level.value)
        self.above += above
        if self.sum == 0.0 and self.alarm is None:
            # Kept while the sum rises, so that a drift isn't taken for likeness of neighbours.
            self.since, self.alike = index, self._latest
        self.sum = max(0.0, self.sum + gains(self.level.promised)[above])
        if self.alarm is None and self.sum >= self.level.limit * self.alike:
            self.alarm = index
        if (index + 1) % _BLOCK == 0:
            self._blocks.append(self.above - sum(self._blocks))
            share, blocks = self.above / (index + 1), len(self._blocks)
            if 0 < share < 1:
                # The design effect, drawn towards _ALIKE while there are few blocks.
                effects = blocks * np.var(self._blocks) / (_BLOCK * share * (1 - share))
                estimate = (_WEIGHT * _ALIKE + _CUT * effects) / (_WEIGHT + blocks - 1)
                self._latest = max(1.0, float(estimate))


def levels_of(thresholds: Thresholds) -> list[Level]:
    """The levels to watch, the highest first; without those that can't raise an alarm."""
    good = np.sort(np.array(thresholds.good.image))
    values = {
        "median": float(np.quantile(good, 0.5, method="higher")),
        "upper quartile": float(np.quantile(good, 0.75, method="higher")),
        "review threshold": thresholds.review,
        "reject threshold": thresholds.image,
    }
    distinct = {value: name for name, value in values.items()}  # of equal ones the last stays
    # Half covers the uncertainty of few calibration images, half the cumulative sums.
    each = FALSE_ALARMS / 2 / len(distinct)
    levels = []
    for value, name in distinct.items():
        above = int((good > value).sum())
        share = rate_of(above, len(good), above / len(good), 1 - each).at_most
        promised = share + DEFECT_SHARE * (1 - share)
        if promised < 1:
            levels.append(Level(name, value, promised, limit_of(promised, each)))
    return sorted(levels, key=lambda level: -level.value)


@dataclass(frozen=True)
class Promise:
    """Promise of a version's thresholds, as the record keeps it.

    Attributes:
        rates: false-reject rates of the thresholds.
        same_scores: ids of the version and of others that differ by their thresholds alone.
        caught: share of known defects that are caught; None if unknown.
    """

    rates: dict[Literal["review", "reject"], Rate]
    levels: list[Level]
    same_scores: list[str]
    caught: float | None

    @classmethod
    def given(
        cls, limits: Thresholds, same_scores: Collection[str], caught: float | None = None
    ) -> Promise:
        """The promise of thresholds; other arguments as the attributes."""
        review, reject = limits.to_review.false_rejects, limits.to_reject.false_rejects
        rates: dict[Literal["review", "reject"], Rate] = {"review": review, "reject": reject}
        return cls(rates, levels_of(limits), sorted(same_scores), caught)


class Drift:
    """The drift of a stream of scores, with the first alarm of each level.

    Args:
        levels: the levels to watch, see `levels_of`.
        scores: image scores of the parts, in their order.
    """

    def __init__(self, levels: Sequence[Level], scores: Sequence[float] = ()) -> None:
        self.watched = [Watched(level) for level in levels]
        self.parts = len(scores)
        for watched in self.watched:
            for index, score in enumerate(scores):
                watched.add(score, index)

    @property
    def alarm(self) -> Watched | None:
        """The level with the earliest alarm; None without an alarm."""
        raised = [level for level in self.watched if level.alarm is not None]
        return min(raised, key=lambda level: level.alarm or 0, default=None)

    def lines(self) -> list[str]:
        """A sentence for each level."""
        lines = []
        for watched in self.watched:
            share = percent(watched.above / self.parts) if self.parts else "–"
            most = percent(watched.level.promised)
            line = f"above the {watched.level.name} ({watched.level.value:.4g}): {share} of "
            line += f"{self.parts} parts; expected: at most {most}"
            if watched.alarm is not None:
                line += f". Alarm at part {watched.alarm + 1}; the rise began at part "
                line += f"{watched.since + 1}"
            lines.append(line)
        return lines

    def flagged(self, review: Threshold) -> Comparison:
        """Compare the flagged share with the promise; `as promised` for an unwatched threshold.

        Parts that resemble each other count as fewer, independent ones.
        """
        for watched in self.watched:
            if watched.level.value == review.value:
                above, parts = (round(n / watched.alike) for n in (watched.above, self.parts))
                return compare_flagged(above, parts, review.false_rejects)
        return "as promised"


_SCORES = f"""
SELECT MIN (id), MAX (score) FROM (
    SELECT id, score, NULLIF (json_extract (line, '$.group'), '') AS views FROM parts
    WHERE model_id = ? AND score IS NOT NULL AND COALESCE (json_extract (line, '$.reason'), '') = ''
    AND sha256 NOT IN (SELECT sha256 FROM {JUDGED} WHERE verdict = 'defect') AND {{condition}}
    ORDER BY id DESC LIMIT ?) GROUP BY COALESCE (views, id)
"""
# Ids of the newest judgement and part: without new ones the drift is as it was.
_NEWEST = "SELECT (SELECT MAX (id) FROM feedback), (SELECT COALESCE (MAX (id), 0) FROM parts)"


def scores_of(
    db: sqlite3.Connection,
    model_ids: Collection[str],
    condition: str = "TRUE",
    most: int = sys.maxsize,
) -> list[float]:
    """Scores of recorded parts that were judged by their score, in the order of the parts.

    Of a part's views the highest score counts; images that people have called defects don't.
    `condition` is SQL about `parts`. Of each model the newest `most` images count, and of all
    scores the newest `most`.
    """
    query = _SCORES.format(condition=condition)
    rows = [row for model in model_ids for row in db.execute(query, (model, most))]
    return [score for _, score in sorted(rows)][-most:]


class RecordedDrift:
    """Drift of one model's parts in a growing record. Threads may share it."""

    def __init__(self, promise: Promise, review: Threshold) -> None:
        self.promise, self.review = promise, review
        self._newest: tuple[Any, ...] = ()  # ids of judgement and part, see _NEWEST
        self._drift = Drift(promise.levels)
        self._lock = threading.Lock()

    def look(self, record: Path) -> Drift:
        """The drift of a record's newest `HORIZON` parts; the last one while it can't be read."""
        with self._lock, suppress(DataError), open_to_read(record) as db:
            db.execute("BEGIN")
            newest = db.execute(_NEWEST).fetchone()
            if newest != self._newest:
                scores = scores_of(db, self.promise.same_scores, most=HORIZON)
                self._drift, self._newest = Drift(self.promise.levels, scores), newest
        return self._drift
