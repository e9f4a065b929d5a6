"""Why a model gives an image its score: the patches flagged, beside those compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from anomaly.errors import ImageError
from anomaly.explain.explanation import (
    Explained,
    GoodImages,
    GoodPatch,
    read_one,
    score_gradient,
    tile_of,
    worst_patches,
)
from anomaly.explain.patches import comparison, marked, patch_box, patch_crop
from anomaly.explain.saliency import saliency_map
from anomaly.explain.tiles import Picture, beside, glowing, stacked
from anomaly.features.embedder import network_input
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.preprocessing import Loaded, Refused
from anomaly.maps.heatmap import display, overlay
from anomaly.model.checkpoint import Model
from anomaly.model.prediction import Prediction


def explain_score(
    model: Model, path: Path, folders: Sequence[Path], decoders: Decoders
) -> Explained:
    """Show why a model gives an image its score.

    Args:
        model: trained.
        path: the image.
        folders: where its training images may be.
        decoders: one process is enough.

    Returns:
        Feature maps of the hooked layers, the patches that were flagged beside good ones, and the
        gradient of the score.

    Raises:
        ImageError: the image can't be used.
    """
    detector = model.detector
    item = read_one(path, detector.loading, decoders)
    (prediction,) = detector.predict_batches([[item]], [path])
    if isinstance(prediction, Refused):
        raise ImageError(prediction.reason, prediction.status)
    thresholds = detector.thresholds
    shown = Explained()
    shown.facts.update(
        model_id=model.model_id,
        image_score=prediction.image_score,
        verdict=detector.verdict(prediction),
        reason=prediction.oddness,
    )
    if thresholds is not None:
        shown.facts.update(threshold=thresholds.image, threshold_label=thresholds.label)
    most = float("inf") if thresholds is None else thresholds.pixel
    patches = worst_patches(prediction.patch_scores, most)
    height, width = prediction.patch_scores.shape
    worst = tile_of(item, (height, width), patches[0])
    image = network_input([worst], detector.normalise, detector.device)[0]
    shown.draw_maps(detector.extractor.network, image, detector.extractor.layers)

    picture = display(item.decoded)
    anomaly_map = prediction.anomaly_map()
    review = None if thresholds is None else thresholds.review_pixel
    strong = float(np.nanmax(anomaly_map)) if thresholds is None else thresholds.pixel
    heatmap = marked(overlay(picture, anomaly_map, strong, review=review), [])
    saliency = saliency_map(score_gradient(detector, worst))
    seen = marked(np.rint(worst.pixels * 255).astype(np.uint8), [])
    shown.pictures["score_gradient.png"] = beside(
        [
            ("what the network sees" + (" of its worst tile" if worst.whole else ""), seen),
            (f"heatmap, score {prediction.image_score:.3g}", heatmap),
            ("pixels that move the score: |gradient|", glowing(seen, saliency)),
        ]
    )
    good = GoodImages(detector, model.manifest, folders, decoders.load)
    limit = None if thresholds is None else thresholds.pixel
    evidence, shown.facts["patches"] = _evidence_picture(
        good, item, prediction, patches, heatmap, limit
    )
    shown.pictures["evidence.png"] = evidence
    if prediction.nearest is None:
        shown.notes.append(
            "the nearest good patches: PaDiM keeps none, only means and covariances of each place; "
            "evidence.png has the same place on some good images instead"
        )
    if missing := good.missing():
        name, reason = next(iter(missing.items()))
        shown.notes.append(
            f"{len(missing)} training images ({name}: {reason}); name their folder with --good"
        )
    return shown


def _evidence_picture(
    good: GoodImages,
    item: Loaded,
    prediction: Prediction,
    patches: Sequence[tuple[int, int]],
    heatmap: Picture,
    limit: float | None,
) -> tuple[Picture, list[dict[str, Any]]]:
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
    rows: list[list[tuple[tuple[str, str], Picture]]] = []
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
