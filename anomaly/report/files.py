"""Where an evaluation's files lie: one folder for each category, and the index over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from anomaly.files.writing import claim, write
from anomaly.report.category import Category, Failure, folder_name
from anomaly.report.document import report_html
from anomaly.report.index import index_html
from anomaly.report.tables import metrics_json, scores_csv

INDEX_FILES = ("index.html", "metrics.json", "scores.csv")
CATEGORY_FILES = ("report.html", "metrics.json", "scores.csv")


def write_report(category: Category, folder: Path, *, overwrite: bool) -> Path:
    """Write one evaluation's report and the index over it; returns the report.

    Raises:
        OutputError: they exist already, or can't be written.
    """
    place = EvaluationFolder(folder, overwrite=overwrite)
    report = place.add(category)
    place.finish([category], [])
    return report


class EvaluationFolder:
    """The folder that `evaluate` writes.

        index.html, metrics.json, scores.csv             over all categories
        <category>/report.html, metrics.json, scores.csv

    Args:
        folder: made if need be.
        overwrite: replace earlier files of these names instead of refusing.

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
        name = self._free_name(folder_name(category.name))
        folder = self.folder / name
        claim(folder, CATEGORY_FILES, overwrite=self._overwrite)
        evaluation = category.evaluation
        write(folder / "metrics.json", metrics_json([evaluation], [category.verdicts]))
        write(folder / "scores.csv", scores_csv([evaluation], [category.thresholds]))
        write(folder / "report.html", report_html(category))
        self._reports[category.name] = f"{name}/report.html"
        return folder / "report.html"

    def finish(self, categories: Sequence[Category], failures: Sequence[Failure]) -> Path:
        """Write what goes over all categories; returns the index."""
        evaluations = [c.evaluation for c in categories]
        verdicts = [c.verdicts for c in categories]
        thresholds = [c.thresholds for c in categories]
        write(self.folder / "metrics.json", metrics_json(evaluations, verdicts))
        write(self.folder / "scores.csv", scores_csv(evaluations, thresholds))
        index = self.folder / "index.html"
        write(index, index_html(categories, failures, self._reports))
        return index

    def _free_name(self, name: str) -> str:
        """The name, or one like it that no other category has, whatever the letters' case."""
        taken = {link.split("/")[0].casefold() for link in self._reports.values()}
        free, number = name, 2
        while free.casefold() in taken:
            free, number = f"{name}-{number}", number + 1
        return free
