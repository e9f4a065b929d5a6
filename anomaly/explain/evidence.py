"""Why a detector says so: which patches, unlike which good ones, because of which pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.errors import ImageError
from anomaly.evaluation.splits import TrainingImages
from anomaly.explain.feature_maps import feature_map_pictures
from anomaly.explain.patches import absent, patch_box, patch_crop
from anomaly.explain.pictures import RgbImage
from anomaly.explain.saliency import image_gradient
from anomaly.hooks import capture
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Tiling, View
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, turn_of, upright
from anomaly.maps.heatmap import display
from anomaly.scoring.image_score import inside_of
from anomaly.scoring.pipeline import Model


@dataclass(frozen=True)
class Findings:
    """What there is to say and show about an image.

    Attributes:
        facts: for a machine to read.
        pictures: (H, W, 3) uint8 RGB, by the name of a file for each.
        notes: what can't be shown, and why.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, RgbImage] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def draw_maps(
        self,
        network: nn.Module,
        image: Tensor,
        layers: Sequence[str],
        picture: RgbImage,
        before: str = "",
    ) -> None:
        """Draw the feature maps of layers.

        Args:
            network: in eval mode.
            image: (3, H, W), normalised as the network wants it, on its device.
            layers: paths of layers that put out feature maps.
            picture: the image before it was normalised, (H, W, 3) uint8 RGB.
            before: what the pictures' names begin with.
        """
        maps = feature_map_pictures(network, image, layers, picture=picture)
        for layer, drawn in maps.items():
            self.pictures[f"{before}feature_maps_{layer}.png"] = drawn


def read_one(path: Path, loading: Preprocessing, decoders: Decoders) -> NetworkInput:
    """Load one image, with the decoded file.

    Raises:
        ImageError: it can't be used.
    """
    decoders.begin(Task(loading, keep_image=True))
    item = decoders.load(path)
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    return item


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
    """What the network sees of an image at a patch: one tile, or all of it where it has no tiles.

    Args:
        item: one loaded image.
        grid: (h, w) of its patch grid; with tiles, of their mosaic.
        patch: (row, column) in that grid.
    """
    if not isinstance(item.view, Tiling):
        return item
    rows, columns = item.view.axes
    row, column = patch[0] * len(rows) // grid[0], patch[1] * len(columns) // grid[1]
    view = View(rows[row], columns[column])
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

    def score(images: Tensor) -> Tensor:
        with capture(network, layers, stop=True, grad=True) as captured:
            captured.run(detector.normalise(images))
            maps = detector.extractor.maps_of(captured.pop(), images)
        embeddings = detector.embedder.align(maps)
        inside = inside_of([item], embeddings, detector.region)
        found: Tensor = detector.score_patches(embeddings, item.layout, inside)[1]
        return found

    pixels = torch.from_numpy(item.pixels).permute(2, 0, 1).to(detector.device)
    return image_gradient(score, pixels)


def training_names(manifest: Mapping[str, Any]) -> list[str]:
    """The names of the training images, each at the index that the memory bank knows it by."""
    names = list(manifest["training_images"])
    refused: dict[str, int] = manifest["refused_images"] or {}
    for name, index in sorted(refused.items(), key=lambda at: at[1]):
        names.insert(index, name)
    return names


class GoodImages:
    """The good images that a detector has learned from, as far as they are still to be found.

    Args:
        detector: a trained detector.
        manifest: of its model folder.
        there: finds them.
        read: loads one file as the detector wants it, with the decoded image.
    """

    def __init__(
        self,
        detector: Model,
        manifest: Mapping[str, Any],
        there: TrainingImages,
        read: Callable[[Path], NetworkInput | UnusableImage],
    ) -> None:
        self._detector = detector
        self._read = read
        self._names = training_names(manifest)
        self._hashes: dict[str, str] = manifest["training_images"]
        self._files = there
        self._found: dict[str, NetworkInput | str] = {}
        self._grids: dict[tuple[int, int], tuple[int, int]] = {}

    def nearest(
        self, item: NetworkInput, patches: Sequence[tuple[int, int]], count: int = 5
    ) -> list[list[GoodPatch]]:
        """What patches were compared with, nearest first.

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
            learned = list(self._hashes)
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
        """Where a patch that was learned of an image, or of a turned copy of it, is on the image.

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
        """Where a patch of an image would be on a training image, whose grid may be another."""
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
        return {name: item for name, item in self._found.items() if isinstance(item, str)}

    def _image(self, name: str) -> NetworkInput | str:
        if name not in self._found:
            self._found[name] = self._look_for(name)
        return self._found[name]

    def _look_for(self, name: str) -> NetworkInput | str:
        found = self._files.find(name)
        if isinstance(found, str):
            return found
        item = self._read(found.path)
        return item if isinstance(item, NetworkInput) else "can't be read"

    def _embedding(self, item: NetworkInput, patch: tuple[int, int]) -> Tensor:
        tile = tile_of(item, self._grid(item), patch)
        embeddings = self._detector.embedder([tile])[0]
        height, width = embeddings.shape[:2]
        return embeddings[patch[0] % height, patch[1] % width]

    def _grid(self, item: NetworkInput) -> tuple[int, int]:
        """(h, w) of the patch grid, of the mosaic where there are tiles."""
        rows, columns = item.view.axes
        size = item.view.size
        if size not in self._grids:
            (tile,) = next(item.tiles(1))
            height, width = tile.pixels.shape[:2]
            self._grids[size] = self._detector.embedder.grid((height, width))
        height, width = self._grids[size]
        return height * len(rows), width * len(columns)
