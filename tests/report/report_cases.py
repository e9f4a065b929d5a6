"""Evaluations made of numbers and drawn pictures, for tests of reports: no network, no training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pixel_map import pixel_map

from anomaly.calibration.thresholds import GoodScores, Thresholds, thresholds_by_hand
from anomaly.datasets.samples import Sample
from anomaly.evaluation.evaluate import Evaluation
from anomaly.evaluation.metrics import image_intervals, image_metrics, metrics_by_type
from anomaly.imaging.read import Image
from anomaly.maps.heatmap import pixels_for
from anomaly.report import report
from anomaly.report.page import About
from anomaly.report.report import Category
from anomaly.scoring.model import Scored

LIMIT = 10.0
HOSTILE = (
    "<img src=x onerror=window.hacked=1>.png",
    "</script><script>window.hacked=1</script>.png",
    "\"'><svg onload=window.hacked=1>.png",
    "line\nbreak\u2028.png",
    "\u202egnp.elbisrever\u202c.png",
    "not utf-8 \udcff.png",
    "${window.hacked=1} {{hacked}} &lt;b&gt;.png",
)


def tile(
    pixels: np.ndarray, anomaly_map: np.ndarray, mask: np.ndarray | None, count: int = 100
) -> dict[str, Any]:
    """The small picture of one of `count` images."""
    image = Image(pixels, 255.0, "rgb8", "")
    prediction = SimpleNamespace(
        image=image,
        source_map=pixel_map(anomaly_map),
        anomaly_map=anomaly_map.astype(np.float32),
        thresholds=SimpleNamespace(pixel=LIMIT),
    )
    return report.tile(prediction, mask, pixels_for(count, report._PIXELS))  # type: ignore[arg-type]


@cache
def picture(defect: bool, shape: tuple[int, int] = (96, 120)) -> dict[str, Any]:
    """A part of grey noise; a defect is marked and found."""
    pixels = np.random.default_rng(0).integers(120, 180, (*shape, 3), dtype=np.uint8)
    mask = np.zeros(shape, dtype=bool)
    mask[30:44, 40:60] = defect
    return tile(pixels, np.where(mask, 1.4 * LIMIT, 2.0), mask)


def case(
    count: int = 30,
    *,
    name: str = "disc",
    names: Sequence[str] = (),
    thresholds: Thresholds | None = None,
    tiles: Sequence[dict[str, Any]] = (),
) -> Category:
    """`count` images, three kinds of them, with overlapping scores and some ties at the limit."""
    rng = np.random.default_rng(0)
    kinds = ("good", "good", "scratch", "stain")
    scored = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        score = float(np.float32(rng.normal(8 if kind == "good" else 12, 2)))
        score = LIMIT if i % 11 == 5 else score
        file = names[i] if i < len(names) else f"test/{kind}/{i:04}.png"
        sample = Sample(Path("/data") / f"{i}.png", file, kind)
        scored.append(Scored(sample, score, "", f"{name}{i}".encode("utf-8", "replace").hex()))
    scores, labels = [s.score for s in scored], [s.sample.is_defect for s in scored]
    pictures = {
        i: tiles[i % len(tiles)] if tiles else picture(s.sample.is_defect)
        for i, s in enumerate(scored)
    }
    settings = {"model.kind": "patchcore", "backbone.name": "resnet18"}
    evaluation = Evaluation(
        name,
        tuple(scored),
        image_metrics(scores, labels),
        image_intervals(scores, labels),
        metrics_by_type(scores, labels, [s.sample.defect_type for s in scored]),
        thresholds,
    )
    return Category(
        evaluation=evaluation,
        about=About(
            "PatchCore", "distance", thresholds, "runs/my disc", "0123456789abcdef", settings
        ),
        tiles=pictures,
    )


def limits(image: float = LIMIT, review: float | None = None) -> Thresholds:
    """Thresholds that some scores lie on; no review zone unless asked for."""
    scores = (6.0, 7.0, 8.0, 9.0)
    peak = LIMIT * min(image, 9.0) / image  # so that pixels are marked above LIMIT
    good = GoodScores(("a", "b", "c", "d"), scores, (peak,) * 4, "4 images")
    return thresholds_by_hand(good, image if review is None else review, image)
