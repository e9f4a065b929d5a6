"""Writes features so that an interrupted run can go on; `feature_files` is their form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from anomaly.errors import OutputError
from anomaly.export.feature_files import (
    SETTINGS,
    SKIPPED,
    Array,
    Format,
    Saved,
    append_index,
    delete_orphans,
    encoded,
    is_ours,
    read_settings,
    shard_files,
    trusted_index,
    write_index,
)
from anomaly.files.csv_files import csv_text
from anomaly.files.writing import as_json, claim, write

# A shard closes before its rows fill more memory than this.
_SHARD_BYTES = 256 * 1024**2


class FeatureWriter:
    """Writes features into a folder; use it in a `with` statement, which saves what is left.

    Args:
        folder: made if need be. One that holds features of the same settings is continued.
        settings: what makes these features, as JSON values; `layers` and `format` among them.
        shard_size: images in a shard.
        overwrite: begin anew.

    Raises:
        OutputError: features of other settings are there, or the folder can't be used.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], shard_size: int, *, overwrite: bool
    ) -> None:
        self.folder = folder
        self._format: Format = settings["format"]
        self._shard_size = shard_size
        self._waiting: dict[tuple[tuple[int, ...], ...], list[tuple[str, str, list[Array]]]] = {}
        self._layers: tuple[str, ...] = tuple(settings["layers"])
        if overwrite and folder.is_dir():
            claim(folder, [f.name for f in folder.iterdir() if is_ours(f.name)], overwrite=True)
        claim(folder, (), overwrite=False)
        self._check_settings(settings)
        self._index = trusted_index(folder, self._layers, self._format)
        write_index(folder, self._index)
        delete_orphans(folder, {saved.shard for saved in self._index})
        write(folder / SETTINGS, as_json(settings))

    @property
    def done(self) -> dict[str, str]:
        """Images saved, and the sha256 of each file."""
        return {saved.path: saved.image_sha256 for saved in self._index}

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a full disk another try would only hide the first error.
        if kind is None or not issubclass(kind, OutputError):
            for shapes in list(self._waiting):
                self._save(shapes)

    def add(self, path: str, image_sha256: str, features: Mapping[str, Array]) -> None:
        """Take the features of one image, a (…) float32 array for each layer.

        Images whose features differ in shape go to different shards.
        """
        values = [features[layer] for layer in self._layers]
        shapes = tuple(value.shape for value in values)
        rows = self._waiting.setdefault(shapes, [])
        rows.append((path, image_sha256, values))
        held = len(rows) * sum(value.nbytes for value in values)
        if len(rows) == self._shard_size or held >= _SHARD_BYTES:
            self._save(shapes)

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
        names = shard_files(shard, self._layers, self._format)
        for name, content in zip(names, encoded(arrays, self._format), strict=True):
            write(self.folder / name, content)
        new = [Saved(shard, row, path, sha) for row, (path, sha, _) in enumerate(rows)]
        append_index(self.folder, new)
        self._index += new

    def _next_number(self) -> int:
        return max((int(saved.shard.rpartition("-")[2]) + 1 for saved in self._index), default=0)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        if not any(is_ours(f.name) for f in self.folder.iterdir()):
            return
        before = read_settings(self.folder)
        # Through JSON, so that tuples and lists are the same.
        now = json.loads(json.dumps(settings))
        changed = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise OutputError(
                f"{self.folder} holds features made in another way: {'; '.join(changed)}. "
                "Give another --output or add --overwrite"
            )
