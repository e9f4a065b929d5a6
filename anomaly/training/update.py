"""Update a model and its thresholds with further good images that people have confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from anomaly.backbones.engine import ExportedNetwork
from anomaly.calibration.thresholds import (
    GoodScores,
    Thresholds,
    threshold_for_false_reject_rate,
    thresholds_from,
)
from anomaly.datasets import Sample
from anomaly.errors import DataError, ModelError
from anomaly.files.writing import from_json
from anomaly.scoring.build import fitter_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model
from anomaly.training.cross_fitting import cross_fit, good_scores, scores_of
from anomaly.training.features import CachedFeatures, cached_features
from anomaly.training.fit import StageProgress

# A suspect scores this multiple of the threshold that the other images would give.
_SUSPECT_FACTOR = 1.1


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of learning further images.

    Attributes:
        detector: the updated detector, not saved yet.
        good: their scores, each by a detector that hasn't learned it.
        hashes: sha256 of each image learned, by name.
        suspects: scores of the suspects, which weren't learned, by name, the highest first.
        refused: reasons of unusable images, by name.
    """

    detector: Model
    good: GoodScores
    hashes: dict[str, str]
    suspects: dict[str, float]
    refused: dict[str, str]


def learn(
    detector: Model,
    samples: Sequence[Sample],
    *,
    scratch: Path,
    include_suspects: bool = False,
    progress: StageProgress = lambda stage, done, total: None,
) -> Learned:
    """Learn further good images, except suspects.

    Each is scored by a detector that has learned most others, but not it. One that would still be
    rejected is a suspect: a defect that was called good, or the only one of its kind.

    The thresholds come from these scores and the earlier ones, whose detectors had learned less
    and so score higher. The reject threshold also keeps its rate among the new images alone, since
    future parts may all be like them.

    Args:
        detector: trained; it isn't changed.
        samples: good images that it hasn't learned, each once.
        scratch: an existing folder for temporary files.
        include_suspects: learn suspects, too.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: no image is usable, all are suspects, or the detector has no thresholds.
    """
    if isinstance(detector.extractor, ExportedNetwork):
        raise ModelError("an exported model can't learn; update the one it was exported from")
    if detector.thresholds is None:
        raise DataError(
            "the model has no thresholds, so suspects can't be recognised; set thresholds with "
            "`anomaly calibrate` first"
        )
    limit, (_, rate) = detector.thresholds.image, detector.rates()
    known = [*detector.manifest["training_images"], *detector.manifest["refused_images"]]
    # Numbers follow those of the known images.
    names = dict(enumerate(unique_names([s.name for s in samples], known), len(known)))
    numbered = dict(enumerate(samples, len(known)))
    groups = {i: sample.group for i, sample in numbered.items() if sample.group}
    fitter, seen = fitter_of(detector.config), partial(progress, "features")
    images = {i: sample.source for i, sample in numbered.items()}
    with closing(cached_features(detector, fitter, images, scratch, seen)) as patches:
        patches.checked()
        learned = {i: names[i] for i in sorted(patches.hashes)}
        # The first trial, with all images, finds the suspects; a second one learns without them.
        new, good = _trial(detector, patches, learned, groups, progress)
        suspects = {} if include_suspects else _suspects(good, limit, rate)
        if len(suspects) == len(good.names):
            raise DataError(
                f"all new images look unlike the learned ones and may be defects: "
                f"{', '.join(suspects)}. If they are good, add --include-suspects"
            )
        if suspects:
            learned = {i: name for i, name in learned.items() if name not in suspects}
            new, good = _trial(detector, patches, learned, groups, progress)
        refused = {names[item.index]: item.reason for item in patches.refused}
        hashes = {name: patches.hashes[i] for i, name in learned.items()}
        statistics = TrainingStatistics.of([patches.statistics[i] for i in learned])
    left_out = {name: i for i, name in names.items() if name not in hashes}
    manifest, known_statistics = detector.manifest, detector.training_statistics
    new = replace(
        new,
        thresholds=_thresholds(detector, good),
        training_statistics=known_statistics and known_statistics.merged(statistics),
        manifest={
            **manifest,
            "training_images": {**manifest["training_images"], **hashes},
            "refused_images": {**manifest["refused_images"], **left_out},
            **({"parent": detector.model_id} if detector.model_id else {}),
        },
        model_id="",
        folder=None,
    )
    return Learned(new, good, hashes, suspects, refused)


def _trial(
    detector: Model,
    patches: CachedFeatures,
    names: Mapping[int, str],
    groups: Mapping[int, str],
    progress: StageProgress,
) -> tuple[Model, GoodScores]:
    """A detector that has learned the named images, and each one's score by one without it."""
    known = len(detector.manifest["training_images"])
    fitter = fitter_of(detector.config).incremental(detector.scorer, known)
    new = replace(detector, scorer=fitter.fit(patches.only(names)))
    if len(names) > 1:
        good = cross_fit(
            new,
            patches,
            fitter,
            names,
            patches.hashes,
            groups={i: group for i, group in groups.items() if i in names},
            progress=partial(progress, "calibration"),
        )
    else:  # otherwise the detector stays unchanged
        scored = scores_of(detector, patches.only(names), patches.views)
        good = good_scores([*names.values()], [*scored.values()], "")
    hashes = tuple(patches.hashes[i] for i in names)  # some may have been used for calibration
    return new, replace(good, hashes=hashes)


def _suspects(new: GoodScores, limit: float, rate: float) -> dict[str, float]:
    """Scores of the images that stand out from all others, the highest first.

    Each scores 10 % above the reject threshold that images with lower scores would give, or higher
    than such an image. At most half of the images: what most of them share isn't suspicious.
    """
    order = np.argsort(-np.array(new.image), kind="stable").tolist()
    scores = [new.image[i] for i in order]
    count = 0
    for k in range((len(order) + 1) // 2):
        rest = scores[k + 1 :]
        least = threshold_for_false_reject_rate(rest, rate).value if rest else limit
        if scores[k] > _SUSPECT_FACTOR * max(limit, least):
            count = k + 1
    return {new.names[i]: new.image[i] for i in order[:count]}


def _thresholds(detector: Model, new: GoodScores) -> Thresholds:
    assert detector.thresholds is not None
    good = detector.thresholds.good.joined(new)
    source = (
        f"{len(good.names)} good images, each scored by a model that hasn't seen it, "
        f"{len(new.names)} of them new"
    )
    return thresholds_from(replace(good, source=source), *detector.rates(), newest=new.image)


def lineage(detector: Model) -> frozenset[str]:
    """The ids of a detector and of the models it was updated from."""
    ids: list[str] = []
    for line in detector.history.splitlines():
        with suppress(ValueError, AttributeError):  # an edited line: the history isn't protected
            ids.append(str(from_json(line).get("model_before", "")))
    return frozenset({detector.model_id, detector.manifest.get("parent", ""), *ids} - {""})


def unique_names(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Names that differ from each other and from used ones: `3/x.png` is the third x.png."""
    used, unique_ones = set(taken), []
    for name in names:
        unique, number = name, 1
        while unique in used:
            number += 1
            unique = f"{number}/{name}"
        used.add(unique)
        unique_ones.append(unique)
    return unique_ones
