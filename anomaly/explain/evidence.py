"""Evidence for an image score: worst patches, good patches like them, gradient of the score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.extractor import network_input
from anomaly.errors import ImageError
from anomaly.evaluation.evaluate import TrainingImages
from anomaly.explain import saliency
from anomaly.explain.page import Explanation
from anomaly.hooks import capture
from anomaly.imaging.geometry import View, patch_edges
from anomaly.imaging.loading import NetworkInput, UnusableImage, turn_of, upright
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.inference.results import region_rows
from anomaly.maps.anomaly_map import MarkedRegion
from anomaly.maps.heatmap import RgbImage, display
from anomaly.scoring.model import Model, Prediction, patches_inside, pieces_of

# A rectangle in an image's own pixels: top, left, bottom, right; the last two lie outside.
Box: TypeAlias = tuple[float, float, float, float]
MARK = (255, 64, 32)
_FLAWS = 4  # marked regions with crops
_CROP = 150  # side of a crop in pixels
_CONTEXT = 7  # side of a crop in sides of its patch


def explained(model: Model, image: Path | Image, *good: str | Path) -> Explanation:
    """The evidence for an image's score.

    Args:
        model: the trained model.
        image: a file, or pixels.
        good: folders with training images, besides the data set's.

    Raises:
        ImageError: the image can't be scored.
        DataError: a name in `good` isn't a folder.
    """
    item = Decoders(model.loading, keep_image=True).load(image)
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    (prediction,) = model.predict_batches([[item]])
    if isinstance(prediction, UnusableImage):
        raise ImageError(prediction.reason, prediction.status)
    flaws = () if model.thresholds is None else prediction.regions
    peaks = [peak_of(flaw, item.view) for flaw in flaws]
    item = item.in_part()  # so that equal places are compared
    scores = prediction.patch_scores
    patches = worst_patches(scores, peaks, item.view)
    good_images = GoodImages(model, *good)
    facts, crops = _compared(item, scores, patches, good_images)
    folder = model.folder
    if folder is not None and folder.name == "model":
        folder = folder.parent  # the run, as people name it
    return Explanation(
        prediction,
        {"name": model.name, "model id": model.model_id, "folder": str(folder or "")},
        _pictures(model, prediction, tile_of(item, scores.shape, next(iter(patches)))),
        region_rows(prediction.name, flaws, model.config.image.mm_per_pixel),
        facts,
        crops,
        good_images.missing(),
    )


def _compared(
    item: NetworkInput,
    scores: NDArray[np.float32],
    patches: Mapping[tuple[int, int], int | None],
    good_images: GoodImages,
) -> tuple[list[dict[str, Any]], list[list[RgbImage]]]:
    """Facts and crops of an image's worst patches, and of the good patches beside each.

    Args:
        item: the image, in its part's coordinates.
        scores: patch scores (h, w).
        patches: from `worst_patches`.
        good_images: source of the good patches.
    """
    photograph = display(item.decoded)
    facts: list[dict[str, Any]] = []
    crops: list[list[RgbImage]] = []
    nearest = good_images.nearest(item, [*patches])
    for (patch, region), good_patches in zip(patches.items(), nearest, strict=True):
        crop = patch_crop(photograph, patch_box(item.view, scores.shape, *patch))
        crops.append([crop, *map(good_images.crop, good_patches)])
        facts.append(
            {
                "region": region,
                "row": patch[0],
                "column": patch[1],
                "score": float(scores[patch]),
                "compared_with": [asdict(good_patch) for good_patch in good_patches],
            }
        )
    return facts, crops


def _pictures(model: Model, prediction: Prediction, worst: NetworkInput) -> dict[str, RgbImage]:
    """Pictures of feature maps and of the score's gradient, by name, of an image or worst tile."""
    extractor = model.extractor
    network_picture = saliency.levels(worst.pixels)
    (normalised,) = network_input([worst], model.normalise, model.device)
    maps = saliency.feature_map_pictures(
        extractor.network, normalised, extractor.layers, picture=network_picture
    )
    pictures = {f"feature_maps_{layer}": picture for layer, picture in maps.items()}
    shown = saliency.fitted(network_picture)
    glow = saliency.glowing(shown, saliency.saliency_map(score_gradient(model, worst)))
    pictures["score_gradient"] = saliency.beside(
        [
            ("what the network sees" + (" of its worst tile" if worst.mosaic else ""), shown),
            (f"heatmap, score {prediction.score:.3g}", saliency.fitted(prediction.heatmap())),
            ("pixels that move the score: |gradient|", glow),
        ]
    )
    return pictures


def patch_box(view: View, grid: tuple[int, int], row: int, column: int) -> Box:
    """The box of a patch in the original image, or in the part's coordinates of an aligned one.

    The patch lies in a row and column of the image's patch grid (h, w), with tiles of their mosaic.
    """
    (top, bottom), (left, right) = (
        patch_edges(pieces, count // len(pieces))[:, index].tolist()
        for pieces, count, index in zip(view.axes, grid, (row, column), strict=True)
    )
    return top, left, bottom, right


def patch_crop(picture: RgbImage, box: Box, size: int = _CROP) -> RgbImage:
    """A patch and its surroundings, the patch itself outlined.

    Args:
        picture: the whole image (H0, W0, 3).
        box: the patch's box in it.
        size: side of the result in pixels.

    Returns:
        (size, size, 3), white beyond the image's border.
    """
    first_row, first_column, end_row, end_column = box
    # Padded by a whole crop on each side, so that a patch at the border needs no case of its own.
    side = max(1, round(max(end_row - first_row, end_column - first_column) * _CONTEXT))
    top, left = (round((a + b - side) / 2) for a, b in zip(box[:2], box[2:], strict=True))
    around = ((side, side), (side, side), (0, 0))
    padded = np.pad(picture, around, constant_values=saliency.BACKGROUND)
    crop = padded[top + side : top + 2 * side, left + side : left + 2 * side]
    result, scale = saliency.resized(crop, size, size, cv2.INTER_CUBIC), size / side
    # The outline lies outside the patch: one pixel before its first, and at its end.
    first = round((first_column - left) * scale) - 1, round((first_row - top) * scale) - 1
    last = round((end_column - left) * scale), round((end_row - top) * scale)
    return np.asarray(cv2.rectangle(result, first, last, MARK, 1), np.uint8)


def _not_found() -> RgbImage:
    """A grey tile (150, 150, 3) in place of the crop of a missing training image."""
    tile = np.full((_CROP, _CROP, 3), 225, np.uint8)
    words = saliency.text_line("not found", _CROP)
    tile[_CROP // 2 :][: len(words)] = np.minimum(words, 225)
    return tile


def worst_patches(
    scores: NDArray[np.float32], peaks: Sequence[tuple[float, float]], view: View
) -> dict[tuple[int, int], int | None]:
    """Patches at the peaks of the four worst marked regions; without any, the highest patch.

    Args:
        scores: patch scores (h, w), with tiles of their mosaic; NaN doesn't count.
        peaks: (x, y) of the marked regions' peaks, from `peak_of`, the worst region first.
        view: geometry of the network's input.

    Returns:
        Number of the region, from 1, or None, by the patch's (row, column). Of regions with one
        nearest patch only the worst is named.
    """
    # Middles of the patches, in the coordinates of the peaks.
    rows, columns = (
        patch_edges(pieces, count // len(pieces)).mean(axis=0)
        for pieces, count in zip(view.axes, scores.shape, strict=True)
    )
    worst: dict[tuple[int, int], int | None] = {}
    for number, (x, y) in enumerate(peaks[:_FLAWS], 1):
        distance = (rows[:, None] - y) ** 2 + (columns - x) ** 2
        # The nearest patch that counts.
        worst.setdefault(_highest(np.where(np.isnan(scores), np.nan, -distance)), number)
    return worst or {_highest(scores): None}


def _highest(values: NDArray[Any]) -> tuple[int, int]:
    """(row, column) of the highest of the values (h, w); NaN doesn't count."""
    row, column = divmod(int(np.nanargmax(values)), values.shape[1])
    return row, column


def peak_of(flaw: MarkedRegion, view: View) -> tuple[float, float]:
    """(x, y) of the middle of a region's highest pixel, in the part's coordinates if aligned."""
    peak = np.array([(flaw.peak_x + 0.5, flaw.peak_y + 0.5)])
    ((x, y),) = (peak if view.pose is None else view.pose.in_part(peak)).tolist()
    return x, y


@dataclass(frozen=True)
class GoodPatch:
    """A patch of a training image.

    Attributes:
        image: name of the training image.
        row: row in the image's patch grid.
        column: column in the image's patch grid.
        distance: distance in score units to the patch it stands beside; None where the method
            measures none, and the patch only shows the same place.
    """

    image: str
    row: int
    column: int
    distance: float | None


def tile_of(item: NetworkInput, grid: tuple[int, int], patch: tuple[int, int]) -> NetworkInput:
    """The network's input at a patch: the patch's tile, or the whole image without tiles.

    The patch lies in (row, column) of the image's patch grid (h, w), with tiles of their mosaic.
    """
    if item.view.whole:
        return item
    rows, columns = item.view.axes
    row, column = patch[0] * len(rows) // grid[0], patch[1] * len(columns) // grid[1]
    return item.tile_at(row, column)


def score_gradient(model: Model, item: NetworkInput) -> Tensor:
    """The gradient of an image's anomaly score with respect to its pixels.

    Args:
        model: the trained model, of any method, with any image score.
        item: one loaded image, or one tile of it.

    Returns:
        (3, H, W) at the network's size, in score units per unit of a colour in [0, 1].
    """
    network, layers = model.extractor.network, model.extractor.layers
    pieces = pieces_of([item])

    def score(images: Tensor) -> Tensor:
        with capture(network, layers, stop=True, grad=True) as captured:
            captured.run(model.normalise(images))
            maps = model.extractor.maps_of(captured.pop(), images)
        embeddings = model.embedder.align(maps)
        inside = patches_inside(pieces, embeddings, model.region)
        scores: Tensor = model.score_patches(embeddings, pieces, inside)[1]
        return scores

    pixels = torch.from_numpy(item.pixels).permute(2, 0, 1).to(model.device)
    return saliency.image_gradient(score, pixels)


def training_names(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the training images, in the order of the indices that memory bank vectors carry.

    Args:
        manifest: a model's manifest; images refused or left out have an index, too.
    """
    names = list(manifest["training_images"])
    refused: dict[str, int] = manifest["refused_images"]
    # The lowest index first, so that each name lands at its own.
    for name, index in sorted(refused.items(), key=lambda item: item[1]):
        names.insert(index, name)
    return names


class GoodImages:
    """Good patches of a model's training images, with pictures where the files still exist.

    Args:
        model: the trained model.
        folders: folders with training images, besides the data set's.

    Raises:
        DataError: a name isn't a folder.
    """

    def __init__(self, model: Model, *folders: str | Path) -> None:
        self._model = model
        self._names = training_names(model.manifest)
        self._files = TrainingImages(model, *folders)
        self._loaded: dict[str, NetworkInput | None] = {}  # by name; None for one not found
        self._grid_of = cache(model.embedder.grid)

    def nearest(
        self, item: NetworkInput, patches: Sequence[tuple[int, int]], count: int = 5
    ) -> list[list[GoodPatch]]:
        """Good patches to compare an image's patches with, a list for each patch.

        A memory bank gives those nearest to a patch, nearest first. A method without a bank gives
        the same place on images spread evenly over the training set.

        Args:
            item: the image.
            patches: (row, column) of the image's patches.
            count: most good patches in a list.
        """
        with torch.inference_mode():
            embeddings = torch.stack([self._embedding(item, patch) for patch in patches])
            evidence = self._model.scorer.evidence(embeddings, count)
        if evidence is None:  # the method keeps no patches
            learned = list(self._model.manifest["training_images"])
            count = min(count, len(learned))
            names = [learned[i * len(learned) // count] for i in range(count)]
            return [
                [GoodPatch(name, *self._same_place(item, patch, name), None) for name in names]
                for patch in patches
            ]
        distances, origins = (values.tolist() for values in evidence)
        return [
            [
                GoodPatch(self._names[image], *self.as_photographed(image, row, column), distance)
                for (image, row, column), distance in zip(places, nearest, strict=True)
            ]
            for places, nearest in zip(origins, distances, strict=True)
        ]

    def crop(self, patch: GoodPatch) -> RgbImage:
        """A patch in its surroundings (150, 150, 3); a grey tile where its image is missing."""
        item = self._image(patch.image)
        if item is None:
            return _not_found()
        box = patch_box(item.view, self._grid(item), patch.row, patch.column)
        return patch_crop(display(item.decoded), box)

    def as_photographed(self, image: int, row: int, column: int) -> tuple[int, int]:
        """Place of a learned patch on the upright image: (row, column) in that image's patch grid.

        Args:
            image: index of the training image.
            row: row from the bank's origin, which also holds the turn of a turned copy.
            column: column from the bank's origin.
        """
        turn, row = turn_of(row)
        if not turn or (item := self._image(self._names[image])) is None:
            return row, column
        rows, columns = item.view.axes
        return upright(turn, (row, column), self._grid(item), (len(rows), len(columns)))

    def _same_place(self, item: NetworkInput, patch: tuple[int, int], name: str) -> tuple[int, int]:
        """(row, column) of an image's patch in the grid, which may differ, of a training image.

        It is `patch` itself if the training image is missing.
        """
        good = self._image(name)
        if good is None:
            return patch
        # The patch of the training image in which this one's middle lies, in whole numbers.
        row, column = (
            (2 * place + 1) * target // (2 * count)
            for place, count, target in zip(patch, self._grid(item), self._grid(good), strict=True)
        )
        return row, column

    def missing(self) -> list[str]:
        """Names of the training images that were to be shown and weren't found."""
        return [name for name, item in self._loaded.items() if item is None]

    def _image(self, name: str) -> NetworkInput | None:
        """A training image by name, in its part's coordinates; None where no file is that image."""
        if name not in self._loaded:
            self._loaded[name] = None
            if sample := self._files.find(name):
                item = Decoders(self._model.loading, keep_image=True).load(sample.path)
                if isinstance(item, NetworkInput):
                    self._loaded[name] = item.in_part()
        return self._loaded[name]

    def _embedding(self, item: NetworkInput, patch: tuple[int, int]) -> Tensor:
        """The embedding (D,) of an image's patch."""
        tile = tile_of(item, self._grid(item), patch)
        embeddings = self._model.embedder([tile])[0]
        height, width = embeddings.shape[:2]
        return embeddings[patch[0] % height, patch[1] % width]

    def _grid(self, item: NetworkInput) -> tuple[int, int]:
        """(h, w) of an image's patch grid; with tiles, of their mosaic."""
        rows, columns = item.view.axes
        height, width = self._grid_of((rows[0].size, columns[0].size))
        return height * len(rows), width * len(columns)
