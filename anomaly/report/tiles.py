"""Test images -> small pictures for the report: the image, its heatmap, and outlines."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.evaluation.evaluate import Map, Mask
from anomaly.maps.encoding import encoded, jpeg, pixels_for
from anomaly.maps.heatmap import display, layer, outlines
from anomaly.maps.regions import predicted_mask
from anomaly.scoring.prediction import Prediction

# All pictures of a page together, for about 30 MB at most: 190 images of 500 x 1254 are whole.
_PIXELS = 120_000_000
_HEAT_SIDE = 160


@dataclass(frozen=True)
class Tile:
    """What the report shows of one image.

    Attributes:
        photo: JPEG.
        heat: WebP with opacity, to be stretched over the photo; empty where nothing is coloured.
        size: (width, height) of the photo; the outlines' coordinates.
        source: (width, height) of the original image.
        truth: outline of the ground-truth mask, as an SVG path.
        marked: outline of the predicted mask, as an SVG path.
        partly: whether the network didn't look at some of the image.
    """

    photo: bytes
    heat: bytes
    size: tuple[int, int]
    source: tuple[int, int]
    truth: str
    marked: str
    partly: bool = False


class Tiles:
    """Makes tiles behind the scoring; used in a `with` statement.

    Args:
        count: how many images there will be; the more, the smaller their pictures.
        threshold: the anomaly map's value where marking starts; None takes each map's highest.
        workers: threads.
    """

    def __init__(self, count: int, threshold: float | None, workers: int) -> None:
        self._pixels = pixels_for(count, _PIXELS)
        self._threshold = threshold
        self._pool = ThreadPoolExecutor(workers)
        self._tiles: dict[int, Future[Tile]] = {}

    def __enter__(self) -> Tiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, prediction: Prediction, anomaly_map: Map, mask: Mask | None) -> None:
        """Take one image: (H0, W0) map and mask.

        Raises:
            ValueError: the image was decoded in another process.
        """
        if prediction.image is None:
            raise ValueError(f"image {prediction.index} isn't at hand to be shown")
        threshold = self._threshold
        if threshold is None:
            threshold = float(np.nanmax(anomaly_map))
        found = replace(prediction.source_map, values=anomaly_map)
        masks = mask, predicted_mask(found, threshold) > 0
        photo, small, areas = _reduced(
            display(prediction.image), anomaly_map, masks, self._pixels
        )  # now, so that the full image isn't kept waiting in the queue
        height, width = anomaly_map.shape
        self._tiles[prediction.index] = self._pool.submit(
            _encoded, photo, small, areas, threshold, (width, height)
        )

    def finished(self) -> dict[int, Tile]:
        """The tiles by the images' places in the test split; waits for the last."""
        return {index: future.result() for index, future in self._tiles.items()}


def fitting(size: tuple[int, int], pixels: int) -> tuple[int, int]:
    """(width, height) of a picture of `size` brought down to about so many pixels, or as it is."""
    scale = min(1.0, (pixels / (size[0] * size[1])) ** 0.5)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _reduced(
    picture: NDArray[np.uint8], anomaly_map: Map, masks: tuple[Mask | None, Mask], pixels: int
) -> tuple[NDArray[np.uint8], Map, tuple[Mask | None, Mask]]:
    """Picture, map, ground-truth and predicted mask of about so many pixels, or as they are."""
    height, width = anomaly_map.shape
    size = fitting((width, height), pixels)
    if size == (width, height):
        return picture.copy(), anomaly_map, masks
    photo = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
    small = np.asarray(cv2.resize(anomaly_map, size, interpolation=cv2.INTER_AREA), np.float32)
    truth, marked = masks
    return photo, small, (None if truth is None else _covered(truth, size), _covered(marked, size))


def _covered(mask: Mask, size: tuple[int, int]) -> Mask:
    """A mask made smaller: a defect of a single pixel must still show."""
    covered = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0
    return np.asarray(covered, bool)


def _encoded(
    photo: NDArray[np.uint8],
    anomaly_map: Map,
    masks: tuple[Mask | None, Mask],
    threshold: float,
    source: tuple[int, int],
) -> Tile:
    height, width = anomaly_map.shape
    truth, marked = masks
    return Tile(
        photo=jpeg(photo[..., ::-1]),
        heat=_heat(anomaly_map, threshold),
        size=(width, height),
        source=source,
        truth="" if truth is None else svg_path(outlines(truth)),
        marked=svg_path(outlines(marked)),
        partly=bool(np.isnan(anomaly_map).any()),
    )


def _heat(anomaly_map: Map, threshold: float) -> bytes:
    """The heatmap as a picture of its own; it is smooth, so a small one will do."""
    height, width = anomaly_map.shape
    scale = min(1.0, _HEAT_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = np.asarray(cv2.resize(anomaly_map, size, interpolation=cv2.INTER_AREA), np.float32)
    colours = layer(small, threshold)
    return _webp(colours[..., [2, 1, 0, 3]]) if colours[..., 3].any() else b""


def _webp(picture: NDArray[np.uint8]) -> bytes:
    return encoded(".webp", picture, cv2.IMWRITE_WEBP_QUALITY)


def svg_path(lines: Sequence[NDArray[np.int32]]) -> str:
    """Closed lines of pixel coordinates as an SVG path through the pixels' centres."""
    parts = []
    for line in lines:
        points = cv2.approxPolyDP(line, 0.6, closed=True).reshape(-1, 2)
        steps = np.diff(points, axis=0)
        start = f"M{points[0, 0]}.5 {points[0, 1]}.5"
        # A single pixel still gets a dot: a closed line of no length with round caps.
        parts.append(start + "".join(f"l{x} {y}" for x, y in steps) + "z")
    return "".join(parts)
