"""Settings tried within a budget, cheapest first: alone, then what has helped together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from anomaly.backbones.networks import networks_on_disk
from anomaly.config.schema import Config
from anomaly.errors import AnomalyError
from anomaly.training.fit import StageProgress
from anomaly.training.tuning.candidates import (
    NETWORK,
    POSE,
    SCORE,
    TURNS,
    Change,
    changed,
    image_scores,
    shares_features,
    steps,
    work,
)
from anomaly.training.tuning.judging import LEAST_DEFECTS, Mask, worth
from anomaly.training.tuning.trials import Features, Images, Trial

_AS_LONG = 2.0  # another network takes so many times as long: a guess, on the safe side


@dataclass(frozen=True, eq=False)
class Tried:
    """Settings that were tried, with their trial.

    Attributes:
        changes: from the settings that were there; none for these themselves.
        trial: what came of them.
    """

    changes: tuple[Change, ...]
    trial: Trial

    @property
    def step(self) -> tuple[Change, ...]:
        """The changes of what has to be computed anew."""
        return tuple(change for change in self.changes if change.axis != SCORE)


def usable(tried: Sequence[Tried]) -> Mask:
    """The images that all trials have scored, in the order of `Scores.every`."""
    every = np.stack([t.trial.scores.every for t in tried])
    return np.asarray(~np.isnan(every).any(0))


@dataclass(frozen=True)
class Skipped:
    """Settings that weren't tried.

    Attributes:
        changes: from the settings that were there.
        why: the budget, or an error.
    """

    changes: tuple[Change, ...]
    why: str


@dataclass(eq=False)
class Search:
    """Tries settings; used once.

    Args:
        config: the settings that are there.
        images: what they are tried on.
        budget: seconds.
        device: where the network and the scorer run.
        scratch: an existing folder for temporary files.
        say: called with what is worth knowing on the way.
        progress: called with (stage, done, total).

    Attributes:
        tried: in the order in which they were, those that are there first.
        hashes: sha256 of the known images that can be used, see `Features.hashes`.
        skipped: and why.
    """

    config: Config
    images: Images
    budget: float
    device: torch.device
    scratch: Path
    say: Callable[[str], None]
    progress: StageProgress
    tried: list[Tried] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def run(self) -> None:
        """Try all settings that fit into the budget.

        Raises:
            AnomalyError: the settings that are there can't be trained.
        """
        self._began = time.monotonic()
        self.say(f"trying settings for {_minutes(self.budget)} at most, yours first")
        planned = steps(self.config, networks_on_disk())
        if self.images.parts < LEAST_DEFECTS:  # only what good images can tell
            planned = [step for step in planned if step.axis in (POSE, TURNS)]
        with closing(self._features(())) as features:
            self._try((), features)
            self.hashes = features.hashes
            took = self.tried[0].trial.seconds
            self.say(f"trying your settings took {sum(took.values()):.0f} s")
            planned.sort(key=lambda step: self._estimate((step,)))
            for step in planned:
                shares = shares_features(changed(self.config, (step,)), self.config)
                self._try_if_it_fits((step,), features if shares else None)
        if self.images.parts >= LEAST_DEFECTS:
            self._try_together()

    def _try_together(self) -> None:
        """Try the best change of each axis that has helped with those of the others."""
        worths: dict[tuple[Change, ...], float] = {}
        rate = self.config.calibration.review_rate
        common = usable(self.tried)
        for tried in self.tried:
            value = float(worth(tried.trial.scores.only(common), rate).sum())
            worths[tried.step] = max(value, worths.get(tried.step, 0.0))
        best: dict[str, Change] = {}
        for (step,) in sorted((s for s in worths if s), key=worths.__getitem__, reverse=True):
            if worths[step,] > worths[()]:
                best.setdefault(step.axis, step)
        helped = list(best.values())  # the most helpful one first
        for count in range(len(helped), 1, -1):  # all of them, or as many as fit
            if self._try_if_it_fits(tuple(helped[:count])):
                return

    def _try_if_it_fits(
        self, changes: tuple[Change, ...], features: Features | None = None
    ) -> bool:
        expected = self._estimate(changes)
        left = self.budget - (time.monotonic() - self._began)
        if expected > left:
            why = f"takes about {_minutes(expected)}, but only {_minutes(left)} are left"
            self.skipped.append(Skipped(changes, why))
            return False
        name = " and ".join(map(str, changes))
        self.say(f"next: {name}, {changes[-1].reason} (about {_minutes(expected)})")
        try:
            if features is not None:
                self._try(changes, features)
            else:
                with closing(self._features(changes)) as own:
                    self._try(changes, own)
        except AnomalyError as error:
            self.skipped.append(Skipped(changes, str(error)))
        return True

    def _try(self, changes: tuple[Change, ...], features: Features) -> None:
        config = changed(self.config, changes)
        ways = [changes, *((*changes, score) for score in image_scores(config))]
        trials = features.trials([changed(self.config, way) for way in ways])
        self.tried += map(Tried, ways, trials)

    def _features(self, changes: tuple[Change, ...]) -> Features:
        config = changed(self.config, changes)
        if self.tried and config.backbone == self.config.backbone:  # its precision is settled
            settled = self.tried[0].trial.config.precision
            config = config.model_copy(update={"precision": settled})
        return Features(
            config,
            self.images,
            device=self.device,
            scratch=self.scratch,
            progress=self.progress,
        )

    def _estimate(self, changes: tuple[Change, ...]) -> float:
        """Seconds that a step takes, by what the first one took."""
        seconds = self.tried[0].trial.seconds
        new = changed(self.config, changes)
        known, train, rest = (y / x for x, y in zip(work(self.config), work(new), strict=True))
        features = 0.0
        if not shares_features(new, self.config):
            features = seconds["known"] * known + seconds["features"] * train
        if any(change.axis == NETWORK for change in changes):
            features *= _AS_LONG
        return features + (seconds["learning"] + seconds["scoring"]) * rest


def _minutes(seconds: float) -> str:
    return f"{max(seconds, 0):.0f} s" if seconds <= 120 else f"{seconds / 60:.0f} min"
