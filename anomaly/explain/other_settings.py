"""Other settings of a trained model that its own features can tell: image scores, single layers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anomaly.calibration import Thresholds, thresholds_from
from anomaly.calibration.rates import rate_of
from anomaly.datasets import Sample
from anomaly.errors import AnomalyError, DataError
from anomaly.evaluation.splits import training_names
from anomaly.explain.score import good_images
from anomaly.files.tables import text_table
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

_MEASURED_SECONDS = 5.0  # after which the time for all images can be estimated
_WHOLE = 2.5  # times as long as the features takes all of it
_ROWS = 6  # settings that are listed


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
    def as_high(self) -> float:
        """How many of the good images score as high as an image, in the mean of the images."""
        good = np.array(self.thresholds.good.image)
        return float((good[:, None] >= self.images).sum(0).mean())

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
        """Seconds since the start."""
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
                f"other settings need about {needed:.0f} s with {total} training images, but the "
                f"budget is {self.seconds:.0f} s; give --budget {1 + needed // 60:.0f}m"
            )


def other_settings(
    model: Model,
    images: Sequence[Path],
    *,
    good: Sequence[Path] = (),
    budget: float = 120.0,
    workers: int = 2,
    progress: StageProgress = lambda stage, done, total: None,
) -> list[SettingScores]:
    """What other image scores, and single layers, would make of missed defects.

    The network sees each image once, and the bank stays as it was learned; only for a layer alone
    another one is learned. So that takes less than training does.

    Args:
        model: trained, with thresholds.
        images: files that can be scored.
        good: further folders with training images.
        budget: seconds; a layer that would take too long is left out.
        workers: decoding processes.
        progress: called with (stage, done, total).

    Returns:
        The model's own settings first.

    Raises:
        DataError: training images aren't where they were.
        OverBudgetError: there isn't time enough.
    """
    samples, clock = _training_samples(model, good), Budget(budget, progress)
    fitter = fitter_of(model.config).prepared(sum(model.extractor.channels), model.device)
    with (
        tempfile.TemporaryDirectory(prefix="anomaly-") as scratch,
        Decoders(min(workers, len(samples)), Task(model.loading, looks=True)) as decoders,
        closing(FeatureCache(model, fitter, decoders, Path(scratch), clock.features)) as cache,
    ):
        learned = cache.build({i: sample.source for i, sample in samples.items()}).checked()
        missed = cache.build(dict(enumerate(images)), learned=False)
        scored = partial(_scored, samples=samples, fitter=fitter, progress=progress)
        started = clock.spent
        tried = scored(model, _image_scores(model), learned, missed)
        layers = model.extractor.layers if not fitter.compact else ()
        for place, layer in enumerate(layers if len(layers) > 1 else ()):
            if 2 * clock.spent - started > budget:  # it takes as long as the last ones took
                break
            started = clock.spent
            alone = [_layer(features, place) for features in (learned, missed)]
            other = replace(model, scorer=fitter.fit(alone[0]))
            tried += scored(other, {f"backbone.layers=[{layer}]": Change(SCORE)}, *alone)
    return tried


def _training_samples(model: Model, folders: Sequence[Path]) -> dict[int, Sample]:
    """The training images by their numbers, see `anomaly.methods.base.PatchBatch`."""
    samples, missing = good_images(model, *folders).numbered(model.manifest)
    if missing:
        name, why = next(iter(missing.items()))
        raise DataError(
            f"other settings are compared on the training images, but {len(missing)} of "
            f"{len(samples) + len(missing)} can't be read ({name}: {why}); give their folder with "
            "--good"
        )
    return samples


def _image_scores(model: Model) -> dict[str, Change]:
    """The model's own image score, those that `tune` tries, and the highest patch, by name."""
    config = model.config
    changes = [Change(SCORE), *image_scores(config)]
    if config.image_score_in_force not in ("max", "smallest_defect"):
        changes.append(Change(SCORE, {"model.image_score": "max"}))
    return {", ".join(f"{k}={value}" for k, value in c.values.items()): c for c in changes}


def _layer(features: CachedFeatures, place: int) -> CachedFeatures:
    """The embeddings of one of the layers alone."""
    align: Callable[..., Any] | None = features.align
    assert align is not None  # maps are kept
    return replace(features, align=lambda maps: align([maps[place]]), points=())


def _scored(
    model: Model,
    changes: Mapping[str, Change],
    good: CachedFeatures,
    missed: CachedFeatures,
    *,
    samples: Mapping[int, Sample],
    fitter: Fitter[Any],
    progress: StageProgress,
) -> list[SettingScores]:
    """What settings that share patch scores say of the images, by the settings' names."""
    configs = [changed(model.config, (change,)) for change in changes.values()]
    recorder = Recorder(configs)
    names = training_names(model.manifest)
    held_out = cross_fit(
        model,
        good,
        fitter,
        {i: names[i] for i in samples},
        good.pictures(),
        folds=model.config.calibration.folds,
        groups={i: sample.group for i, sample in samples.items() if sample.group},
        score=recorder,
        progress=partial(progress, "good images"),
    )
    numbers, count = {name: i for i, name in enumerate(names)}, 1 + max(missed.views, default=-1)
    of_images = scores_by(model, configs, missed, missed.views)

    def thresholds(of_good: Mapping[int, float]) -> Thresholds:
        image = tuple(of_good[numbers[name]] for name in held_out.names)
        return thresholds_from(replace(held_out, image=image), *model.rates())

    return [
        SettingScores(
            name, thresholds(of_good), np.array([of_image.get(i, np.nan) for i in range(count)])
        )
        for name, of_good, of_image in zip(changes, recorder.scores, of_images, strict=True)
    ]


def settings_table(tried: Sequence[SettingScores]) -> list[str]:
    """Settings that catch more missed defects, the best first, and the model's own, for people."""
    own, total = tried[0], tried[0].thresholds.images
    ranked = sorted(tried, key=lambda each: (-each.caught, each.as_high / each.thresholds.images))
    listed = ranked[:_ROWS] if own in ranked[:_ROWS] else [*ranked[: _ROWS - 1], own]
    return [
        *text_table([("settings", "caught", "good images as high", ""), *map(_row, listed)]),
        "caught: above the review threshold that training would find with these settings",
        f"good images as high: how many of {total} (scored by models that haven't seen them) "
        f"score as high as {'it' if len(own.images) == 1 else 'one of these defects on average'}, "
        "with the 95 % interval of the share",
    ]


def _row(scores: SettingScores) -> tuple[str, ...]:
    count, images = round(scores.as_high), scores.thresholds.images
    return (
        scores.name or "as trained",
        f"{scores.caught} of {len(scores.images)}",
        f"{count} of {images}",
        f"({rate_of(count, images, count / images).interval})",
    )
