"""Why an image has its anomaly score: evidence, the score's gradient, feature maps; a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
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
    in_part,
    patch_box,
    patch_centres,
    score_gradient,
    tile_of,
    worst_patches,
)
from anomaly.explain.feature_maps import feature_map_pictures
from anomaly.explain.page import explanation_html
from anomaly.explain.pictures import (
    RgbImage,
    beside,
    fitted,
    glowing,
    patch_crop,
    picture_of,
    read_image,
    save_explanation,
)
from anomaly.explain.saliency import saliency_map
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.imaging.read import Image
from anomaly.inference.rows import RegionRow, region_rows
from anomaly.maps.heatmap import display
from anomaly.report.category import training_of
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Why an image has its score, in pictures and figures.

    Attributes:
        prediction: what the detector makes of the image.
        model: name, method, network, id and folder of the detector, when it was trained and how
            many images it has learned from; empty where one isn't known.
        pictures: (H, W, 3) uint8 RGB by name: `score_gradient` (the pixels that move the score) and
            `feature_maps_<layer>` for each hooked layer.
        regions: what is marked, as in regions.csv.
        patches: place and score of each flagged patch, the region that it is in, and what it was
            compared with.
        crops: of each flagged patch a picture, and one of each that it was compared with.
        notes: what couldn't be shown, and why.
    """

    prediction: Prediction
    model: Mapping[str, str]
    pictures: dict[str, RgbImage]
    regions: list[RegionRow]
    patches: list[dict[str, Any]]
    crops: list[list[RgbImage]]
    notes: list[str]

    def __repr__(self) -> str:
        return f"<Explanation of {self.prediction!r}: {', '.join(self.pictures)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page, in a frame of its own."""
        return f'<iframe srcdoc="{escape(self.html())}" width="100%" height="900"></iframe>'

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write `explanation.html`, the pictures as PNG files, and `explanation.json`.

        Raises:
            OutputError: they exist already, or can't be written.
        """
        facts = {"image": self.prediction.name} | self.facts()
        pictures = {f"{name}.png": picture for name, picture in self.pictures.items()}
        save_explanation(
            Path(folder), facts, pictures, self.notes, self.html(), overwrite=overwrite
        )

    def html(self) -> str:
        """The page for people, which loads nothing from elsewhere and fits on a sheet of A4."""
        return explanation_html(self)

    def facts(self) -> dict[str, Any]:
        """The model's id, score, verdict, regions and patches as plain values."""
        prediction, limits = self.prediction, self.prediction.thresholds
        facts: dict[str, Any] = {
            "model_id": self.model["model id"],
            "image_score": prediction.score,
            "verdict": prediction.verdict,
            "reason": prediction.reason,
        }
        if limits is not None:
            facts |= {"threshold": limits.image, "threshold_label": limits.label}
        return facts | {"regions": list(map(asdict, self.regions)), "patches": self.patches}


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
    flaws = () if detector.thresholds is None else prediction.regions
    places = [in_part(flaw, item.view.pose) for flaw in flaws]
    item = item.in_part()  # so that equal places of parts are compared
    scores = prediction.patch_scores
    height, width = scores.shape
    centres = patch_centres(item.view, (height, width))
    patches = worst_patches(scores, places, centres)
    of_region: dict[tuple[int, int], int] = {}
    for number, place in enumerate(places, 1):
        of_region.setdefault(worst_patches(scores, [place], centres)[0], number)
    worst = tile_of(item, (height, width), patches[0])
    extractor = detector.extractor
    maps = feature_map_pictures(
        extractor.network,
        network_input([worst], detector.normalise, detector.device)[0],
        extractor.layers,
        layouts=extractor.layouts,
        picture=picture_of(worst),
    )
    seen_map = fitted(prediction.heatmap())
    crops, facts = _compared(training, item, patches, scores)
    facts = [{"region": of_region.get(p), **f} for p, f in zip(patches, facts, strict=True)]
    pictures = {f"feature_maps_{layer}": picture for layer, picture in maps.items()}
    pictures["score_gradient"] = _gradient(detector, prediction, worst, seen_map)
    regions = region_rows(prediction.name, flaws, detector.config.image.mm_per_pixel)
    notes = _notes(detector.method, prediction, training)
    return Explanation(prediction, _about(detector), pictures, regions, facts, crops, notes)


def _about(detector: Model) -> dict[str, str]:
    """What `Explanation.model` says."""
    folder, model_id = detector.folder, detector.model_id
    if folder is not None and folder.name == "model":
        folder = folder.parent  # the run, as people name it
    return {
        "name": detector.name,
        "method": detector.method,
        "network": detector.config.backbone.name,
        "model id": model_id,
        "folder": "" if folder is None else str(folder),
        "trained": "" if folder is None else str(training_of(folder, model_id).get("time", "")),
        "good images": str(len(detector.manifest["training_images"])),
    }


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


def _gradient(
    detector: Model, prediction: Prediction, worst: NetworkInput, heatmap: RgbImage
) -> RgbImage:
    saliency = saliency_map(score_gradient(detector, worst))
    seen = fitted(picture_of(worst))
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
            f"nearest good patches: {method} keeps none; the page shows the same place on some "
            "good images instead"
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
) -> tuple[list[list[RgbImage]], list[dict[str, Any]]]:
    """Show patches beside what they were compared with.

    Args:
        good: the images that the detector has learned from.
        item: the image, with the decoded file.
        patches: (row, column) of each patch to show.
        scores: patch scores (h, w).

    Returns:
        For each patch its crop and those of what it was compared with; and its place, its score and
        the good patches that it was compared with.
    """
    picture = display(item.decoded)
    height, width = scores.shape
    crops: list[list[RgbImage]] = []
    facts: list[dict[str, Any]] = []
    for patch, near in zip(patches, good.nearest(item, patches), strict=True):
        score = float(scores[patch])
        crop = patch_crop(picture, patch_box(item.view, (height, width), *patch))
        crops.append([crop, *map(good.crop, near)])
        place = {"row": patch[0], "column": patch[1], "score": score}
        facts.append({**place, "compared_with": [asdict(other) for other in near]})
    return crops, facts
