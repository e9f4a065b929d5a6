"""The pictures of an explanation: colours, marks, titles, panels beside one another, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.files.writing import as_json, claim, clear, write
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.maps.heatmap import encode_png

RgbImage = NDArray[np.uint8]

MARK = (255, 64, 32)
_LINE_HEIGHT, _INDENT = 18, 2
_FONT, _FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.4
_PANEL = 160  # wide enough for most titles
_CROP = 150
_CONTEXT = 7  # sides of the patch that a crop shows
_BACKGROUND = 255
_INK = (40, 40, 40)


@dataclass(frozen=True)
class Box:
    """A rectangle in an image's own pixels; bottom and right lie outside."""

    top: float
    left: float
    bottom: float
    right: float


def picture_of(item: NetworkInput) -> RgbImage:
    """The network's input before it is normalised, (H, W, 3) RGB."""
    return np.rint(item.pixels * 255).astype(np.uint8)


def colored(values: NDArray[Any]) -> RgbImage:
    """Show numbers as colours: viridis, dark blue for the lowest, yellow for the highest.

    Args:
        values: (H, W) floats; what isn't finite becomes grey.

    Returns:
        (H, W, 3) RGB.
    """
    if values.size == 0:  # OpenCV dies of a division by zero
        return np.zeros((*values.shape, 3), np.uint8)
    finite = np.isfinite(values)
    known = values[finite] if finite.any() else np.zeros(1)
    darkest, brightest = float(known.min()), float(known.max())
    unit = (np.where(finite, values, darkest) - darkest) / max(brightest - darkest, 1e-30)
    levels = np.rint(np.clip(unit, 0, 1) * 255).astype(np.uint8)
    picture = cv2.cvtColor(cv2.applyColorMap(levels, cv2.COLORMAP_VIRIDIS), cv2.COLOR_BGR2RGB)
    picture[~finite] = 128
    return np.asarray(picture, np.uint8)


def glowing(picture: RgbImage, values: NDArray[Any]) -> RgbImage:
    """An image in grey, coloured where a map is high.

    Args:
        picture: (H, W, 3).
        values: (h, w) in [0, 1], brought to the picture's size.

    Returns:
        (H, W, 3).
    """
    height, width = picture.shape[:2]
    fitted = cv2.resize(np.asarray(values, np.float32), (width, height))
    unit = np.clip(fitted, 0, 1)
    levels = np.rint(unit * 255).astype(np.uint8)
    heat = cv2.cvtColor(cv2.applyColorMap(levels, cv2.COLORMAP_INFERNO), cv2.COLOR_BGR2RGB)
    grey = cv2.cvtColor(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    opacity = (0.85 * np.sqrt(unit))[..., None]
    return np.asarray(np.rint(heat * opacity + grey * 0.75 * (1 - opacity)), np.uint8)


def read_image(source: Path | Image, loading: Preprocessing) -> NetworkInput | UnusableImage:
    """Load one image, with the decoded file; else why it can't be used."""
    return Decoders(loading, keep_image=True).load(source)


def resized(
    picture: RgbImage, height: int, width: int, enlarging: int = cv2.INTER_NEAREST
) -> RgbImage:
    """Bring a picture (H, W, 3) to (height, width, 3); `enlarging` is how it is enlarged."""
    larger = height * width >= picture.shape[0] * picture.shape[1]
    how = enlarging if larger else cv2.INTER_AREA
    return np.asarray(cv2.resize(picture, (width, height), interpolation=how), np.uint8)


def patch_crop(picture: RgbImage, box: Box, size: int = _CROP) -> RgbImage:
    """A patch and its surroundings, the patch itself outlined.

    Args:
        picture: the whole image, (H0, W0, 3).
        box: the patch.
        size: side of the result.

    Returns:
        (size, size, 3); beyond the image's border it is white.
    """
    side = max(1, round(max(box.bottom - box.top, box.right - box.left) * _CONTEXT))
    top = round((box.top + box.bottom - side) / 2)
    left = round((box.left + box.right - side) / 2)
    padded = np.pad(picture, ((side, side), (side, side), (0, 0)), constant_values=_BACKGROUND)
    crop = padded[top + side : top + 2 * side, left + side : left + 2 * side]
    inside = Box(box.top - top, box.left - left, box.bottom - top, box.right - left)
    return _outlined(resized(crop, size, size, cv2.INTER_CUBIC), inside, size / side)


def fitted(picture: RgbImage, longest: int = 420) -> RgbImage:
    """The whole image (H0, W0, 3), its longest side of so many pixels."""
    height, width = picture.shape[:2]
    scale = longest / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return resized(picture, *size, cv2.INTER_CUBIC)


def _outlined(picture: RgbImage, box: Box, scale: float) -> RgbImage:
    """A copy with a frame just outside the box, in pixels of the picture / `scale`."""
    result = picture.copy()
    first = round(box.left * scale) - 1, round(box.top * scale) - 1
    last = round(box.right * scale), round(box.bottom * scale)
    cv2.rectangle(result, first, last, MARK, 1)
    return result


def absent(text: str) -> RgbImage:
    """A grey tile, as large as a crop, that says word by word why there is no picture."""
    tile = np.full((_CROP, _CROP, 3), 225, np.uint8)
    words = stacked([text_line(word, _CROP) for word in text.split()])
    top = (_CROP - len(words)) // 2
    tile[top : top + len(words)] = np.minimum(words, tile[0])
    return tile


def _text_width(text: str) -> int:
    return 2 * _INDENT + cv2.getTextSize(text, _FONT, _FONT_SCALE, 1)[0][0]


def text_line(text: str, width: int) -> RgbImage:
    """A line of text, (18, width, 3); what doesn't fit is cut off."""
    line = np.full((_LINE_HEIGHT, width, 3), _BACKGROUND, np.uint8)
    cv2.putText(line, text, (_INDENT, 13), _FONT, _FONT_SCALE, _INK, 1, cv2.LINE_AA)
    return line


def stacked(pictures: Sequence[RgbImage]) -> RgbImage:
    """Put pictures below each other, left-aligned; the narrow ones get white to their right."""
    width = max(picture.shape[1] for picture in pictures)
    return np.vstack([_padded(picture, picture.shape[0], width) for picture in pictures])


def beside(
    panels: Sequence[tuple[str, RgbImage]], gap: int = 8, narrowest: int = _PANEL
) -> RgbImage:
    """Put titled pictures next to each other, aligned at the top, with white around them.

    Args:
        panels: title and picture (H, W, 3).
        gap: pixels of white to the left, to the right and below.
        narrowest: a picture of fewer columns gets white to its right, at least as much as its
            title needs.
    """
    tallest = max(picture.shape[0] for _, picture in panels)
    columns = [np.full((_LINE_HEIGHT + tallest + gap, gap, 3), _BACKGROUND, np.uint8)]
    for title, picture in panels:
        width = max(picture.shape[1], narrowest, _text_width(title))
        column = stacked([text_line(title, width), picture])
        columns.append(_padded(column, len(columns[0]), width + gap))
    return np.hstack(columns)


def _padded(picture: RgbImage, height: int, width: int) -> RgbImage:
    """A picture with white below and to its right, of this size."""
    missing = ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0))
    return np.pad(picture, missing, constant_values=_BACKGROUND)


_FACTS, PAGE = "explanation.json", "explanation.html"
_PICTURES = ("score_gradient.png", "grad_cam.png")
_MAPS = ("feature_maps_*.png", "classifier_feature_maps_*.png")


def claim_folder(folder: Path, *, overwrite: bool) -> list[str]:
    """Make a folder for an explanation, and see that it can be written there.

    Args:
        folder: made if need be.
        overwrite: take one that holds an explanation already.

    Returns:
        The names of the files that an explanation may have there, or an earlier one has.

    Raises:
        OutputError: it holds an explanation already, or can't be written to.
    """
    maps = [file.name for pattern in _MAPS for file in folder.glob(pattern)]
    names = [_FACTS, PAGE, *_PICTURES, *maps]
    claim(folder, names, overwrite=overwrite)
    return names


def save_explanation(
    folder: Path,
    facts: Mapping[str, Any],
    pictures: Mapping[str, RgbImage],
    notes: Sequence[str],
    page: str = "",
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write an explanation; of an earlier one there nothing is left.

    Args:
        folder: made if need be.
        facts: plain values.
        pictures: (H, W, 3) uint8 RGB, by the names of their files.
        notes: what can't be shown, and why.
        page: HTML for people; none where it is empty.
        overwrite: replace an earlier explanation.

    Returns:
        What explanation.json says.

    Raises:
        OutputError: one is there already, or the folder can't be written to.
    """
    clear(folder, claim_folder(folder, overwrite=overwrite))
    for name, picture in pictures.items():
        write(folder / name, encode_png(picture))
    if page:
        write(folder / PAGE, page)
    written = {**facts, "pictures": list(pictures), "not_shown": list(notes)}
    write(folder / _FACTS, as_json(written))
    return written
