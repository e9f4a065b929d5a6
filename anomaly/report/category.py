"""One model's evaluation with everything that its report shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anomaly.calibration import Thresholds
from anomaly.evaluation.evaluate import Evaluation
from anomaly.evaluation.metrics import Confusion, confusion
from anomaly.report.tiles import Tile


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
