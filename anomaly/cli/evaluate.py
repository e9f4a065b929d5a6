"""`anomaly evaluate`: models × their test splits -> a report for each and an index over all."""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli import common_options as machine
from anomaly.cli.config_runs import Source, made, sources
from anomaly.datasets import open_test_images
from anomaly.errors import AnomalyError, ConfigError, ModelError, first_of
from anomaly.files.lock import locked
from anomaly.report.category import Failure
from anomaly.report.comparison import summary, write_comparison
from anomaly.report.index import EvaluationFolder
from anomaly.report.tables import at_thresholds, table, undefined
from anomaly.scoring.image_statistics import nearest
from anomaly.storage.folder import find_products
from anomaly.storage.load import appearances

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anomaly.datasets import Sample
    from anomaly.report.category import Category, Failure

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", type=Path, action="extend", nargs="+", help="runs, or their model/ folders"
    )
    what.add_argument(
        "--config",
        action="extend",
        nargs="+",
        help="configs; what isn't trained yet is trained into --runs first",
    )
    what.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="compare two evaluations, the outputs of this command, instead of making one",
    )
    parser.add_argument("--output", type=Path, required=True, help="where the reports go")
    machine.add_settings(
        parser, "with --config: override a setting of all of them; may be repeated"
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
        action="extend",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with --model: test with the good images in these folders, not with the data set's",
    )
    parser.add_argument(
        "--defects",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with --model: test with the defects in these folders; subfolders name their types",
    )
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="FOLDER",
        help="with --defects: their masks, named like them (scratch/1.png for scratch/1.jpg), of "
        "several folders each in one of its name",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace earlier reports there")
    machine.add_cluster(
        parser, "train and evaluate models side by side on the workers of this Ray cluster"
    )
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
    if options.good or options.defects:  # before torch is imported, which takes seconds
        _check_alone(options.model)
        _say_unmasked(open_test_images(options.good, options.defects, options.masks), options.masks)
    with locked(options.output):
        if options.compare:
            first, second = options.compare
            return _compare(first, second, options.output, options.overwrite)
        return _run(options)


def _say_unmasked(samples: Sequence[Sample], masks: Path | None) -> None:
    defects = [sample for sample in samples if sample.is_defect]
    bare = [sample for sample in defects if sample.mask_path is None]
    if bare and masks is not None:
        log.warning(
            "%d of %d defects have no mask in %s, %s for one; they count in the figures of images, "
            "not in those of pixels",
            len(bare),
            len(defects),
            masks,
            bare[0].path,
        )


def _check_alone(folders: Sequence[Path]) -> None:
    """See that the named images aren't to be those of several products.

    Raises:
        ConfigError: a folder holds the runs of several.
    """
    for folder in folders:
        with suppress(ModelError):  # said when it is evaluated
            if len(products := find_products(folder)) > 1:
                raise ConfigError(
                    f"{folder} holds several products ({', '.join(products)}), and --good and "
                    "--defects name the images of one; evaluate them one by one, with --model "
                    f"{folder / next(iter(products))} say"
                )


def _run(options: argparse.Namespace) -> int:
    folder = EvaluationFolder(options.output, overwrite=options.overwrite)
    categories: list[Category] = []
    failures: list[Failure] = []
    sets: dict[Path, list[Category]] = {}

    def take(source: Source, outcome: Category | AnomalyError) -> None:
        """Add what came of a model to the report; if that is an error, the others go on."""
        try:
            if isinstance(outcome, AnomalyError):
                raise outcome
            category = _distinct(outcome, Path(outcome.model), {c.name for c in categories})
            report = folder.add(category)
            print(f"{category.name}: {report}")
            # The pictures are in the report; only the figures are needed from here on.
            categories.append(replace(category, tiles={}))
            if source.product:
                sets.setdefault(Path(outcome.model).parent, []).append(categories[-1])
        except AnomalyError as error:
            log.error("%s", error)
            failures.append(Failure(str(source), str(error)))

    try:
        with machine.cluster(options) as cluster:
            if cluster is None:
                _one_by_one(options, take)
            else:
                machine.annex("cluster.evaluate").run(options, cluster, take)
    finally:
        # Whatever stopped the run, what was evaluated has its index.
        if categories:
            folder.finish(categories, failures)
    for place, members in sets.items():
        if len(members) > 1:
            _tell_apart(place, members)
    return _say(categories, failures, options.output)


def _tell_apart(folder: Path, members: Sequence[Category]) -> None:
    """Say how many test images of each product are taken for another one.

    Args:
        folder: of the products' runs.
        members: their evaluations.
    """
    try:
        known = appearances(folder)
    except AnomalyError as error:
        log.warning("which product an image shows can't be told: %s", error)
        return
    for category in members:
        product = Path(category.model).name
        counts = Counter(nearest(known, look) for look in category.looks.values())
        others = [f"{count} for {name}" for name, count in counts.items() if name != product]
        right = f"{counts[product]} of {counts.total()} test images are taken for it"
        print(f"{product}: {', '.join([right, *others])}")


def _one_by_one(
    options: argparse.Namespace, take: Callable[[Source, Category | AnomalyError], None]
) -> None:
    device, threads = machine.device_and_threads(options)
    for source in sources(options):
        try:
            outcome: Category | AnomalyError = made(source, options, device, threads)
        except AnomalyError as error:
            outcome = error
        take(source, outcome)


def _distinct(category: Category, folder: Path, taken: set[str]) -> Category:
    """Two models of one name are told apart by their folders."""
    if category.name not in taken:
        return category
    name = f"{category.name} ({folder})"
    return replace(category, evaluation=replace(category.evaluation, name=name))


def _say(categories: Sequence[Category], failures: Sequence[Failure], output: Path) -> int:
    if not categories:
        return 2
    evaluations = [c.evaluation for c in categories]
    print(table(evaluations))
    for category in categories:
        if category.verdicts is not None:
            print(at_thresholds(category.name, category.verdicts))
    for line in undefined(evaluations):
        print(line)
    refused = [row.reason for e in evaluations for row in e.scored if row.image_score is None]
    for reason in first_of(refused):
        log.warning("not scored: %s", reason)
    print(f"all of it: {output / 'index.html'}")
    return 3 if refused or failures else 0


def _compare(first: Path, second: Path, output: Path, overwrite: bool) -> int:
    print(summary(write_comparison(first, second, output, overwrite=overwrite)))
    print(f"all of it: {output / 'comparison.html'}")
    return 0
