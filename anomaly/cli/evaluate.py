"""`anomaly evaluate`: models × their test splits -> a report for each and an index over all."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.errors import AnomalyError, ConfigError, DataError, why
from anomaly.files.writing import sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anomaly.datasets import Dataset, Sample
    from anomaly.model.checkpoint import Model
    from anomaly.report.category import Category, Failure
    from anomaly.report.files import EvaluationFolder

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, nargs="+", help="runs, or their model/ folders")
    what.add_argument(
        "--config", nargs="+", help="configs; what isn't trained yet is trained into --runs first"
    )
    what.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="compare two evaluations, the outputs of this command, instead of making one",
    )
    parser.add_argument("--output", type=Path, required=True, help="where the reports go")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --config: override a setting of all of them; may be repeated",
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="with --config: where runs are (runs)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        help="the data sets' folder, where it has moved since training",
    )
    parser.add_argument(
        "--good",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with --model: test with the good images in these folders, not with the data set's",
    )
    parser.add_argument(
        "--defects",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with --model: test with the defects in these folders; subfolders name their types",
    )
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="FOLDER",
        help="with --defects: their masks, named like them (scratch/1.png for scratch/1.jpg)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier reports there")
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Evaluate every model named, or compare two evaluations."""
    if options.overrides and not options.config:
        raise ConfigError("--set needs --config: a trained model keeps the settings it has")
    if (options.good or options.defects or options.masks) and not options.model:
        raise ConfigError("--good, --defects and --masks need --model: a trained model to test")
    if options.masks and not options.defects:
        raise ConfigError("--masks needs --defects, the images that the masks are of")
    if (options.good or options.defects) and options.data_root:
        raise ConfigError("--data-root names a data set to test with, --good and --defects images")
    from anomaly.files.output_lock import locked

    with locked(options.output):
        if options.compare:
            first, second = options.compare
            return _compare(first, second, options.output, options.overwrite)
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from anomaly.report.files import EvaluationFolder

    folder = EvaluationFolder(options.output, overwrite=options.overwrite)
    device, threads = machine.settle(options)
    categories: list[Category] = []
    failures: list[Failure] = []
    try:
        for source in options.model or options.config:
            _attempt(source, options, device, threads, folder, categories, failures)
    finally:
        # Whatever stopped the run, what was evaluated has its index.
        if categories:
            folder.finish(categories, failures)
    return _say(categories, failures, options.output)


def _attempt(
    source: Path | str,
    options: argparse.Namespace,
    device: Any,
    threads: int,
    folder: EvaluationFolder,
    categories: list[Category],
    failures: list[Failure],
) -> None:
    """Evaluate one model; what goes wrong with it is noted, and the others go on."""
    from anomaly.cli.trained import trained_run
    from anomaly.report.category import Failure

    try:
        run_folder = Path(source)
        if options.config:
            chosen = ["--device", options.device, "--threads", str(threads)]
            run_folder = trained_run(str(source), options.overrides, options.runs, chosen)
        category = _evaluate(run_folder, options, device, threads)
        category = _distinct(category, run_folder, {c.name for c in categories})
        report = folder.add(category)
        print(f"{category.name}: {report}")
        # The pictures are in the report; only the figures are needed from here on.
        categories.append(replace(category, tiles={}))
    except AnomalyError as error:
        print(f"error: {error}", file=sys.stderr)
        failures.append(Failure(str(source), str(error)))


def _evaluate(folder: Path, options: argparse.Namespace, device: Any, threads: int) -> Category:
    from anomaly.evaluation.evaluate import evaluate
    from anomaly.model.checkpoint import load, portable
    from anomaly.report.category import Category
    from anomaly.report.page import utc_now
    from anomaly.report.tiles import Tiles

    model = load(folder, device)
    detector, thresholds = model.detector, model.detector.thresholds
    samples, data_folder = _test_images(model, folder, options)
    started = time.perf_counter()
    limit = None if thresholds is None else thresholds.pixel
    with ProgressLine() as progress, Tiles(len(samples), limit, threads) as tiles:
        evaluation = evaluate(
            detector,
            samples,
            mask_above=detector.config.data.mask_above,
            workers=threads,
            progress=lambda done, total: progress(detector.config.name, done, total),
            visit=lambda prediction, _, anomaly_map, mask: tiles.add(prediction, anomaly_map, mask),
        )
        pictures = tiles.finished()
    return Category(
        evaluation=evaluation,
        thresholds=thresholds,
        model=str(folder),
        model_id=model.model_id,
        manifest=model.manifest,
        settings=portable(detector.config),
        training=_training_of(folder),
        data_folder=data_folder,
        date=utc_now(),
        seconds=time.perf_counter() - started,
        tiles=pictures,
    )


def dataset_of(model: Model, folder: Path, data_root: Path | None) -> Dataset:
    """The data set that a model was trained on: where it was, or in another root folder.

    Raises:
        DataError: it isn't there, or nothing says where it is.
    """
    from anomaly.datasets import open_dataset

    data = model.detector.config.data
    if data_root is None:
        return open_dataset(data.format, trained_on(folder), None)
    return open_dataset(data.format, data_root, data.category)


def _test_images(
    model: Model, folder: Path, options: argparse.Namespace
) -> tuple[Sequence[Sample], str]:
    """Those that were named, but for what the model has learned from; else the data set's.

    Returns:
        The images, and the folders that they come from, for people.
    """
    from anomaly.datasets import TEST_IMAGES, open_test_images

    if options.good or options.defects:
        named = open_test_images(options.good, options.defects, options.masks)
        learned = frozenset(model.manifest["training_images"].values())
        samples = [sample for sample in named if _sha256(sample.path) not in learned]
        if len(samples) < len(named):
            known = len(named) - len(samples)
            log.warning("the model has learned from %d of %d images; left out", known, len(named))
        if not samples:
            raise DataError(f"{folder} has learned from all of these images; give others")
        given = [*(options.good or []), *(options.defects or [])]
        return samples, ", ".join(map(str, given))
    dataset = dataset_of(model, folder, options.data_root)
    if dataset.test:
        return dataset.test, str(dataset.folder)
    layout = model.detector.config.data.format
    kept = TEST_IMAGES[layout]
    raise DataError(
        f"{dataset.folder} has no test images: data.format={layout} {kept}. Give --good FOLDER "
        "with other good images and --defects FOLDER with defects"
    )


def _sha256(file: Path) -> str:
    """Of a file's bytes; empty where it can't be read, which scoring will say."""
    try:
        return sha256_of(file)
    except OSError:
        return ""


def trained_on(folder: Path) -> Path:
    """The data set's folder, which the run remembers beside the model."""
    training = _training_of(folder)
    if not training:
        raise DataError(
            f"{folder} has no train.json that says where its data set is; give --data-root"
        )
    if not isinstance(training.get("data_folder"), str):
        raise DataError(
            f"{folder}: its train.json doesn't say where the data set is; give --data-root"
        )
    return Path(training["data_folder"])


def _training_of(folder: Path) -> dict[str, Any]:
    """What train.json beside the model says; empty where there is none that can be read."""
    for file in (folder / "train.json", folder.absolute().parent / "train.json"):
        if file.is_file():
            try:
                return dict(json.loads(file.read_text("utf-8")))
            except (OSError, ValueError, TypeError) as error:
                log.warning("%s can't be read: %s", file, why(error))
    return {}


def _distinct(category: Category, folder: Path, taken: set[str]) -> Category:
    """Two models of one name are told apart by their folders."""
    if category.name not in taken:
        return category
    name = f"{category.name} ({folder})"
    return replace(category, evaluation=replace(category.evaluation, name=name))


def _say(categories: Sequence[Category], failures: Sequence[Failure], output: Path) -> int:
    from anomaly.report.tables import table, undefined

    if not categories:
        return 2
    evaluations = [c.evaluation for c in categories]
    print(table(evaluations))
    for line in undefined(evaluations):
        print(line)
    refused = [row for e in evaluations for row in e.scored if row.image_score is None]
    for row in refused[:5]:
        log.warning("not scored: %s", row.reason)
    print(f"all of it: {output / 'index.html'}")
    return 3 if refused or failures else 0


def _compare(first: Path, second: Path, output: Path, overwrite: bool) -> int:
    from anomaly.files.writing import claim, write
    from anomaly.report.comparison import compare, comparison_csv, summary
    from anomaly.report.comparison_page import comparison_html

    comparison = compare(first, second)
    claim(output, ("comparison.html", "comparison.csv"), overwrite=overwrite)
    write(output / "comparison.csv", comparison_csv(comparison))
    write(output / "comparison.html", comparison_html(comparison))
    print(summary(comparison))
    print(f"all of it: {output / 'comparison.html'}")
    return 0
