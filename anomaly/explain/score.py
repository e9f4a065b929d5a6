"""Why an image has its anomaly score: evidence, the score's gradient, feature maps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.backbones.extractor import network_input
from anomaly.datasets import Sample
from anomaly.datasets.samples import listed
from anomaly.errors import DataError, ImageError
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.explain.evidence import (
    GoodImages,
    GoodPatch,
    patch_box,
    patch_centres,
    score_gradient,
    tile_of,
    worst_patches,
)
from anomaly.explain.feature_maps import feature_map_pictures
from anomaly.explain.pictures import (
    RgbImage,
    beside,
    glowing,
    marked,
    patch_crop,
    picture_of,
    read_image,
    save_explanation,
    stacked,
)
from anomaly.explain.saliency import saliency_map
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


def explained(detector: Model, image: Path | Image, *good: str | Path) -> Explanation:
    """Why an image has its score; see `AnomalyDetector.explain`.

    Args:
        detector: trained.
        image: a file, or pixels.
        good: further folders with training images.

    Raises:
        ImageError: the image can't be scored.
        DataError: one of `good` isn't a folder.
    """
    item = read_image(image, detector.loading)
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    (prediction,) = detector.predict_batches([[item]])
    if isinstance(prediction, UnusableImage):
        raise ImageError(prediction.reason, prediction.status)
    training = GoodImages(detector, good_images(detector, *good))
    item = item.in_part()  # so that equal places of parts are compared
    seen = replace(prediction, view=item.view, image=item.image)
    flaws = () if detector.thresholds is None else seen.regions
    scores = prediction.patch_scores
    height, width = scores.shape
    patches = worst_patches(scores, flaws, patch_centres(item.view, (height, width)))
    worst = tile_of(item, (height, width), patches[0])
    extractor = detector.extractor
    maps = feature_map_pictures(
        extractor.network,
        network_input([worst], detector.normalise, detector.device)[0],
        extractor.layers,
        layouts=extractor.layouts,
        picture=picture_of(worst),
    )
    title = "most unusual patch"
    if flaws:
        title = "worst patch of each flaw that is marked"
    elif detector.thresholds is not None:
        title += "; nothing is marked"
    seen_map = _heatmap(seen, item)
    boxes = [patch_box(item.view, (height, width), *patch) for patch in patches]
    overview = beside([(title, marked(display(item.decoded), boxes)), ("heatmap", seen_map)])
    rows, facts = _compared(training, item, patches, scores)
    pictures = {f"feature_maps_{layer}": picture for layer, picture in maps.items()}
    pictures["score_gradient"] = _gradient(detector, prediction, worst, seen_map)
    pictures["evidence"] = stacked([overview, *rows])
    notes = _notes(detector.method, prediction, training)
    return Explanation(prediction, detector.model_id, pictures, facts, notes)


def good_images(detector: Model, *named: str | Path) -> TrainingImages:
    """The training images, looked for in folders and where the data set was at training.

    An update learns from elsewhere, so that one place alone needn't hold all of them.

    Raises:
        DataError: what is named isn't a folder.
    """
    in_folders: list[Sample] = []
    for folder in map(Path, named):
        if not folder.is_dir():
            raise DataError(f"{folder} isn't a folder; name the one with the training images")
        in_folders += listed(folder, folder)
    of_dataset: list[Sample] = []
    if detector.folder is not None:
        with suppress(DataError):
            of_dataset = dataset_images(detector, detector.folder, None)
    hashes = detector.manifest["training_images"]
    return TrainingImages(hashes, [*of_dataset, *in_folders], renamed=in_folders)


def _heatmap(prediction: Prediction, item: NetworkInput) -> RgbImage:
    limits, source_map = prediction.thresholds, prediction.source_map.held()
    review = None if limits is None else limits.review_pixel
    strong = float(np.nanmax(source_map())) if limits is None else limits.pixel
    areas = outlined_areas(source_map, strong, review)
    return marked(heatmap(item.decoded, source_map, strong, areas))


def _gradient(
    detector: Model, prediction: Prediction, worst: NetworkInput, heatmap: RgbImage
) -> RgbImage:
    saliency = saliency_map(score_gradient(detector, worst))
    seen = marked(picture_of(worst))
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


def _compared(
    good: GoodImages,
    item: NetworkInput,
    patches: Sequence[tuple[int, int]],
    scores: NDArray[np.float32],
) -> tuple[list[RgbImage], list[dict[str, Any]]]:
    """Show patches beside what they were compared with.

    Args:
        good: the images that the detector has learned from.
        item: the image, with the decoded file.
        patches: (row, column) of each patch to show.
        scores: patch scores (h, w).

    Returns:
        For each patch a line of crops; and its place, its score and the good patches that it was
        compared with.
    """
    picture = display(item.decoded)
    height, width = scores.shape
    lines: list[RgbImage] = []
    facts: list[dict[str, Any]] = []
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        score = float(scores[patch])
        crop = patch_crop(picture, patch_box(item.view, (height, width), *patch))
        panels = [(f"{len(lines) + 1}: score {score:.3g}\nthis image", crop)]
        panels += [(_caption(other), good.crop(other)) for other in near]
        lines.append(beside(panels))
        place = {"row": patch[0], "column": patch[1], "score": score}
        facts.append({**place, "compared_with": [asdict(other) for other in near]})
    return lines, facts


def _caption(patch: GoodPatch) -> str:
    where = "same place" if patch.distance is None else f"distance {patch.distance:.3g}"
    return f"{where}\n{PurePath(patch.image).name}"
