"""What this program has written into a folder, told by its tell-tale files: never an input."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

HEATMAPS, MASKS, MAPS = "heatmaps", "masks", "maps"
# Of a run with one model, and of one with models of several products.
SCALE, SCALES = "heatmap_scale.png", "heatmap_scales"
PAGE, PAGES = "results.html", "pages"
JOURNAL = "results.partial.jsonl"
WATCHED = "results.watched.jsonl"
DONE = "results.done.json"
GOLDEN = "golden.json"
JOB, PARTS = "results.job.json", "results.parts"
# Folders of a run of `infer`.
FOLDERS = (HEATMAPS, MASKS, MAPS, PAGES, SCALES, PARTS)
# What shards write.
SHARDED = (JOB, PARTS, HEATMAPS, SCALE, SCALES, MASKS, MAPS)
INFER = (
    "results.csv",
    "results.jsonl",
    "results.parquet",
    "regions.csv",
    "parts.csv",
    PAGE,
    PAGES,
    HEATMAPS,
    SCALE,
    SCALES,
    MASKS,
    MAPS,
    JOURNAL,
    WATCHED,
    DONE,
    JOB,
    PARTS,
)
# What a run of `infer` writes into its folders, and what its settings call that, where it is asked
# for with an option of its own.
_WRITTEN = {
    HEATMAPS: (".png",),
    SCALES: (".png",),
    MASKS: (".png",),
    MAPS: (".png", ".tiff"),
    PAGES: (".html",),
    PARTS: (".parquet",),
}
_ASKED = {MASKS: {"masks"}, MAPS: {"float32", "uint16"}}
TRAIN = ("model", "train.json", "suspects")
# And what belongs to the model of a run: its golden parts.
RUN = (*TRAIN, "golden")
_EXPLANATION = "explanation.json"
_MANIFEST = "manifest.json"


def own_outputs(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Which entries of a folder this program's commands have written there.

    Nothing is taken for theirs by its name alone, and nothing else in such a folder is.

    Args:
        folder: the folder.
        names: all that is in it.
    """
    own: set[str] = set()
    if "model" in names and is_model(folder / "model", (_MANIFEST,)):
        own.update(TRAIN)
    if "golden" in names and (folder / "golden" / GOLDEN).is_file():
        own.add("golden")
    if not {JOURNAL, WATCHED, DONE, JOB}.isdisjoint(names) or (
        "results.csv" in names and _head(folder / "results.csv").startswith(b"path,image_sha256,")
    ):
        own.update(INFER)
    if _EXPLANATION in names:
        own.update(_explained(folder / _EXPLANATION))
    return frozenset(own.intersection(names))


def foreign(folder: Path, name: str) -> Path | None:
    """A file in one of a run's folders that the run hasn't written; None where there is none.

    Files are told by their suffixes, and a folder that its run wasn't to write holds foreign ones
    only. What file managers leave (hidden files, and `Thumbs.db`) isn't counted.

    Args:
        folder: a run's.
        name: of a folder in it that is one of `own_outputs`.

    Raises:
        OSError: a folder can't be listed.
    """
    if name not in _WRITTEN or not (folder / name).is_dir():
        return None
    suffixes = _WRITTEN[name] if _may_have_written(folder, name) else ()
    return next((file for file in _files(folder / name) if file.suffix not in suffixes), None)


def _files(folder: Path) -> Iterator[Path]:
    for found in os.scandir(folder):
        if found.is_dir(follow_symlinks=False):
            yield from _files(Path(found.path))
        elif not found.name.startswith(".") and found.name != "Thumbs.db":
            yield Path(found.path)


def _may_have_written(folder: Path, name: str) -> bool:
    """Whether a run may have written a folder, as far as its settings are known."""
    try:
        if name == PAGES:  # of several products
            return f'href="{PAGES}/'.encode() in (folder / PAGE).read_bytes()
        written = _ASKED.get(name)
        return written is None or not written.isdisjoint(_settings(folder)["set of outputs"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return True


def _settings(folder: Path) -> dict[str, Any]:
    """What the rows of a run hang on, as its file or its journal says."""
    for name in (DONE, JOURNAL, WATCHED):
        if (folder / name).exists():
            with (folder / name).open("rb") as stream:
                text = stream.read() if name == DONE else stream.readline()
            return dict(json.loads(text)["about"])
    raise FileNotFoundError(folder / DONE)


def is_model(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder that holds entries of these names is a model folder."""
    return _MANIFEST in names and b'"anomaly-model/' in _head(folder / _MANIFEST)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(1000)
    except OSError:  # not there, or not ours to read
        return b""


def _explained(file: Path) -> list[str]:
    try:
        return [_EXPLANATION, *map(str, json.loads(file.read_bytes())["pictures"])]
    except (OSError, ValueError, LookupError, TypeError):
        return []
