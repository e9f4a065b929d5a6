"""Which of several settings catches more defects, beyond chance; told by images that didn't choose.

A defect counts by how rare its score is among good images: 1 above all of them, falling to 0 where
twice the promised share of good images score as much. The mean is the area under the ROC curve up
to twice the promised false-reject rate: it grows with what is caught at the promised rate, and
tells settings apart by fewer defects than counts at one threshold do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.rates import Rate, rate_of

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEAST_DEFECTS = 6  # with fewer no difference is beyond chance
_FOLDS = 5
_DRAWS = 4000
_CHANCE = 0.05


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one set of settings on the common images.

    Attributes:
        held_out: (n,) of training images, by models that haven't learned from them.
        defects: (m,) of known defects.
        good: (g,) of other good images.
    """

    held_out: Floats
    defects: Floats
    good: Floats

    @property
    def groups(self) -> tuple[Floats, Floats, Floats]:
        """The three groups of scores."""
        return self.held_out, self.defects, self.good

    def only(self, masks: Sequence[Mask]) -> Scores:
        """The scores of some images, by a mask for each group."""
        return Scores(*(s[mask] for s, mask in zip(self.groups, masks, strict=True)))

    def of(self, defects: Mask) -> Scores:
        """The scores of some defects and of all good images."""
        return Scores(self.held_out, self.defects[defects], self.good)

    @property
    def reference(self) -> Floats:
        """Scores (n + g,) of all good images: training images, and others."""
        return np.concatenate([self.held_out, self.good])

    def limit(self, rate: float) -> float:
        """The threshold that flags at most a share of good images on average."""
        good = self.reference
        above = max(1, int(rate * (len(good) + 1) + 1e-9))
        return float(np.partition(good, len(good) - above)[len(good) - above])


def worth(scores: Scores, rate: float) -> Floats:
    """The worth (m,) of each defect, from 0 to 1; see above."""
    return _counted((scores.reference[:, None] >= scores.defects).mean(0), rate)


def _counted(shares: Floats, rate: float) -> Floats:
    return np.asarray(np.clip(1 - shares / (2 * rate), 0, 1))


def _leaning(scores: Scores, rate: float) -> Floats:
    """Influence of each good image on the sum of worths, by leave-one-out.

    The sum of their squares is the jackknife's variance.
    """
    above = scores.reference[:, None] >= scores.defects
    count = max(len(above) - 1, 1)
    sums = _counted((above.sum(0) - above) / count, rate).sum(1)
    return np.asarray((sums - sums.mean()) * np.sqrt(count / len(above)))


@dataclass(frozen=True)
class Judgement:
    """The chosen settings, and their expected results.

    Attributes:
        index: of the settings.
        better: whether they catch more than the first ones, beyond chance.
        chance: of such a gain where none catches more.
        caught: defects above the threshold for review of settings that the others have chosen.
        flagged: good images above it; thresholds are found without them.
    """

    index: int
    better: bool
    chance: float
    caught: Rate
    flagged: Rate


def judge(
    settings: Sequence[Scores], costs: Sequence[float], rate: float, seed: int = 0
) -> Judgement:
    """The cheapest settings that catch as much as the best, if these catch more than the first.

    Cross-fitted: four fifths of the defects choose, and the fifth left out says what the chosen
    ones catch. So the many settings that were tried make no gain of chance. Whether what all fifths
    gain together is beyond chance is told by drawing signs for each image's part in it: a defect's
    gain, and how much the gain leans on each good image, on which thresholds hang.

    Args:
        settings: the first are those that there were.
        costs: of each.
        rate: the promised false-reject rate.
        seed: of the fifths and the draws.
    """
    draw = np.random.default_rng(seed)
    first, count = settings[0], len(settings[0].defects)
    folds = [draw.permutation(len(group)) % _FOLDS for group in first.groups]
    worths = np.stack([worth(scores, rate) for scores in settings])
    gains, leaning = np.zeros(count), np.zeros(len(first.reference))
    caught = flagged = 0
    for fold in range(_FOLDS):
        out = [of_group == fold for of_group in folds]
        sums = worths[:, ~out[1]].sum(1).round(6)
        chosen = settings[min(range(len(settings)), key=lambda s: (-sums[s], costs[s]))]
        limit = chosen.only([~mask for mask in out]).limit(rate)
        parts = [chosen.of(out[1]), first.of(out[1])]
        gains[out[1]] = np.subtract(*(worth(part, rate) for part in parts))
        leaning += np.subtract(*(_leaning(part, rate) for part in parts))
        held_out, defects, good = (int((g > limit).sum()) for g in chosen.only(out).groups)
        caught, flagged = caught + defects, flagged + held_out + good
    signs = draw.choice([-1.0, 1.0], (len(gains) + len(leaning), _DRAWS))
    by_chance = np.concatenate([gains, leaning]) @ signs
    chance = float((by_chance >= gains.sum() - 1e-9).mean())
    better = count >= LEAST_DEFECTS and chance <= _CHANCE
    total = len(first.held_out) + len(first.good)
    return Judgement(
        _cheapest(worths, costs) if better else 0,
        better,
        chance,
        rate_of(caught, count, caught / max(count, 1)),
        rate_of(flagged, total, flagged / total),
    )


def _cheapest(worths: Floats, costs: Sequence[float]) -> int:
    """The cheapest settings within a standard error of the best, with half of their gain at least.

    Args:
        worths: of each of the settings' defects (settings, m).
        costs: of each.
    """
    sums = worths.sum(1)
    best = int(np.argmax(sums))
    less = worths[best] - worths
    alike = less.sum(1) <= less.std(1) * np.sqrt(worths.shape[1])
    alike &= sums - sums[0] >= (sums[best] - sums[0]) / 2
    return min(np.flatnonzero(alike).tolist(), key=lambda s: (costs[s], -sums[s]))
