"""Evidence for an anomaly score: patches, the good ones most like them, and the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.extractor import network_input
from anomaly.datasets import Sample
from anomaly.datasets.samples import listed
from anomaly.errors import DataError, ImageError
from anomaly.evaluation.splits import TrainingImages, dataset_images, training_names
from anomaly.explain import saliency
from anomaly.explain.page import Explanation
from anomaly.hooks import capture
from anomaly.imaging.geometry import AxisView, View
from anomaly.imaging.loading import NetworkInput, UnusableImage, turn_of, upright
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.inference.rows import region_rows
from anomaly.maps.anomaly_map import MarkedRegion
from anomaly.maps.heatmap import RgbImage, display
from anomaly.scoring.image_score import patches_inside, pieces_of
from anomaly.scoring.model import Model
from anomaly.scoring.prediction import Prediction

# A rectangle in an image's own pixels: top, left, bottom, right; the last two lie outside.
Box: TypeAlias = tuple[float, float, float, float]
MARK = (255, 64, 32)
_FLAWS = 4  # that are shown
_CROP = 150
_CONTEXT = 7  # sides of the patch that a crop shows


def explained(detector: Model, image: Path | Image, *good: str | Path) -> Explanation:
    """Find the evidence for an image's score; see `Detector.explain`.

    Args:
        detector: trained.
        image: a file, or pixels.
        good: further folders with training images.

    Raises:
        ImageError: the image can't be scored.
        DataError: one of `good` isn't a folder.
    """
    item = Decoders(detector.loading, keep_image=True).load(image)
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    (prediction,) = detector.predict_batches([[item]])
    if isinstance(prediction, UnusableImage):
        raise ImageError(prediction.reason, prediction.status)
    training = GoodImages(detector, good_images(detector, *good))
    flaws = () if detector.thresholds is None else prediction.regions
    places = [peak_of(flaw, item.view) for flaw in flaws]
    item = item.in_part()  # so that equal places of parts are compared
    scores = prediction.patch_scores
    patches = worst_patches(scores, places, item.view)
    pictures = _pictures(detector, prediction, tile_of(item, scores.shape, next(iter(patches))))
    photograph = display(item.decoded)
    crops: list[list[RgbImage]] = []
    facts: list[dict[str, Any]] = []
    found = training.nearest(item, [*patches])
    for (patch, region), near in zip(patches.items(), found, strict=True):
        crop = patch_crop(photograph, patch_box(item.view, scores.shape, *patch))
        crops.append([crop, *map(training.crop, near)])
        facts.append(
            {
                "region": region,
                "row": patch[0],
                "column": patch[1],
                "score": float(scores[patch]),
                "compared_with": [asdict(other) for other in near],
            }
        )
    folder = detector.folder
    if folder is not None and folder.name == "model":
        folder = folder.parent  # the run, as people name it
    model = {"name": detector.name, "model id": detector.model_id, "folder": str(folder or "")}
    regions = region_rows(prediction.name, flaws, detector.config.image.mm_per_pixel)
    notes = []
    if missing := training.missing():
        name, reason = next(iter(missing.items()))
        notes.append(
            f"{len(missing)} training images ({name}: {reason}); name their folder with --good "
            "(good=)"
        )
    return Explanation(prediction, model, pictures, regions, facts, crops, notes)


def _pictures(detector: Model, prediction: Prediction, worst: NetworkInput) -> dict[str, RgbImage]:
    """Feature maps and the score's gradient, by name.

    Args:
        detector: trained.
        prediction: of the image.
        worst: the image, or its worst tile.
    """
    extractor, seen = detector.extractor, saliency.picture_of(worst)
    maps = saliency.feature_map_pictures(
        extractor.network,
        network_input([worst], detector.normalise, detector.device)[0],
        extractor.layers,
        picture=seen,
    )
    pictures = {f"feature_maps_{layer}": picture for layer, picture in maps.items()}
    seen, gradient = saliency.fitted(seen), saliency.saliency_map(score_gradient(detector, worst))
    pictures["score_gradient"] = saliency.beside(
        [
            ("what the network sees" + (" of its worst tile" if worst.whole else ""), seen),
            (f"heatmap, score {prediction.score:.3g}", saliency.fitted(prediction.heatmap())),
            ("pixels that move the score: |gradient|", saliency.glowing(seen, gradient)),
        ]
    )
    return pictures


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
        in_folders += listed(folder)
    of_dataset: list[Sample] = []
    if detector.folder is not None:
        with suppress(DataError):
            of_dataset = dataset_images(detector, detector.folder)
    hashes = detector.manifest["training_images"]
    return TrainingImages(hashes, [*of_dataset, *in_folders], renamed=in_folders)


def patch_box(view: View, grid: tuple[int, int], row: int, column: int) -> Box:
    """The box of a patch in the original image, or in the part where the view is one of it.

    Args:
        view: how the network saw the image.
        grid: (h, w) of its patch grid; with tiles, of their mosaic.
        row: of the patch.
        column: of the patch.
    """
    (top, bottom), (left, right) = (
        _edges(pieces, count, index)
        for pieces, count, index in zip(view.axes, grid, (row, column), strict=True)
    )
    return top, left, bottom, right


def patch_crop(picture: RgbImage, box: Box, size: int = _CROP) -> RgbImage:
    """A patch and its surroundings, the patch itself outlined.

    Args:
        picture: the whole image, (H0, W0, 3).
        box: the patch.
        size: side of the result.

    Returns:
        (size, size, 3); beyond the image's border it is white.
    """
    first_row, first_column, end_row, end_column = box
    side = max(1, round(max(end_row - first_row, end_column - first_column) * _CONTEXT))
    top, left = (round((a + b - side) / 2) for a, b in zip(box[:2], box[2:], strict=True))
    around = ((side, side), (side, side), (0, 0))
    padded = np.pad(picture, around, constant_values=saliency.BACKGROUND)
    crop = padded[top + side : top + 2 * side, left + side : left + 2 * side]
    result, scale = saliency.resized(crop, size, size, cv2.INTER_CUBIC), size / side
    first = round((first_column - left) * scale) - 1, round((first_row - top) * scale) - 1
    last = round((end_column - left) * scale), round((end_row - top) * scale)
    return np.asarray(cv2.rectangle(result, first, last, MARK, 1), np.uint8)


def absent(text: str) -> RgbImage:
    """A grey tile, as large as a crop, that says word by word why there is no picture."""
    tile = np.full((_CROP, _CROP, 3), 225, np.uint8)
    words = saliency.stacked([saliency.text_line(word, _CROP) for word in text.split()])
    top = (_CROP - len(words)) // 2
    tile[top : top + len(words)] = np.minimum(words, tile[0])
    return tile


def _edges(pieces: Sequence[AxisView], count: int, index: int) -> tuple[float, float]:
    """Beginning and end of one of `count` patches along an axis of one or more pieces."""
    each = count // len(pieces)
    piece = pieces[index // each]
    local = index % each
    start, end = piece.to_source(np.array([local, local + 1.0]) * (piece.size / each)).tolist()
    return start, end


def worst_patches(
    scores: NDArray[np.float32], places: Sequence[tuple[float, float]], view: View
) -> dict[tuple[int, int], int | None]:
    """The patches at the peaks of the four worst flaws.

    Args:
        scores: patch scores (h, w), with tiles of their mosaic; NaN doesn't count.
        places: (x, y) of the flaws' peaks, the worst first. Where there are none, the highest of
            all patches is returned alone.
        view: how the network saw the image that the peaks are places of.

    Returns:
        (row, column) of each once, and which flaw it is of, from 1.
    """
    rows, columns = (
        np.array([sum(_edges(pieces, count, index)) / 2 for index in range(count)])
        for pieces, count in zip(view.axes, scores.shape, strict=True)
    )
    worst: dict[tuple[int, int], int | None] = {}
    for number, (x, y) in enumerate(places[:_FLAWS], 1):
        away = (rows[:, None] - y) ** 2 + (columns - x) ** 2
        worst.setdefault(_where(np.where(np.isnan(scores), -np.inf, -away)), number)
    return worst or {_where(np.nan_to_num(scores, nan=-np.inf)): None}


def _where(values: NDArray[Any]) -> tuple[int, int]:
    """(row, column) of the highest value (h, w)."""
    row, column = divmod(int(values.argmax()), values.shape[1])
    return row, column


def peak_of(flaw: MarkedRegion, view: View) -> tuple[float, float]:
    """(x, y) of a flaw's highest pixel, in the part's coordinates where it has a pose."""
    peak = np.array([(flaw.peak_x + 0.5, flaw.peak_y + 0.5)])
    ((x, y),) = (peak if view.pose is None else view.pose.in_part(peak)).tolist()
    return x, y


@dataclass(frozen=True)
class GoodPatch:
    """A patch of a training image.

    Attributes:
        image: the training image's name.
        row: of the patch grid.
        column: of the patch grid.
        distance: to the patch that it is compared with; None where it only shows the same place.
    """

    image: str
    row: int
    column: int
    distance: float | None


def tile_of(item: NetworkInput, grid: tuple[int, int], patch: tuple[int, int]) -> NetworkInput:
    """The network's input at a patch: one tile, or the whole image where there are no tiles.

    Args:
        item: one loaded image.
        grid: (h, w) of its patch grid; with tiles, of their mosaic.
        patch: (row, column) in that grid.
    """
    if item.view.whole:
        return item
    rows, columns = item.view.axes
    row, column = patch[0] * len(rows) // grid[0], patch[1] * len(columns) // grid[1]
    view = View((rows[row],), (columns[column],))
    pixels = item.render(view)
    return replace(item, view=view, pixels=pixels, tile=(row, column), whole=item.view)


def score_gradient(detector: Model, item: NetworkInput) -> Tensor:
    """The gradient of an image's anomaly score with respect to its pixels.

    Args:
        detector: of any method, with any image score.
        item: one loaded image, or one tile of it.

    Returns:
        (3, H, W) at the network's size, in score units per unit of a colour in [0, 1].
    """
    network, layers = detector.extractor.network, detector.extractor.layers
    pieces = pieces_of([item])

    def score(images: Tensor) -> Tensor:
        with capture(network, layers, stop=True, grad=True) as captured:
            captured.run(detector.normalise(images))
            maps = detector.extractor.maps_of(captured.pop(), images)
        embeddings = detector.embedder.align(maps)
        inside = patches_inside(pieces, embeddings, detector.region)
        scores: Tensor = detector.score_patches(embeddings, pieces, inside)[1]
        return scores

    pixels = torch.from_numpy(item.pixels).permute(2, 0, 1).to(detector.device)
    return saliency.image_gradient(score, pixels)


class GoodImages:
    """The good images that a detector has learned from, as far as they are still to be found.

    Args:
        detector: a trained detector.
        files: finds them.
    """

    def __init__(self, detector: Model, files: TrainingImages) -> None:
        self._detector = detector
        self._names = training_names(detector.manifest)
        self._files = files
        self._looked_up: dict[str, NetworkInput | str] = {}
        self._grid_of = cache(detector.embedder.grid)

    def nearest(
        self, item: NetworkInput, patches: Sequence[tuple[int, int]], count: int = 5
    ) -> list[list[GoodPatch]]:
        """The good patches that patches were compared with, nearest first.

        A method that keeps patches names them. One that keeps none is shown with the same place
        on `count` good images, taken evenly.

        Args:
            item: the image that the patches are of.
            patches: (row, column) of each.
            count: how many good patches for each.
        """
        with torch.inference_mode():
            wanted = torch.stack([self._embedding(item, patch) for patch in patches])
            evidence = self._detector.scorer.evidence(wanted, count)
        if evidence is None:
            learned = list(self._detector.manifest["training_images"])
            count = min(count, len(learned))
            picked = [learned[i * len(learned) // count] for i in range(count)]
            return [
                [GoodPatch(name, *self._same_place(item, patch, name), None) for name in picked]
                for patch in patches
            ]
        distances, origins = (values.tolist() for values in evidence)
        return [
            [
                GoodPatch(self._names[image], *self.as_photographed(image, row, column), distance)
                for (image, row, column), distance in zip(places, near, strict=True)
            ]
            for places, near in zip(origins, distances, strict=True)
        ]

    def crop(self, patch: GoodPatch) -> RgbImage:
        """The patch in its surroundings (H, W, 3), or a grey tile that says why it isn't shown."""
        item = self._image(patch.image)
        if isinstance(item, str):
            return absent(item)
        box = patch_box(item.view, self._grid(item), patch.row, patch.column)
        return patch_crop(display(item.decoded), box)

    def as_photographed(self, image: int, row: int, column: int) -> tuple[int, int]:
        """The place on an image of a patch that was learned from it, or from a turned copy.

        Args:
            image: its number.
            row: of the patch, as its origin has it.
            column: of the patch.
        """
        turn, row = turn_of(row)
        item = self._image(self._names[image]) if turn else "isn't needed"
        if isinstance(item, str):
            return row, column
        rows, columns = item.view.axes
        return upright(turn, (row, column), self._grid(item), (len(rows), len(columns)))

    def _same_place(self, item: NetworkInput, patch: tuple[int, int], name: str) -> tuple[int, int]:
        """The same place as a patch's on a training image, whose grid may be another."""
        other = self._image(name)
        if isinstance(other, str):
            return patch
        row, column = (
            (2 * place + 1) * there // (2 * here)
            for place, here, there in zip(patch, self._grid(item), self._grid(other), strict=True)
        )
        return row, column

    def missing(self) -> dict[str, str]:
        """Images that were wanted but couldn't be shown, and why."""
        return {name: item for name, item in self._looked_up.items() if isinstance(item, str)}

    def _image(self, name: str) -> NetworkInput | str:
        """A training image, or why it isn't there."""
        if name not in self._looked_up:
            found: Sample | NetworkInput | UnusableImage | str = self._files.find(name)
            if isinstance(found, Sample):
                found = Decoders(self._detector.loading, keep_image=True).load(found.path)
            if isinstance(found, UnusableImage):
                found = "can't be read"
            self._looked_up[name] = found if isinstance(found, str) else found.in_part()
        return self._looked_up[name]

    def _embedding(self, item: NetworkInput, patch: tuple[int, int]) -> Tensor:
        tile = tile_of(item, self._grid(item), patch)
        embeddings = self._detector.embedder([tile])[0]
        height, width = embeddings.shape[:2]
        return embeddings[patch[0] % height, patch[1] % width]

    def _grid(self, item: NetworkInput) -> tuple[int, int]:
        """(h, w) of the patch grid, of the mosaic where there are tiles."""
        rows, columns = item.view.axes
        height, width = self._grid_of((rows[0].size, columns[0].size))
        return height * len(rows), width * len(columns)
