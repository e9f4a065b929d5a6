"""Saved features on disk: shards of arrays, and an index of which row came from which file.

    features/
      features.json                settings; a later run with other settings is refused
      index.csv                    shard, row, path, image_sha256: one line a saved image
      features-00000.safetensors   {layer: (n, …)}; or one features-00000.<layer>.npy a layer
      skipped.csv                  files that couldn't be used, and why

A shard is listed in the index only when it is complete: an interrupted run continues after the
last complete shard. Imports no torch.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from anomaly.errors import DataError, OutputError, unwritable, why
from anomaly.files.tables import csv_rows, csv_text
from anomaly.files.writing import as_json, claim, clear, from_json, write
from anomaly.scoring.build import differences

Array: TypeAlias = NDArray[np.float32]
Format: TypeAlias = Literal["safetensors", "npy"]

SETTINGS, INDEX, SKIPPED = "features.json", "index.csv", "skipped.csv"
_SHARD = re.compile(r"features-\d{5,}(\..+)?\.(npy|safetensors)", re.DOTALL)
# A shard is written before waiting rows fill more memory than this.
_SHARD_BYTES = 256 * 1024**2
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
        paths: the N files, by their paths when the features were saved.
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
    settings = _read_settings(folder)
    index = _read_index(folder)
    if not index:
        raise DataError(f"{folder} holds no features yet; run the command that makes them")
    rows: dict[str, list[int]] = {}
    for saved in index:
        rows.setdefault(saved.shard, []).append(saved.row)
    # An interrupted run may have listed only a part of its last shard.
    parts = [_read_shard(folder, shard, kept, settings) for shard, kept in rows.items()]
    values = {}
    for layer in settings["layers"]:
        arrays = [part[layer] for part in parts]
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise DataError(
                f"{folder}: images of several sizes have maps of several shapes ({shapes}); read "
                "the shards one by one, or save the features pooled"
            )
        values[layer] = np.concatenate(arrays)
    return SavedFeatures(tuple(saved.path for saved in index), values)


def _encoded(arrays: Mapping[str, Array], form: Format) -> list[bytes]:
    """The contents of the files of `_shard_files`."""
    if form == "safetensors":
        # An array's memory is written as it lies, and maps may lie channels last.
        return [save({layer: np.ascontiguousarray(array) for layer, array in arrays.items()})]
    files = []
    for array in arrays.values():
        content = io.BytesIO()
        np.save(content, array)
        files.append(content.getvalue())
    return files


def _read_shard(
    folder: Path, shard: str, rows: Sequence[int], settings: Mapping[str, Any]
) -> dict[str, Array]:
    """Some rows of a shard, by layer."""
    layers, form = settings["layers"], settings["format"]
    files = [folder / name for name in _shard_files(shard, layers, form)]
    try:
        if form == "safetensors":
            arrays = load_file(files[0])
        else:
            arrays = dict(zip(layers, map(np.load, files), strict=True))
        return {layer: arrays[layer][rows] for layer in layers}
    except (OSError, EOFError, ValueError, LookupError, SafetensorError) as error:
        raise DataError(
            f"{folder}: shard {shard} can't be read ({why(error)}). Delete its lines from "
            f"{INDEX} and run `anomaly features` again to make the shard again"
        ) from None


def _trusted_index(folder: Path, layers: Sequence[str], form: Format) -> list[Saved]:
    """The index without missing shards."""
    index = _read_index(folder)
    files = {saved.shard: _shard_files(saved.shard, layers, form) for saved in index}
    whole = {shard for shard in files if all((folder / name).is_file() for name in files[shard])}
    return [saved for saved in index if saved.shard in whole]


def _delete_orphans(folder: Path, shards: set[str]) -> None:
    """Files of shards that are written, but not in the index, since the run was interrupted."""
    written = (file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name))
    clear(folder, [name for name in written if name.partition(".")[0] not in shards])


def _shard_files(shard: str, layers: Sequence[str], form: Format) -> list[str]:
    """The names of a shard's files."""
    if form == "safetensors":
        return [f"{shard}.safetensors"]
    return [f"{shard}.{layer}.npy" for layer in layers]


def _read_index(folder: Path) -> list[Saved]:
    file = folder / INDEX
    if not file.is_file():
        return []
    try:
        # The last line of an interrupted run may be incomplete.
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        rows = csv_rows(text[: text.rfind("\n") + 1])
        return [Saved(shard, int(row), path, sha) for shard, row, path, sha in rows[1:]]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} isn't an index of features ({why(error)}); delete the folder"
        ) from None


def _append_index(folder: Path, new: Sequence[Saved]) -> None:
    """Add the rows of a written shard to the index."""
    try:
        with (folder / INDEX).open("ab") as file:
            file.write(csv_text(_lines(new)).encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(folder / INDEX, error) from None


def _lines(index: Sequence[Saved]) -> list[tuple[str, ...]]:
    return [(saved.shard, str(saved.row), saved.path, saved.image_sha256) for saved in index]


def _read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the features in a folder.

    Raises:
        DataError: there are none.
    """
    file = folder / SETTINGS
    try:
        settings = from_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no features: {SETTINGS} can't be read ({why(error)})"
        ) from None
    if not isinstance(settings, dict) or not {"layers", "format"} <= settings.keys():
        raise DataError(f"{file} isn't a file that `anomaly features` wrote; give another folder")
    return settings


def _is_ours(name: str) -> bool:
    """Whether a file of this name belongs to saved features."""
    return name in (SETTINGS, INDEX, SKIPPED) or bool(_SHARD.fullmatch(name))


class FeatureWriter:
    """Writes features into a folder; use it in a `with` statement, which saves the last rows.

    Args:
        folder: created if missing. Features with the same settings are continued.
        settings: settings of the features as JSON values, with `layers` and `format`.
        shard_size: images in a shard.
        overwrite: start again.

    Raises:
        OutputError: the folder holds features with other settings, or can't be used.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], shard_size: int, *, overwrite: bool
    ) -> None:
        self.folder = folder
        self._format: Format = settings["format"]
        self._shard_size = shard_size
        self._waiting: dict[tuple[tuple[int, ...], ...], list[tuple[str, str, list[Array]]]] = {}
        self._layers: tuple[str, ...] = tuple(settings["layers"])
        if overwrite and (folder / SETTINGS).exists():
            clear(folder, [f.name for f in folder.iterdir() if _is_ours(f.name)])
        claim(folder, (), overwrite=False)
        self._check_settings(settings)
        self._index = _trusted_index(folder, self._layers, self._format)
        write(folder / INDEX, csv_text([_COLUMNS, *_lines(self._index)]))
        _delete_orphans(folder, {saved.shard for saved in self._index})
        write(folder / SETTINGS, as_json(settings))

    @property
    def done(self) -> dict[str, str]:
        """Images saved, and the sha256 of each file."""
        return {saved.path: saved.image_sha256 for saved in self._index}

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a full disk another try would only hide the first error.
        if kind is None or not issubclass(kind, OutputError):
            for shapes in list(self._waiting):
                self._save(shapes)

    def add(self, path: str, image_sha256: str, features: Mapping[str, Array]) -> None:
        """Add the features of one image, a (…) float32 array for each layer.

        Images whose features differ in shape go to different shards.
        """
        values = [features[layer] for layer in self._layers]
        shapes = tuple(value.shape for value in values)
        rows = self._waiting.setdefault(shapes, [])
        rows.append((path, image_sha256, values))
        # Rows of one shape take as many bytes each.
        sizes = {k: len(w) * sum(v.nbytes for v in w[0][2]) for k, w in self._waiting.items()}
        if len(rows) == self._shard_size:
            self._save(shapes)
        elif sum(sizes.values()) >= _SHARD_BYTES:
            self._save(max(sizes, key=sizes.__getitem__))

    def skipped(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """List the files that couldn't be used: (path, status, reason)."""
        write(self.folder / SKIPPED, csv_text([("path", "status", "reason"), *rows]))

    def _save(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        rows = self._waiting.pop(shapes)
        shard = f"features-{self._next_number():05}"
        arrays = {
            layer: np.stack([values[i] for _, _, values in rows])
            for i, layer in enumerate(self._layers)
        }
        names = _shard_files(shard, self._layers, self._format)
        for name, content in zip(names, _encoded(arrays, self._format), strict=True):
            write(self.folder / name, content)
        new = [Saved(shard, row, path, sha) for row, (path, sha, _) in enumerate(rows)]
        _append_index(self.folder, new)
        self._index += new

    def _next_number(self) -> int:
        return max((int(saved.shard.rpartition("-")[2]) + 1 for saved in self._index), default=0)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        if not (present := sorted(f.name for f in self.folder.iterdir() if _is_ours(f.name))):
            return
        if SETTINGS not in present:
            raise OutputError(
                f"{self.folder / present[0]} isn't from saved features; give another --output"
            )
        before = _read_settings(self.folder)
        # Through JSON, so that tuples and lists are the same.
        now = json.loads(json.dumps(settings))
        if different := differences(before, now):
            raise OutputError(
                f"{self.folder} holds features with other settings ({'; '.join(different)}); "
                f"give another --output or add --overwrite"
            )
