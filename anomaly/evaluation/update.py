"""Confirmed good images -> an updated model and the changed verdicts."""

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
from anomaly.imaging.read import Image, described
from anomaly.scoring.build import fitter_of
from anomaly.scoring.pipeline import Model
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
    """Two detectors' verdicts and scores of one image.

    Attributes:
        name: of the image.
        before: the verdict of the first.
        after: the verdict of the second.
        scores: of both.
    """

    name: str
    before: str
    after: str
    scores: tuple[float, float]

    @property
    def newly_passes(self) -> bool:
        """Whether the image was caught and would now be called good."""
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
    """Compare the verdicts of two detectors with the same network.

    Args:
        both: the detectors.
        samples: the images.
        scratch: folder for temporary files.
        workers: decoding processes.
        progress: called with (done, total).

    Yields:
        One for each usable image; the log has a warning with the reason for each other.
    """
    before = both[0]
    with Decoders(min(workers, len(samples)), Task(before.loading)) as decoders:
        for start in range(0, len(samples), _AT_ONCE):
            batch = samples[start : start + _AT_ONCE]
            images = {i: sample.source for i, sample in enumerate(batch)}
            cache = FeatureCache(before, fitter_of(before.config), decoders, scratch)
            with closing(cache):
                features = cache.build(images, learned=False)
                scores = [scores_of(detector, features, features.views) for detector in both]
            for i in sorted(scores[0]):
                old, new = (of[i][0] for of in scores)
                first, second = (
                    model.verdict_of(score, features.views[i], features.statistics[i])
                    for model, score in zip(both, (old, new), strict=True)
                )
                yield Compared(batch[i].name, first, second, (old, new))
            for refused in features.refused:
                log.warning("skipped: %s", refused.reason)
            progress(start + len(batch), len(samples))


_LISTED = 10  # changed verdicts of a kind


@dataclass(frozen=True, eq=False)
class Update:
    """An updated detector, not saved yet, and its effects.

    Attributes:
        detector: the updated detector.
        learned: the result of learning.
        known: number of images left out, because they are learned already or copies.
        before: the earlier thresholds.
        compared: verdicts of both detectors by kind of image, such as `confirmed defects`.
    """

    detector: Model
    learned: Learned
    known: int
    before: Thresholds
    compared: Mapping[str, tuple[Compared, ...]]

    @property
    def refusal(self) -> str:
        """Why the update is refused; empty if it isn't."""
        defects, parts = (self.compared.get(kind, ()) for kind in (DEFECTS, GOLDEN_PARTS))
        escapes = [image.name for image in defects if image.newly_passes]
        missed = [part.name for part in parts if is_missed(part.name) and part.after == "good"]
        for names, kind, how, remedy in (
            (
                escapes,
                "confirmed",
                "caught would now be called good",
                "check the images confirmed as good",
            ),
            (
                missed,
                "known",
                "missed before would again be called good",
                "find other settings with anomaly tune",
            ),
        ):
            if names:
                were = "defect that was" if len(names) == 1 else "defects that were"
                return (
                    f"{len(names)} {kind} {were} {how} ({some(names)}), so the update is refused; "
                    f"{remedy}, or force it"
                )
        return ""

    def keep(self, source: Path, output: Path, *, overwrite: bool = False) -> str:
        """Write the new run: model, place of its data set, and golden parts with new scores.

        Args:
            source: the model folder that was updated, or its run.
            output: the new run's folder.
            overwrite: replace an earlier run there.

        Returns:
            The new model's id.

        Raises:
            OutputError: an earlier run exists, or the disk is full.
        """
        parts = golden_of(find_model(source))
        scores = {
            part.name: {"image_score": part.scores[1], "verdict": part.after}
            for part in self.compared.get(GOLDEN_PARTS, ())
        }
        golden = None if parts is None else (parts, scores)
        return keep_run(self.detector, output, source, golden=golden, overwrite=overwrite)

    @property
    def moved(self) -> ThresholdChange:
        """The changes of the new thresholds."""
        assert self.detector.thresholds is not None
        return ThresholdChange(self.before, self.detector.thresholds)

    def lines(self) -> list[str]:
        """Readable lines on what was learned and what changes."""
        return [*self._learned(), *self._changed()]

    def _learned(self) -> Iterator[str]:
        new, limits = self.learned.good, self.moved.after
        if self.known:
            yield f"images left out, already learned or copies of others: {self.known}"
        for name, score in self.learned.suspects.items():
            yield f"suspect, not learned: {name} (score {score:.4g})"
        after = _verdicts(map(limits.verdict, new.image))
        images = counted(len(new.names), "good image")
        yield f"learned {images}; each scored without itself: {after}"
        yield f"before the update: {_verdicts(self.learned.before)}"
        if self.before.label != "calibrated":
            label = self.before.label
            yield f"the thresholds were set {label} before; now they are set by rates"
        yield from limits.lines()
        yield from self.moved.lines()
        yield (
            f"{len(new.names)} new images can't guarantee a false-reject rate below "
            f"{percent(supported_rate(len(new.names)))}"
        )

    def _changed(self) -> Iterator[str]:
        for kind, images in self.compared.items():
            changed = [image for image in images if image.before != image.after]
            yield f"{kind}: {len(changed)} of {len(images)} verdicts change"
            # Escapes first.
            changed.sort(key=lambda image: (not image.newly_passes, image.name))
            yield from (f"  {image}" for image in first_of([*map(str, changed)], most=_LISTED))


DEFECTS, GOLDEN_PARTS = "confirmed defects", "golden parts"


def golden_samples(folder: Path | None) -> list[Sample]:
    """The golden parts beside a model folder; empty without any."""
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
    """Learn good images, and compare verdicts before and after.

    Args:
        detector: trained; it isn't changed.
        good: images that people have confirmed to be good.
        compare: further images by kind; those under `DEFECTS` must stay caught, and the missed
            defects under `GOLDEN_PARTS` must be caught.
        tested: sha256 of the test split's images, which mustn't be learned.
        include_suspects: learn suspects, too; see `learn`.
        workers: decoding processes.
        scratch: folder for temporary files.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: an image is given as good and as a defect, or belongs to the test split; or no
            image is left to learn.
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
    assert detector.thresholds is not None  # `learn` requires thresholds
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
    """New good images, each once; unreadable files are included, to be reported.

    Raises:
        DataError: one is a defect or of the test split, or none is left.
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
                f"{sample.path} belongs to the test split that the model is evaluated on, so it "
                f"can't be learned; give other images"
            )
        if sha256 not in met:
            kept.append(sample)
        met |= {sha256} - {""}
    if not kept:
        raise DataError(
            f"nothing to learn: the model has already learned all {len(good)} good images; give "
            f"new ones"
        )
    return kept


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Each image once, by content; unreadable files are included, to be reported."""
    first: dict[str, Sample] = {}
    for i, sample in enumerate(samples):
        first.setdefault(content_hash(sample) or str(i), sample)
    return list(first.values())


def _verdicts(verdicts: Iterable[str]) -> str:
    """Number of images by verdict, in words."""
    counts = Counter(verdicts)
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
    """An updated detector; see `AnomalyDetector.update`."""
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
