"""Rows of verdicts: what `infer` says about each image."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from anomaly.errors import DataError
from anomaly.images import list_images


@dataclass(frozen=True)
class Row:
    """One image's line in results.csv and results.jsonl; the fields are the columns, in order.

    Attributes:
        path: the file, as given or found.
        image_sha256: of the file's bytes; empty where they couldn't be read.
        status: `ok`, `unreadable` or `unsupported`.
        image_score: higher is more anomalous; None unless `ok`.
        threshold: a higher score is rejected; None where the model has none.
        verdict: `good`, `reject`, or `review` where a person has to look; empty without a score
            or a threshold.
        heatmap: picture, relative to the output folder; empty unless `ok`.
        model_id: which model said so.
        software_version: of this program.
        threshold_label: how the threshold was found: `provisional` until calibrated.
        reason: why there is no score, or why a person has to look.
    """

    path: str
    image_sha256: str
    status: str
    image_score: float | None
    threshold: float | None
    verdict: str
    heatmap: str
    model_id: str
    software_version: str
    threshold_label: str
    reason: str


def as_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV with a header; floats have all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    for row in rows:
        writer.writerow(_cell(value) for value in asdict(row).values())
    return text.getvalue()


def as_jsonl(rows: Iterable[Row]) -> str:
    """Rows as one JSON object a line."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """The image files meant by files and folders, each once, in order of their names.

    Raises:
        DataError: an input doesn't exist, or there is no image at all.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        if given.is_dir():
            found.update(dict.fromkeys(list_images(given)))
        elif given.exists():
            found[given] = None
        else:
            raise DataError(f"--input {given} doesn't exist (looked in {Path.cwd()})")
    if not found:
        raise DataError(f"no images in {', '.join(map(str, inputs))}")
    return sorted(found)


def picture_names(paths: Sequence[Path], inputs: Sequence[Path]) -> list[str]:
    """A heatmap's path for each image, mirroring the inputs' folders; no two are equal.

    Args:
        paths: the image files.
        inputs: the files and folders that they were found through.
    """
    roots = [(p if p.is_dir() else p.parent).absolute() for p in inputs]
    common = Path(os.path.commonpath(roots))
    taken: set[str] = set()
    names = []
    for path in paths:
        mirrored = path.absolute().relative_to(common)
        plain = mirrored.with_suffix(".png") if mirrored.suffix.lower() == ".png" else mirrored
        name = plain.as_posix() if plain.suffix == ".png" else f"{plain.as_posix()}.png"
        # Names that differ in case alone are one name on Windows and macOS.
        while name.casefold() in taken:
            name = f"{name.removesuffix('.png')}~.png"
        taken.add(name.casefold())
        names.append(name)
    return names
