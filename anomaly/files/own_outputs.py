"""What this program has written into a folder, told by its tell-tale files: never an input."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

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
