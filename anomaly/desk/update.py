"""Confirmed good images -> an updated model, its thresholds, and the verdicts that change."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from anomaly.calibration.thresholds import (
    GoodScores,
    ThresholdChange,
    threshold_for_false_reject_rate,
    thresholds_from,
)
from anomaly.datasets.samples import Sample
from anomaly.desk.change import DEFECTS, Change, known_parts, new_images, verdicts_of
from anomaly.desk.golden import golden_of, score_golden, write_record
from anomaly.errors import DataError, ModelError, counted, first_of
from anomaly.files.writing import RUN, as_json, claim, clear, write
from anomaly.methods.base import Fitter
from anomaly.runtime import StageProgress
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.model import Model, score
from anomaly.storage.folder import appearing, find_model
from anomaly.storage.models import save
from anomaly.storage.thresholds import changes_of, changes_with
from anomaly.training.features import CachedFeatures, TrainingSetup, cached_features
from anomaly.training.fit import cross_fit, good_scores
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)

_SUSPECT_FACTOR = 1.1  # a suspect's score over the threshold that the other images would give


def update(
    model: Model,
    good: Sequence[Sample],
    *,
    defects: Sequence[Sample] = (),
    past: Sequence[Sample] = (),
    include_suspects: bool = False,
    scratch: Path | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Change:
    """Learn good images, and compare verdicts before and after.

    Args:
        model: the trained model; it isn't changed.
        good: images that people have confirmed as good.
        defects: images of defects, compared like those of the test split and the golden parts.
        past: parts that nobody has judged; their changed verdicts are listed.
        include_suspects: learn suspects, too; see `learn`.
        scratch: folder for temporary files; None for the system's.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: an image is given as good and as a defect, no image is left to learn, or the
            model has no thresholds.
    """
    known = known_parts([model], defects)
    images = new_images(model, good, "good images", known, defects=defects)
    learned = learn(
        model, images, scratch=scratch, include_suspects=include_suspects, progress=progress
    )
    for reason in first_of(learned.refused):
        log.warning("skipped: %s", reason)
    verdicts = verdicts_of(model, learned.model, {**known, "past parts": past}, progress=progress)
    before, after = model.thresholds, learned.model.thresholds
    assert before is not None  # `learn` requires thresholds
    assert after is not None
    rates = verdicts.defects_found(after, known[DEFECTS])
    asked = {"updated": {"include_suspects": include_suspects}}
    changes = changes_with(model, asked, after, {"learned": learned.hashes}, rates)
    if caution := ThresholdChange(before, after).caution:
        log.warning(caution)
    for name, value in learned.suspects.items():
        log.warning("suspect, not learned: %s (score %.4g)", name, value)
    if learned.suspects:
        log.warning("check the suspects; if they are good, add --include-suspects")
    # Without the suspects, so that both lines count the same images.
    hashes = set(learned.hashes.values())
    scored_before = [image for image in score(model, images) if image.sha256 in hashes]
    verdicts_before = _verdict_counts(image.verdict(before) for image in scored_before)
    verdicts_now = _verdict_counts(map(after.verdict, learned.good.image))
    number = counted(len(learned.good.names), "good image")
    notes = [
        f"learned {number}; each scored without itself: {verdicts_now}",
        f"before the update: {verdicts_before}",
    ]
    updated = replace(learned.model, changes=changes)
    doubts = [verdicts.refusal] if verdicts.refusal else []
    return Change(model, updated, verdicts, notes, doubts, learned.refused)


def _verdict_counts(verdicts: Iterable[str]) -> str:
    """Numbers of images by verdict: `3 good, 1 review, 0 reject`."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("good", "review", "reject"))


def save_updated(model: Model, source: Path, output: Path, *, overwrite: bool = False) -> str:
    """Write the run of an updated model, with golden parts scored anew.

    Args:
        model: the updated model.
        source: the run, or the model folder, of the model before the update.
        output: the new run's folder.
        overwrite: replace an earlier run there, with its golden parts.

    Returns:
        The model's id.

    Raises:
        OutputError: an earlier run is there, or there is no room.
    """
    parts = golden_of(find_model(source))
    answers = {} if parts is None else score_golden(model, parts)
    claim(output, RUN, overwrite=overwrite)
    model_id = save(model, output / "model", overwrite=overwrite)
    clear(output, ("golden", "suspects"))  # both belong to the earlier model there
    if parts is not None:
        with appearing(output / "golden") as draft:
            shutil.copytree(parts, draft, dirs_exist_ok=True)
            write_record(draft, model_id, answers)
    data_folder = str(training_record(source).get("data_folder", ""))
    record = {
        "name": model.config.name,
        **({"data_folder": data_folder} if data_folder else {}),
        "model_id": model_id,
        "images": {"learned": len(model.manifest["training_images"])},
    }
    write(output / "train.json", as_json(record))
    return model_id


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of learning further images.

    Attributes:
        model: the updated model, not saved yet.
        good: scores of the learned images, each by a model that hasn't learned it.
        hashes: sha256 of each learned image, by name.
        suspects: scores of the images that weren't learned, by name, the highest first.
        refused: reasons why images are unusable.
    """

    model: Model
    good: GoodScores
    hashes: dict[str, str]
    suspects: dict[str, float]
    refused: list[str]


def learn(
    model: Model,
    samples: Sequence[Sample],
    *,
    scratch: Path | None = None,
    include_suspects: bool = False,
    progress: StageProgress = lambda stage, done, total: None,
) -> Learned:
    """Learn further good images, except suspects.

    Each is scored by a model that has learned most others, but not it. One that would still be
    rejected is a suspect: a defect that was called good, or the only one of its kind.

    The thresholds come from these scores and the earlier ones, whose models had learned less
    and so score higher. The reject threshold also keeps its rate among the new images alone, since
    future parts may all be like them.

    Args:
        model: the trained model; it isn't changed.
        samples: good images that the model hasn't learned, each once.
        scratch: folder for temporary files; None for the system's.
        include_suspects: learn suspects, too.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: no image is usable, all are suspects, or the model has no thresholds.
    """
    if model.extractor.engine != "torch":
        raise ModelError("an exported model can't learn; update the one it was exported from")
    if model.thresholds is None:
        raise DataError(
            "the model has no thresholds, so suspects can't be recognised; set thresholds with "
            "`anomaly calibrate` first"
        )
    review_rate, reject_rate = model.rates()
    known = [*model.manifest["training_images"], *model.manifest["refused_images"]]
    names = unique_names([sample.name for sample in samples], known)
    renamed = (replace(sample, name=name) for sample, name in zip(samples, names, strict=True))
    numbered = dict(enumerate(renamed, len(known)))  # numbers follow those of the known images
    setup = TrainingSetup.to_update(model)
    images = {i: sample.source for i, sample in numbered.items()}
    with (
        tempfile.TemporaryDirectory(prefix=".update-", dir=scratch) as folder,
        cached_features(setup, images, Path(folder), partial(progress, "features")) as patches,
    ):
        learned = {i: numbered[i] for i in sorted(patches.facts)}
        # The first trial, with all images, finds the suspects; a second one learns without them.
        new, good = _trial(model, setup.fitter, patches, learned, progress)
        limit = model.thresholds.image
        suspects = {} if include_suspects else _suspects(good, limit, reject_rate)
        if len(suspects) == len(good.names):
            raise DataError(
                f"all new images look unlike the learned ones and may be defects: "
                f"{', '.join(suspects)}. If they are good, add --include-suspects"
            )
        if suspects:
            learned = {i: s for i, s in learned.items() if s.name not in suspects}
            new, good = _trial(model, setup.fitter, patches, learned, progress)
        refused = [item.reason for item in patches.refused]
        hashes = {sample.name: patches.hashes[i] for i, sample in learned.items()}
        statistics = TrainingStatistics.of(patches.statistics_of([*learned]))
    # Suspects and unusable images keep their numbers, too.
    left_out = {s.name: i for i, s in numbered.items() if s.name not in hashes}
    known_statistics = model.training_statistics
    all_good = model.thresholds.good.joined(good)
    source = (
        f"{len(all_good.names)} good images, each scored by a model that hasn't seen it, "
        f"{len(good.names)} of them new"
    )
    all_good = replace(all_good, source=source)
    new = replace(
        new,
        thresholds=thresholds_from(all_good, review_rate, reject_rate, newest=good.image),
        training_statistics=known_statistics and known_statistics.merged(statistics),
        manifest={
            **model.manifest,
            "training_images": {**model.manifest["training_images"], **hashes},
            "refused_images": {**model.manifest["refused_images"], **left_out},
            **({"parent": model.model_id} if model.model_id else {}),
        },
        model_id="",
        folder=None,
    )
    return Learned(new, good, hashes, suspects, refused)


def _trial(
    model: Model,
    fitter: Fitter[Any],
    patches: CachedFeatures,
    samples: Mapping[int, Sample],
    progress: StageProgress,
) -> tuple[Model, GoodScores]:
    """A model that has also learned `samples` (by number), and their scores by models without them.

    The patches are those of all new images.
    """
    new = replace(model, scorer=fitter.fit(patches.only(samples)))
    if len(samples) > 1:
        scoring = partial(progress, "calibration")
        good, _ = cross_fit(new, patches, fitter, samples, progress=scoring)
    else:  # without its only new image, the model is the present one
        scored = patches.only(samples).scores(model)
        good = good_scores([s.name for s in samples.values()], scored.values(), "")
    # With hashes, images that an earlier calibration has used count once.
    hashes = tuple(patches.hashes[i] for i in samples)
    return new, replace(good, hashes=hashes)


def _suspects(new: GoodScores, limit: float, rate: float) -> dict[str, float]:
    """Scores, by name, of the images that stand out from the others, the highest first.

    A suspect scores over 10 % above both `limit`, the present reject threshold, and the one that
    all lower scores would give at the same `rate` of false rejects; every image above a suspect is
    one, too. At most half of the images, rounded up, are suspects: a look that most images share
    isn't suspicious.
    """
    ranked = sorted(zip(new.names, new.image, strict=True), key=lambda row: -row[1])
    scores = [score for _, score in ranked]
    suspects = 0
    for k in range((len(scores) + 1) // 2):
        rest = scores[k + 1 :]
        of_rest = threshold_for_false_reject_rate(rest, rate).value if rest else limit
        if scores[k] > _SUSPECT_FACTOR * max(limit, of_rest):
            suspects = k + 1
    return dict(ranked[:suspects])


def lineage(model: Model) -> frozenset[str]:
    """The ids of a model and of the models it was updated from."""
    ids = [str(entry.get("model_before", "")) for entry in changes_of(model)]
    return frozenset({model.model_id, model.manifest.get("parent", ""), *ids} - {""})


def unique_names(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Names that differ from each other and from used ones: `3/x.png` is the third x.png."""
    used = set(taken)
    result = []
    for name in names:
        numbered = (f"{number}/{name}" for number in count(2))
        result.append(next(free for free in chain([name], numbered) if free not in used))
        used.add(result[-1])
    return result
