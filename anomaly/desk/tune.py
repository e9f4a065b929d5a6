"""Data set and settings -> the settings that catch more of the known defects. `anomaly tune`.

The choice is measured on images that didn't choose. A defect counts by how rare its score is among
good images: 1 above all of them, falling to 0 where twice the promised share of good images score
as much. The mean is the area under the ROC curve up to twice the promised false-reject rate: it
grows with what is caught at the promised rate, and tells settings apart by fewer defects than
counts at one threshold do.

Views of one part are alike: what chance does to one, it does to all. So parts are left out, and
parts decide what is beyond chance.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from anomaly.backbones.networks import networks_on_disk
from anomaly.calibration.rates import Rate, percent, rate_anywhere, rate_of
from anomaly.config.load import parse_config
from anomaly.config.schema import METHODS, NAMED_DIGITS, Config, readers
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Dataset, Sample
from anomaly.desk.advice import LEAST_DEFECTS
from anomaly.errors import AnomalyError, DataError, counted
from anomaly.files.tables import text_table
from anomaly.files.writing import write
from anomaly.runtime import StageProgress, device_of
from anomaly.scoring.build import turns_of
from anomaly.scoring.model import Scored, score
from anomaly.training.fit import train

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]

_FOLDS, _DIVISIONS = 5, 10  # with 3 divisions the outcome depends on the seed
_DRAWS = 2000  # of random signs
# Random signs ignore that fifths share parts: where 12 settings are alike, one passes this bound in
# 6 to 8 % of cases, and its expected catch is 2 points too high. A stricter bound kept, for
# castings, settings that miss 6 to 15 of 35 defects where others catch 34.
_CHANCE = 0.04

_LARGER, _SMALLER = 1.5, 0.75  # times image.area's side
_GRAIN = 32  # pixels; `image.area` is a multiple, as networks take it
# Axes of changes. Nobody knows a network's time before; the best image score may depend on all
# other settings, so image scores are tried once more at the end.
TURNS, POSE, NETWORK, SCORE, BANK = "turns", "pose", "network", "image score", "bank"


@dataclass(frozen=True, eq=False)
class Change:
    """Other values of a few settings, and the reason to try them.

    Attributes:
        axis: subject of the settings; changes of one axis exclude each other.
        values: new values by setting, as in `image.tile`.
        reason: the purpose, as a phrase for people.
    """

    axis: str
    values: Mapping[str, Any]
    reason: str

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items() if value)


_STEPS = tuple(
    Change(axis, {setting: value}, reason)
    for axis, setting, value, reason in (
        (SCORE, "model.image_score", "map_top_percent", "for defects of any size"),
        (SCORE, "model.image_score", "map_max", "for defects of a few pixels"),
        (SCORE, "model.image_score", "map_top_relative", "for parts of changing light or grain"),
        (BANK, "model.coreset_ratio", 0.1, "for good parts with details that are rare"),
        (TURNS, "model.turned_copies", "quarter_turns", "for parts that lie in four ways"),
        (TURNS, "model.turned_copies", "quarter_turns_and_mirrors", "for parts that lie any way"),
        (POSE, "image.align", "shift", "for parts that lie in other places"),
        (POSE, "image.align", "rigid", "for parts that are turned, too"),
    )
)


def with_changes(config: Config, changes: Iterable[Change]) -> Config:
    """A config with some values changed; turned copies don't enlarge its bank.

    Raises:
        ConfigError: the values contradict each other.
    """
    values = config.model_dump(exclude_unset=True)
    for change in changes:
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
    new = parse_config(values, "tune")
    growth = (1 + len(turns_of(new))) / (1 + len(turns_of(config)))
    if growth == 1:
        return new
    # Turned copies add many patches and little that is new, and scoring must cost no more.
    ratio = min(1.0, float(f"{new.model.coreset_ratio / growth:.3g}"))
    model = new.model.model_copy(update={"coreset_ratio": ratio})
    return new.model_copy(update={"model": model})


def possible_changes(config: Config, networks: Sequence[str]) -> list[Change]:
    """Changes of the settings, one of each axis at a time.

    Args:
        config: the present settings.
        networks: names of the networks whose weights are at hand.
    """
    model = config.model
    fits = {
        SCORE: model.smallest_defect is None,  # beside it, no other image score has an effect
        BANK: model.coreset_ratio < 0.1 and model.kind in readers("model.coreset_ratio"),
        TURNS: not METHODS[model.kind].one_grid and model.turned_copies == "none",
        POSE: config.image.align == "none",
    }
    present = {"model.image_score": config.image_score_in_force}
    return [
        *(step for step in _STEPS if fits[step.axis] and step.values != present),
        *_sizes(config),
        *(
            Change(
                NETWORK,
                {"backbone.name": name, "backbone.weights": "imagenet", "backbone.layers": None},
                "another network sees other details",
            )
            for name in networks
            if name != config.backbone.name
        ),
    ]


def _sizes(config: Config) -> list[Change]:
    """Smaller tiles, or other sizes of the whole image."""
    image = config.image
    if image.tile is not None:
        half = {"image.tile": max(64, image.tile // 2)}
        return [Change("size", half, "for defects that are small beside a tile")]
    if image.resize is not None:
        return []
    return [
        Change("size", {"image.area": side}, reason)
        for factor, reason in (
            (_SMALLER, "for large defects on a grainy surface"),
            (_LARGER, "for defects that are small beside a patch"),
        )
        if 64 <= (side := round(image.area * factor / _GRAIN) * _GRAIN) != image.area
    ]


def times(config: Config) -> tuple[float, float, float]:
    """Relative computing times of a config, against one with the same network.

    Returns:
        Times for scoring known images, for features of training images, and for learning from
        these: a coreset's selection compares all patches with all that are kept.
    """
    pixels, copies = _pixels(config), 1 + len(turns_of(config))
    return pixels, pixels * copies, pixels * copies * _bank(config)


def cost(config: Config, base: Config) -> float:
    """Relative cost of a config in use (1 for `base`); reproducible, unlike a time."""
    network = 2.0 if config.backbone != base.backbone else 1.0
    image = network * _pixels(config) / _pixels(base)
    return 0.8 * image + 0.2 * _bank(config) / _bank(base)


def _pixels(config: Config) -> float:
    """Network pixels of an image, or of its tiles, up to a factor that images have in common."""
    image = config.image
    pixels = float((image.crop or image.resize or image.area) ** 2)
    if image.tile is not None:  # the smaller, the more of them
        pixels /= float((image.tile - image.overlap) ** 2)
    return pixels


def _bank(config: Config) -> float:
    """Number of bank vectors, up to a factor that configs have in common."""
    return config.model.coreset_ratio * (1 + len(turns_of(config))) * _pixels(config)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the known images by one set of settings.

    Attributes:
        defects: (m,) scores of known defects.
        good: (n,) scores of training images, by models that haven't learned from them, and of other
            good images.
    """

    defects: Floats
    good: Floats

    @property
    def every(self) -> Floats:
        """Scores (m + n,) of all images, defects first."""
        return np.concatenate([self.defects, self.good])

    def only(self, mask: Mask) -> Scores:
        """The scores of some images, by a mask (m + n,) in the order of `every`."""
        defects, good = np.split(mask, [len(self.defects)])
        return Scores(self.defects[defects], self.good[good])

    def threshold_at(self, rate: float) -> float:
        """The good score that is the threshold for this rate of flagged good images on average.

        Its rank from above is rate · (n + 1), rounded down; at least 1, so few images allow more.
        """
        # No threshold helps where there is a reason for review: such scores are infinite.
        good = self.good[np.isfinite(self.good)]
        above = max(1, int(rate * (len(good) + 1) + 1e-9))
        return float(np.partition(good, len(good) - above)[len(good) - above])


def worths(scores: Scores, rate: float) -> Floats:
    """The worth (m,) of each defect, from 0 to 1, as the module's text defines it."""
    return _worths_at(_good_above(scores) / len(scores.good), rate)


def _good_above(scores: Scores) -> NDArray[np.int64]:
    """Number (m,) of good images that score as high as each defect, or higher."""
    good = np.sort(scores.good)
    return np.asarray(len(good) - np.searchsorted(good, scores.defects))


def _worths_at(shares: Floats, rate: float) -> Floats:
    """Worths (m,) of defects, from the shares (m,) of good images that score as high or higher."""
    return np.asarray(np.clip(1 - shares / (2 * rate), 0, 1))


def _influence(scores: Scores, rate: float) -> Floats:
    """Influence (n,) of each good image on the sum of worths, by leave-one-out.

    The sum of their squares is the jackknife's variance.
    """
    good = scores.good
    count = max(len(good) - 1, 1)  # of good images without one
    order = np.argsort(scores.defects)
    above = _good_above(scores)[order]
    # Gain of each defect, in rising order of scores, if a good image above it is left out.
    gains = _worths_at((above - 1) / count, rate) - _worths_at(above / count, rate)
    below = np.searchsorted(scores.defects[order], good, side="right")
    without = np.append(0.0, gains.cumsum())[below]
    return np.asarray((without.mean() - without) * np.sqrt(count / len(good)))


@dataclass(frozen=True)
class Judgement:
    """The chosen settings, and their expected results.

    Attributes:
        index: index of the chosen settings; 0 for the present ones.
        better: True if these settings catch more than the present ones, beyond chance.
        chance: probability of such a gain if no settings catch more than the present ones.
        parts: number of parts with known defects.
        caught: defects above a review threshold; settings and threshold were found without the
            images of the defect's part.
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
        settings: scores by each candidate's settings, the present ones first.
        costs: cost of each candidate.
        rate: the promised false-reject rate.
        seed: seed of the fifths and the random signs.
        groups: the part that each image shows, in the order of `Scores.every`. Images with None,
            and those beyond the last, show a part of their own.
    """
    rng = np.random.default_rng(seed)
    count = len(settings[0].defects)
    part_of = _part_numbers(groups, settings[0].every.size)
    if len(np.unique(part_of[count:])) < 2:  # good images of a single group have to be parted
        part_of = _part_numbers(groups[:count], part_of.size)
    parts = len(np.unique(part_of[:count]))
    gained = np.zeros(part_of.max() + 1)  # by part
    above = np.zeros((2, part_of.size))  # by the present settings, and by the chosen ones
    for out in _folds(part_of, parts, rng):
        kept = [scores.only(~out) for scores in settings]
        gains = _gains(kept, rate, part_of[~out])
        best = int(gains.sum(1).round(6).argmax())
        present_and_best = [settings[index].only(out) for index in (0, best)]
        gained += _gains(present_and_best, rate, part_of[out], len(gained))[1]
        for row, index in zip(above, (0, _cheapest(gains, costs)), strict=True):
            row[out] += settings[index].every[out] > kept[index].threshold_at(rate)
    signs = rng.choice([-1.0, 1.0], (len(gained), _DRAWS))
    chance = float((gained @ signs >= gained.sum() - 1e-9).mean())
    better = parts >= LEAST_DEFECTS and chance <= _CHANCE
    return Judgement(
        _cheapest(_gains(settings, rate, part_of), costs) if better else 0,
        better,
        chance,
        parts,
        _rate(above[int(better), :count], part_of[:count], better),
        _rate(above[int(better), count:], part_of[count:], better),
    )


def _part_numbers(groups: Sequence[Hashable], count: int) -> Numbers:
    """Number of the part (count,) that each image shows, from 0 in order of appearance."""
    names = [*groups, *[None] * (count - len(groups))]
    numbers: dict[Hashable, int] = {}
    keys = (object() if name is None else name for name in names)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _folds(part_of: Numbers, parts: int, rng: np.random.Generator) -> Iterator[Mask]:
    """The images (n,) of each fifth of the parts, for each division into fifths.

    Fifths differ by one part with defects at most, and by one other part. The `parts` parts with
    defects have the first numbers.
    """
    others = int(part_of.max()) + 1 - parts
    for _ in range(_DIVISIONS):
        places = np.append(rng.permutation(parts), parts + rng.permutation(others))
        yield from (places[part_of] % _FOLDS == fold for fold in range(_FOLDS))


def _gains(settings: Sequence[Scores], rate: float, part_of: Numbers, parts: int = 0) -> Floats:
    """Each part's share (settings, parts) in the worth that settings gain over the first ones.

    A defect's share is its worth; a good image's is its influence on the worths, because good
    images set the thresholds.

    Args:
        settings: scores of the same images by each candidate's settings.
        rate: the promised false-reject rate.
        part_of: number of each image's part.
        parts: least number of columns; a part that no image shows gains nothing.
    """
    shares = [np.append(worths(scores, rate), _influence(scores, rate)) for scores in settings]
    return np.stack([np.bincount(part_of, share - shares[0], parts) for share in shares])


def _cheapest(gains: Floats, costs: Sequence[float]) -> int:
    """Index of the cheapest settings that gain about as much as the best.

    They lie within a standard error of the best, and gain half as much at least. The gains are
    those of `_gains`, (settings, parts).
    """
    sums = gains.sum(1).round(6)
    best = int(np.argmax(sums))
    lag = gains[best] - gains
    alike = (lag.sum(1) <= np.sqrt((lag**2).sum(1))) & (sums >= sums[best] / 2)
    return min(np.flatnonzero(alike).tolist(), key=lambda index: (costs[index], -sums[index]))


def _rate(above: Floats, part_of: Numbers, chosen: bool) -> Rate:
    """The share of images above a threshold, on average over the divisions into fifths.

    Its bounds are wider where settings were chosen, and count parts, not views: as many as would
    be equally certain if all parts had equally many views (Kish's effective number).

    Args:
        above: number of divisions (n,) in which each image was above the threshold.
        part_of: number of each image's part.
        chosen: True if the settings were chosen among several.
    """
    views = np.unique(part_of, return_counts=True)[1]
    groups = int(above.size**2 // max((views**2).sum(), 1))
    count = round(float(above.sum()) / _DIVISIONS)
    bounds = rate_anywhere if chosen else rate_of
    return bounds(count, above.size, count / max(above.size, 1), groups=groups)


_HEAD = ("settings", "defects caught", "good flagged", "ms")
_NETWORK_TIME = 2.0  # guess of another network's time, on the safe side; 1 for the present one


@dataclass(frozen=True, eq=False)
class Trial:
    """Settings with which a model was trained and has scored the known images.

    Attributes:
        changes: differences from the present settings; empty for these themselves.
        config: the settings, with the precision that training has chosen.
        scores: scores of all images: NaN for an unusable image, and for a training image without
            a held-out score (a copy of another); infinite for an image with a reason for review.
        hashes: sha256 of the usable known images.
        seconds: time of the trial, by stage.
        image_seconds: time to score one known image.
        flagged: number of good test images above the trial's own review threshold, among those
            scored, in words; empty without any.
    """

    changes: tuple[Change, ...]
    config: Config
    scores: Scores
    hashes: frozenset[str]
    seconds: Mapping[str, float]
    image_seconds: float
    flagged: str

    @property
    def name(self) -> str:
        """Changes of the settings, for people."""
        return _name_of(self.changes)


@dataclass(eq=False)
class Search:
    """Tries settings within a budget, cheapest first: alone, then what has helped together.

    Args:
        config: the present settings.
        train: good images to learn from.
        defects: known defects.
        good: good test images.
        budget: time limit, in seconds.
        device: device of the network and the scorer.
        scratch: an existing folder for temporary files.
        progress: called with (stage, done, total).

    Attributes:
        tried: trials in the order of trying, the present settings first.
        skipped: reasons why settings weren't tried (budget, error), by the settings' names.
    """

    config: Config
    train: Sequence[Sample]
    defects: Sequence[Sample]
    good: Sequence[Sample]
    budget: float
    device: torch.device
    scratch: Path
    progress: StageProgress = lambda stage, done, total: None
    tried: list[Trial] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Try all settings that fit into the budget.

        Raises:
            AnomalyError: the present settings can't be trained.
        """
        self._began = time.monotonic()
        log.info(f"trying settings for {_minutes(self.budget)} at most, yours first")
        self.tried = [self.trial(())]
        log.info(f"trying your settings took {sum(self.tried[0].seconds.values()):.0f} s")
        planned = possible_changes(self.config, networks_on_disk())
        for step in sorted(planned, key=lambda step: self._estimate((step,))):
            self._try_if_it_fits((step,))
        self._try_together([step for step in planned if step.axis == SCORE])

    def trial(self, changes: tuple[Change, ...]) -> Trial:
        """Train with changed settings, and score the known images by the model."""
        config = with_changes(self.config, changes)
        if self.tried and config.backbone == self.config.backbone:
            config = config.model_copy(update={"precision": self.tried[0].config.precision})
        training = train(
            config, self.train, device=self.device, scratch=self.scratch, progress=self.progress
        )
        model = training.model
        assert model.thresholds is not None  # `train` calibrates by default
        began = time.perf_counter()
        known = score(model, [*self.defects, *self.good])
        took = time.perf_counter() - began
        good = model.thresholds.good
        of_good = dict(zip(good.names, good.image, strict=True))
        learned = set(model.manifest["training_images"].values())
        split = len(self.defects)
        values = [
            # A copy of a training image scores too low.
            math.nan if image.sha256 in learned and i >= split else _comparable(image)
            for i, image in enumerate(known)
        ]
        held_out = [of_good.get(sample.name, math.nan) for sample in self.train]
        tested = [value for value in values[split:] if not math.isnan(value)]
        flagged = sum(value > model.thresholds.review for value in tested)
        return Trial(
            changes,
            config.model_copy(update={"precision": model.config.precision}),
            Scores(np.array(values[:split]), np.array([*held_out, *values[split:]])),
            frozenset(image.sha256 for image in known if image.score is not None),
            training.seconds | {"scoring": took},
            took / len(known),
            f"{flagged} of {len(tested)}" if tested else "",
        )

    def usable(self) -> Mask:
        """The images that all trials have scored, in the order of `Scores.every`."""
        every = np.stack([trial.scores.every for trial in self.tried])
        return np.asarray(~np.isnan(every).any(0))

    def _try_together(self, image_scores: Sequence[Change]) -> None:
        """Combine the most helpful changes of several axes; then try image scores with the best."""
        totals = self._worths()
        best: dict[str, Change] = {}
        for i in sorted(range(1, len(self.tried)), key=totals.__getitem__, reverse=True):
            (step,) = self.tried[i].changes
            if totals[i] > totals[0] and step.axis != SCORE:
                best.setdefault(step.axis, step)
        helpful = list(best.values())  # the most helpful change first
        for count in range(len(helpful), 1, -1):  # all together, or as many as the budget allows
            if self._try_if_it_fits(tuple(helpful[:count])):
                break
        totals = self._worths()
        changes = self.tried[int(np.argmax(totals))].changes
        if changes and changes[0].axis != SCORE:
            for step in image_scores:
                self._try_if_it_fits((*changes, step))

    def _worths(self) -> list[float]:
        """Total worth of the defects by trial, on images that all trials have scored."""
        rate = self.config.calibration.review_rate
        common = self.usable()
        return [float(worths(trial.scores.only(common), rate).sum()) for trial in self.tried]

    def _try_if_it_fits(self, changes: tuple[Change, ...]) -> bool:
        """Try changes together; False if the time left is too short. `skipped` notes failures."""
        expected = self._estimate(changes)
        left = self.budget - (time.monotonic() - self._began)
        if expected > left:
            reason = f"needs about {_minutes(expected)}, {_minutes(left)} left (--budget)"
            self.skipped[_name_of(changes)] = reason
            return False
        log.info(f"next: {_name_of(changes)}, {changes[-1].reason} (about {_minutes(expected)})")
        try:
            self.tried.append(self.trial(changes))
        except AnomalyError as error:
            self.skipped[_name_of(changes)] = str(error)
        return True

    def _estimate(self, changes: tuple[Change, ...]) -> float:
        """Expected seconds of a trial, from the stages of the first one."""
        seconds = self.tried[0].seconds
        present, changed = times(self.config), times(with_changes(self.config, changes))
        # Ratios for scoring, features and learning.
        known, features, rest = (new / old for old, new in zip(present, changed, strict=True))
        network = known * seconds["scoring"] + features * seconds["features"]
        if any(change.axis == NETWORK for change in changes):
            network *= _NETWORK_TIME
        learning = rest * (seconds["scorer"] + seconds["calibration"])
        return seconds["backbone"] + network + learning


def _name_of(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes)) or "your settings"


def _comparable(image: Scored) -> float:
    """A score to compare: NaN without one, infinite with a reason for review."""
    if image.score is None:
        return math.nan
    return math.inf if image.reason else image.score


@dataclass(frozen=True, eq=False, repr=False)
class Tuning:
    """The choice of `anomaly.tune`, and its evidence.

    Attributes:
        base: the settings before.
        tried: all trials, that of `base` first, with scores of the images that all could score.
        skipped: reasons why settings weren't tried, by the settings' names.
        judgement: the choice, and its expected rates on new parts.
    """

    base: Config
    tried: tuple[Trial, ...]
    skipped: Mapping[str, str]
    judgement: Judgement

    def __repr__(self) -> str:
        return f"<Tuning of {self.base.name}: {self.reason}>"

    @property
    def chosen(self) -> Trial:
        """The trial that was chosen."""
        return self.tried[self.judgement.index]

    @property
    def config(self) -> Config:
        """The chosen settings, to train with; `chosen_by` names the known images."""
        chosen_by = tuple(sorted(sha256[:NAMED_DIGITS] for sha256 in self.tried[0].hashes))
        new = {"name": f"{self.base.name}_tuned", "chosen_by": chosen_by}
        return with_changes(self.base, self.chosen.changes).model_copy(update=new)

    @property
    def reason(self) -> str:
        """The reason for the choice, in a sentence or two."""
        if self.judgement.parts < LEAST_DEFECTS:
            return f"your settings stay: {_too_few(self.judgement.parts)}"
        defects = len(self.tried[0].scores.defects)
        caught = self.caught(self.tried[0])
        if self.judgement.better:
            cases = round(1000 * max(self.judgement.chance, 1e-3))
            return (
                f"use {self.chosen.name}: it catches {self.caught(self.chosen)} of {defects} known "
                f"defects, your settings catch {caught}. If none of the {len(self.tried)} settings "
                f"tried were better, such a gain would appear in at most {cases} of 1,000 cases. "
                "Among settings that catch about as many defects, the cheapest in use is chosen"
            )
        best = max(self.tried, key=self.caught)
        if self.caught(best) <= caught:
            return "your settings stay: no other settings catch more"
        return (
            f"your settings stay: {best.name} catches {self.caught(best)} of {defects} known "
            f"defects, your settings catch {caught}, which may be chance. Collect about "
            "20 more defective parts"
        )

    def lines(self) -> list[str]:
        """The table, the choice and its expected rates, for people."""
        rate = percent(self.base.calibration.review_rate)
        caught, flagged = self.judgement.caught, self.judgement.flagged
        return [
            *text_table([_HEAD, *map(self._row, self.tried)]),
            f"defects caught: if {rate} of all good images are flagged; good flagged: good test "
            "images above the threshold that training finds; ms: milliseconds for an image",
            *(f"not tried: {name}: {why}" for name, why in self.skipped.items()),
            "",
            self.reason,
            f"expected of new parts: {caught.count} of {caught.images} defects caught "
            f"({caught.interval}), {flagged.count} of {flagged.images} good images flagged "
            f"({flagged.interval}; 95 % confidence), measured on a fifth of the parts at a time "
            "while the others chose",
        ]

    def caught(self, trial: Trial) -> int:
        """Number of known defects caught at the review rate of `base`."""
        limit = trial.scores.threshold_at(self.base.calibration.review_rate)
        return int((trial.scores.defects > limit).sum())

    def write(self, file: Path) -> None:
        """Write the chosen settings as YAML, with the table and the reason as comments.

        Raises:
            OutputError: the disk is full, or permission is missing.
        """
        values = self.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        comments = ["Written by `anomaly tune`.", *self.lines()]
        head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
        write(file, head + yaml.safe_dump(values, allow_unicode=True, sort_keys=False, width=100))

    def _row(self, trial: Trial) -> tuple[str, ...]:
        """The columns of `_HEAD` for a trial."""
        caught = f"{self.caught(trial)} of {len(trial.scores.defects)}"
        return trial.name, caught, trial.flagged, f"{1000 * trial.image_seconds:.0f}"


def _too_few(parts: int) -> str:
    return (
        f"known defects on {counted(parts, 'part')} are too few to compare settings; give at least "
        f"{LEAST_DEFECTS} defective parts, better 20, with --defects FOLDER"
    )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes}:{rest:02} min"


def tune(
    config: Config,
    data: Dataset | None = None,
    *,
    defects: Sequence[Sample] | None = None,
    budget: float = 600.0,
    device: str | torch.device = "auto",
    progress: StageProgress = lambda stage, done, total: None,
) -> Tuning:
    """Try settings that matter, and choose those that catch more of the known defects.

    Each candidate is trained on the training images, with thresholds as `fit` finds them. The
    present settings stay unless others catch more beyond chance; of those within a standard error
    of the best, the cheapest is chosen. Its config names the images that chose it.

    Args:
        config: the present settings.
        data: training images, and known defects and good images in its test split; by default the
            data set of `config.data`.
        defects: known defects, in place of the data set's.
        budget: time limit in seconds. Settings that would exceed it aren't tried, but the present
            ones always are.
        device: `auto` (the GPU where there is one), `cpu`, `cuda`, or a torch device.
        progress: called with (stage, done, total).

    Raises:
        DataError: there are too few training images, or known defects on too few parts, or none of
            these can be used.
        AnomalyError: the present settings can't be trained.
    """
    if data is None:
        data = open_dataset(config.data.format, config.data.root, config.data.category)
    tested = [*data.test, *data.validation]
    if defects is None:
        defects = [sample for sample in tested if sample.is_defect]
    good = [sample for sample in tested if not sample.is_defect]
    parts = {sample.group or i for i, sample in enumerate(defects)}
    if len(parts) < LEAST_DEFECTS:
        raise DataError(_too_few(len(parts)))
    with tempfile.TemporaryDirectory(prefix="anomaly-") as folder:
        search = Search(
            config, data.train, defects, good, budget, device_of(device), Path(folder), progress
        )
        search.run()
    common = search.usable()
    tried = [replace(trial, scores=trial.scores.only(common)) for trial in search.tried]
    if not len(tried[0].scores.defects):
        raise DataError("none of the known defects can be used; `anomaly check` says why")
    groups = [
        sample.group
        for sample, used in zip((*defects, *data.train, *good), common, strict=True)
        if used
    ]
    # Among equals, fewer changed values are cheaper.
    costs = [cost(t.config, config) + 1e-3 * sum(len(c.values) for c in t.changes) for t in tried]
    scores = [trial.scores for trial in tried]
    judgement = judge(scores, costs, config.calibration.review_rate, config.seed, groups)
    return Tuning(config, tuple(tried), search.skipped, judgement)
