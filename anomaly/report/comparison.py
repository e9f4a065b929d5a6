"""Two evaluations of the same images -> what changed: figures, verdicts, scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anomaly.errors import DataError, why
from anomaly.files.csv_files import csv_rows, csv_text

_HEADER = (
    *("category", "path", "defect_type", "score_a", "score_b", "difference"),
    *("verdict_a", "verdict_b", "changed", "of_threshold_a", "of_threshold_b"),
)
_RANK = {"good": 0, "review": 1, "reject": 2}


@dataclass(frozen=True)
class Change:
    """One image in both evaluations.

    Attributes:
        category: of both.
        path: of the image, in its data set.
        defect_type: `good`, or the kind of defect.
        scores: first and second; None where it wasn't scored.
        verdicts: first and second; empty without a threshold.
        ratios: the scores over their own models' thresholds, which can be compared where the
            scores of two models can't; None without one.
    """

    category: str
    path: str
    defect_type: str
    scores: tuple[float | None, float | None]
    verdicts: tuple[str, str]
    ratios: tuple[float | None, float | None]

    @property
    def changed(self) -> bool:
        """Whether the verdict is another one."""
        return self.verdicts[0] != self.verdicts[1]

    @property
    def better(self) -> bool | None:
        """Whether the second verdict is nearer to the truth; None where there aren't two."""
        first, second = (_RANK.get(v) for v in self.verdicts)
        if first is None or second is None or first == second:
            return None
        return (second > first) == (self.defect_type != "good")

    @property
    def moved(self) -> float | None:
        """How far the score moved, in thresholds."""
        first, second = self.ratios
        return None if first is None or second is None else second - first


@dataclass(frozen=True)
class Comparison:
    """What differs between two evaluations.

    Attributes:
        names: of both, as the user gave them.
        figures: category to both's figures.
        changes: every image that is in both, those with another verdict first.
        alone: how many images only the first and only the second has.
    """

    names: tuple[str, str]
    figures: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    changes: tuple[Change, ...]
    alone: tuple[int, int]


def compare(first: Path, second: Path) -> Comparison:
    """Compare what `evaluate` wrote into two folders.

    Categories and images are told apart by name; two evaluations of one category each are
    compared whatever the models' names.

    Raises:
        DataError: a folder doesn't hold an evaluation, or they have no image in common.
    """
    figures = _read_figures(first), _read_figures(second)
    rows = _read_rows(first), _read_rows(second)
    if len(figures[0]) == len(figures[1]) == 1:
        (name,), (other,) = figures[0], figures[1]
        figures = figures[0], {name: figures[1][other]}
        rows = rows[0], {(name, path): row for (_, path), row in rows[1].items()}
    common = [key for key in rows[0] if key in rows[1]]
    if not common:
        raise DataError(f"{first} and {second} have no image in common; compare like with like")
    try:
        changes = [_change(key, rows[0][key], rows[1][key]) for key in common]
    except (ValueError, KeyError) as error:
        raise _no_evaluation(f"{first} or {second}", error) from None
    changes.sort(key=lambda c: (not c.changed, c.better is not False, -abs(c.moved or 0.0)))
    both = {name: (figures[0][name], figures[1][name]) for name in figures[0] if name in figures[1]}
    alone = len(rows[0]) - len(common), len(rows[1]) - len(common)
    return Comparison((str(first), str(second)), both, tuple(changes), alone)


def comparison_csv(comparison: Comparison) -> str:
    """One row for each image in both; floats have all their digits."""
    rows: list[Sequence[object]] = [_HEADER]
    for c in comparison.changes:
        known = c.scores[0] is not None and c.scores[1] is not None
        difference = c.scores[1] - c.scores[0] if known else None  # type: ignore[operator]
        cells = (*c.scores, difference, *c.verdicts, int(c.changed), *c.ratios)
        rows.append((c.category, c.path, c.defect_type, *cells))
    return csv_text(rows)


def summary(comparison: Comparison) -> str:
    """The outcome in one sentence."""
    changed = [c for c in comparison.changes if c.changed]
    better = sum(c.better is True for c in changed)
    worse = sum(c.better is False for c in changed)
    text = (
        f"{len(changed)} of {len(comparison.changes)} images changed verdict, "
        f"{better} for the better and {worse} for the worse"
    )
    if any(comparison.alone):
        text += f"; only in A: {comparison.alone[0]}, only in B: {comparison.alone[1]}"
    return text


def _read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        text = (folder / "metrics.json").read_text("utf-8")
        return dict(json.loads(text)["categories"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_evaluation(folder, error) from None


def _read_rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    try:
        text = (folder / "scores.csv").read_bytes().decode("utf-8", "surrogateescape")
        header, *cells = csv_rows(text)
        rows = [dict(zip(header, row, strict=True)) for row in cells]
        return {(row["category"], row["path"]): row for row in rows}
    except (OSError, ValueError, KeyError) as error:
        raise _no_evaluation(folder, error) from None


def _no_evaluation(folder: Path | str, error: Exception) -> DataError:
    return DataError(
        f"{folder} holds no evaluation ({why(error)}); give folders that `evaluate --output` wrote"
    )


def _change(key: tuple[str, str], first: dict[str, str], second: dict[str, str]) -> Change:
    scores = _number(first["image_score"]), _number(second["image_score"])
    limits = _number(first["threshold"]), _number(second["threshold"])
    ratios = _ratio(scores[0], limits[0]), _ratio(scores[1], limits[1])
    verdicts = first["verdict"], second["verdict"]
    return Change(*key, first["defect_type"], scores, verdicts, ratios)


def _ratio(score: float | None, limit: float | None) -> float | None:
    return score / limit if score is not None and limit else None


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
