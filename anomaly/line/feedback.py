"""The parts of a record of which a person has said what they are, as image files."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from anomaly.datasets import Sample
from anomaly.errors import DataError, OutputError, why
from anomaly.files.writing import short_name, write
from anomaly.imaging.read import FORMATS, HEAD_BYTES, identify

_PAST = 200  # newest pictures that nobody has said anything of
# What was said last of each image.
_SAID = """
SELECT sha256, verdict, defect_type FROM feedback
WHERE id IN (SELECT MAX (id) FROM feedback GROUP BY sha256) ORDER BY id
"""
# Parts of an image and of some models; those with a picture come first.
_PART = """
SELECT parts.id, pictures.file FROM parts LEFT JOIN pictures ON pictures.part = parts.id
WHERE parts.sha256 = ? AND parts.model_id IN ({ids})
ORDER BY pictures.part IS NULL, parts.id DESC LIMIT 1
"""
_NEWEST = """
SELECT MAX (parts.id), pictures.file FROM pictures JOIN parts ON pictures.part = parts.id
WHERE parts.model_id IN ({ids}) AND parts.sha256 NOT IN (SELECT sha256 FROM feedback)
GROUP BY parts.sha256 ORDER BY MAX (parts.id) DESC LIMIT ?
"""

# The models that have scored what was judged; and of an image, the part of one of them.
_MODELS = """
SELECT DISTINCT model FROM parts WHERE sha256 IN (SELECT sha256 FROM feedback) ORDER BY model
"""
_PICTURE = """
SELECT parts.id, pictures.file FROM parts LEFT JOIN pictures ON pictures.part = parts.id
WHERE parts.sha256 = ? AND parts.model = ? ORDER BY pictures.part IS NULL, parts.id DESC LIMIT 1
"""


@dataclass(frozen=True)
class Confirmed:
    """Pictures of a record.

    Attributes:
        good: of parts that people have called good.
        defects: of parts that people have called defects.
        past: the newest of those that nobody has said anything of.
        lost: how many parts people have called good or defects whose picture isn't kept.
    """

    good: list[Sample] = field(default_factory=list)
    defects: list[Sample] = field(default_factory=list)
    past: list[Sample] = field(default_factory=list)
    lost: int = 0


def confirmed_parts(record: Path, model_ids: Collection[str], folder: Path) -> Confirmed:
    """Write pictures of a record into a folder.

    The last word on an image counts. Parts of other models are none of this one's business.

    Args:
        record: the record of `serve`, which may be in use.
        model_ids: of the model and those that it comes from.
        folder: an empty one.

    Raises:
        DataError: the record can't be read, or knows no part of these models.
        OutputError: no room for the pictures.
    """
    marks = ", ".join("?" * len(model_ids))
    samples: dict[str, list[Sample]] = {"good": [], "defect": []}
    lost = 0
    with _opened(record) as db:
        known = f"SELECT EXISTS (SELECT 1 FROM parts WHERE model_id IN ({marks}))"
        if not db.execute(known, (*model_ids,)).fetchone()[0]:
            raise DataError(
                f"{record} holds no part that this model has scored, nor one that it comes from. "
                "Where an int8 export of it was served, which is another model, write the "
                "pictures into a folder (anomaly feedback --pictures), and give that"
            )
        for sha256, verdict, kind in db.execute(_SAID).fetchall():
            query = _PART.format(ids=marks)
            found = db.execute(query, (sha256, *model_ids)).fetchone()
            if found is None:
                continue
            part, file = found
            if file is None:
                lost += 1
            else:
                samples[verdict].append(_sample(folder, part, file, kind))
        newest = db.execute(_NEWEST.format(ids=marks), (*model_ids, _PAST))
        past = [_sample(folder, part, file) for part, file in newest]
    return Confirmed(samples["good"], samples["defect"], past, lost)


def save_pictures(record: Path, folder: Path) -> dict[str, Counter[str]]:
    """Write the pictures of all parts that people have judged, by the model that scored them.

    For programs that take files, and for models that aren't those of the record: `good/` and
    `defect/<type>/` are what `start` and `train` learn from, too.

    Args:
        record: the record of `serve`, which may be in use.
        folder: gets a folder for each model, by its name in the service.

    Returns:
        How many are `good` and `defect`, and how many aren't kept (`lost`), by model.

    Raises:
        DataError: the record can't be read, or nobody has judged a part in it.
        OutputError: a model's folder exists, or there is no room.
    """
    counts: dict[str, Counter[str]] = {}
    with _opened(record) as db:
        models = [str(row[0]) for row in db.execute(_MODELS)]
        if not models:
            raise DataError(f"{record} holds no part that anybody has judged")
        if there := [folder / model for model in models if (folder / model).exists()]:
            raise OutputError(f"{there[0]} exists already; give another folder for the pictures")
        said = db.execute(_SAID).fetchall()
        for model in models:
            counts[model] = Counter()
            for sha256, verdict, kind in said:
                found = db.execute(_PICTURE, (sha256, model)).fetchone()
                if found is None:
                    continue
                part, file = found
                counts[model][verdict if file else "lost"] += 1
                if file:
                    kept = folder / model / verdict / (_folder_name(kind) if kind else "")
                    write(kept / f"part-{part}.{_suffix(file)}", file)
    return counts


def _suffix(file: bytes) -> str:
    kind = identify(file[:HEAD_BYTES])
    return next(name for name, one in FORMATS.items() if one is kind)


def _folder_name(kind: str) -> str:
    """A kind of defect, as somebody has typed it, as a folder's name that is no hidden one."""
    return short_name(re.sub(r"[^\w -]", "_", kind).strip() or "_")


@contextmanager
def _opened(record: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{record.absolute().as_uri()}?mode=ro", uri=True)) as db:
            yield db
    except sqlite3.Error:
        raise DataError(f"{record} can't be read as a record of serve") from None
    except OSError as error:
        raise DataError(f"{record} can't be read: {why(error)}") from None


def _sample(folder: Path, part: int, file: bytes, kind: str = "") -> Sample:
    name = f"part {part}" + (f" ({kind})" if kind else "")
    path = folder / f"part-{part}"
    write(path, file)
    return Sample(path, name)
