"""Model x test images -> one model's evaluation with everything that its report shows."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.calibration import Thresholds
from anomaly.datasets import Sample
from anomaly.errors import AnomalyError
from anomaly.evaluation.evaluate import Evaluation, Map, Mask, Scored, score_test_split
from anomaly.evaluation.metrics import Confusion, confusion
from anomaly.methods.base import Progress
from anomaly.report.page import utc_now
from anomaly.report.tiles import Tile, Tiles
from anomaly.scoring.build import to_dict
from anomaly.scoring.image_statistics import ImageStatistics
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.folder import find_model
from anomaly.storage.thresholds import thresholds_alone_differ
from anomaly.training.runs import training_record

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, repr=False)
class Category:
    """An evaluation, where it comes from, and its pictures.

    Attributes:
        evaluation: scores and figures.
        thresholds: the model's own; None where it has none.
        model: the model's folder, as the user named it.
        model_id: names this very model.
        method: the model's method, by the name that it has in the literature.
        unit: of the scores.
        engine: what computed them.
        manifest: the model's manifest.
        settings: the model's config as plain values.
        training: what the run's train.json says; empty where it isn't there.
        data_folder: where the test images are.
        own_split: whether they are the test split of a data set, not images of somebody's choice.
        date: of the evaluation, in UTC.
        seconds: that scoring the test split took.
        tiles: by the images' places in the test split; empty for no report.
        looks: what each image that was scored is like as a whole, by its place; empty unless asked
            for.
    """

    evaluation: Evaluation
    thresholds: Thresholds | None
    model: str = ""
    model_id: str = ""
    method: str = ""
    unit: str = "score"
    engine: str = "torch"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    data_folder: str = ""
    own_split: bool = True
    date: str = ""
    seconds: float = 0.0
    tiles: Mapping[int, Tile] = field(default_factory=dict)
    looks: Mapping[int, ImageStatistics] = field(default_factory=dict)

    def __repr__(self) -> str:
        figures = {k: v for k, v in self.metrics.items() if k.endswith(("auroc", "aupro"))}
        said = ", ".join(f"{k} {v:.4f}" for k, v in figures.items() if v is not None)
        count = f"{self.evaluation.n_good} good, {self.evaluation.n_defect} defective"
        return f"<Evaluation of {self.name} on {count}: {said}>"

    @property
    def name(self) -> str:
        """The category's name."""
        return self.evaluation.name

    @property
    def metrics(self) -> dict[str, float | None]:
        """Image and pixel figures by name; None where one is undefined (see `undefined`)."""
        return dict(self.evaluation.metrics.values)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Every test image and its score."""
        return self.evaluation.scored

    @property
    def verdicts(self) -> Confusion | None:
        """What the model's own thresholds did; None where it has none."""
        limits = self.thresholds
        if limits is None:
            return None
        rows = [
            (row.verdict(limits), row.sample.is_defect, row.sample.defect_type)
            for row in self.evaluation.scored
            if row.image_score is not None
        ]
        return confusion([v for v, _, _ in rows], [d for _, d, _ in rows], [t for _, _, t in rows])


def evaluated(
    detector: Model,
    samples: Sequence[Sample],
    data_folder: str,
    *,
    mask_above: int,
    own_split: bool = True,
    workers: int = 2,
    progress: Progress = lambda done, total: None,
    model: str = "",
    keep_looks: bool = False,
) -> Category:
    """Score test images and draw them for the report.

    Args:
        detector: trained.
        samples: to test with.
        data_folder: where they are, for people.
        mask_above: mask values above this are defect.
        own_split: whether they are the test split of a data set.
        workers: decoding processes, besides one for masks.
        progress: called with (done, total).
        model: the model's folder, as the user named it.
        keep_looks: whether to keep what each image is like as a whole, some kB of it.

    Raises:
        DataError: as `evaluate`.
    """
    started = time.perf_counter()
    limit = None if detector.thresholds is None else detector.thresholds.pixel
    looks: dict[int, ImageStatistics] = {}

    def take(prediction: Prediction, _: Sample, anomaly_map: Map, mask: Mask | None) -> None:
        if keep_looks:
            looks[prediction.index] = prediction.statistics
        tiles.add(prediction, anomaly_map, mask)

    with Tiles(len(samples), limit, workers) as tiles:
        evaluation = score_test_split(
            detector,
            samples,
            mask_above=mask_above,
            workers=workers,
            progress=progress,
            visit=take,
        )
        pictures = tiles.finished()
    folder = Path(model) if model else detector.folder
    return Category(
        evaluation=evaluation,
        thresholds=detector.thresholds,
        model="" if folder is None else str(folder),
        model_id=detector.model_id,
        method=detector.method,
        unit=detector.unit,
        engine=detector.extractor.engine,
        manifest=detector.manifest,
        settings=to_dict(detector.config),
        training={} if folder is None else _training(folder, detector.model_id),
        data_folder=data_folder,
        own_split=own_split,
        date=utc_now(),
        seconds=time.perf_counter() - started,
        tiles=pictures,
        looks=looks,
    )


def _training(folder: Path, model_id: str) -> dict[str, Any]:
    """What is known of a model's training; empty where the record beside it is another model's."""
    record = training_record(folder)
    if record.get("model_id", model_id) == model_id:
        return record
    with suppress(AnomalyError):
        if record["model_id"] in thresholds_alone_differ(find_model(folder)):
            return record
    return {}


@dataclass(frozen=True)
class Failure:
    """A category that couldn't be evaluated."""

    name: str
    reason: str


def folder_name(name: str) -> str:
    """A category's name as that of a folder that is the same on every system."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "model"
