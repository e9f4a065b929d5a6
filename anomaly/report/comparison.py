"""Two evaluations of the same images -> what changed: figures, verdicts, scores; as a page.

Names, dates, settings and pictures come from the evaluations' own reports.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from anomaly.errors import DataError, why
from anomaly.files.tables import csv_rows, csv_text
from anomaly.files.writing import from_json
from anomaly.maps.encoding import thumbnail
from anomaly.report.category import Tile
from anomaly.report.page import embedded_data

_HEADER = (
    *("category", "path", "defect_type", "score_a", "score_b", "difference"),
    *("verdict_a", "verdict_b", "changed", "of_threshold_a", "of_threshold_b"),
)
_PICTURED = 60  # images with pictures on the page
_PHOTO_PIXELS = 100_000
_RANK = {"good": 0, "review": 1, "reject": 2}
# What a change of verdict is, in the order of the page.
KINDS = (
    *("Defects newly caught", "Defects newly missed"),
    *("Good parts newly flagged", "Good parts released"),
    *("Rejected instead of for review", "For review instead of rejected", "Same verdict"),
)


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
        """Whether the verdict is another one; where one has none, nothing has changed."""
        return "" not in self.verdicts and self.verdicts[0] != self.verdicts[1]

    @property
    def better(self) -> bool | None:
        """Whether the second verdict is nearer to the truth; None where there aren't two."""
        first, second = (_RANK.get(v) for v in self.verdicts)
        if first is None or second is None or first == second:
            return None
        return (second > first) == (self.defect_type != "good")

    @property
    def kind(self) -> int:
        """Which of `KINDS` it is."""
        if not self.changed:
            return len(KINDS) - 1
        before, after = (verdict != "good" for verdict in self.verdicts)
        if before == after:
            return 4 if self.verdicts[1] == "reject" else 5
        return (0 if after else 1) if self.defect_type != "good" else (2 if after else 3)

    @property
    def moved(self) -> float | None:
        """How far the score moved, in thresholds."""
        first, second = self.ratios
        return None if first is None or second is None else second - first


@dataclass(frozen=True)
class Report:
    """What a category's report says of its model, and shows; nothing where there is none.

    Attributes:
        origin: names and values for people: the model, when it was trained and evaluated.
        settings: of the model, by dotted name.
        pictures: by the images' names.
    """

    origin: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, Tile] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What differs between two evaluations.

    Attributes:
        names: of both, as the user gave them.
        figures: category to both's figures.
        changes: every image that is in both, in the order of `KINDS`.
        alone: how many images only the first and only the second has.
        reports: category to both's reports, with pictures of the first changes.
    """

    names: tuple[str, str]
    figures: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
    changes: tuple[Change, ...]
    alone: tuple[int, int]
    reports: Mapping[str, tuple[Report, Report]] = field(default_factory=dict)


def compare(first: Path, second: Path) -> Comparison:
    """Compare what `evaluate` wrote into two folders.

    Categories and images are told apart by name, and images of one name by their content; two
    evaluations of one category each are compared whatever the models' names.

    Raises:
        DataError: a folder doesn't hold an evaluation, or they have no image in common.
    """
    (figures_a, rows_a), (figures_b, rows_b) = _read(first), _read(second)
    names = {name: name for name in figures_a if name in figures_b}
    if len(figures_a) == len(figures_b) == 1:
        (name,), (other,) = figures_a, figures_b
        names = {name: other}
        rows_b = {(name, path): row for (_, path), row in rows_b.items()}
    common = [key for key, row in rows_a.items() if key in rows_b and _is_same(row, rows_b[key])]
    if not common:
        raise DataError(f"{first} and {second} have no image in common; compare like with like")
    try:
        changes = [_change(key, rows_a[key], rows_b[key]) for key in common]
    except (ValueError, KeyError) as error:
        raise _no_evaluation(f"{first} or {second}", error) from None
    changes.sort(key=lambda c: (c.kind, -abs(c.moved or 0.0)))
    both = {name: (figures_a[name], figures_b[other]) for name, other in names.items()}
    alone = len(rows_a) - len(common), len(rows_b) - len(common)
    wanted = {(c.category, c.path) for c in changes[:_PICTURED] if c.changed}
    of_a = _reports(first, {name: name for name in names}, wanted)
    of_b = _reports(second, {other: name for name, other in names.items()}, wanted)
    reports = {name: (of_a.get(name, Report()), of_b.get(name, Report())) for name in names}
    return Comparison((str(first), str(second)), both, tuple(changes), alone, reports)


def _reports(
    folder: Path, names: Mapping[str, str], wanted: set[tuple[str, str]]
) -> dict[str, Report]:
    """What an evaluation's reports say and show; those that can't be read are left out.

    Args:
        folder: of the evaluation.
        names: of its categories, to those that they have in the comparison.
        wanted: category and path of the images whose pictures are kept.
    """
    reports = {}
    for file in sorted(folder.glob("*/report.html")):
        with suppress(OSError, ValueError, LookupError, TypeError, cv2.error):
            data = embedded_data(file.read_text("utf-8"))
            name = names.get(data["name"], "")
            shown = [image for image in data["images"] if (name, image["name"]) in wanted]
            limits = data["thresholds"]
            settings = [f["rows"] for f in data["facts"] if f["title"] == "Settings"]
            reports[name] = Report(
                {
                    "model": str(data["subtitle"]),
                    **{str(key): str(value) for key, value in data["provenance"]},
                    **{f"{n} above": f"{v:.5g}" for n in ("review", "reject") if (v := limits[n])},
                },
                {str(key): str(value) for rows in settings for key, value in rows},
                {image["name"]: _picture(image) for image in shown},
            )
    return reports


def _picture(image: Mapping[str, Any]) -> Tile:
    """An image of a report, its photograph brought down."""
    data = np.frombuffer(base64.b64decode(image["photo"]), np.uint8)
    photo = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR_RGB), np.uint8)
    width, height = image["size"]
    return Tile(
        thumbnail(photo, _PHOTO_PIXELS).photo,
        base64.b64decode(image["heat"]),
        (int(width), int(height)),
        tuple(image["source"]),
        str(image["truth"]),
        str(image["marked"]),
    )


def _is_same(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Whether two rows are of first image, as far as is known: earlier tables have no hashes."""
    hashes = first.get("image_sha256"), second.get("image_sha256")
    return not all(hashes) or hashes[0] == hashes[1]


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
    changes = comparison.changes
    if mute := [name for i, name in enumerate("AB") if not any(c.verdicts[i] for c in changes)]:
        text = f"{len(changes)} images in both; {' and '.join(mute)} without verdicts"
    else:
        better = sum(c.better is True for c in changes)
        worse = sum(c.better is False for c in changes)
        text = (
            f"{better + worse} of {len(changes)} images changed verdict, "
            f"{better} for the better and {worse} for the worse"
        )
    if any(comparison.alone):
        text += f"; only in A: {comparison.alone[0]}, only in B: {comparison.alone[1]}"
    return text


def _read(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], dict[str, str]]]:
    """An evaluation's figures by category, and its rows by category and path."""
    try:
        figures = dict(from_json((folder / "metrics.json").read_text("utf-8"))["categories"])
        text = (folder / "scores.csv").read_bytes().decode("utf-8", "surrogateescape")
        header, *cells = csv_rows(text)
        rows = [dict(zip(header, row, strict=True)) for row in cells]
        return figures, {(row["category"], row["path"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
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
