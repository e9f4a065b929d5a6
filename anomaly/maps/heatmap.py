"""Anomaly map + image -> a picture for a person; pictures, maps and masks as files.

Colours have one meaning for all images of a model: nothing below three quarters of the threshold,
full colour from 5/4 on, brightest at twice the threshold. They are those of inferno, in which
equal steps of the score look equal, also in grey and to the colour-blind. A line runs around each
marked region, and a fainter one around what is for review.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import cv2
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from anomaly.imaging.read import Decoding, Image, read_image
from anomaly.maps.anomaly_map import FAINT, MARKED, AnomalyMap

RgbImage = NDArray[np.uint8]

OPACITY = 0.65
_FAINT = 0.5
# Levels 0 to 255 reach up to twice the threshold.
_AT_THRESHOLD = 127.5
_SHOWN_FROM = 0.75  # of the threshold; what is lower isn't coloured
_STRIP_PIXELS = 8_000_000


def display(image: Image, rows: slice = slice(None)) -> RgbImage:
    """Some rows of the image as a screen shows them.

    Returns:
        (rows, W0, 3) uint8 RGB; deeper images are scaled by their declared full scale.
    """
    pixels = image.pixels[rows]
    if pixels.dtype != np.uint8:
        pixels = cv2.convertScaleAbs(pixels, alpha=255 / image.full_scale)
    return np.asarray(pixels, np.uint8)


def shrunk(image: Image, size: tuple[int, int]) -> Image:
    """The same image at (H, W), no larger than its own."""
    if image.size == size:
        return image
    # Averages over areas take eight times as long, and show a difference from two pixels on.
    how = cv2.INTER_AREA if image.size[0] >= 2 * size[0] else cv2.INTER_LINEAR
    pixels = cv2.resize(image.pixels, size[::-1], interpolation=how)
    return replace(image, pixels=np.asarray(pixels))


def heatmap(
    image: Image, anomaly_map: AnomalyMap, threshold: float, areas: NDArray[np.uint8]
) -> RgbImage:
    """Lay an anomaly map over its image, a strip at a time: large maps needn't fit into memory.

    Args:
        image: the decoded file.
        anomaly_map: gives some rows of the map, (rows, W0).
        threshold: the map's value where marking starts, above 0.
        areas: (H0, W0), what is outlined; see `outlined_areas`.

    Returns:
        (H0, W0, 3) RGB.
    """
    height, width = image.size
    line = max(1, round(min(image.size) / 300))
    margin = 2 * line + 2
    rows = max(_STRIP_PIXELS // width, 2 * margin)
    result = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        # Lines along the cut itself fall into the margin and go with it.
        wide = slice(max(0, top - margin), min(height, bottom + margin))
        strip = np.array(display(image, wide))
        _overlay(strip, anomaly_map(wide), threshold, areas[wide], line)
        result[top:bottom] = strip[top - wide.start : bottom - wide.start]
    return result


def _overlay(
    result: RgbImage,
    anomaly_map: NDArray[np.float32],
    threshold: float,
    areas: NDArray[np.uint8],
    line: int,
) -> None:
    """Lay a heatmap over a picture (H, W, 3), in place; see `heatmap`.

    Args:
        result: the picture.
        anomaly_map: (H, W) in score units; NaN where the network didn't look, shown darkened.
        threshold: the map's value where marking starts.
        areas: (H, W), what is outlined.
        line: width in pixels.
    """
    _tint(result, anomaly_map, threshold)
    hidden = np.isnan(anomaly_map)
    if hidden.any():
        result[hidden] //= 2
    if (areas == FAINT).any():
        _outline(result, areas > 0, line, _FAINT)
    _outline(result, areas == MARKED, line)


def _tint(picture: RgbImage, anomaly_map: NDArray[np.float32], threshold: float) -> None:
    """Colour a picture in place where the map is high enough to show."""
    box = _around(anomaly_map > _SHOWN_FROM * threshold)
    if box is None:
        return
    tint, veil = _tables()
    level = _levels(anomaly_map[box], threshold)
    levels = cv2.merge([level, level, level])
    # Look-ups and 8-bit arithmetic: ten times as fast as blending in floats.
    dimmed = cv2.multiply(picture[box], cv2.LUT(levels, veil), scale=1 / 255)
    picture[box] = cv2.add(dimmed, cv2.LUT(levels, tint))


def _outline(picture: RgbImage, area: NDArray[np.bool_], width: int, strength: float = 1.0) -> None:
    """Draw a white line with dark edges along the border of an area, in place.

    Args:
        picture: (H, W, 3).
        area: (H, W).
        width: of the white line, in pixels.
        strength: 1 covers what is under it.
    """
    edged = width + max(min(width, 2), width // 3)
    box = _around(area, edged + 2)
    if box is None:
        return
    inside = area[box].astype(np.uint8) * np.uint8(255)
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    border = np.asarray(inside - cv2.erode(inside, cross, borderValue=0), np.uint8)
    dark, bright = _soft_line(border, edged), _soft_line(border, width)
    at = np.divmod(np.flatnonzero(dark), dark.shape[1])  # sooner than numpy.nonzero
    under = picture[box][at].astype(np.float32)
    drawn = under * (1 - dark[at][:, None] / np.float32(255))
    drawn += (255 - drawn) * (bright[at][:, None] / np.float32(255))
    picture[box][at] = np.rint(under + strength * (drawn - under)).astype(np.uint8)


def _soft_line(border: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Opacity (H, W) of a line along border pixels (255), with softened edges."""
    side = 2 * (3 * width // 4) + 1  # the outermost pixels become the soft edge
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    soft = cv2.blur(cv2.dilate(border, disc), (3, 3))
    return np.asarray(cv2.max(border, soft), np.uint8)


def _around(area: NDArray[np.bool_], margin: int = 0) -> tuple[slice, slice] | None:
    """The rows and columns that hold the True parts, with a margin; None where there are none."""
    left, top, width, height = cv2.boundingRect(area.view(np.uint8))
    if not width:
        return None
    rows = slice(max(0, top - margin), top + height + margin)
    return rows, slice(max(0, left - margin), left + width + margin)


def layer(anomaly_map: NDArray[np.float32], threshold: float) -> RgbImage:
    """The heatmap alone, to be laid over a picture at any opacity (`OPACITY` for `heatmap`'s look).

    Args:
        anomaly_map: (H, W) in score units; NaN where the network didn't look, half black.
        threshold: as for `heatmap`.

    Returns:
        (H, W, 4) RGBA, not premultiplied.
    """
    level = _levels(anomaly_map, threshold)
    colours, alpha = _ramp()
    result = np.dstack([colours[level], np.rint(255 * alpha[level]).astype(np.uint8)])
    result[np.isnan(anomaly_map)] = (0, 0, 0, 128)
    return result


def outlines(area: NDArray[np.bool_]) -> list[NDArray[np.int32]]:
    """Closed lines around the True parts of (H, W), holes too: (n, 1, 2) of (x, y) each."""
    lines, _ = cv2.findContours(area.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    return [np.asarray(line, np.int32) for line in lines]


def colour_stops(count: int = 17) -> list[tuple[int, int, int, float]]:
    """(red, green, blue, opacity) evenly from a score of 0 up to twice the threshold."""
    colours, alpha = _ramp()
    at = np.rint(np.linspace(0, 255, count)).astype(int)
    return [(*map(int, colours[i]), round(float(alpha[i]), 4)) for i in at]  # type: ignore[misc]


def encode_png(picture: NDArray[np.generic]) -> bytes:
    """A picture as a PNG file's bytes.

    Every row is stored as its difference from the one above and compressed by ISA-L's level 1:
    a tenth of the time that OpenCV's encoder takes, for files of about its size.

    Args:
        picture: (H, W, 3) RGB or (H, W) grey, 8 or 16 bits.
    """
    height, width = picture.shape[:2]
    bits, colour = 8 * picture.dtype.itemsize, 2 if picture.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    data = ((b"IDAT", part) for part in _deflated(picture.reshape(height, -1), width))
    pieces = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chain([(b"IHDR", header)], data, [(b"IEND", b"")]):
        checked = isal_zlib.crc32(body, isal_zlib.crc32(kind))
        pieces += struct.pack(">I", len(body)) + kind, body, struct.pack(">I", checked)
    return b"".join(pieces)


def _deflated(flat: NDArray[np.generic], width: int) -> Iterator[bytes]:
    """The compressed rows (H, samples) of a PNG file, a strip of the picture at a time."""
    stream = isal_zlib.compressobj(1)
    high_first = flat.dtype.newbyteorder(">")
    above: NDArray[np.uint8] | None = None
    step = max(1, _STRIP_PIXELS // width)
    for top in range(0, len(flat), step):
        strip = np.ascontiguousarray(flat[top : top + step].astype(high_first, copy=False))
        values = strip.view(np.uint8)
        rows = np.empty((len(values), 1 + values.shape[1]), np.uint8)
        rows[:, 0] = 2  # the filter "up" (PNG specification, section 9.2)
        rows[0, 1:] = values[0] if above is None else values[0] - above
        np.subtract(values[1:], values[:-1], out=rows[1:, 1:])
        above = values[-1]
        part = stream.compress(rows)
        yield part + stream.flush() if top + step >= len(flat) else part


def _levels(anomaly_map: NDArray[np.float32], threshold: float) -> NDArray[np.uint8]:
    steps = np.nan_to_num(anomaly_map) * np.float32(_AT_THRESHOLD / max(threshold, 1e-12))
    return np.asarray(np.clip(steps, 0, 255), np.uint8)


@lru_cache(maxsize=1)
def _ramp() -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Each level's colour (256, 3) RGB and its opacity (256,) from 0 to 1."""
    levels = np.arange(256, dtype=np.uint8)
    colours = np.asarray(cv2.applyColorMap(levels[:, None], cv2.COLORMAP_INFERNO), np.uint8)
    return colours[:, 0, ::-1], np.clip((levels / _AT_THRESHOLD - _SHOWN_FROM) * 2, 0, 1)


@lru_cache(maxsize=1)
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What each level adds to a picture and what it leaves of it, (256, 1, 3) RGB each."""
    colours, alpha = _ramp()
    opacity = (alpha * OPACITY)[:, None, None]
    tint = np.rint(colours[:, None] * opacity).astype(np.uint8)
    veil = np.rint(255 * (1 - opacity)).astype(np.uint8).repeat(3, axis=2)
    return np.ascontiguousarray(tint), veil


_DEFLATE, _DIFFERENCES = 8, 2  # of TIFF, and its predictor


def encode_float32(anomaly_map: NDArray[np.float32]) -> bytes:
    """A map (H0, W0) as a float TIFF in score units, NaN where the network didn't look.

    Lossless, and made smaller in the way that libtiff, tifffile and scikit-image all read as they
    are: the predictor for floats (3) is smaller still, but needs a further package there.
    """
    settings = (cv2.IMWRITE_TIFF_COMPRESSION, _DEFLATE, cv2.IMWRITE_TIFF_PREDICTOR, _DIFFERENCES)
    return encoded(".tiff", anomaly_map, *settings)


SHOWN = 200  # images with a picture on the page of a run
_PIXELS = 25_000_000  # of all of them together
_MOST, _LEAST = 2_000_000, 96 * 96
QUALITY = 75  # of JPEG and WebP


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
    """Most pixels of each picture, so that a page of `count` stays small.

    Args:
        count: pictures on the page.
        together: pixels of all of them.
    """
    return int(np.clip(together / max(count, 1), _LEAST, _MOST))


def jpeg(picture: NDArray[np.generic]) -> bytes:
    """A picture (H, W, 3) BGR as a JPEG file: larger than WebP, in a twentieth of its time."""
    return encoded(".jpg", picture, cv2.IMWRITE_JPEG_QUALITY, QUALITY)


def encoded(kind: str, picture: NDArray[np.generic], *settings: int) -> bytes:
    """A picture as a file's bytes.

    Args:
        kind: the file's extension.
        picture: (H, W), (H, W, 3) or (H, W, 4), blue first.
        settings: OpenCV's, each number followed by its value.
    """
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
