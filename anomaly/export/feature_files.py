"""Saved features on disk: shards of arrays, and an index of which row came from which file.

    features/
      features.json                what made them; a later run with other settings is refused
      index.csv                    shard, row, path, image_sha256: one line a saved image
      features-00000.safetensors   {layer: (n, …)}; or one features-00000.<layer>.npy a layer
      skipped.csv                  files that couldn't be used, and why

A shard appears under its name complete, and only then in the index: an interrupted run goes on
behind the last complete shard. Imports no torch.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from anomaly.errors import DataError, OutputError, why
from anomaly.files.csv_files import csv_rows, csv_text
from anomaly.files.writing import claim, write

Array: TypeAlias = NDArray[np.float32]
Format: TypeAlias = Literal["safetensors", "npy"]

SETTINGS, INDEX, SKIPPED = "features.json", "index.csv", "skipped.csv"
_COLUMNS = ("shard", "row", "path", "image_sha256")


@dataclass(frozen=True)
class Saved:
    """One line of the index."""

    shard: str
    row: int
    path: str
    image_sha256: str


@dataclass(frozen=True, eq=False)
class SavedFeatures:
    """Features read back, N images.

    Attributes:
        paths: the N files, as they were named when the features were saved.
        values: (N, …) float32 for each layer.
    """

    paths: tuple[str, ...]
    values: dict[str, Array]


def read_features(folder: Path) -> SavedFeatures:
    """Read saved features.

    Args:
        folder: what `anomaly features` wrote.

    Raises:
        DataError: no features there, a shard is missing or damaged, or (with `--pool none`) the
            images differ in size, so that their maps don't fit into one array.
    """
    settings = read_settings(folder)
    index = _read_index(folder)
    if not index:
        raise DataError(f"{folder} holds no features yet; run the command that makes them")
    rows: dict[str, list[int]] = {}
    for saved in index:
        rows.setdefault(saved.shard, []).append(saved.row)
    # A run that was cut off may have listed a part of its last shard only.
    parts = [(_read_shard(folder, shard, settings), kept) for shard, kept in rows.items()]
    values = {}
    for layer in settings["layers"]:
        arrays = [part[layer][kept] for part, kept in parts]
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise DataError(
                f"{folder}: images of several sizes have maps of several shapes ({shapes}); read "
                "the shards one by one, or save the features pooled"
            )
        values[layer] = np.concatenate(arrays)
    return SavedFeatures(tuple(saved.path for saved in index), values)


def encoded(arrays: Mapping[str, Array], form: Format) -> list[bytes]:
    """The contents of the files of `shard_files`."""
    if form == "safetensors":
        return [save(dict(arrays))]
    files = []
    for array in arrays.values():
        content = io.BytesIO()
        np.save(content, array)
        files.append(content.getvalue())
    return files


def _read_shard(folder: Path, shard: str, settings: Mapping[str, Any]) -> dict[str, Array]:
    try:
        if settings["format"] == "safetensors":
            return load_file(folder / f"{shard}.safetensors")
        return {layer: np.load(folder / f"{shard}.{layer}.npy") for layer in settings["layers"]}
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"{folder}: shard {shard} can't be read ({why(error)}); delete its lines from "
            f"{INDEX} and run `anomaly features` again, which makes it anew"
        ) from None


def trusted_index(folder: Path, layers: Sequence[str], form: Format) -> list[Saved]:
    """The index without shards that have vanished."""
    index = _read_index(folder)
    whole = {
        shard
        for shard in {saved.shard for saved in index}
        if all((folder / name).is_file() for name in shard_files(shard, layers, form))
    }
    return [saved for saved in index if saved.shard in whole]


def delete_orphans(folder: Path, shards: set[str]) -> None:
    """Files of shards that were written, but whose run ended before they were in the index."""
    claim(
        folder,
        [
            f.name
            for f in folder.glob("features-*")
            if f.name.partition(".")[0] not in shards and f.suffix in (".npy", ".safetensors")
        ],
        overwrite=True,
    )


def shard_files(shard: str, layers: Sequence[str], form: Format) -> list[str]:
    """The names of a shard's files."""
    if form == "safetensors":
        return [f"{shard}.safetensors"]
    return [f"{shard}.{layer}.npy" for layer in layers]


def _read_index(folder: Path) -> list[Saved]:
    file = folder / INDEX
    if not file.is_file():
        return []
    try:
        # The last line of a run that was cut off may lack its end.
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        rows = csv_rows(text[: text.rfind("\n") + 1])
        return [Saved(shard, int(row), path, sha) for shard, row, path, sha in rows[1:]]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} is no index of features ({why(error)}); delete the folder"
        ) from None


def write_index(folder: Path, index: Sequence[Saved]) -> None:
    """Write the whole index."""
    write(folder / INDEX, csv_text([_COLUMNS, *_lines(index)]))


def append_index(folder: Path, new: Sequence[Saved]) -> None:
    """Add the rows of a shard that is on disk already."""
    try:
        with (folder / INDEX).open("ab") as file:
            file.write(csv_text(_lines(new)).encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"{folder / INDEX} can't be written: {error.strerror}") from None


def _lines(index: Sequence[Saved]) -> list[tuple[str, ...]]:
    return [(saved.shard, str(saved.row), saved.path, saved.image_sha256) for saved in index]


def read_settings(folder: Path) -> dict[str, Any]:
    """What the features in a folder hang on.

    Raises:
        DataError: there are none.
    """
    file = folder / SETTINGS
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no features: {SETTINGS} can't be read ({why(error)})"
        ) from None
    if not isinstance(settings, dict) or not {"layers", "format"} <= settings.keys():
        raise DataError(f"{file} isn't what `anomaly features` writes")
    return settings


def is_ours(name: str) -> bool:
    """Whether a file of this name belongs to saved features."""
    return name in (SETTINGS, INDEX, SKIPPED) or name.startswith("features-")
