"""Explanations on disk: pictures as PNG files, and explanation.json, which says what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anomaly.explain.tiles import RgbImage
from anomaly.files.writing import as_json, claim, clear, write
from anomaly.maps.heatmap import encode_png

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
