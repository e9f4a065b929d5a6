"""Good images that people have confirmed -> an updated model, and which verdicts change."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anomaly.calibration import ThresholdChange, Thresholds
from anomaly.calibration.rates import percent, supported_rate
from anomaly.datasets import Sample
from anomaly.errors import DataError, counted, first_of, some
from anomaly.evaluation.recalibrate import evaluated_on, sources
from anomaly.evaluation.splits import content_hash
from anomaly.imaging.array_input import ArrayFormat, ImageLike
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.listing import list_images
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image, described
from anomaly.scoring.build import fitter_of
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import combined, verdict
from anomaly.storage.folder import find_model
from anomaly.storage.golden import golden_of, is_missed
from anomaly.storage.thresholds import change
from anomaly.training.cross_fitting import scores_of
from anomaly.training.feature_cache import FeatureCache
from anomaly.training.fit import StageProgress
from anomaly.training.runs import keep_run
from anomaly.training.update import Learned, learn

log = logging.getLogger(__name__)

_AT_ONCE = 64  # images whose features are kept in a temporary file


@dataclass(frozen=True)
class Compared:
    """What two detectors say of one image.

    Attributes:
        name: of the image.
        before: the verdict of the one.
        after: of the other.
        scores: of both.
    """

    name: str
    before: str
    after: str
    scores: tuple[float, float]

    @property
    def newly_passes(self) -> bool:
        """It was caught, and would be called good."""
        return self.before != "good" and self.after == "good"

    def __str__(self) -> str:
        before, after = self.scores
        return f"{self.name}: {self.before} -> {self.after} ({before:.4g} -> {after:.4g})"


def verdict_changes(
    both: tuple[Model, Model],
    samples: Sequence[Sample],
    scratch: Path,
    workers: int,
    progress: partial[None],
) -> Iterator[Compared]:
    """What two detectors that share their network say of images.

    Args:
        both: the detectors.
        samples: the images.
        scratch: where temporary files go.
        workers: decoding processes.
        progress: called with (done, total).

    Yields:
        One for each image that can be used; of the others a warning in the log says why.
    """
    before = both[0]
    if before.judge.rules:
        yield from _changes_by_rules(both, samples, workers, progress)
        return
    with Decoders(min(workers, len(samples)), Task(before.loading)) as decoders:
        for start in range(0, len(samples), _AT_ONCE):
            batch = samples[start : start + _AT_ONCE]
            images = {i: sample.source for i, sample in enumerate(batch)}
            cache = FeatureCache(before, fitter_of(before.config), decoders, scratch)
            with closing(cache):
                features = cache.build(images, learned=False)
                scores = [scores_of(detector, features, features.views) for detector in both]
            for i in sorted(scores[0]):
                raw = [(of[i][0], *of[i][2:]) for of in scores]
                old, new = (
                    combined(s, model.thresholds)[0] for s, model in zip(raw, both, strict=True)
                )
                first, second = (
                    verdict(score, model.thresholds, model.review_reason(features.statistics[i]))
                    for model, score in zip(both, (old, new), strict=True)
                )
                yield Compared(batch[i].name, first, second, (old, new))
            for refused in features.refused:
                log.warning("skipped: %s", refused.reason)
            progress(start + len(batch), len(samples))


def _changes_by_rules(
    both: tuple[Model, Model], samples: Sequence[Sample], workers: int, progress: partial[None]
) -> Iterator[Compared]:
    """As `verdict_changes`, for models with rules, whose verdicts need each image's regions."""
    answers: list[dict[int, tuple[float, str]]] = []
    for model in both:
        scored: dict[int, tuple[float, str]] = {}
        results = model.score_all([sample.source for sample in samples], workers=workers)
        for done, result in enumerate(results, 1):
            if not isinstance(result, UnusableImage):
                scored[result.index] = (result.score, result.verdict)
            elif model is both[0]:
                log.warning("skipped: %s", result.reason)
            progress(len(answers) * len(samples) + done, len(both) * len(samples))
        answers.append(scored)
    before, after = answers
    for i in sorted(before):
        (old, first), (new, second) = before[i], after[i]
        yield Compared(samples[i].name, first, second, (old, new))


_LISTED = 10  # changed verdicts of a kind


@dataclass(frozen=True, eq=False)
class Update:
    """An updated detector, not saved yet, and what it changes.

    Attributes:
        detector: has learned the new images.
        learned: how it came to be.
        known: images left out because it has learned from them already, and copies.
        before: the thresholds so far.
        compared: what both detectors say, by what the images are: `confirmed defects`, say.
    """

    detector: Model
    learned: Learned
    known: int
    before: Thresholds
    compared: Mapping[str, tuple[Compared, ...]]

    @property
    def refusal(self) -> str:
        """Why the update isn't taken; empty where nothing is against it."""
        defects, parts = (self.compared.get(kind, ()) for kind in (DEFECTS, GOLDEN_PARTS))
        escapes = [image.name for image in defects if image.newly_passes]
        missed = [part.name for part in parts if is_missed(part.name) and part.after == "good"]
        for names, kind, how, remedy in (
            (escapes, "confirmed", "caught would pass", "look at what was confirmed as good"),
            (
                missed,
                "known",
                "missed before would pass again",
                "anomaly tune finds other settings",
            ),
        ):
            if names:
                were = "defect that was" if len(names) == 1 else "defects that were"
                return (
                    f"{len(names)} {kind} {were} {how} ({some(names)}), so the update isn't "
                    f"taken; {remedy}, or force it"
                )
        return ""

    def keep(self, source: Path, output: Path, *, overwrite: bool = False) -> str:
        """Write the new run: model, where its data set is, and golden parts with today's scores.

        Args:
            source: the model folder that was updated, or its run.
            output: the new run's folder.
            overwrite: replace an earlier run there.

        Returns:
            The new model's id.

        Raises:
            OutputError: an earlier run is there, or there is no room.
        """
        parts = golden_of(find_model(source))
        scores = {
            part.name: {"image_score": part.scores[1], "verdict": part.after}
            for part in self.compared.get(GOLDEN_PARTS, ())
        }
        golden = None if parts is None else (parts, scores)
        return keep_run(self.detector, output, [source], golden=golden, overwrite=overwrite)

    @property
    def moved(self) -> ThresholdChange:
        """What the thresholds found anew change."""
        assert self.detector.thresholds is not None
        return ThresholdChange(self.before, self.detector.thresholds)

    def lines(self) -> list[str]:
        """What was learned and what it changes, for people."""
        return [*self._learned(), *self._changed()]

    def _learned(self) -> Iterator[str]:
        new, limits = self.learned.good, self.moved.after
        if self.known:
            yield f"left out, as known already or copies of others: {self.known}"
        for name, score in self.learned.suspects.items():
            yield f"suspect, not learned: {name} (score {score:.4g})"
        images = counted(len(new.names), "good image")
        yield f"learned {images}; each scored without itself: {_verdicts(limits, new.image)}"
        yield f"the model as it was, by their scores: {_verdicts(self.before, self.learned.before)}"
        if self.before.label != "calibrated":
            label = self.before.label
            yield f"the thresholds were found {label} so far, and are found by rates now"
        yield from limits.lines()
        yield from self.moved.lines()
        yield (
            f"{len(new.names)} new images alone can't guarantee a false-reject rate below "
            f"{percent(supported_rate(len(new.names)))}"
        )

    def _changed(self) -> Iterator[str]:
        for kind, images in self.compared.items():
            changed = [image for image in images if image.before != image.after]
            yield f"{kind}: {len(changed)} of {len(images)} verdicts change"
            # What passes first.
            changed.sort(key=lambda image: (not image.newly_passes, image.name))
            yield from (f"  {image}" for image in first_of([*map(str, changed)], most=_LISTED))


DEFECTS, GOLDEN_PARTS = "confirmed defects", "golden parts"


def golden_samples(folder: Path | None) -> list[Sample]:
    """The golden parts beside a model folder, if there are any."""
    golden = None if folder is None else golden_of(folder)
    if golden is None:
        return []
    return [Sample(p, p.relative_to(golden).as_posix()) for p in list_images(golden)]


def update(
    detector: Model,
    good: Sequence[Sample],
    *,
    compare: Mapping[str, Sequence[Sample]],
    tested: Collection[str] = frozenset(),
    include_suspects: bool = False,
    workers: int = 2,
    scratch: Path | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Update:
    """Learn from good images, and compare verdicts before and after.

    Args:
        detector: trained; it stays as it is.
        good: images that people have confirmed to be good.
        compare: further images by what they are; those called `DEFECTS` must stay caught, and the
            missed defects among `GOLDEN_PARTS` must be caught.
        tested: sha256 of the test split's images, which nothing may be learned from.
        include_suspects: learn from images that may be defects, too, see `learn`.
        workers: decoding processes.
        scratch: where temporary files go.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: an image is given as good and as a defect, or belongs to the test split; or
            nothing is left to learn from.
    """
    compare = {**compare, DEFECTS: _distinct(compare.get(DEFECTS, ()))}
    missed = [part for part in compare.get(GOLDEN_PARTS, ()) if is_missed(part.name)]
    kept = _fresh(detector, good, [*compare[DEFECTS], *missed], tested)
    with tempfile.TemporaryDirectory(prefix=".update-", dir=scratch) as folder:
        learned = learn(
            detector,
            kept,
            scratch=Path(folder),
            workers=workers,
            include_suspects=include_suspects,
            progress=progress,
        )
        both = detector, learned.detector
        compared = {
            kind: tuple(
                verdict_changes(both, images, Path(folder), workers, partial(progress, kind))
            )
            for kind, images in compare.items()
            if images
        }
    assert detector.thresholds is not None  # learn has asked for some
    caught = [defect.after != "good" for defect in compared.get(DEFECTS, ())]
    made = change(
        {"updated": {"include_suspects": include_suspects}},
        detector.thresholds,
        learned.detector.thresholds,
        {"learned": learned.hashes},
        {"caught": sum(caught), "images": len(caught)} if caught else None,
    )
    changes = (*detector.changes, made | {"model_before": detector.model_id})
    return Update(
        replace(learned.detector, changes=changes),
        learned,
        len(good) - len(kept),
        detector.thresholds,
        compared,
    )


def _fresh(
    detector: Model,
    good: Sequence[Sample],
    defects: Sequence[Sample],
    tested: Collection[str],
) -> list[Sample]:
    """The good images that aren't known yet, each once; unreadable files stay, to be reported.

    Raises:
        DataError: one is a defect, or of the test split; or none is left.
    """
    met = set(detector.manifest["training_images"].values())
    bad = {content_hash(sample) for sample in defects} - {""}
    kept = []
    for sample in good:
        sha256 = content_hash(sample)
        if sha256 in bad:
            raise DataError(f"{sample.path} is given as good and as a defect; give it once")
        if sha256 in tested:
            raise DataError(
                f"{sample.path} belongs to the test split that the model is evaluated on, which "
                "nothing may be learned from; give other images"
            )
        if sha256 not in met:
            kept.append(sample)
        met |= {sha256} - {""}
    if not kept:
        raise DataError(
            f"there is nothing to learn: the model knows all of the {len(good)} good images"
        )
    return kept


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Each image once, by its content; unreadable files stay, to be reported."""
    first: dict[str, Sample] = {}
    for i, sample in enumerate(samples):
        first.setdefault(content_hash(sample) or str(i), sample)
    return list(first.values())


def _verdicts(thresholds: Thresholds, scores: Sequence[float]) -> str:
    """How many scores are good, for review, to be rejected."""
    counts = Counter(map(thresholds.verdict, scores))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("good", "review", "reject"))


def updated(
    detector: Model,
    good: str | Path | Iterable[ImageLike],
    array_format: ArrayFormat,
    *,
    defects: str | Path | Iterable[ImageLike] | None,
    include_suspects: bool,
    force: bool,
) -> Model:
    """A detector that has learned more; see `AnomalyDetector.update`."""
    compare = {GOLDEN_PARTS: golden_samples(detector.folder)}
    if defects is not None:
        compare[DEFECTS] = _samples(sources(defects, array_format, "defects"))
    made = update(
        detector,
        _samples(sources(good, array_format)),
        compare=compare,
        tested=evaluated_on(detector),
        include_suspects=include_suspects,
    )
    for reason in made.learned.refused.values():
        log.warning("skipped: %s", reason)
    for line in made.lines():
        log.info(line)
    if made.moved.caution:
        log.warning(made.moved.caution)
    if made.learned.suspects:
        log.warning("suspects, not learned: %s", ", ".join(made.learned.suspects))
    if made.refusal and not force:
        raise DataError(made.refusal)
    return made.detector


def _samples(images: Iterable[Path | Image]) -> list[Sample]:
    return [
        Sample(image, image.name)
        if isinstance(image, Path)
        else Sample(Path(described(i)), described(i), image=image)
        for i, image in enumerate(images)
    ]
