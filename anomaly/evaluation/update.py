"""Confirmed good images -> an updated model and the changed verdicts."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anomaly.calibration.thresholds import ThresholdChange, Thresholds
from anomaly.datasets import Sample
from anomaly.errors import DataError, counted
from anomaly.evaluation.price import (
    DEFECTS,
    Price,
    evaluated_on,
    fresh,
    known_parts,
    price,
)
from anomaly.evaluation.recalibrate import samples_of
from anomaly.imaging.arrays import ImageLike
from anomaly.imaging.read import list_images
from anomaly.scoring.model import Model, score
from anomaly.storage.folder import find_model
from anomaly.storage.golden import golden_of, score_golden
from anomaly.storage.thresholds import change
from anomaly.training.fit import StageProgress
from anomaly.training.runs import keep_run
from anomaly.training.update import Learned, learn

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Update:
    """An updated detector, not saved yet, and its effects.

    Attributes:
        detector: the updated detector.
        learned: the result of learning.
        before: the earlier thresholds.
        verdicts: of the learned images by the earlier detector.
        cost: verdicts of known parts by both detectors.
    """

    detector: Model
    learned: Learned
    before: Thresholds
    verdicts: Sequence[str]
    cost: Price

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
        golden = None
        if parts is not None:
            golden = parts, score_golden(self.detector, list_images(parts), parts)
        return keep_run(self.detector, output, source, golden=golden, overwrite=overwrite)

    @property
    def moved(self) -> ThresholdChange:
        """The changes of the new thresholds."""
        assert self.detector.thresholds is not None
        return ThresholdChange(self.before, self.detector.thresholds)

    def lines(self) -> list[str]:
        """Readable lines on what was learned and what changes."""
        new, limits = self.learned.good, self.moved.after
        suspects = self.learned.suspects.items()
        return [
            *(f"suspect, not learned: {name} (score {value:.4g})" for name, value in suspects),
            f"learned {counted(len(new.names), 'good image')}; each scored without itself: "
            + _verdicts(map(limits.verdict, new.image)),
            f"before the update: {_verdicts(self.verdicts)}",
            *limits.lines(),
            *self.moved.lines(),
            *self.cost.lines(),
        ]


def update(
    detector: Model,
    good: Sequence[Sample],
    *,
    defects: Sequence[Sample] = (),
    past: Sequence[Sample] = (),
    include_suspects: bool = False,
    scratch: Path | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Update:
    """Learn good images, and compare verdicts before and after.

    Args:
        detector: trained; it isn't changed.
        good: images that people have confirmed to be good.
        defects: images of defects, compared like those of the test split and the golden parts.
        past: parts that nobody has judged, whose changed verdicts are listed.
        include_suspects: learn suspects, too; see `learn`.
        scratch: folder for temporary files.
        progress: called with (stage, done, total).

    Raises:
        ModelError: an exported model, or a method that can't learn more.
        DataError: an image is given as good and as a defect, or no image is left to learn.
    """
    known = known_parts([detector], evaluated_on(detector), defects)
    kept = fresh(detector, good, "good images", known, defects=defects)
    with tempfile.TemporaryDirectory(prefix=".update-", dir=scratch) as folder:
        learned = learn(
            detector,
            kept,
            scratch=Path(folder),
            include_suspects=include_suspects,
            progress=progress,
        )
    known = {**known, "past parts": list(past)}
    cost = price(detector, learned.detector, known, progress=progress)
    assert detector.thresholds is not None  # `learn` requires thresholds
    assert learned.detector.thresholds is not None
    made = change(
        {"updated": {"include_suspects": include_suspects}},
        detector.thresholds,
        learned.detector.thresholds,
        {"learned": learned.hashes},
        cost.defects_found(learned.detector.thresholds, known[DEFECTS]),
    )
    changes = (*detector.changes, made | {"model_before": detector.model_id})
    hashes = set(learned.hashes.values())
    verdicts = [
        one.verdict(detector.thresholds) for one in score(detector, kept) if one.sha256 in hashes
    ]
    after = replace(learned.detector, changes=changes)
    return Update(after, learned, detector.thresholds, verdicts, cost)


def _verdicts(verdicts: Iterable[str]) -> str:
    """Number of images by verdict, in words."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("good", "review", "reject"))


def updated(
    detector: Model,
    good: str | Path | Iterable[ImageLike],
    *,
    defects: str | Path | Iterable[ImageLike] | None,
    include_suspects: bool,
    force: bool,
) -> Model:
    """An updated detector; see `Detector.update`."""
    decoding = detector.loading.decoding
    made = update(
        detector,
        samples_of(good, decoding),
        defects=[] if defects is None else samples_of(defects, decoding, "defects"),
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
    if made.cost.refusal and not force:
        raise DataError(f"{made.cost.refusal}; check the good images, or give force=True")
    return made.detector
