"""Other settings of a trained model that its own features can tell: image scores, single layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anomaly.calibration import Thresholds, thresholds_from
from anomaly.datasets import Sample
from anomaly.errors import AnomalyError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.methods.base import Fitter
from anomaly.scoring.build import fitter_of
from anomaly.scoring.pipeline import Model
from anomaly.training.cross_fitting import cross_fit
from anomaly.training.feature_cache import CachedFeatures, FeatureCache
from anomaly.training.fit import StageProgress
from anomaly.training.tuning.candidates import SCORE, Change, changed, image_scores
from anomaly.training.tuning.judging import Floats
from anomaly.training.tuning.trials import Recorder, scores_by

_MEASURED_SECONDS = 5.0  # after which the time that all images take can be told
_WHOLE = 2.5  # times as long as the features takes all of it


class OverBudgetError(AnomalyError):
    """There isn't time enough for other settings."""


@dataclass(frozen=True, eq=False)
class SettingScores:
    """What one set of settings scores.

    Attributes:
        name: what differs from the model's settings; empty for these.
        thresholds: those that training would find.
        images: (m,) scores of the images; NaN for one that can't be scored.
    """

    name: str
    thresholds: Thresholds
    images: Floats

    @property
    def as_high(self) -> list[int]:
        """How many of the good images score as high as each of the images."""
        good = np.array(self.thresholds.good.image)
        return [int((good >= score).sum()) for score in self.images]

    @property
    def caught(self) -> int:
        """How many of the images aren't called good."""
        return int((self.images > self.thresholds.review).sum())


@dataclass(eq=False)
class Budget:
    """Ends what takes longer than somebody will wait.

    Attributes:
        seconds: that it may take.
        progress: called with (stage, done, total).
    """

    seconds: float
    progress: StageProgress = lambda stage, done, total: None

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def features(self, done: int, total: int) -> None:
        """Take note of features computed.

        Raises:
            OverBudgetError: all of them, and what follows, will take too long.
        """
        self.progress("features", done, total)
        needed = _WHOLE * self.spent / max(done, 1) * total
        if self.spent > _MEASURED_SECONDS and needed > self.seconds:
            raise OverBudgetError(
                f"other settings need about {needed:.0f} s with {total} training images, and "
                f"{self.seconds:.0f} s were given; give --budget {1 + needed // 60:.0f}m"
            )


def try_on_features(
    model: Model,
    training: Mapping[str, Sample],
    images: Sequence[Path],
    numbers: Mapping[str, int],
    *,
    scratch: Path,
    budget: Budget,
    workers: int = 2,
) -> Iterator[SettingScores]:
    """Score images, and the training images by models that haven't seen them, by other settings.

    The network sees each image once, and the bank stays as it was learned; only for a layer alone
    another one is learned. So that takes less than training does.

    Args:
        model: trained, with thresholds.
        training: all images that it has learned from, by name.
        images: to score.
        numbers: of the training images, see `anomaly.methods.base.PatchBatch`, by name.
        scratch: an existing folder for temporary files.
        budget: a layer that would take too long is left out.
        workers: decoding processes.

    Yields:
        The model's own settings first.

    Raises:
        OverBudgetError: there isn't time enough for any.
    """
    fitter = fitter_of(model.config).prepared(sum(model.extractor.channels), model.device)
    samples = {numbers[name]: sample for name, sample in training.items()}
    samples = {number: samples[number] for number in sorted(samples)}
    names = {number: name for name, number in numbers.items() if number in samples}
    groups = {i: sample.group for i, sample in samples.items() if sample.group}
    with Decoders(min(workers, len(samples)), Task(model.loading, looks=True)) as decoders:
        cache = FeatureCache(model, fitter, decoders, scratch, budget.features)
        with closing(cache):
            good = cache.build({i: sample.source for i, sample in samples.items()}).checked()
            missed = cache.build(dict(enumerate(images)), learned=False)
            scored = partial(_scored, fitter=fitter, names=names, groups=groups, budget=budget)
            changes = [Change(SCORE), *_image_scores(model)]
            started = budget.spent
            yield from scored(model, changes, good, missed)
            layers = model.extractor.layers if not fitter.compact else ()
            for place, layer in enumerate(layers if len(layers) > 1 else ()):
                took = max(budget.spent - started, 0.0)
                if budget.spent + took > budget.seconds:
                    return
                started = budget.spent
                alone = [_layer(features, place) for features in (good, missed)]
                other = replace(model, scorer=fitter.fit(alone[0]))
                only = [Change("layers", {"backbone.layers": f"[{layer}]"})]
                yield from scored(other, only, *alone)


def _image_scores(model: Model) -> list[Change]:
    """What image scores may be made of instead, those of `tune` and the highest patch."""
    now = model.config.image_score_in_force
    highest = [Change(SCORE, {"model.image_score": "max"})] if now != "max" else []
    return [*image_scores(model.config), *highest]


def _layer(features: CachedFeatures, place: int) -> CachedFeatures:
    """The embeddings of one of the layers alone."""
    align: Callable[..., Any] | None = features.align
    assert align is not None  # maps are kept
    return replace(features, align=lambda maps: align([maps[place]]), points=())


def _scored(
    model: Model,
    changes: Sequence[Change],
    good: CachedFeatures,
    missed: CachedFeatures,
    *,
    fitter: Fitter[Any],
    names: Mapping[int, str],
    groups: Mapping[int, str],
    budget: Budget,
) -> list[SettingScores]:
    """What settings that share patch scores say of the images."""
    of_scores = [change if change.axis == SCORE else Change(SCORE) for change in changes]
    configs = [changed(model.config, (change,)) for change in of_scores]
    recorder = Recorder(configs)
    held_out = cross_fit(
        model,
        good,
        fitter,
        names,
        good.pictures(),
        folds=model.config.calibration.folds,
        groups=groups,
        score=recorder,
        progress=partial(budget.progress, "good images"),
    )
    number, count = {name: i for i, name in names.items()}, 1 + max(missed.views, default=-1)
    of_images = scores_by(model, configs, missed, missed.views)
    return [
        SettingScores(
            ", ".join(f"{key}={value}" for key, value in change.values.items()),
            thresholds_from(
                replace(held_out, image=tuple(of_good[number[n]] for n in held_out.names)),
                *model.rates(),
            ),
            np.array([scores.get(i, np.nan) for i in range(count)]),
        )
        for change, of_good, scores in zip(changes, recorder.scores, of_images, strict=True)
    ]
