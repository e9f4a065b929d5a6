"""`anomaly evaluate`: trained models × their test splits -> metrics.json, scores.csv, a table."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.errors import DataError

if TYPE_CHECKING:
    from anomaly.calibration import Thresholds
    from anomaly.evaluation import Evaluation

log = logging.getLogger(__name__)

OUTPUTS = ("metrics.json", "scores.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", type=Path, nargs="+", required=True, help="runs, or their model/ folders"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the figures go")
    parser.add_argument(
        "--data-root",
        type=Path,
        help="the data sets' folder, where it has moved since training",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier figures there")
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Evaluate every model named."""
    from anomaly.files import claim, write
    from anomaly.report.tables import metrics_json, scores_csv, table, undefined

    claim(options.output, OUTPUTS, overwrite=options.overwrite)
    device, threads = machine.settle(options)
    evaluations: list[Evaluation] = []
    thresholds: list[Thresholds | None] = []
    with ProgressLine() as progress:
        for folder in options.model:
            evaluation, limits = _evaluate(folder, options.data_root, device, threads, progress)
            evaluations.append(_distinct(evaluation, folder, {e.name for e in evaluations}))
            thresholds.append(limits)
    write(options.output / "metrics.json", metrics_json(evaluations))
    write(options.output / "scores.csv", scores_csv(evaluations, thresholds))
    print(table(evaluations))
    for line in undefined(evaluations):
        print(line)
    refused = [row for e in evaluations for row in e.scored if row.image_score is None]
    for row in refused[:5]:
        log.warning("not scored: %s", row.reason)
    print(f"figures in {options.output / 'metrics.json'}, rows in {options.output / 'scores.csv'}")
    return 3 if refused else 0


def _evaluate(
    folder: Path, data_root: Path | None, device: Any, threads: int, progress: ProgressLine
) -> tuple[Evaluation, Thresholds | None]:
    from anomaly.checkpoint import load
    from anomaly.datasets import open_dataset
    from anomaly.evaluation import evaluate

    model = load(folder, device)
    data = model.detector.config.data
    if data_root is None:
        dataset = open_dataset(data.format, trained_on(folder), None)
    else:
        dataset = open_dataset(data.format, data_root, data.category)
    if not dataset.test:
        raise DataError(
            f"{dataset.folder} has no test images: evaluation needs test/good and "
            "test/<type of defect> beside train/"
        )
    evaluation = evaluate(
        model.detector,
        dataset.test,
        mask_above=data.mask_above,
        workers=threads,
        progress=lambda done, total: progress(model.detector.config.name, done, total),
    )
    return evaluation, model.detector.thresholds


def trained_on(folder: Path) -> Path:
    """The data set's folder, which the run remembers beside the model."""
    for file in (folder / "train.json", folder.absolute().parent / "train.json"):
        if file.is_file():
            try:
                return Path(json.loads(file.read_text("utf-8"))["data_folder"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{file} doesn't say where the data set is ({error}); give --data-root"
                ) from None
    raise DataError(f"{folder} has no train.json that says where its data set is; give --data-root")


def _distinct(evaluation: Evaluation, folder: Path, taken: set[str]) -> Evaluation:
    """Two models of one name are told apart by their folders."""
    from dataclasses import replace

    name = evaluation.name
    if name in taken:
        name = f"{name} ({folder})"
    return replace(evaluation, name=name)
