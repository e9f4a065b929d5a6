"""Maps, masks and small pictures as files: PNG, JPEG, TIFF."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.read import Decoding, read_image
from anomaly.maps.heatmap import display, encode_png
from anomaly.maps.regions import AnomalyMap, strips

# Level 65,535 stands for 8 times the threshold; level 0 for pixels that weren't looked at.
LEVELS_AT_THRESHOLD = 8192

_DEFLATE, _DIFFERENCES = 8, 2  # of TIFF, and its predictor


def encode_uint16(anomaly_map: AnomalyMap, size: tuple[int, int], threshold: float) -> bytes:
    """A map as a 16-bit grey PNG; the file states the scale: score = level × scale.

    Args:
        anomaly_map: gives some rows of the map, (rows, W0); NaN becomes 0.
        size: (H0, W0) of the image.
        threshold: level 8192, for all images of a model; eight times of it is the most. Of a
            threshold of 0, all scores above it have the highest level.
    """
    scale = max(threshold, 1e-12) / LEVELS_AT_THRESHOLD
    levels = np.empty(size, np.uint16)
    for strip in strips(size):
        scores = anomaly_map(strip)
        inside = np.clip(np.rint(np.nan_to_num(scores) / scale), 1, 65535)
        levels[strip] = np.where(np.isnan(scores), 0, inside)
    return encode_png(levels, {"scale": repr(scale)})


def encode_float32(anomaly_map: NDArray[np.float32]) -> bytes:
    """A map (H0, W0) as a float TIFF in score units, NaN where the network didn't look.

    Lossless, and made smaller in the way that libtiff, tifffile and scikit-image all read as they
    are: the predictor for floats (3) is smaller still, but needs a further package there.
    """
    settings = [cv2.IMWRITE_TIFF_COMPRESSION, _DEFLATE, cv2.IMWRITE_TIFF_PREDICTOR, _DIFFERENCES]
    return _encode(".tiff", anomaly_map, settings)


SHOWN = 200  # images with a picture on the page of a run
_PIXELS = 25_000_000  # of all of them together
_MOST, _LEAST = 2_000_000, 96 * 96
_QUALITY = 75


@dataclass(frozen=True)
class Thumbnail:
    """A picture brought down for a page.

    Attributes:
        photo: JPEG.
        size: its (width, height).
        source: those of the picture that it was made of.
    """

    photo: bytes
    size: tuple[int, int]
    source: tuple[int, int]


def thumbnail(picture: NDArray[np.uint8], pixels: int) -> Thumbnail:
    """A picture (H, W, 3) RGB at a whole fraction of its size, which is quick to make.

    Args:
        picture: what remains over at the right and at the bottom is left out.
        pixels: it has at most so many.
    """
    height, width = picture.shape[:2]
    step = max(1, min(math.ceil(math.sqrt(height * width / pixels)), height, width))
    size = width // step, height // step
    if step > 1:
        whole = picture[: size[1] * step, : size[0] * step]
        picture = np.asarray(cv2.resize(whole, size, interpolation=cv2.INTER_AREA), np.uint8)
    return Thumbnail(jpeg(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)), size, (width, height))


_PHOTOGRAPH_PIXELS = 4_000_000


def photograph(file: bytes, decoding: Decoding) -> bytes:
    """An image file as a JPEG for browsers, reduced by a whole factor."""
    return thumbnail(display(read_image(file, decoding)), _PHOTOGRAPH_PIXELS).photo


def pixels_for(count: int, together: int) -> int:
    """How many pixels each picture has at most, so that a page of `count` stays small.

    Args:
        count: pictures on the page.
        together: pixels of all of them.
    """
    return int(np.clip(together / max(count, 1), _LEAST, _MOST))


def jpeg(picture: NDArray[np.generic]) -> bytes:
    """A picture (H, W, 3) BGR as a JPEG file: larger than WebP, in a twentieth of its time."""
    return encoded(".jpg", picture, cv2.IMWRITE_JPEG_QUALITY)


def encoded(kind: str, picture: NDArray[np.generic], quality: int) -> bytes:
    """A picture as a file's bytes.

    Args:
        kind: the file's extension.
        picture: (H, W), (H, W, 3) or (H, W, 4) uint8, blue first.
        quality: OpenCV's number of the setting.
    """
    return _encode(kind, picture, [quality, _QUALITY])


def _encode(kind: str, picture: NDArray[np.generic], settings: list[int]) -> bytes:
    done, data = cv2.imencode(kind, np.ascontiguousarray(picture), settings)
    if not done:
        raise ValueError(f"a picture of shape {picture.shape} can't be encoded as {kind}")
    return data.tobytes()


class Thumbnails:
    """Those of the images that matter most, as far as a run has come: `SHOWN` at most.

    Args:
        count: images that there may be.
    """

    def __init__(self, count: int = SHOWN) -> None:
        self.pixels = pixels_for(min(count, SHOWN), _PIXELS)
        self._of: dict[str, Thumbnail] = {}
        self._ranked: list[tuple[bool, float, int, str]] = []
        self._number = itertools.count()

    def keep(self, heatmap: str, flagged: bool, score: float, small: Thumbnail) -> None:
        """Take the small picture of a heatmap, and drop one that now matters less."""
        self._of[heatmap] = small
        heapq.heappush(self._ranked, (flagged, score, -next(self._number), heatmap))
        if len(self._ranked) > SHOWN:
            self._of.pop(heapq.heappop(self._ranked)[-1], None)

    def get(self, heatmap: str) -> Thumbnail | None:
        """That of a heatmap; None where it isn't here."""
        return self._of.get(heatmap)
