"""`anomaly evaluate`: models × their test splits -> a report for each and figures of all."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from anomaly.cli.terminal import ProgressLine
from anomaly.datasets.inputs import find_inputs, open_test_images
from anomaly.desk import golden
from anomaly.desk.advice import weakness_lines
from anomaly.errors import AnomalyError, ConfigError, ModelError, WriteError, first_of
from anomaly.evaluation.evaluate import images_to_test
from anomaly.files.writing import GOLDEN, claim, locked
from anomaly.report.report import (
    FIGURE_FILES,
    Category,
    at_thresholds,
    evaluated,
    optimism_warning,
    table,
    undefined_figures,
    write_evaluation,
)
from anomaly.storage.folder import find_runs
from anomaly.storage.models import load_model

log = logging.getLogger(__name__)


def run_evaluate(options: argparse.Namespace) -> int:
    """Evaluate the models of --model, or compare the golden parts of one with their record.

    Returns:
        The exit code of `_report` or `_check_golden`.
    """
    if options.golden is not None:
        return _check_golden(options)
    if options.output is None:
        raise ConfigError("give --output, a folder for the reports, or --golden, known parts")
    if options.good or options.defects:  # before torch is imported, which takes seconds
        open_test_images(options.good, options.defects)
    with locked(options.output):
        return _run(options)


def _check_golden(options: argparse.Namespace) -> int:
    """Compare golden parts with their record, or record them.

    Returns:
        0 nothing has changed (or all is recorded), 1 a score or a verdict has changed, or an image
        is missing or new.
    """
    if len(options.model) > 1:
        raise ConfigError("--golden needs one --model")
    if not options.tolerance >= 0:
        raise ConfigError(f"--tolerance is {options.tolerance}; it must be 0 or more")
    folder: Path = options.golden
    find_inputs([folder], option="--golden")
    if not options.overwrite:
        golden.read_record(folder)  # refused before torch is imported
    model = load_model(options.model[0], options.device)
    with ProgressLine() as progress:
        scoring = partial(progress, "scoring")
        if options.overwrite:
            with locked(folder):
                answers = golden.score_golden(model, folder, scoring)
                golden.write_record(folder, model.model_id, answers)
            print(f"{len(answers)} images recorded in {folder / GOLDEN}")
            return 0
        check = golden.check(model, folder, options.tolerance, scoring)
    if check.recorded_by != model.model_id:
        log.info(f"recorded with model {check.recorded_by}, checked with {model.model_id}")
    for name, change in check.moved.items():
        print(f"{name}: {change}")
    unchanged = len(check.parts - check.moved.keys())
    ready = "" if check.moved else ": ready"
    print(f"{unchanged} of {len(check.parts)} images score as recorded{ready}")
    if check.missed:
        print(check.missed)
    return 1 if check.moved else 0


def _run(options: argparse.Namespace) -> int:
    """Evaluate all models, one after the other; returns the exit code, see `_report`."""
    claim(options.output, FIGURE_FILES, overwrite=options.overwrite)
    categories: list[Category] = []
    failed = 0
    for source in _sources(options):
        try:
            category = _evaluate(source, options)
            if category.name in {c.name for c in categories}:  # two models of one name
                name = f"{category.name} ({category.about.folder})"
                category = replace(category, evaluation=replace(category.evaluation, name=name))
            every = [*categories, category]
            report = write_evaluation(options.output, every, overwrite=options.overwrite)
            print(f"{category.name}: {report}")
            # The pictures are in the report; only the figures are needed from here on.
            categories.append(replace(category, tiles={}))
        except WriteError:  # the others couldn't be written either
            raise
        except AnomalyError as error:  # the others go on
            log.error("%s", error)
            failed += 1
    return _report(categories, failed, options.output)


def _sources(options: argparse.Namespace) -> list[Path]:
    """The run and model folders of --model; a folder of runs stands for all its runs."""
    sources: list[Path] = []
    for folder in options.model:
        runs = [folder]
        if not (options.good or options.defects):  # these are images of one model
            with suppress(ModelError):  # evaluating it says why
                runs = find_runs(folder)
        sources += runs
    return sources


def _evaluate(folder: Path, options: argparse.Namespace) -> Category:
    """Evaluate the model of a run or model folder.

    Raises:
        AnomalyError: the model or its test images can't be used.
    """
    model = load_model(folder, options.device)
    samples, data_folder = images_to_test(model, options.good, options.defects)
    with ProgressLine() as progress:
        return evaluated(
            model,
            samples,
            data_folder,
            tested=["--defects", *options.defects] if options.defects else [],
            progress=partial(progress, model.config.name),
            folder=folder,
        )


def _report(categories: Sequence[Category], failed: int, output: Path) -> int:
    """Print the figures of all models, and advice.

    Args:
        categories: the evaluations.
        failed: number of models that couldn't be evaluated.
        output: the folder of the reports.

    Returns:
        0 all done, 3 some models or images failed, 2 none was evaluated.
    """
    if not categories:
        return 2
    evaluations = [c.evaluation for c in categories]
    for category in categories:
        if category.verdicts is not None:
            print(at_thresholds(category.name, category.verdicts))
    print(table(evaluations))
    for category in categories:
        if note := optimism_warning(category.evaluation):
            log.warning("%s: %s", category.name, note)
    for line in undefined_figures(evaluations):
        print(line)
    refused = [row.reason for e in evaluations for row in e.scored if row.score is None]
    for reason in first_of(refused):
        log.warning("not scored: %s", reason)
    for category in categories:
        for line in category.rates:
            print(line)
        name = category.name if len(categories) > 1 else ""
        for line in weakness_lines(category.weaknesses, name):
            log.info(line)
    print(f"all figures: {output / 'metrics.json'}")
    return 3 if refused or failed else 0
