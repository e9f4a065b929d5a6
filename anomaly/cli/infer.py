"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps.

With `--watch` there is a row as each file arrives, for as long as the shift lasts.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np

from anomaly.cli import annex
from anomaly.cli.common import chosen_device, joined_cluster
from anomaly.cli.terminal import NOTE, ProgressLine, Stopping
from anomaly.datasets.inputs import Found, find_inputs, is_list, passed_over, picture_names
from anomaly.desk.production import flagged_line
from anomaly.errors import DataError, first_of, visible
from anomaly.files.writing import (
    FOLDERS,
    HEATMAPS,
    PAGE,
    from_json,
    locked,
    remove_drafts,
    write,
)
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import is_folder, list_files
from anomaly.inference.outputs import Outputs
from anomaly.inference.pipeline import (
    LINES,
    Finished,
    Inputs,
    Run,
    RunJournal,
    resumable,
)
from anomaly.inference.rows import Row, Tally, learned_by
from anomaly.inference.watch import WatchJournal, watch
from anomaly.maps.heatmap import SHOWN, Thumbnails
from anomaly.report.gallery import gallery_html
from anomaly.report.page import About
from anomaly.report.report import passed_in_evaluation
from anomaly.runtime import cores
from anomaly.scoring.model import Model
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Score images, or what arrives."""
    if options.watch:
        _check_watch(options)
    kinds = frozenset(options.write or ("heatmaps", "page")) - {"none"}
    outputs = Outputs(options.output, kinds)
    with locked(options.output):
        found = None if options.watch else find_inputs(options.input)
        with suppress(DataError):  # a folder that can't be listed now is tried again
            files = (file for folder in options.input for file in list_files(folder))
            if others := found.passed_over if found else passed_over(files):
                log.log(NOTE, others)
        is_complete = outputs.begin(
            watch=options.watch, resume=options.resume, overwrite=options.overwrite
        )
        with Stopping() as stop, ExitStack() as opened:
            images = len(found.paths) if found else cores()
            device = chosen_device(options, images=images)
            model = load_model(options.model, device)
            if found is None:
                folders = sorted(str(folder.absolute()) for folder in options.input)
                about = outputs.about(model, {"folders": folders})
            else:
                about = outputs.about(model, {"list of images": found.sha256})
            if is_complete:
                code = RunJournal.finished(options.output, about)
                print(f"the run in {options.output} is complete; there is nothing to resume")
                return code

            def stopped() -> bool:
                return stop.signal is not None

            predict = None
            if cluster := opened.enter_context(joined_cluster(options, device)):
                predict = partial(annex("cluster.workers").predict, cluster, model, stopped)
            if not options.resume:
                outputs.clear(model)
            thumbnails = Thumbnails(len(found.paths) if found else SHOWN)
            writer = outputs.pictures(model, thumbnails.pixels)
            scoring = partial(
                Run,
                model,
                outputs,
                decoders=Decoders(model.loading, writer),
                stopped=stopped,
                thumbnails=thumbnails,
                predict=predict,
            )
            if found is None:
                return _watch(options, model, outputs, about, scoring)
            ended = _list(options, found, model, outputs, about, scoring)
            return stop.exit_code if ended is None else ended


def _list(
    options: argparse.Namespace,
    found: Found,
    model: Model,
    outputs: Outputs,
    about: dict[str, object],
    scoring: Callable[..., Run],
) -> int | None:
    """Score the images of a list; returns the exit code, None where a signal has stopped it."""
    total = len(found.paths)
    journal = RunJournal(outputs, about, found.groups)
    with resumable(lambda: f"{len(journal.done)} of {total} images are"):
        with journal, ProgressLine() as progress:
            outputs.write_scale(model)
            mirrored = [] if any(map(is_list, options.input)) else options.input
            names = picture_names(found.paths, mirrored)
            inputs = Inputs(found.paths, names, found.groups)
            run = scoring(journal)
            started, earlier = time.perf_counter(), len(journal.done)
            run.score(inputs, partial(progress, "scoring"))
        speed = (len(journal.done) - earlier) / (time.perf_counter() - started)
        rows = [journal.done[index].row for index in sorted(journal.done)]
        is_complete = len(rows) == total
        page = _page(options, model, rows, about, run) if is_complete else None
        tally = Tally(model, rows)
        print(tally.line(total))
        _print_rows(rows, speed, options.output, page)
        if tally.learned:
            print(
                f"{tally.learned} of these images were used to train the model: new images will "
                "score higher. The promise is compared with the other "
                f"{tally.counts['ok'] - tally.learned}"
            )
        _print_escapes(model, options.model)
        if line := _difference(tally, model, options.model):
            log.warning(line)
        if not is_complete:
            print("stopped; continue with --resume")
            return None
        journal.finish(tally.exit_code)
        remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
        return tally.exit_code


def _page(
    options: argparse.Namespace,
    model: Model,
    rows: Iterable[Row],
    about: dict[str, object],
    run: Run,
) -> Path | None:
    """Write results.html if it is wanted."""
    if "page" not in run.outputs.kinds:
        return None
    named = ", ".join(map(str, options.input))
    of, learned = About.of(model, options.model), learned_by(model)
    page: Path = options.output / PAGE
    text = gallery_html(model.name, of, named, rows, page.parent, run.thumbnails, about, learned)
    write(page, text)
    return page


def _difference(tally: Tally, model: Model, folder: Path) -> str:
    """A line if more or fewer images are flagged than promised; empty otherwise."""
    if model.thresholds is None:
        return ""
    promised = model.thresholds.to_review.false_rejects
    return flagged_line(tally.flagged[True], tally.flagged.total(), promised, str(folder))


def _print_escapes(model: Model, folder: Path) -> None:
    """Repeat how many defects passed in the newest evaluation that lies in the model's run."""
    if model.thresholds is None:
        return
    files = find_model(folder).parent.glob("*/scores.csv")
    for file in sorted(files, key=lambda f: f.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError):  # a file of something else
            text = file.read_text("utf-8", "surrogateescape")
            if line := passed_in_evaluation(text, model.thresholds):
                print(line)
                break


def _print_rows(rows: list[Row], speed: float, output: Path, page: Path | None) -> None:
    reasons = [
        f"{row.verdict}: {row.path}: {row.reason}" for row in rows if row.verdict and row.reason
    ]
    unscored = [f"{row.status}: {row.reason}" for row in rows if row.status != "ok"]
    where = ", all in results.csv"
    for line in first_of(reasons, f" with a reason{where}") + first_of(unscored, where):
        print(f"  {visible(line)}")
    if times := [row.milliseconds for row in rows if row.milliseconds and row.status == "ok"]:
        p50, p99 = np.quantile(times, (0.5, 0.99))
        print(
            f"{speed:.3g} images a second; from file to row, half of them took at most "
            f"{p50:.0f} ms each, 99 % at most {p99:.0f} ms"
        )
    heatmaps = f", pictures in {output / HEATMAPS}" if any(row.heatmap for row in rows) else ""
    if rows:
        shown = f", all shown in {page}" if page else ""
        print(f"rows in {output / 'results.csv'}{heatmaps}{shown}")


def _watch(
    options: argparse.Namespace,
    model: Model,
    outputs: Outputs,
    about: dict[str, object],
    scoring: Callable[..., Run],
) -> int:
    """Score what arrives until a signal comes, a line for each image; returns the exit code.

    Raises:
        OutputError: results can't be written; those that could are kept.
    """
    tally, is_warned = Tally(model), False

    def on_row(finished: Finished) -> None:
        nonlocal is_warned
        tally.add(finished.row)
        print(_line(finished.row), flush=True)
        if not is_warned and (line := _difference(tally, model, options.model)):
            log.warning(line)
            is_warned = True

    journal = WatchJournal(outputs, about, on_row)
    run = scoring(journal)
    log.info("watching %s; Ctrl-C ends it", ", ".join(map(str, options.input)))
    with resumable(lambda: f"{tally.counts['ok']} images are"), journal:
        outputs.write_scale(model)
        watch(run, journal, options.input, trouble=log.warning)
    page = _page(options, model, _rows_so_far(options.output), about, run)
    remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
    shown = f", all shown in {page}" if page else ""
    print(f"{tally.line()}; rows in {options.output / 'results.csv'}{shown}")
    return tally.exit_code


def _rows_so_far(output: Path) -> Iterator[Row]:
    """The rows written so far, of earlier runs there, too."""
    with (output / LINES).open(encoding="utf-8") as lines:
        yield from (Row(**from_json(line)) for line in lines)


def _line(row: Row) -> str:
    """An image's row as one line to print, whatever the image's name."""
    text = f"{row.verdict or row.status:<12}"
    if row.image_score is None:
        text += row.reason
    else:
        text += f"{row.image_score:.4g}"
        text += f" = {row.image_score / row.threshold:.2f} x reject" if row.threshold else ""
        text += f"  {row.path}" + (f": {row.reason}" if row.reason else "")
    return f"{row.time[11:19]} UTC  {visible(text)}"


def _check_watch(options: argparse.Namespace) -> None:
    if options.ray is not None:
        raise DataError("--ray can't be given with --watch, which scores on this machine")
    for folder in options.input:
        if not is_folder(folder):
            raise DataError(f"--watch follows folders; --input {folder} isn't a folder")
    for inner, outer in permutations(options.input, 2):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise DataError(f"--input {inner} lies in {outer}, which --watch follows; leave it out")
