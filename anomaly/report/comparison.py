"""Two evaluations of the same images -> what changed: figures, verdicts, scores; as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from anomaly.errors import DataError, why
from anomaly.files.tables import csv_rows, csv_text
from anomaly.files.writing import claim, clear, from_json, write
from anomaly.report.page import row_html, table_html, table_page
from anomaly.report.tables import COLUMNS

_HEADER = (
    *("category", "path", "defect_type", "score_a", "score_b", "difference"),
    *("verdict_a", "verdict_b", "changed", "of_threshold_a", "of_threshold_b"),
)
_FILES = ("comparison.html", "comparison.csv")
_SHOWN = 100  # images on the page whose verdict is the same
# What is counted of the images in both: whether they are good, and their verdict.
_COUNTED: dict[str, tuple[bool, str]] = {
    "False rejects": (True, "reject"),
    "Good to review": (True, "review"),
    "Escapes": (False, "good"),
}
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


def write_comparison(first: Path, second: Path, output: Path, *, overwrite: bool) -> Comparison:
    """Compare two evaluations and write comparison.csv and comparison.html.

    Args:
        first: an evaluation's folder.
        second: another one's.
        output: where to write.
        overwrite: replace an earlier comparison there.

    Raises:
        DataError: one of them is no evaluation, or they have no image in common.
        OutputError: an earlier comparison is there, or there is no room.
    """
    comparison = compare(first, second)
    claim(output, _FILES, overwrite=overwrite)
    clear(output, _FILES)
    write(output / "comparison.csv", comparison_csv(comparison))
    write(output / "comparison.html", comparison_html(comparison))
    return comparison


def compare(first: Path, second: Path) -> Comparison:
    """Compare what `evaluate` wrote into two folders.

    Categories and images are told apart by name, and images of one name by their content; two
    evaluations of one category each are compared whatever the models' names.

    Raises:
        DataError: a folder doesn't hold an evaluation, or they have no image in common.
    """
    (figures_a, rows_a), (figures_b, rows_b) = _read(first), _read(second)
    if len(figures_a) == len(figures_b) == 1:
        (name,), (other,) = figures_a, figures_b
        figures_b = {name: figures_b[other]}
        rows_b = {(name, path): row for (_, path), row in rows_b.items()}
    common = [key for key, row in rows_a.items() if key in rows_b and _is_same(row, rows_b[key])]
    if not common:
        raise DataError(f"{first} and {second} have no image in common; compare like with like")
    try:
        changes = [_change(key, rows_a[key], rows_b[key]) for key in common]
    except (ValueError, KeyError) as error:
        raise _no_evaluation(f"{first} or {second}", error) from None
    changes.sort(key=lambda c: (not c.changed, c.better is not False, -abs(c.moved or 0.0)))
    both = {name: (figures_a[name], figures_b[name]) for name in figures_a if name in figures_b}
    alone = len(rows_a) - len(common), len(rows_b) - len(common)
    return Comparison((str(first), str(second)), both, tuple(changes), alone)


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


def comparison_html(comparison: Comparison) -> str:
    """The page: figures, images with another verdict, and the others that moved furthest."""
    changed = [c for c in comparison.changes if c.changed]
    rest = [c for c in comparison.changes if not c.changed]
    a, b = (escape(name) for name in comparison.names)
    about = f"<b>A</b> <bdi>{a}</bdi> · <b>B</b> <bdi>{b}</bdi> · {escape(summary(comparison))}"
    content = f"""
<h2>Figures</h2>{_figures_table(comparison)}
<h2>Another verdict: {len(changed)} of {len(comparison.changes)} images</h2>
{_images_table(changed)}
<h2>Same verdict, moved furthest</h2>{_images_table(rest[:_SHOWN])}
<p class="soft small">“Of threshold” is a score over its own model's threshold: scores of two
models can't be compared otherwise. Counts are of the images in both, at each model's own
thresholds. comparison.csv has every image.</p>"""
    return table_page("Comparison", "Comparison", about, content)


def _figures_table(comparison: Comparison) -> str:
    titles = ["Category", *(title for title, _ in COLUMNS), *_COUNTED]
    rows = []
    for name, (first, second) in comparison.figures.items():
        own = [change for change in comparison.changes if change.category == name]
        figures = [_pair(first.get(key), second.get(key)) for _, key in COLUMNS]
        counts = [_count_pair(own, *what) for what in _COUNTED.values()]
        rows.append(row_html(f"<bdi>{escape(name)}</bdi>", [*figures, *counts]))
    return table_html(titles, rows)


def _pair(first: float | None, second: float | None) -> str:
    shown = "<br>→ ".join("–" if v is None else f"{v:.4f}" for v in (first, second))
    if first is None or second is None:
        return shown
    return shown + _difference(f"{second - first:+.4f}", second - first)


def _count_pair(changes: Sequence[Change], good: bool, verdict: str) -> str:
    """How many images of one kind have a verdict, in both; fewer are better."""
    if not all(any(c.verdicts[i] for c in changes) for i in (0, 1)):
        return "–"
    of_kind = [c for c in changes if good == (c.defect_type == "good")]
    first, second = (sum(c.verdicts[i] == verdict for c in of_kind) for i in (0, 1))
    return f"{first}<br>→ {second}" + _difference(f"{second - first:+d}", first - second)


def _difference(text: str, gain: float) -> str:
    tone = "better" if gain > 0 else "worse" if gain < 0 else "soft"
    return f'<small class="{tone}">{text}</small>'


def _images_table(changes: Sequence[Change]) -> str:
    if not changes:
        return '<p class="soft">None.</p>'
    titles = ("Image", "Type", "Verdict A → B", "Score A → B", "Of threshold A → B")
    return f'<div class="listed">{table_html(titles, map(_image_row, changes))}</div>'


def _image_row(change: Change) -> str:
    tone = {True: "better", False: "worse", None: "soft"}[change.better]
    name = f"<bdi>{escape(change.category)}</bdi> <bdi>{escape(change.path)}</bdi>"
    verdicts = escape(" → ".join(v or "–" for v in change.verdicts))
    cells = (
        f"<bdi>{escape(change.defect_type)}</bdi>",
        f'<span class="{tone}">{verdicts}</span>',
        " → ".join("–" if s is None else f"{s:.4g}" for s in change.scores),
        " → ".join("–" if r is None else f"{r:.3f}" for r in change.ratios),
    )
    return row_html(name, cells)
