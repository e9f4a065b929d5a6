"""Parts that people judge: which ones first, masks of marked defects, and image files of them."""

from __future__ import annotations

import math
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets import Sample
from anomaly.datasets.samples import NEARLY_ALL
from anomaly.errors import DataError, OutputError
from anomaly.files.writing import short_name, write
from anomaly.imaging.read import read_header, suffix_of
from anomaly.line.record import JUDGED, open_to_read
from anomaly.maps.heatmap import encode_png

_NEAR = 0.1  # of a threshold: a score this close to it is in doubt
_CHECKS = 10  # good parts to judge as a check
_MOST_PAINTED = 100_000_000  # pixels that the strokes of one mark may be near to

# The newest part of each image with a picture; those of one model, or all.
_PARTS = f"""
SELECT MAX (parts.id), model, verdict, score,
    json_extract (line, '$.review_threshold'), json_extract (line, '$.threshold'),
    json_extract (line, '$.reason'), json_extract (line, '$.path'), time, parts.sha256,
    parts.sha256 IN (SELECT sha256 FROM {JUDGED})
FROM pictures JOIN parts ON parts.id = pictures.part WHERE ? IN ('', model) GROUP BY parts.sha256
"""
# Kinds of defect that people have named, the most frequent first.
_KINDS = f"""
SELECT defect_type FROM {JUDGED} AS judged JOIN parts ON parts.id = judged.part
WHERE defect_type <> '' AND ? IN ('', model) GROUP BY defect_type ORDER BY COUNT (*) DESC, 1 LIMIT 9
"""


_COLUMNS = (
    "id", "model", "verdict", "image_score", "review_threshold", "threshold", "reason", "path",
    "time", "image_sha256", "judged",
)  # fmt: skip
# Why parts are worth judging, the worthiest first, and which of them comes first.
_ORDER: dict[str, Callable[[dict[str, Any]], float]] = {
    "review": lambda part: -part["image_score"],
    "near": lambda part: _margin(part),
    "unlike": lambda part: -part["id"],
    "check": lambda part: random.Random(part["id"]).random(),
    "reject": lambda part: part["image_score"],
}


def queue(record: Path, model: str = "", limit: int = 50) -> dict[str, Any]:
    """Unjudged parts with a picture, the most useful to judge first.

    Args:
        record: of `serve`, which may be in use.
        model: only parts that this one has scored; empty for all.
        limit: largest number of parts.

    Returns:
        `parts`, whose `why` is `review`, `near` (a threshold), `unlike` (the training images; the
        `reason` says in what), `check` (good, drawn at random) or `reject`; `left`, how many there
        are in all; `kinds` of defect that people have named.

    Raises:
        DataError: the record can't be read.
    """
    with open_to_read(record) as db:
        parts = [dict(zip(_COLUMNS, row, strict=True)) for row in db.execute(_PARTS, (model,))]
        kinds = [kind for (kind,) in db.execute(_KINDS, (model,))]
    alike: dict[str, list[dict[str, Any]]] = {why: [] for why in _ORDER}
    for part in parts:
        alike[why := _why(part)].append({"why": why, **part})
    for why, first in _ORDER.items():
        alike[why].sort(key=first)
    # The same ten until newer parts come: once they are judged, the check is done.
    del alike["check"][_CHECKS:]
    unjudged = [part for group in alike.values() for part in group if not part.pop("judged")]
    return {"parts": unjudged[:limit], "left": len(unjudged), "kinds": kinds}


def _why(part: dict[str, Any]) -> str:
    if part["reason"]:
        return "unlike"
    if part["verdict"] not in ("good", "reject"):
        return "review"
    if _margin(part) <= _NEAR:
        return "near"
    return "check" if part["verdict"] == "good" else "reject"


def _margin(part: dict[str, Any]) -> float:
    """Distance of the score to the nearer threshold, as a share of it."""
    limits = filter(None, (part["review_threshold"], part["threshold"]))
    return min((abs(part["image_score"] / limit - 1) for limit in limits), default=math.inf)


def mask_of(
    file: bytes,
    width: int,
    rectangles: Iterable[tuple[float, float, float, float]] = (),
    strokes: Iterable[tuple[float, Sequence[tuple[float, float]]]] = (),
) -> bytes:
    """A person's mark on a part, as a mask of the image's size: a PNG of 0 and 255.

    Args:
        file: the image file.
        width: of the photograph; all that follows is in its pixels.
        rectangles: left, top, right and bottom edge of each, which takes pixels that it touches.
        strokes: radius of the brush and points (x, y) on its way; pixels are marked whose middle is
            no farther from the way than the radius.

    Raises:
        DataError: nothing is marked, or nearly all of the image, or it would take too long.
    """
    size = read_header(file).size
    scale = max(1, size[1] // width)
    mask = np.zeros(size, np.bool_)
    for edges in rectangles:
        left, top, right, bottom = (max(0.0, scale * edge) for edge in edges)
        mask[math.floor(top) : math.ceil(bottom), math.floor(left) : math.ceil(right)] = True
    painted = 0
    for radius, points in strokes:
        for line in zip(points, points[1:] or points, strict=False):
            painted += _paint(mask, scale * radius, scale * np.array(line))
            if painted > _MOST_PAINTED:
                raise DataError("the strokes are too many or too long; draw fewer")
    if not 0 < mask.mean() < NEARLY_ALL:
        what = "nearly all of the image" if mask.any() else "nothing"
        raise DataError(f"the mark covers {what}; mark the defect alone")
    return encode_png(mask.astype(np.uint8) * np.uint8(255))


def _paint(mask: NDArray[np.bool_], radius: float, line: NDArray[np.float64]) -> int:
    """Mark the pixels of (H, W) near a line from one (x, y) to another; how many were looked at."""
    most = mask.shape[::-1]
    low = np.clip(np.floor(line.min(axis=0) - radius), 0, most).astype(int)
    high = np.clip(np.ceil(line.max(axis=0) + radius), 0, most).astype(int)
    x, y = np.arange(low[0], high[0]) + 0.5, np.arange(low[1], high[1])[:, None] + 0.5
    (x0, y0), (dx, dy) = line[0], line[1] - line[0]
    length = dx * dx + dy * dy
    along = np.clip(((x - x0) * dx + (y - y0) * dy) / length, 0, 1) if length else 0.0
    near = (x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2 <= radius * radius
    mask[low[1] : high[1], low[0] : high[0]] |= near
    return int(near.size)


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
# The newest mask of an image since its last judgement other than defect.
_MARK = """
SELECT png FROM marks JOIN feedback ON feedback.id = marks.feedback WHERE sha256 = :sha256 AND id >
    (SELECT COALESCE (MAX (id), 0) FROM feedback WHERE sha256 = :sha256 AND verdict <> 'defect')
ORDER BY id DESC LIMIT 1
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
                f"{record} holds no part scored by this model or an earlier version of it. An "
                "int8 export counts as another model: write its judged pictures into a folder "
                "with anomaly feedback --pictures, and give that folder"
            )
        for _, verdict, kind, part, file in _judged(db, "model_id", model_ids):
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
    `defect/<type>/` are layouts that `start` and `train` take. `ground_truth/<type>/` has the
    masks of marked defects.

    Args:
        record: the record of `serve`, which may be in use.
        folder: gets a folder for each model, as `model_folder` names it.

    Returns:
        How many are `good` and `defect`, how many aren't kept (`lost`), and how many defects have
        a mask (`masks`), by model.

    Raises:
        DataError: the record can't be read, or nobody has judged a part in it.
        OutputError: a model's folder exists, or the disk is full.
    """
    counts: dict[str, Counter[str]] = {}
    with open_to_read(record) as db:
        models = [str(row[0]) for row in db.execute(_MODELS)]
        if not models:
            raise DataError(
                f"{record} holds no judged part; judge parts on the page of serve or with --verdict"
            )
        places = {model: folder / model_folder(model) for model in models}
        if there := [place for place in places.values() if place.exists()]:
            raise OutputError(f"{there[0]} exists already; give another folder for the pictures")
        has_marks = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'marks'").fetchone()
        for model, place in places.items():
            counts[model] = Counter()
            for sha256, verdict, kind, part, file in _judged(db, "model", [model]):
                counts[model][verdict if file else "lost"] += 1
                if file is None:
                    continue
                kept = place / verdict / (_folder_name(kind) if kind else "")
                write(kept / f"part-{part}.{suffix_of(file)}", file)
                mark = db.execute(_MARK, {"sha256": sha256}).fetchone() if has_marks else None
                if verdict == "defect" and mark:
                    counts[model]["masks"] += 1
                    write(place / "ground_truth" / kept.name / f"part-{part}_mask.png", mark[0])
    return counts


def _judged(
    db: sqlite3.Connection, column: str, models: Collection[str]
) -> Iterator[tuple[str, str, str, int, bytes | None]]:
    """Hash, verdict, kind of defect, part and picture of each judged image that models have scored.

    Args:
        db: the record.
        column: what names the models: `model` or `model_id`.
        models: their names or ids.
    """
    query = _PART.format(column=column, marks=_marks(models))
    for sha256, verdict, kind in db.execute(_JUDGED).fetchall():
        if (part := db.execute(query, (sha256, *models)).fetchone()) is not None:
            yield sha256, verdict, kind, *part


def _marks(values: Collection[str]) -> str:
    """Placeholders for the values of a query."""
    return ", ".join("?" * len(values))


def model_folder(model: str) -> str:
    """A model's name in the service as a folder's name."""
    return short_name(re.sub(r"/|^\.", "_", model))


def _folder_name(kind: str) -> str:
    """A typed kind of defect as the name of a visible folder."""
    return short_name(re.sub(r"[^\w -]", "_", kind).strip() or "_")


def _sample(folder: Path, part: int, file: bytes, kind: str = "") -> Sample:
    name = f"part {part}" + (f" ({kind})" if kind else "")
    path = folder / f"part-{part}"
    write(path, file)
    return Sample(path, name)
