"""The pictures of an explanation: tiles beside one another, captions, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.files.writing import as_json, claim, clear, write
from anomaly.imaging.loading import NetworkInput
from anomaly.maps.heatmap import encode_png

RgbImage = NDArray[np.uint8]

_CAPTION_HEIGHT, _INDENT = 18, 2
_FONT, _FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.4
# Enough for "channel 1234" above a part of a grid, and for a title above one of few pictures.
_NARROWEST, _PANEL = 96, 160
_BACKGROUND = 255
_INK = (40, 40, 40)


def picture_of(item: NetworkInput) -> RgbImage:
    """What the network gets of an image before it is normalised, (H, W, 3) RGB."""
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


def signed(values: NDArray[Any]) -> RgbImage:
    """Values around 0 as a picture around mid-grey.

    Args:
        values: (H, W, 3); stretched by the 99th percentile of their absolute values.
    """
    strongest = float(np.percentile(np.abs(values), 99)) or 1.0
    return np.asarray(np.rint(np.clip(values / strongest, -1, 1) * 127 + 128), np.uint8)


def resized(picture: RgbImage, height: int, width: int) -> RgbImage:
    """Bring a picture (H, W, 3) to (height, width, 3); enlarged pixels keep their edges."""
    enlarging = height * width >= picture.shape[0] * picture.shape[1]
    how = cv2.INTER_NEAREST if enlarging else cv2.INTER_AREA
    return np.asarray(cv2.resize(picture, (width, height), interpolation=how), np.uint8)


def captioned(picture: RgbImage, text: str) -> RgbImage:
    """The picture with text above it, in as many lines as it takes.

    A picture that is too narrow for words gets white to its right.
    """
    wide = _widened(picture, max(picture.shape[1], _NARROWEST))
    lines = _wrapped(text, wide.shape[1])
    return np.vstack([*(_line(line, wide.shape[1]) for line in lines), wide])


def shortened(text: str, width: int) -> str:
    """Text that fits into a line of so many pixels: a long one keeps its beginning and its end."""
    kept = len(text)
    short = text
    while kept > 2 and _text_width(short) > width:
        kept -= 1
        short = f"{text[: kept // 3]}...{text[len(text) - kept + kept // 3 :]}"
    return short


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if _text_width(longer) <= width:
            lines[-1] = longer
        elif lines[-1]:
            lines.append(shortened(word, width))
        else:
            lines[-1] = shortened(word, width)
    return lines


def _text_width(text: str) -> int:
    return 2 * _INDENT + cv2.getTextSize(text, _FONT, _FONT_SCALE, 1)[0][0]


def _line(text: str, width: int) -> RgbImage:
    line = np.full((_CAPTION_HEIGHT, width, 3), _BACKGROUND, np.uint8)
    cv2.putText(line, text, (_INDENT, 13), _FONT, _FONT_SCALE, _INK, 1, cv2.LINE_AA)
    return line


def grid(tiles: Sequence[RgbImage], columns: int, gap: int = 4) -> RgbImage:
    """Put pictures of one size side by side, row by row.

    Args:
        tiles: at least one, all (H, W, 3).
        columns: how many in a row.
        gap: pixels of white around each.

    Returns:
        (rows · (H + gap) + gap, columns · (W + gap) + gap, 3).
    """
    height, width = tiles[0].shape[:2]
    rows = -(-len(tiles) // columns)
    shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, 3)
    sheet = np.full(shape, _BACKGROUND, np.uint8)
    for index, tile in enumerate(tiles):
        top = gap + index // columns * (height + gap)
        left = gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = tile
    return sheet


def stacked(pictures: Sequence[RgbImage]) -> RgbImage:
    """Put pictures below each other, left-aligned; the narrow ones get white to their right."""
    width = max(picture.shape[1] for picture in pictures)
    return np.vstack([_widened(picture, width) for picture in pictures])


def beside(panels: Sequence[tuple[str, RgbImage]], gap: int = 8) -> RgbImage:
    """Put titled pictures next to each other, aligned at the top, with white around them.

    Titles are wrapped, and narrow pictures get white to their right.
    """
    wide = [_widened(picture, max(picture.shape[1], _PANEL)) for _, picture in panels]
    titles = [_wrapped(text, w.shape[1]) for (text, _), w in zip(panels, wide, strict=True)]
    most = max(map(len, titles))
    tallest = max(picture.shape[0] for picture in wide)
    columns = []
    for lines, picture in zip(titles, wide, strict=True):
        above = [_line(line, picture.shape[1]) for line in [*lines, *[""] * (most - len(lines))]]
        padding = ((0, tallest - picture.shape[0] + gap), (0, 0), (0, 0))
        below = np.pad(picture, padding, constant_values=_BACKGROUND)
        columns += [np.vstack([*above, below])]
    edges = ((0, 0), (0, gap), (0, 0))
    spaced = [np.pad(column, edges, constant_values=_BACKGROUND) for column in columns]
    return np.pad(np.hstack(spaced), ((0, 0), (gap, 0), (0, 0)), constant_values=_BACKGROUND)


def _widened(picture: RgbImage, width: int) -> RgbImage:
    padding = ((0, 0), (0, width - picture.shape[1]), (0, 0))
    return np.pad(picture, padding, constant_values=_BACKGROUND)


_FACTS = "explanation.json"
_PICTURES = ("evidence.png", "score_gradient.png", "grad_cam.png")
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
    names = [_FACTS, *_PICTURES, *maps]
    claim(folder, names, overwrite=overwrite)
    return names


def save_explanation(
    folder: Path,
    facts: Mapping[str, Any],
    pictures: Mapping[str, RgbImage],
    notes: Sequence[str],
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write an explanation; of an earlier one there nothing is left.

    Args:
        folder: made if need be.
        facts: plain values.
        pictures: (H, W, 3) uint8 RGB, by the names of their files.
        notes: what can't be shown, and why.
        overwrite: replace an earlier explanation.

    Returns:
        What explanation.json says.

    Raises:
        OutputError: one is there already, or the folder can't be written to.
    """
    clear(folder, claim_folder(folder, overwrite=overwrite))
    for name, picture in pictures.items():
        write(folder / name, encode_png(picture))
    said = {**facts, "pictures": list(pictures), "not_shown": list(notes)}
    write(folder / _FACTS, as_json(said))
    return said
