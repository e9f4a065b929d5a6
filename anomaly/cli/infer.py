"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps.

With `--watch` each arriving file gets its row, until a signal ends the command.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import permutations
from pathlib import Path

from anomaly.cli import annex
from anomaly.cli.terminal import NOTE, ProgressLine, Stopping
from anomaly.datasets.inputs import Images, find_inputs, is_list, passed_over, picture_names
from anomaly.desk.advice import flagged_line
from anomaly.errors import DataError, first_of, visible
from anomaly.files.writing import FOLDERS, HEATMAPS, PAGE, from_json, locked, remove_drafts, write
from anomaly.imaging.pool import Decoders, warm_up
from anomaly.imaging.read import is_folder, list_files
from anomaly.inference.pipeline import (
    Finished,
    Inputs,
    Journal,
    Predict,
    Run,
    RunJournal,
    WatchJournal,
    resumable,
    watch,
)
from anomaly.inference.results import LINES, Outputs, Row, Tally, learned_by
from anomaly.maps.heatmap import SHOWN, Thumbnails
from anomaly.report.page import About, gallery_html
from anomaly.report.report import passed_in_evaluation
from anomaly.runtime import cores
from anomaly.scoring.model import Model
from anomaly.storage.folder import find_model
from anomaly.storage.models import load_model

log = logging.getLogger(__name__)


def run_infer(options: argparse.Namespace) -> int:
    """Score the images of --input, or with --watch those that arrive; returns the exit code."""
    find_model(options.model)  # refused before torch is imported
    if options.watch:
        _check_watch(options)
    kinds = frozenset(options.write or ("heatmaps", "page")) - {"none"}
    outputs = Outputs(options.output, kinds)
    with locked(options.output):
        inputs = None if options.watch else find_inputs(options.input)
        with suppress(DataError):  # watching tries again a folder that can't be listed now
            files = (file for folder in options.input for file in list_files(folder))
            if others := inputs.passed_over if inputs else passed_over(files):
                log.log(NOTE, others)
        is_complete = outputs.begin(
            watch=options.watch, resume=options.resume, overwrite=options.overwrite
        )
        # A first signal lets the images in hand finish, so that --resume can go on.
        with Stopping() as stop:
            return _score(options, inputs, outputs, stop, is_complete=is_complete)


def _predict_on_cluster(
    address: str | None, model: Model, stop: Stopping, opened: ExitStack
) -> Predict | None:
    """The function that scores on Ray's machines; None without an address."""
    if address is None:
        return None
    workers = annex("cluster.workers")
    cluster = opened.enter_context(workers.joined(address, model.device.type))
    return partial(workers.predict, cluster, model, stop.has_come)


def _score(
    options: argparse.Namespace,
    inputs: Images | None,
    outputs: Outputs,
    stop: Stopping,
    *,
    is_complete: bool,
) -> int:
    """Load the model and score until all is done or a signal comes; returns the exit code.

    `inputs` is None to watch the folders of --input. If `is_complete`, the output folder holds a
    complete run already, which --resume names.
    """
    # Decoding processes start while torch is imported.
    warm_up(len(inputs.paths) if inputs else cores())
    model = load_model(options.model, options.device)
    folders = sorted(str(folder.absolute()) for folder in options.input)
    images = {"list of images": inputs.sha256} if inputs else {"folders": folders}
    about = outputs.about(model, images)
    if is_complete:  # loaded only to check that it is the same run
        code = RunJournal.exit_code_of_complete(options.output, about)
        print(f"the run in {options.output} is complete; there is nothing to resume")
        return code
    with ExitStack() as opened:
        predict = _predict_on_cluster(options.ray, model, stop, opened)
        if not options.resume:  # only now: until here a refusal leaves earlier results alone
            outputs.clear(model)
        thumbnails = Thumbnails(len(inputs.paths) if inputs else SHOWN)
        decoders = Decoders(model.loading, outputs.picture_writer(model, thumbnails.pixels))

        def scoring(record: Journal) -> Run:
            return Run(model, outputs, record, decoders, stop.has_come, thumbnails, predict)

        if inputs is None:
            printer = _RowPrinter(model, options.model)
            watched = WatchJournal(outputs, about, printer)
            return _watch(options, watched, scoring(watched), printer.tally)
        journal = RunJournal(outputs, about, inputs.groups)
        finished = _score_list(options, inputs, journal, scoring(journal))
        return stop.exit_code if finished is None else finished


def _score_list(
    options: argparse.Namespace, inputs: Images, journal: RunJournal, run: Run
) -> int | None:
    """Score a list of images; returns the exit code, or None if a signal has stopped it."""
    total = len(inputs.paths)
    with resumable(lambda: f"{len(journal.done)} of {total} images"):
        with journal, ProgressLine() as progress:
            # Pictures lie in folders like the inputs', unless a list takes them from anywhere.
            mirrored = [] if any(map(is_list, options.input)) else options.input
            names = picture_names(inputs.paths, mirrored)
            started, earlier = time.perf_counter(), len(journal.done)
            run.score(Inputs(inputs.paths, names, inputs.groups), partial(progress, "scoring"))
        speed = (len(journal.done) - earlier) / (time.perf_counter() - started)
        rows = [journal.done[index].row for index in sorted(journal.done)]
        is_complete = len(rows) == total
        page = _page(options, run, rows) if is_complete else ""
        tally = Tally(run.model, rows)
        print(tally.line(total))
        _print_rows(rows, speed, options.output, page)
        if tally.learned:
            print(
                f"{tally.learned} of these images were used to train the model: new images will "
                "score higher"
            )
        _print_escapes(run.model, options.model)
        if line := _difference(tally, run.model, options.model):
            log.warning(line)
        if not is_complete:
            print("stopped; continue with --resume")
            return None
        journal.finish(tally.exit_code)
        remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
        return tally.exit_code


def _page(options: argparse.Namespace, run: Run, rows: Iterable[Row]) -> str:
    """Write results.html if --write has `page`; returns a phrase that names it, or nothing."""
    if "page" not in run.outputs.kinds:
        return ""
    named = ", ".join(map(str, options.input))
    model, learned = About.of(run.model, options.model), learned_by(run.model)
    about, folder = run.record.about, options.output
    text = gallery_html(run.model.name, model, named, rows, folder, run.thumbnails, about, learned)
    write(folder / PAGE, text)
    return f", all shown in {folder / PAGE}"


def _difference(tally: Tally, model: Model, folder: Path) -> str:
    """A warning if more or fewer images are flagged than chance explains; empty otherwise."""
    if model.thresholds is None:
        return ""
    promised = model.thresholds.to_review.false_rejects
    run = str(folder) if model.extractor.engine == "torch" else "RUN"  # exports can't be calibrated
    return flagged_line(tally.flagged[True], tally.flagged.total(), promised, run)


def _print_escapes(model: Model, folder: Path) -> None:
    """Print how many defects passed in the newest evaluation that lies in the model's run."""
    if model.thresholds is None:
        return
    files = find_model(folder).parent.glob("*/scores.csv")
    for file in sorted(files, key=lambda f: f.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError):  # a scores.csv of another program
            text = file.read_text("utf-8", "surrogateescape")
            if line := passed_in_evaluation(text, model.thresholds):
                print(line)
                break


def _print_rows(rows: list[Row], speed: float, output: Path, page: str) -> None:
    """Print verdicts that have a reason, unusable images, the speed, and the places of results.

    Args:
        rows: rows of all images, in order.
        speed: images a second.
        output: the output folder.
        page: the phrase that names results.html, or nothing.
    """
    reasons = [
        f"{row.verdict}: {row.path}: {row.reason}" for row in rows if row.verdict and row.reason
    ]
    unscored = [f"{row.status}: {row.reason}" for row in rows if row.status != "ok"]
    where = ", all in results.csv"
    for line in first_of(reasons, f" with a reason{where}") + first_of(unscored, where):
        print(f"  {visible(line)}")
    if any(row.milliseconds and row.status == "ok" for row in rows):
        print(f"{speed:.3g} images a second")
    heatmaps = f", pictures in {output / HEATMAPS}" if any(row.heatmap for row in rows) else ""
    if rows:
        print(f"rows in {output / 'results.csv'}{heatmaps}{page}")


class _RowPrinter:
    """Prints a line for each arriving image; warns once if more or fewer are flagged than promised.

    `folder` is the model's, for the command in the warning.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        self.tally = Tally(model)
        self._model, self._folder = model, folder
        self._is_warned = False

    def __call__(self, finished: Finished) -> None:
        self.tally.add(finished.row)
        print(_line(finished.row), flush=True)
        if not self._is_warned and (line := _difference(self.tally, self._model, self._folder)):
            log.warning(line)
            self._is_warned = True


def _watch(options: argparse.Namespace, journal: WatchJournal, run: Run, tally: Tally) -> int:
    """Score arriving images until a signal comes; returns the exit code.

    `tally` counts them by verdict as they arrive.

    Raises:
        OutputError: a result can't be written; earlier ones are kept.
    """
    log.info("watching %s; Ctrl-C ends it", ", ".join(map(str, options.input)))
    with resumable(lambda: f"{tally.counts['ok']} images"), journal:
        watch(run, journal, options.input)
    with (options.output / LINES).open(encoding="utf-8") as lines:  # earlier runs' rows, too
        page = _page(options, run, (Row(**from_json(line)) for line in lines))
    remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
    print(f"{tally.line()}; rows in {options.output / 'results.csv'}{page}")
    return tally.exit_code


def _line(row: Row) -> str:
    """An image's row as one line to print; control characters of its name are escaped."""
    text = f"{row.verdict or row.status:<12}"
    if row.image_score is None:
        text += row.reason
    else:
        text += f"{row.image_score:.4g}"
        text += f" = {row.image_score / row.threshold:.2f} x reject" if row.threshold else ""
        text += f"  {row.path}" + (f": {row.reason}" if row.reason else "")
    return f"{row.time[11:19]} UTC  {visible(text)}"


def _check_watch(options: argparse.Namespace) -> None:
    """Refuse options that --watch can't follow.

    Raises:
        DataError: --ray is given, or --input isn't a folder or lies in another one.
    """
    if options.ray is not None:
        raise DataError("--ray can't be given with --watch, which scores on this machine")
    for folder in options.input:
        if not is_folder(folder):
            raise DataError(f"--watch follows folders; --input {folder} isn't a folder")
    for inner, outer in permutations(options.input, 2):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise DataError(f"--input {inner} lies in {outer}, which --watch follows; leave it out")
