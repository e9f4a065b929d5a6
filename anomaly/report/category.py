"""One model's evaluation with everything that its report shows."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anomaly.calibration import Thresholds
from anomaly.evaluation.evaluate import Evaluation, evaluate
from anomaly.evaluation.metrics import Confusion, confusion
from anomaly.evaluation.test_split import images_to_test
from anomaly.model.checkpoint import load
from anomaly.model.run_folder import training_record
from anomaly.model.settings import portable
from anomaly.model.training import StageProgress
from anomaly.report.page import utc_now
from anomaly.report.tiles import Tile, Tiles


@dataclass(frozen=True)
class Category:
    """An evaluation, where it comes from, and its pictures.

    Attributes:
        evaluation: scores and figures.
        thresholds: the model's own; None where it has none.
        model: the model's folder, as the user named it.
        model_id: names this very model.
        method: the model's method, by the name that it has in the literature.
        unit: of the scores.
        manifest: the model's manifest.
        settings: the model's config as plain values.
        training: what the run's train.json says; empty where it isn't there.
        data_folder: where the test images are.
        date: of the evaluation, in UTC.
        seconds: that scoring the test split took.
        tiles: by the images' places in the test split; empty for no report.
    """

    evaluation: Evaluation
    thresholds: Thresholds | None
    model: str = ""
    model_id: str = ""
    method: str = ""
    unit: str = "score"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    data_folder: str = ""
    date: str = ""
    seconds: float = 0.0
    tiles: Mapping[int, Tile] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The category's name."""
        return self.evaluation.name

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


@dataclass(frozen=True)
class Failure:
    """A category that couldn't be evaluated."""

    name: str
    reason: str


def folder_name(name: str) -> str:
    """A category's name as that of a folder that is the same on every system."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "model"


def evaluate_run(
    folder: Path,
    *,
    device: torch.device,
    workers: int,
    data_root: Path | None = None,
    good: Sequence[Path] = (),
    defects: Sequence[Path] = (),
    masks: Path | None = None,
    progress: StageProgress = lambda name, done, total: None,
) -> Category:
    """Evaluate a trained model with all that its report shows.

    Args:
        folder: the run, or its model folder.
        device: where to compute.
        workers: decoding processes.
        data_root: as for `anomaly.evaluation.test_split.images_to_test`, and so are `good`,
            `defects` and `masks`.
        good: likewise.
        defects: likewise.
        masks: likewise.
        progress: called with (the model's name, images done, all of them).

    Raises:
        AnomalyError: there is no model, or there are no images to test it with.
    """
    model = load(folder, device)
    detector, thresholds = model.detector, model.detector.thresholds
    samples, data_folder = images_to_test(
        model, folder, data_root=data_root, good=good, defects=defects, masks=masks
    )
    started = time.perf_counter()
    limit = None if thresholds is None else thresholds.pixel
    with Tiles(len(samples), limit, workers) as tiles:
        evaluation = evaluate(
            detector,
            samples,
            mask_above=detector.config.data.mask_above,
            workers=workers,
            progress=lambda done, total: progress(detector.config.name, done, total),
            visit=lambda prediction, _, anomaly_map, mask: tiles.add(prediction, anomaly_map, mask),
        )
        pictures = tiles.finished()
    return Category(
        evaluation=evaluation,
        thresholds=thresholds,
        model=str(folder),
        model_id=model.model_id,
        method=detector.method,
        unit=detector.unit,
        manifest=model.manifest,
        settings=portable(detector.config),
        training=training_record(folder),
        data_folder=data_folder,
        date=utc_now(),
        seconds=time.perf_counter() - started,
        tiles=pictures,
    )
