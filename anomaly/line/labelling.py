"""Judging kept parts after a shift: which ones first, and masks of marked defects."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.samples import NEARLY_ALL
from anomaly.errors import DataError
from anomaly.imaging.read import read_header
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
