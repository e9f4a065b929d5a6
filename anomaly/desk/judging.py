"""Choice among settings by the defects they catch, measured on images that didn't choose.

A defect counts by how rare its score is among good images: 1 above all of them, falling to 0 where
twice the promised share of good images score as much. The mean is the area under the ROC curve up
to twice the promised false-reject rate: it grows with what is caught at the promised rate, and
tells settings apart by fewer defects than counts at one threshold do.

Views of one part are alike: what chance does to one, it does to all. So parts are left out, and
parts decide what is beyond chance.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.rates import Rate, rate_anywhere, rate_of

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]

LEAST_DEFECTS = 6  # parts; with fewer no difference is beyond chance
_FOLDS, _DIVISIONS = 5, 10  # with 3 divisions the outcome hangs on the seed
_DRAWS = 2000
# Signs know little of what the fifths have in common: where 12 settings are alike, one passes this
# bound in 6 to 8 % of cases, and its expected catch is 2 points too high. A stricter one kept, for
# castings, settings that miss 6 to 15 of 35 defects where others catch 34.
_CHANCE = 0.04


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
    def every(self) -> Floats:
        """Scores (m + n + g,) of all images, defects first."""
        return np.concatenate([self.defects, self.reference])

    @property
    def reference(self) -> Floats:
        """Scores (n + g,) of all good images: training images, and others."""
        return np.concatenate([self.held_out, self.good])

    def only(self, mask: Mask) -> Scores:
        """The scores of some images, by a mask in the order of `every`."""
        defects, held_out, good = np.split(mask, np.cumsum([len(self.defects), len(self.held_out)]))
        return Scores(self.held_out[held_out], self.defects[defects], self.good[good])

    def limit(self, rate: float) -> float:
        """The threshold that flags at most a share of good images on average.

        Beside those that have a reason for review, whose scores are infinite: no threshold helps.
        """
        good = self.reference[np.isfinite(self.reference)]
        above = max(1, int(rate * (len(good) + 1) + 1e-9))
        return float(np.partition(good, len(good) - above)[len(good) - above])


def worth(scores: Scores, rate: float) -> Floats:
    """The worth (m,) of each defect, from 0 to 1; see above."""
    return _counted(_good_above(scores) / len(scores.reference), rate)


def _good_above(scores: Scores) -> NDArray[np.int64]:
    """Number (m,) of good images that score as high as each defect, or higher."""
    good = np.sort(scores.reference)
    return np.asarray(len(good) - np.searchsorted(good, scores.defects))


def _counted(shares: Floats, rate: float) -> Floats:
    return np.asarray(np.clip(1 - shares / (2 * rate), 0, 1))


def _leaning(scores: Scores, rate: float) -> Floats:
    """Influence of each good image on the sum of worths, by leave-one-out.

    The sum of their squares is the jackknife's variance.
    """
    good, order = scores.reference, np.argsort(scores.defects)
    above, count = _good_above(scores)[order], max(len(good) - 1, 1)
    # A defect gains so much if one of the good images above it is left out.
    more = _counted((above - 1) / count, rate) - _counted(above / count, rate)
    below = np.searchsorted(scores.defects[order], good, side="right")
    without = np.append(0.0, more.cumsum())[below]
    return np.asarray((without.mean() - without) * np.sqrt(count / len(good)))


@dataclass(frozen=True)
class Judgement:
    """The chosen settings, and their expected results.

    Attributes:
        index: of the settings.
        better: whether they catch more than the first ones, beyond chance.
        chance: of such a gain of any settings, if none catches more.
        parts: number of parts that the known defects are on.
        caught: defects above a threshold for review that was found, as the settings were, without
            images of their parts.
        flagged: good images above such a threshold.
    """

    index: int
    better: bool
    chance: float
    parts: int
    caught: Rate
    flagged: Rate


def judge(
    settings: Sequence[Scores],
    costs: Sequence[float],
    rate: float,
    seed: int = 0,
    groups: Sequence[Hashable] = (),
) -> Judgement:
    """The cheapest settings that catch as much as the best, if the best catch more than the first.

    Cross-fitted: four fifths of the parts choose settings and set the threshold; the fifth left out
    measures what these gain, catch and flag, so a gain isn't luck of the many settings tried. The
    gain is beyond chance if few draws of random signs for the parts' shares in it sum to as much.
    Figures are means over several divisions into fifths.

    Args:
        settings: the first are those that there were.
        costs: of each.
        rate: the promised false-reject rate.
        seed: of the fifths and the draws.
        groups: the part that each image shows, in the order of `Scores.every`. Images with None,
            and those beyond the last, show a part of their own.
    """
    draw = np.random.default_rng(seed)
    count = len(settings[0].defects)
    shown = _numbered(groups, settings[0].every.size)
    if len(np.unique(shown[count:])) < 2:  # good images of a single group have to be parted
        shown = _numbered(groups[:count], shown.size)
    parts = len(np.unique(shown[:count]))
    total = np.zeros(shown.max() + 1)
    above = np.zeros((2, shown.size))  # by the first settings, and by the chosen ones
    for out in _left_out(shown, parts, draw):
        kept = [scores.only(~out) for scores in settings]
        gains = _gains(kept, rate, shown[~out])
        best = int(gains.sum(1).round(6).argmax())
        both = [settings[used].only(out) for used in (0, best)]
        total += _gains(both, rate, shown[out], len(total))[1]
        for row, used in zip(above, (0, _cheapest(gains, costs)), strict=True):
            row[out] += settings[used].every[out] > kept[used].limit(rate)
    signs = draw.choice([-1.0, 1.0], (len(total), _DRAWS))
    chance = float((total @ signs >= total.sum() - 1e-9).mean())
    better = parts >= LEAST_DEFECTS and chance <= _CHANCE
    return Judgement(
        _cheapest(_gains(settings, rate, shown), costs) if better else 0,
        better,
        chance,
        parts,
        _rate(above[int(better), :count], shown[:count], better),
        _rate(above[int(better), count:], shown[count:], better),
    )


def _numbered(groups: Sequence[Hashable], count: int) -> Numbers:
    """Number of the part (count,) that each image shows."""
    names = [*groups, *[None] * (count - len(groups))]
    numbers: dict[Hashable, int] = {}
    keys = (object() if name is None else name for name in names)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _left_out(shown: Numbers, parts: int, draw: np.random.Generator) -> Iterator[Mask]:
    """The images of each fifth of the parts, for each division into fifths.

    A fifth has equally many parts with defects, and equally many others.

    Args:
        shown: number of each image's part.
        parts: with defects; these have the first numbers.
        draw: of the fifths.
    """
    others = int(shown.max()) + 1 - parts
    for _ in range(_DIVISIONS):
        places = np.append(draw.permutation(parts), parts + draw.permutation(others))
        yield from (places[shown] % _FOLDS == fold for fold in range(_FOLDS))


def _gains(settings: Sequence[Scores], rate: float, shown: Numbers, least: int = 0) -> Floats:
    """Each part's share (settings, parts) in what settings are worth more than the first.

    A defect's share is its worth; a good image's is how much the worths lean on it, as thresholds
    do.

    Args:
        settings: of the same images.
        rate: the promised false-reject rate.
        shown: number of each image's part.
        least: number of parts, if it is more than these images show.
    """
    shares = [np.append(worth(scores, rate), _leaning(scores, rate)) for scores in settings]
    return np.stack([np.bincount(shown, share - shares[0], least) for share in shares])


def _cheapest(gains: Floats, costs: Sequence[float]) -> int:
    """The cheapest settings within a standard error of the best, with half of their gain at least.

    Args:
        gains: see `_gains`.
        costs: of each.
    """
    sums = gains.sum(1).round(6)
    best = int(np.argmax(sums))
    less = gains[best] - gains
    alike = (less.sum(1) <= np.sqrt((less**2).sum(1))) & (sums >= sums[best] / 2)
    return min(np.flatnonzero(alike).tolist(), key=lambda s: (costs[s], -sums[s]))


def _rate(above: Floats, shown: Numbers, chosen: bool) -> Rate:
    """The share of images above a threshold, on average over the divisions into fifths.

    Its bounds are wider where settings were chosen, and count parts, not views: as many as would
    say the same if all parts had equally many.
    """
    views = np.unique(shown, return_counts=True)[1]
    groups = int(above.size**2 // max((views**2).sum(), 1))
    count = round(float(above.sum()) / _DIVISIONS)
    bounds = rate_anywhere if chosen else rate_of
    return bounds(count, above.size, count / max(above.size, 1), groups=groups)
