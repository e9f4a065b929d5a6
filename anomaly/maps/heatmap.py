"""Anomaly map + image -> heatmap; pictures, maps and masks as files.

Colours mean the same in all images of a model: none below three quarters of the threshold, full
colour from 5/4 on, brightest at twice the threshold. The colour map is inferno, in which equal
steps of the score look equal, also in grey and to the colour-blind. A line runs around each marked
region, and a fainter line around each region for review.
"""

from __future__ import annotations

import heapq
import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count

import cv2
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from anomaly.imaging.read import Decoding, Image, read_image
from anomaly.maps.anomaly_map import FAINT, MARKED, SourceMap, outlined_areas, strips

RgbImage = NDArray[np.uint8]

OPACITY = 0.65  # of the colours over the image
_FAINT = 0.5  # opacity of the line around a region for review
_AT_THRESHOLD = 127.5  # colour level of the threshold; levels 0 to 255 reach to twice as high
_SHOWN_FROM = 0.75  # share of the threshold; lower values aren't coloured


def display(image: Image, rows: slice = slice(None)) -> RgbImage:
    """Rows (rows, W0, 3) of an image as 8-bit RGB; deeper pixels are scaled by their full scale."""
    pixels = image.pixels[rows]
    if pixels.dtype != np.uint8:
        pixels = cv2.convertScaleAbs(pixels, alpha=255 / image.full_scale)
    return np.asarray(pixels, np.uint8)


def shrunk(image: Image, size: tuple[int, int]) -> Image:
    """An image reduced to (H, W), at most its own size."""
    if image.size == size:
        return image
    # Averaging areas takes eight times as long, and looks better only from a factor of two on.
    interpolation = cv2.INTER_AREA if image.size[0] >= 2 * size[0] else cv2.INTER_LINEAR
    pixels = cv2.resize(image.pixels, size[::-1], interpolation=interpolation)
    return replace(image, pixels=np.asarray(pixels))


def heatmap(
    image: Image,
    anomaly_map: SourceMap,
    threshold: float,
    review: float | None = None,
    *,
    rejected: bool = False,
) -> RgbImage:
    """An image with the colours of its anomaly map, and lines around the defects.

    Args:
        image: the decoded file, H0×W0 pixels.
        anomaly_map: anomaly map of the same size; the image is darkened where it is NaN.
        threshold: map value from which defects are marked, above 0.
        review: lower map value from which areas get a fainter line; None for none.
        rejected: the image is rejected, see `outlined_areas`.

    Returns:
        (H0, W0, 3) RGB.
    """
    areas = outlined_areas(anomaly_map, threshold, review, rejected=rejected)
    height, width = image.size
    line = max(1, round(min(image.size) / 300))
    margin = 2 * line + 2
    result = np.empty((height, width, 3), np.uint8)
    for rows in strips(image.size):  # a large image's whole map may not fit into memory
        # Outlines also run along the cut; these lie in the margin, which is cut off again.
        wide = slice(max(0, rows.start - margin), rows.stop + margin)
        strip = np.array(display(image, wide))
        values, outlined = anomaly_map(wide), areas[wide]
        _tint(strip, values, threshold)
        strip[np.isnan(values)] //= 2
        if (outlined == FAINT).any():
            _outline(strip, outlined > 0, line, _FAINT)
        _outline(strip, outlined == MARKED, line)
        result[rows] = strip[rows.start - wide.start :][: rows.stop - rows.start]
    return result


def _tint(picture: RgbImage, anomaly_map: NDArray[np.float32], threshold: float) -> None:
    """Colour a picture (H, W, 3) in place where its map (H, W) exceeds 3/4 of the threshold."""
    box = _around(anomaly_map > _SHOWN_FROM * threshold)
    if box is None:
        return
    tint, veil = _tables()
    level = _levels(anomaly_map[box], threshold)
    levels = cv2.merge([level, level, level])
    # Look-ups and 8-bit arithmetic: ten times as fast as blending in floats.
    dimmed = cv2.multiply(picture[box], cv2.LUT(levels, veil), scale=1 / 255)
    picture[box] = cv2.add(dimmed, cv2.LUT(levels, tint))


def _outline(picture: RgbImage, area: NDArray[np.bool_], width: int, opacity: float = 1.0) -> None:
    """Draw a white line of `width` pixels along the border of an area (H, W), in place."""
    edged = width + 2 * max(1, width // 3)  # with the line's dark edges
    box = _around(area, edged)
    if box is None:
        return
    lines, under = outlines(area[box]), picture[box]
    drawn = under.copy()
    cv2.drawContours(drawn, lines, -1, (0, 0, 0), edged, cv2.LINE_AA)
    cv2.drawContours(drawn, lines, -1, (255, 255, 255), width, cv2.LINE_AA)
    picture[box] = cv2.addWeighted(drawn, opacity, under, 1 - opacity, 0)


def _around(area: NDArray[np.bool_], margin: int = 0) -> tuple[slice, slice] | None:
    """Rows and columns of the box around the True pixels, and a margin; None without any."""
    left, top, width, height = cv2.boundingRect(area.view(np.uint8))
    if not width:
        return None
    rows = slice(max(0, top - margin), top + height + margin)
    return rows, slice(max(0, left - margin), left + width + margin)


def overlay(anomaly_map: NDArray[np.float32], threshold: float) -> NDArray[np.uint8]:
    """Colours of a heatmap alone; laid over a picture with `OPACITY`, they look like `heatmap`.

    Args:
        anomaly_map: (H, W) in score units; NaN, where the network didn't look, becomes half black.
        threshold: map value from which defects are marked, above 0.

    Returns:
        (H, W, 4) RGBA, not premultiplied.
    """
    level = _levels(anomaly_map, threshold)
    colours, alpha = _ramp()
    result = np.dstack([colours[level], np.rint(255 * alpha[level]).astype(np.uint8)])
    result[np.isnan(anomaly_map)] = (0, 0, 0, 128)
    return result


def outlines(area: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """Corners (n, 1, 2), (x, y), of closed lines around an area (H, W) and around its holes."""
    lines, _ = cv2.findContours(area.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    return [np.asarray(line, np.int32) for line in lines]


def colour_stops(steps: int = 17) -> list[tuple[int, int, int, float]]:
    """Colours (red, green, blue, opacity) in even steps from 0 to twice the threshold."""
    colours, alpha = _ramp()
    at = np.rint(np.linspace(0, 255, steps)).astype(int)
    return [(*map(int, colours[i]), round(float(alpha[i]), 4)) for i in at]  # type: ignore[misc]


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """A picture (H, W, 3) RGB or (H, W) grey as a PNG file's bytes.

    Every row is stored as its difference from the one above and compressed by ISA-L's level 1:
    a tenth of the time that OpenCV's encoder takes, for files of about its size.
    """
    values = np.ascontiguousarray(picture).reshape(len(picture), -1)
    rows = np.empty((len(values), 1 + values.shape[1]), np.uint8)
    rows[:, 0] = 2  # the filter "up" (PNG specification, section 9.2)
    rows[0, 1:] = values[0]
    np.subtract(values[1:], values[:-1], out=rows[1:, 1:])
    height, width = picture.shape[:2]
    colour = 2 if picture.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    pieces = [b"\x89PNG\r\n\x1a\n"]
    data = isal_zlib.compress(rows, 1)
    for kind, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        checksum = isal_zlib.crc32(body, isal_zlib.crc32(kind))
        pieces += struct.pack(">I", len(body)) + kind, body, struct.pack(">I", checksum)
    return b"".join(pieces)


def _levels(anomaly_map: NDArray[np.float32], threshold: float) -> NDArray[np.uint8]:
    """Colour levels (H, W) of a map, from 0 to 255; 0 for NaN."""
    steps = np.nan_to_num(anomaly_map) * np.float32(_AT_THRESHOLD / max(threshold, 1e-12))
    return np.asarray(np.clip(steps, 0, 255), np.uint8)


@lru_cache(maxsize=1)
def _ramp() -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Colours (256, 3) RGB of the levels, and their opacities (256,) in [0, 1]."""
    levels = np.arange(256, dtype=np.uint8)
    colours = np.asarray(cv2.applyColorMap(levels[:, None], cv2.COLORMAP_INFERNO), np.uint8)
    return colours[:, 0, ::-1], np.clip((levels / _AT_THRESHOLD - _SHOWN_FROM) * 2, 0, 1)


@lru_cache(maxsize=1)
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Look-up tables (256, 1, 3) RGB of the levels: colour to add, share of 255 to keep."""
    colours, alpha = _ramp()
    opacity = (alpha * OPACITY)[:, None, None]
    tint = np.rint(colours[:, None] * opacity).astype(np.uint8)
    veil = np.rint(255 * (1 - opacity)).astype(np.uint8).repeat(3, axis=2)
    return np.ascontiguousarray(tint), veil


_DEFLATE, _DIFFERENCES = 8, 2  # TIFF's numbers for a compression and a predictor


def encode_float32(anomaly_map: NDArray[np.float32]) -> bytes:
    """A map (H0, W0) as a float TIFF in score units, NaN where the network didn't look.

    The compression is lossless, and libtiff, tifffile and scikit-image read it. The predictor for
    floats (3) makes smaller files, but tifffile and scikit-image need a further package for it.
    """
    settings = (cv2.IMWRITE_TIFF_COMPRESSION, _DEFLATE, cv2.IMWRITE_TIFF_PREDICTOR, _DIFFERENCES)
    return encoded(".tiff", anomaly_map, *settings)


SHOWN = 200  # most pictures on the page of a run
_PIXELS = 25_000_000  # most pixels of these pictures together
_MOST, _LEAST = 2_000_000, 96 * 96  # pixels of one picture
QUALITY = 75  # of JPEG and WebP, from 0 to 100


@dataclass(frozen=True)
class Thumbnail:
    """Small copy of a picture.

    Attributes:
        photo: the copy as a JPEG file.
        size: (width, height) of the copy.
        source: (width, height) of the picture.
    """

    photo: bytes
    size: tuple[int, int]
    source: tuple[int, int]


def thumbnail(picture: NDArray[np.uint8], pixels: int) -> Thumbnail:
    """Small copy of a picture, reduced by a whole factor, which is quick.

    Args:
        picture: (H, W, 3) RGB; rows and columns beyond a multiple of the factor are cut off.
        pixels: most pixels of the copy; a long strip, which keeps a row or column, may have more.
    """
    height, width = picture.shape[:2]
    step = max(1, min(math.ceil(math.sqrt(height * width / pixels)), height, width))
    size = width // step, height // step
    if step > 1:
        whole = picture[: size[1] * step, : size[0] * step]
        picture = np.asarray(cv2.resize(whole, size, interpolation=cv2.INTER_AREA), np.uint8)
    return Thumbnail(jpeg(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)), size, (width, height))


_PHOTOGRAPH_PIXELS = 4_000_000  # most pixels of a `photograph`


def photograph(file: bytes, decoding: Decoding) -> bytes:
    """An image file's bytes as a JPEG for browsers, reduced by a whole factor.

    Raises:
        ImageError: `unreadable` or `unsupported`.
    """
    return thumbnail(display(read_image(file, decoding)), _PHOTOGRAPH_PIXELS).photo


def pixels_for(pictures: int, together: int) -> int:
    """Most pixels of each picture on a page, so that a page of many pictures stays small.

    At least 9,216, even if very many pictures then exceed `together`; at most 2 million.

    Args:
        pictures: number of pictures on the page.
        together: most pixels of all pictures together.
    """
    return int(np.clip(together / max(pictures, 1), _LEAST, _MOST))


def jpeg(picture: NDArray[np.generic]) -> bytes:
    """A picture (H, W, 3) BGR as a JPEG file: larger than WebP, but written 20 times as fast."""
    return encoded(".jpg", picture, cv2.IMWRITE_JPEG_QUALITY, QUALITY)


def encoded(kind: str, picture: NDArray[np.generic], *settings: int) -> bytes:
    """Bytes of an image file of a picture.

    Args:
        kind: the file's suffix, with the dot.
        picture: (H, W), (H, W, 3) or (H, W, 4), blue first.
        settings: OpenCV's settings, each number followed by its value.

    Raises:
        ValueError: the format doesn't hold such a picture.
    """
    done, data = cv2.imencode(kind, np.ascontiguousarray(picture), settings)
    if not done:
        raise ValueError(f"a picture of shape {picture.shape} can't be encoded as {kind}")
    return data.tobytes()


class Thumbnails:
    """Small heatmaps of the images that matter most so far, at most `SHOWN`.

    Images with a reason for review matter most, then those with the highest scores.

    Args:
        images: number of images of the run, if it is known.
    """

    def __init__(self, images: int = SHOWN) -> None:
        self.pixels = pixels_for(min(images, SHOWN), _PIXELS)  # most pixels of each heatmap
        self._by_name: dict[str, Thumbnail] = {}
        # A heap, the least first: flagged, score, minus the order of arrival, name.
        self._ranked: list[tuple[bool, float, int, str]] = []
        self._number = count()

    def keep(self, heatmap: str, flagged: bool, score: float, small: Thumbnail) -> None:
        """Keep a small heatmap, and drop the one that then matters least.

        Args:
            heatmap: name of the heatmap's file.
            flagged: the image has a reason for review.
            score: the image score.
            small: the heatmap.
        """
        self._by_name[heatmap] = small
        heapq.heappush(self._ranked, (flagged, score, -next(self._number), heatmap))
        if len(self._ranked) > SHOWN:
            self._by_name.pop(heapq.heappop(self._ranked)[-1], None)

    def get(self, heatmap: str) -> Thumbnail | None:
        """Small copy of a heatmap by its file's name; None if it was dropped or never kept."""
        return self._by_name.get(heatmap)
