"""The patches that were flagged beside the good ones that they were compared with: a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

from anomaly.explain.explanation import GoodImages, GoodPatch
from anomaly.explain.patches import comparison, marked, patch_box, patch_crop
from anomaly.explain.tiles import RgbImage, beside, stacked
from anomaly.imaging.preprocessing import Loaded
from anomaly.maps.heatmap import display
from anomaly.model.prediction import Prediction


def evidence_picture(
    good: GoodImages,
    item: Loaded,
    prediction: Prediction,
    patches: Sequence[tuple[int, int]],
    heatmap: RgbImage,
    limit: float | None,
) -> tuple[RgbImage, list[dict[str, Any]]]:
    """Draw why an image was flagged.

    Args:
        good: the images that the detector has learned from.
        item: the image, with the decoded file.
        prediction: what was made of it.
        patches: (row, column) of each patch to show.
        heatmap: (H, W, 3) uint8 RGB, of the image.
        limit: the pixel threshold, in score units; None for a model without thresholds.

    Returns:
        The picture, (H, W, 3) uint8 RGB, and for each patch its place, its score and the good
        patches that it was compared with.
    """
    picture = display(item.decoded)
    height, width = prediction.patch_scores.shape
    boxes = [patch_box(item.view, (height, width), *patch) for patch in patches]
    rows: list[list[tuple[tuple[str, str], RgbImage]]] = []
    facts: list[dict[str, Any]] = []
    for patch, box, near in zip(patches, boxes, good.nearest(item, patches), strict=True):
        score = float(prediction.patch_scores[patch])
        captions = f"{len(rows) + 1}: score {score:.3g}", "this image"
        row = [(captions, patch_crop(picture, box))]
        row += [((_distance(one), PurePath(one.image).name), good.crop(one)) for one in near]
        rows.append(row)
        compared = [asdict(one) for one in near]
        facts.append(
            {"row": patch[0], "column": patch[1], "score": score, "compared_with": compared}
        )
    title = "most unusual patch"
    if limit is not None:
        title = f"worst patch of each flaw, above {limit:.3g}"
    overview = beside([(title, marked(picture, boxes)), ("heatmap", heatmap)])
    return stacked([overview, comparison(rows)]), facts


def _distance(patch: GoodPatch) -> str:
    return "same place" if patch.distance is None else f"distance {patch.distance:.3g}"
