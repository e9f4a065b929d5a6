"""Why an image has its anomaly score: evidence, the score's gradient, feature maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from anomaly.backbones.extractor import network_input
from anomaly.datasets import Sample
from anomaly.datasets.samples import listed
from anomaly.errors import DataError, ImageError
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.explain.evidence import GoodImages, GoodPatch, score_gradient, tile_of
from anomaly.explain.feature_maps import feature_map_pictures
from anomaly.explain.patches import (
    comparison,
    marked,
    patch_box,
    patch_centres,
    patch_crop,
    worst_patches,
)
from anomaly.explain.pictures import (
    RgbImage,
    beside,
    glowing,
    picture_of,
    save_explanation,
    stacked,
)
from anomaly.explain.saliency import saliency_map
from anomaly.imaging.array_input import ArrayFormat, ImageLike
from anomaly.imaging.decoder_pool import load_shared
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.imaging.read import Image
from anomaly.maps.heatmap import display, encode_png, heatmap
from anomaly.maps.regions import outlined_areas
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Why an image has its score, in pictures and figures.

    Attributes:
        prediction: what the detector makes of the image.
        model_id: the detector's; empty for one that hasn't been saved.
        pictures: (H, W, 3) uint8 RGB by name: `evidence` (the patches that were flagged beside the
            good ones they were compared with), `score_gradient` (the pixels that move the score),
            and `feature_maps_<layer>` for each hooked layer.
        patches: place and score of each flagged patch, and what it was compared with.
        notes: what couldn't be shown, and why.
    """

    prediction: Prediction
    model_id: str
    pictures: dict[str, RgbImage]
    patches: list[dict[str, Any]]
    notes: list[str]

    def __repr__(self) -> str:
        return f"<Explanation of {self.prediction!r}: {', '.join(self.pictures)}>"

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return encode_png(self.pictures["evidence"])

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the pictures as PNG files, and `explanation.json`.

        Raises:
            OutputError: they exist already, or can't be written.
        """
        facts = {"image": self.prediction.name} | self.facts()
        pictures = {f"{name}.png": picture for name, picture in self.pictures.items()}
        save_explanation(Path(folder), facts, pictures, self.notes, overwrite=overwrite)

    def facts(self) -> dict[str, Any]:
        """The model's id, score, verdict and patches as plain values."""
        prediction, limits = self.prediction, self.prediction.thresholds
        facts: dict[str, Any] = {
            "model_id": self.model_id,
            "image_score": prediction.score,
            "verdict": prediction.verdict,
            "reason": prediction.reason,
        }
        if limits is not None:
            facts |= {"threshold": limits.image, "threshold_label": limits.label}
        return facts | {"patches": self.patches}


def explained(
    detector: Model, image: ImageLike, given: ArrayFormat, good: str | Path | None
) -> Explanation:
    """Why an image has its score; see `AnomalyDetector.explain`."""

    def read(source: Path | Image) -> NetworkInput | UnusableImage:
        (item,) = load_shared([(0, source)], detector.loading, keep_image=True)
        return item

    item = read(given.source(image))
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    there = good_images(detector) if good is None else good_images(detector, good)
    return explain_score(detector, item, there, read)


def good_images(detector: Model, *named: str | Path) -> TrainingImages:
    """The training images, looked for in folders and where the data set was at training.

    An update learns from elsewhere, so that one place alone needn't hold all of them.

    Raises:
        DataError: what is named isn't a folder.
    """
    given: list[Sample] = []
    for folder in map(Path, named):
        if not folder.is_dir():
            raise DataError(f"{folder} isn't a folder; name the one with the training images")
        given += listed(folder, folder)
    there: list[Sample] = []
    if detector.folder is not None:
        with suppress(DataError):
            there = dataset_images(detector, detector.folder, None)
    return TrainingImages(detector.manifest["training_images"], [*there, *given], renamed=given)


def explain_score(
    detector: Model,
    item: NetworkInput,
    there: TrainingImages,
    read: Callable[[Path], NetworkInput | UnusableImage],
) -> Explanation:
    """Feature maps of the hooked layers, the patches that were flagged, the score's gradient.

    Args:
        detector: trained.
        item: the image, decoded.
        there: finds training images.
        read: loads one of them as the detector wants it, with the decoded image.

    Raises:
        ImageError: the image can't be scored.
    """
    (prediction,) = detector.predict_batches([[item]])
    if isinstance(prediction, UnusableImage):
        raise ImageError(prediction.reason, prediction.status)
    flaws = () if detector.thresholds is None else prediction.regions
    height, width = grid = prediction.patch_scores.shape
    patches = worst_patches(prediction.patch_scores, flaws, patch_centres(item.view, grid))
    worst = tile_of(item, (height, width), patches[0])
    network, layers = detector.extractor.network, detector.extractor.layers
    seen = network_input([worst], detector.normalise, detector.device)[0]
    maps = feature_map_pictures(
        network,
        seen,
        layers,
        layouts=detector.extractor.layouts,
        picture=picture_of(worst),
    )

    seen_map = _heatmap(prediction, item)
    good = GoodImages(detector, detector.manifest, there, read)
    title = "most unusual patch"
    if flaws:
        title = "worst patch of each flaw that is marked"
    elif detector.thresholds is not None:
        title += "; nothing is marked"
    evidence, facts = _evidence_picture(good, item, prediction, patches, seen_map, title)
    pictures = {f"feature_maps_{layer}": picture for layer, picture in maps.items()}
    pictures["score_gradient"] = _gradient(detector, prediction, worst, seen_map)
    pictures["evidence"] = evidence
    notes = _notes(detector.method, prediction, good)
    return Explanation(prediction, detector.model_id, pictures, facts, notes)


def _heatmap(prediction: Prediction, item: NetworkInput) -> RgbImage:
    limits, found = prediction.thresholds, prediction.source_map.held()
    review = None if limits is None else limits.review_pixel
    strong = float(np.nanmax(found())) if limits is None else limits.pixel
    areas = outlined_areas(found, strong, review)
    return marked(heatmap(item.decoded, found, strong, areas), [])


def _gradient(
    detector: Model, prediction: Prediction, worst: NetworkInput, heatmap: RgbImage
) -> RgbImage:
    saliency = saliency_map(score_gradient(detector, worst))
    seen = marked(picture_of(worst), [])
    return beside(
        [
            ("what the network sees" + (" of its worst tile" if worst.whole else ""), seen),
            (f"heatmap, score {prediction.score:.3g}", heatmap),
            ("pixels that move the score: |gradient|", glowing(seen, saliency)),
        ]
    )


def _notes(method: str, prediction: Prediction, good: GoodImages) -> list[str]:
    notes = []
    if prediction.nearest is None:
        notes.append(
            f"the nearest good patches: {method} keeps none; evidence.png has the same place on "
            "some good images instead"
        )
    if missing := good.missing():
        name, reason = next(iter(missing.items()))
        notes.append(
            f"{len(missing)} training images ({name}: {reason}); name their folder with --good "
            "(good=)"
        )
    return notes


def _evidence_picture(
    good: GoodImages,
    item: NetworkInput,
    prediction: Prediction,
    patches: Sequence[tuple[int, int]],
    heatmap: RgbImage,
    title: str,
) -> tuple[RgbImage, list[dict[str, Any]]]:
    """Draw why an image was flagged.

    Args:
        good: the images that the detector has learned from.
        item: the image, with the decoded file.
        prediction: what was made of it.
        patches: (row, column) of each patch to show.
        heatmap: (H, W, 3) uint8 RGB, of the image.
        title: what these patches are.

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
    overview = beside([(title, marked(picture, boxes)), ("heatmap", heatmap)])
    return stacked([overview, comparison(rows)]), facts


def _distance(patch: GoodPatch) -> str:
    return "same place" if patch.distance is None else f"distance {patch.distance:.3g}"
