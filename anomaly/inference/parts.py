"""Several views of one part -> one verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anomaly.inference.rows import Row


@dataclass(frozen=True)
class Part:
    """One part's line in parts.csv; the fields are the columns, in order.

    Attributes:
        group: the part.
        verdict: `reject` where any view is, else `review` where any view is for review or has no
            score, else `good`; empty where the model has no threshold.
        views: how many images it has.
        scored: how many of them have a score.
        image_score: the highest of its views; None without any.
        path: the view that decides: the rejected one with the highest score, else the first one
            for review, else the one with the highest score.
        reason: why a person has to look at that one; empty where that isn't so.
    """

    group: str
    verdict: str
    views: int
    scored: int
    image_score: float | None
    path: str
    reason: str


def judge_parts(rows: Sequence[Row], groups: Mapping[str, str]) -> list[Part]:
    """The parts all of whose views have a row, in order of their names.

    Args:
        rows: one for each image.
        groups: the part of each image, by its path; images without one are left out.
    """
    views: dict[str, list[Row]] = {}
    for row in rows:
        if row.path in groups:
            views.setdefault(groups[row.path], []).append(row)
    expected = Counter(groups.values())
    return [_judge(g, views[g]) for g in sorted(views) if len(views[g]) == expected[g]]


def _judge(group: str, views: Sequence[Row]) -> Part:
    rejected = [row for row in views if row.verdict == "reject"]
    unsure = [row for row in views if row.verdict == "review" or row.image_score is None]
    if rejected:
        verdict, decisive = "reject", max(rejected, key=_score)
    elif unsure:
        verdict, decisive = "review", unsure[0]
    else:
        decisive = max(views, key=_score)
        verdict = decisive.verdict
    scores = [row.image_score for row in views if row.image_score is not None]
    highest = max(scores, default=None)
    return Part(group, verdict, len(views), len(scores), highest, decisive.path, decisive.reason)


def _score(row: Row) -> float:
    return -math.inf if row.image_score is None else row.image_score
