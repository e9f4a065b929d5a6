"""Pictures of the parts that people have judged."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anomaly.datasets import Sample
from anomaly.errors import DataError, OutputError
from anomaly.files.writing import short_name, write
from anomaly.imaging.read import suffix_of
from anomaly.line.record import JUDGED, open_to_read

_PAST = 200  # newest pictures that nobody has judged
_JUDGED = f"SELECT sha256, verdict, defect_type FROM {JUDGED} ORDER BY id"
# The part of an image that given models have scored; parts with a picture come first.
_PART = """
SELECT parts.id, pictures.file FROM parts LEFT JOIN pictures ON pictures.part = parts.id
WHERE parts.sha256 = ? AND parts.{column} IN ({marks})
ORDER BY pictures.part IS NULL, parts.id DESC LIMIT 1
"""
_NEWEST = f"""
SELECT MAX (parts.id), pictures.file FROM pictures JOIN parts ON pictures.part = parts.id
WHERE parts.model_id IN ({{marks}}) AND parts.sha256 NOT IN (SELECT sha256 FROM {JUDGED})
GROUP BY parts.sha256 ORDER BY MAX (parts.id) DESC LIMIT ?
"""
# The models that have scored judged images.
_MODELS = f"""
SELECT DISTINCT model FROM parts WHERE sha256 IN (SELECT sha256 FROM {JUDGED}) ORDER BY model
"""


@dataclass(frozen=True)
class Confirmed:
    """Pictures of a record.

    Attributes:
        good: of parts that people have called good.
        defects: of parts that people have called defects.
        past: of the newest parts that nobody has judged.
        lost: number of judged parts whose picture isn't kept.
    """

    good: list[Sample] = field(default_factory=list)
    defects: list[Sample] = field(default_factory=list)
    past: list[Sample] = field(default_factory=list)
    lost: int = 0


def judgements(record: Path) -> list[dict[str, Any]]:
    """All judgements of a record, the oldest first."""
    names = ("part", "sha256", "who", "verdict", "defect_type", "note", "time")
    with open_to_read(record) as db:
        rows = db.execute(f"SELECT {', '.join(names)} FROM feedback ORDER BY id").fetchall()
    return [dict(zip(names, row, strict=True)) for row in rows]


def confirmed_parts(record: Path, model_ids: Collection[str], folder: Path) -> Confirmed:
    """Write pictures of a record into a folder.

    The last judgement of an image counts. Parts of other models are left out.

    Args:
        record: the record of `serve`, which may be in use.
        model_ids: ids of the model and of those it was updated from.
        folder: an empty one.

    Raises:
        DataError: the record can't be read, or holds no part of these models.
        OutputError: the disk is too full for the pictures.
    """
    marks = _marks(model_ids)
    samples: dict[str, list[Sample]] = {"good": [], "defect": []}
    lost = 0
    with open_to_read(record) as db:
        known = f"SELECT EXISTS (SELECT 1 FROM parts WHERE model_id IN ({marks}))"
        if not db.execute(known, (*model_ids,)).fetchone()[0]:
            raise DataError(
                f"{record} holds no part scored by this model or an earlier version of it; write "
                "judged pictures into a folder with anomaly feedback --pictures, and give that "
                "folder"
            )
        for verdict, kind, part, file in _judged(db, "model_id", model_ids):
            if file is None:
                lost += 1
            else:
                samples[verdict].append(_sample(folder, part, file, kind))
        newest = db.execute(_NEWEST.format(marks=marks), (*model_ids, _PAST))
        past = [_sample(folder, part, file) for part, file in newest]
    return Confirmed(samples["good"], samples["defect"], past, lost)


def save_pictures(record: Path, folder: Path) -> dict[str, Counter[str]]:
    """Write the pictures of all parts that people have judged, by the model that scored them.

    For other programs, and for models that aren't those of the record: `good/` and
    `defect/<type>/` are layouts that `start` and `train` take.

    Args:
        record: the record of `serve`, which may be in use.
        folder: gets a folder for each model, as `safe_name` names it.

    Returns:
        How many are `good` and `defect`, and how many aren't kept (`lost`), by model.

    Raises:
        DataError: the record can't be read, or nobody has judged a part in it.
        OutputError: a model's folder exists, or the disk is full.
    """
    counts: dict[str, Counter[str]] = {}
    with open_to_read(record) as db:
        models = [model for (model,) in db.execute(_MODELS)]
        if not models:
            raise DataError(f"{record} holds no judged part; judge parts on the page of serve")
        places = {model: folder / safe_name(model) for model in models}
        if there := [place for place in places.values() if place.exists()]:
            raise OutputError(f"{there[0]} exists already; give another folder for the pictures")
        for model, place in places.items():
            counts[model] = Counter()
            for verdict, kind, part, file in _judged(db, "model", [model]):
                counts[model][verdict if file else "lost"] += 1
                if file is None:
                    continue
                kept = place / verdict / (safe_name(kind) if kind else "")
                write(kept / f"part-{part}.{suffix_of(file)}", file)
    return counts


def _judged(
    db: sqlite3.Connection, column: str, models: Collection[str]
) -> Iterator[tuple[str, str, int, bytes | None]]:
    """Verdict, kind of defect, part and picture of each judged image that models have scored.

    Args:
        db: the record.
        column: what names the models: `model` or `model_id`.
        models: their names or ids.
    """
    query = _PART.format(column=column, marks=_marks(models))
    for sha256, verdict, kind in db.execute(_JUDGED).fetchall():
        if (part := db.execute(query, (sha256, *models)).fetchone()) is not None:
            yield verdict, kind, *part


def _marks(values: Collection[str]) -> str:
    """Placeholders for the values of a query."""
    return ", ".join("?" * len(values))


def safe_name(text: str) -> str:
    """A record's text, of a model or a kind of defect, as the name of a visible folder."""
    return short_name(re.sub(r"[^\w .-]|^\.|\.$", "_", text.strip()) or "_")


def _sample(folder: Path, part: int, file: bytes, kind: str = "") -> Sample:
    name = f"part {part}" + (f" ({kind})" if kind else "")
    path = folder / f"part-{part}"
    write(path, file)
    return Sample(path, name)
