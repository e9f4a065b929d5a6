"""Categories -> the folder of an evaluation: a report for each, index.html over all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from anomaly.files.writing import claim, clear, write
from anomaly.report.page import row_html, table_html, table_page
from anomaly.report.report import Category, glossary, report_html, term
from anomaly.report.tables import (
    Columns,
    defined_columns,
    flattered,
    mean,
    metrics_json,
    on_shared_images,
    scores_csv,
    shown,
)
from anomaly.version import __version__

INDEX_FILES = ("index.html", "metrics.json", "scores.csv")
CATEGORY_FILES = ("report.html", "metrics.json", "scores.csv")
_SHARED = (
    "Some of these models were evaluated on the same images, so there are no means and no sums."
)


def write_report(category: Category, folder: Path, *, overwrite: bool) -> Path:
    """Write one evaluation's report and the index over it; returns the report.

    Raises:
        OutputError: they exist already, or can't be written.
    """
    place = EvaluationFolder(folder, overwrite=overwrite)
    report = place.add(category)
    place.finish([category], {})
    return report


def folder_name(name: str) -> str:
    """A category's name as that of a folder that is the same on every system."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "model"


class EvaluationFolder:
    """The folder that `evaluate` writes.

        index.html, metrics.json, scores.csv             over all categories
        <category>/report.html, metrics.json, scores.csv

    Args:
        folder: made if need be.
        overwrite: replace earlier files of these names instead of refusing: those over all
            categories with the first one that is added, a category's with that category.

    Raises:
        OutputError: the folder can't be used, or an earlier evaluation is in it.
    """

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        claim(folder, INDEX_FILES, overwrite=overwrite)
        self.folder = folder
        self._overwrite = overwrite
        self._reports: dict[str, str] = {}

    def add(self, category: Category) -> Path:
        """Write one category's files; returns its report.

        Raises:
            OutputError: they exist already, or can't be written.
        """
        name = folder_name(category.name)
        while name.casefold() in {link.split("/")[0].casefold() for link in self._reports.values()}:
            name += "_"
        folder = self.folder / name
        claim(folder, CATEGORY_FILES, overwrite=self._overwrite)
        if not self._reports:
            clear(self.folder, INDEX_FILES)
        clear(folder, CATEGORY_FILES)
        evaluation = category.evaluation
        write(folder / "metrics.json", metrics_json([evaluation]))
        write(folder / "scores.csv", scores_csv([evaluation]))
        write(folder / "report.html", report_html(category))
        self._reports[category.name] = f"{name}/report.html"
        return folder / "report.html"

    def finish(self, categories: Sequence[Category], failures: Mapping[str, str]) -> Path:
        """Write what goes over all categories; returns the index."""
        evaluations = [c.evaluation for c in categories]
        write(self.folder / "metrics.json", metrics_json(evaluations))
        write(self.folder / "scores.csv", scores_csv(evaluations))
        index = self.folder / "index.html"
        write(index, index_html(categories, failures, self._reports))
        return index


def index_html(
    categories: Sequence[Category], failures: Mapping[str, str], links: Mapping[str, str]
) -> str:
    """The page over all categories.

    Args:
        categories: in order; their tiles aren't used.
        failures: why others couldn't be evaluated, by name.
        links: category name to its report, relative to the index.
    """
    evaluations = [c.evaluation for c in categories]
    columns = defined_columns(evaluations)
    head = ["Category", "Good", "Defective", "Escapes", "False rejects", "Good to review"]
    head += [term(key, title) if key in glossary() else escape(title) for title, key in columns]
    rows = [_row(c, columns, links.get(c.name)) for c in categories]
    shared = on_shared_images(evaluations)
    if len(categories) > 1 and not shared:
        rows.append(_mean_row(categories, columns))
    rows += [_failed(name, why, len(head)) for name, why in failures.items()]
    kind = "models" if shared else "categories"
    count = f"{len(categories)} of {len(categories) + len(failures)} {kind} evaluated"
    dates = sorted({c.date for c in categories if c.date})[-1:]
    about = escape(" · ".join([count, *dates, f"anomaly {__version__}"]))
    notes = [f"{c.name}: {note}." for c in categories if (note := flattered(c.evaluation))]
    content = table_html(head, rows) + _notes(notes, shared=shared)
    return table_page("Evaluation", "Evaluation", about, content)


def _row(category: Category, columns: Columns, link: str | None) -> str:
    evaluation = category.evaluation
    name = f"<bdi>{escape(category.name)}</bdi>"
    if link is not None:
        name = f'<a href="{escape(quote(link, errors="replace"))}">{name}</a>'
    if category.data_folder:
        name += f"<small><bdi>{escape(category.data_folder)}</bdi></small>"
    figures = [shown(evaluation.metrics.values.get(key)) for _, key in columns]
    verdicts = ["–"] * 3
    if counts := category.verdicts:
        wrong = _count(counts.escapes), _count(counts.false_rejects)
        verdicts = [*wrong, str(counts.good_to_review)]
    cells = [evaluation.n_good, evaluation.n_defect, *verdicts, *figures]
    return row_html(name, cells)


def _mean_row(categories: Sequence[Category], columns: Columns) -> str:
    means = mean([c.evaluation for c in categories])
    figures = [shown(means.get(key)) for _, key in columns]
    counts = [v for c in categories if (v := c.verdicts)]
    totals = [
        sum(v.escapes for v in counts),
        sum(v.false_rejects for v in counts),
        sum(v.good_to_review for v in counts),
    ]
    good = sum(c.evaluation.n_good for c in categories)
    defective = sum(c.evaluation.n_defect for c in categories)
    cells = [good, defective, *totals, *figures]
    return row_html("Mean, and sum of counts", cells, "mean")


def _failed(name: str, reason: str, columns: int) -> str:
    return (
        f'<tr class="failed"><th scope="row"><bdi>{escape(name)}</bdi></th>'
        f'<td colspan="{columns - 1}">not evaluated: {escape(reason)}</td></tr>'
    )


def _count(wrong: int) -> str:
    return f'<b class="wrong">{wrong}</b>' if wrong else "0"


def _notes(notes: Sequence[str], *, shared: bool) -> str:
    lines = [
        *([_SHARED] if shared else []),
        "Escapes (defects called good), false rejects (good parts rejected) and good parts to "
        "review are counts at each model's own thresholds.",
        *notes,
        "The mean leaves out what is undefined.",
    ]
    return "".join(f'<p class="soft small">{escape(line)}</p>' for line in lines)
