"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps.

With `--watch` there is a row as each file arrives, for as long as the shift lasts.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.calibration.production import flagged_line
from anomaly.cli import annex
from anomaly.cli.common_options import (
    check_cluster,
    chosen_device,
    joined_cluster,
    wanted_threads,
)
from anomaly.cli.logging_setup import NOTE, ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.datasets.inputs import find_inputs, passed_over
from anomaly.errors import DataError, OutputError, first_of, visible
from anomaly.files.outputs import (
    DONE,
    FOLDERS,
    HEATMAPS,
    INFER,
    JOURNAL,
    WATCHED,
    left_by_system,
    locked,
)
from anomaly.files.writing import claim, from_json, remove_drafts
from anomaly.imaging.listing import is_folder
from anomaly.imaging.pool import Decoders, Task
from anomaly.inference.journal import Finished, RunJournal
from anomaly.inference.outputs import OutputOptions, Outputs, about_model
from anomaly.inference.rows import Counts, Row, learned_by
from anomaly.inference.run import Predict, infer_files, resumable
from anomaly.inference.watch import WatchJournal, watch
from anomaly.maps.encoding import Thumbnails
from anomaly.report.gallery import write_gallery
from anomaly.report.tables import passed_in_evaluation
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model

if TYPE_CHECKING:
    from anomaly.cluster.actors import Cluster

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Score images."""
    check_cluster(options)
    if options.watch and options.ray is not None:
        raise DataError("--ray can't be given with --watch, which scores on this machine")
    wanted = {field.name: getattr(options, field.name) for field in fields(OutputOptions)}
    outputs = Outputs(options.output, OutputOptions(**wanted))
    with locked(options.output):
        if options.watch:
            return _watch(options, outputs)
        return _run(options, outputs)


def _run(options: argparse.Namespace, outputs: Outputs) -> int:
    begun = time.perf_counter()
    found = find_inputs(options.input, options.list)
    total = len(found.paths)
    if found.passed_over:
        log.log(NOTE, found.passed_over)
    is_complete = outputs.begin(resume=options.resume, overwrite=options.overwrite)
    with (
        Stopping() as stop,
        ExitStack() as opened,
    ):
        device = chosen_device(options, images=total)
        model = load_model(options.model, device, options.precision)
        about = outputs.about(model, found.sha256)
        if is_complete:
            code = RunJournal.finished(options.output / DONE, about)
            print(f"the run in {options.output} is complete; there is nothing to resume")
            return code
        cluster = opened.enter_context(joined_cluster(options, device))
        predict = None if cluster is None else _predict_on(cluster, options, model, stop)
        if not options.resume:
            outputs.clear(model)
        journal = RunJournal(options.output / JOURNAL, about)
        with resumable(lambda: f"{len(journal.done)} of {total} images are"):
            learned = learned_by(model)
            with ProgressLine() as progress:
                thumbnails = infer_files(
                    model,
                    found,
                    [] if options.list else options.input,
                    outputs,
                    journal,
                    stopped=lambda: stop.signal is not None,
                    progress=partial(progress, "scoring"),
                    predict=predict,
                )
            rows = journal.rows()
            is_complete = len(rows) == total
            page = None
            if is_complete and thumbnails is not None:
                named = ", ".join(map(str, options.input or [options.list]))
                page = write_gallery(
                    model, options.model, named, rows, options.output, thumbnails, about
                )
            _print_rows(rows, total, options.output, page)
            _print_learned(rows, learned)
            _print_escapes(model, options.model)
            _warn_of_difference(model, options.model, rows, learned)
            if is_complete:
                return _finish(options.output, journal, rows, model.name, begun)
        print("stopped; continue with --resume")
        return stop.exit_code


def _predict_on(
    cluster: Cluster, options: argparse.Namespace, model: Model, stop: Stopping
) -> Predict:
    """Have the workers of a cluster score batches."""
    there = annex("cluster.infer")
    job = there.ScoringJob(
        model=options.model.resolve(),
        device=model.device.type,
        precision=options.precision,
        threads=cluster.threads,
        about=about_model(model),
    )
    predict: Predict = there.predicted_by(cluster, job, lambda: stop.signal is not None)
    return predict


def _warn_of_difference(
    model: Model, folder: Path, rows: list[Row], learned: frozenset[str]
) -> None:
    """Warn if more or fewer images are flagged than the thresholds promise."""
    # Images that are flagged whatever their score say nothing of the promise.
    new = [r for r in rows if r.verdict and not r.reason and r.image_sha256 not in learned]
    if model.thresholds is not None:
        promised = model.thresholds.calibration.review.false_rejects
        flagged = sum(row.verdict != "good" for row in new)
        if line := flagged_line(flagged, len(new), promised, str(folder)):
            log.warning(line)


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


def _print_learned(rows: list[Row], learned: frozenset[str]) -> None:
    """Say how many of the images are the model's own training images."""
    if known := sum(row.image_sha256 in learned for row in rows):
        new = sum(row.status == "ok" for row in rows) - known
        print(
            f"{known} of these images were used to train the model: new images will score higher. "
            f"The promise is compared with the other {new}"
        )


def _finish(
    output: Path, journal: RunJournal, rows: list[Row], model_name: str, begun: float
) -> int:
    """Note that a run is complete, and return the command's exit code."""
    code = Counts.of(rows).exit_code
    when = {
        "model_name": model_name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "milliseconds": round(1000 * (time.perf_counter() - begun), 1),
    }
    journal.finish(output / DONE, code, when)
    remove_drafts(output, FOLDERS)  # of decoding processes that were killed
    return code


def _print_rows(rows: list[Row], total: int, output: Path, page: Path | None) -> None:
    print(Counts.of(rows).line(total))
    reasons = [
        f"{row.verdict}: {row.path}: {row.reason}" for row in rows if row.verdict and row.reason
    ]
    unscored = [f"{row.status}: {row.reason}" for row in rows if row.status != "ok"]
    where = ", all in results.csv"
    for line in first_of(reasons, f" with a reason{where}") + first_of(unscored, where):
        print(f"  {visible(line)}")
    heatmaps = f", pictures in {output / HEATMAPS}" if any(row.heatmap for row in rows) else ""
    if rows:
        shown = f", all shown in {page}" if page else ""
        print(f"rows in {output / 'results.csv'}{heatmaps}{shown}")


def _watch(options: argparse.Namespace, outputs: Outputs) -> int:
    """Score what arrives until a signal comes."""
    _check_watch(options)
    resume = options.resume and (options.output / WATCHED).exists()
    claim(options.output, () if resume else INFER, overwrite=options.overwrite)
    remove_drafts(options.output, FOLDERS)
    with suppress(DataError):  # a folder that can't be listed now is tried again
        if others := passed_over(options.input):
            log.log(NOTE, others)
    with Stopping() as stop:
        device = chosen_device(options, images=wanted_threads(options))
        model = load_model(options.model, device, options.precision)
        about = outputs.about(model)
        about["folders"] = sorted(str(folder.absolute()) for folder in options.input)
        if not resume:
            outputs.clear(model)
        thumbnails = Thumbnails() if options.page else None
        counts = _follow(options, outputs, model, about, stop, thumbnails)
        page = ""
        if thumbnails is not None:
            rows, named = _rows_so_far(options.output), ", ".join(map(str, options.input))
            file = write_gallery(
                model, options.model, named, rows, options.output, thumbnails, about
            )
            page = f", all shown in {file}"
    remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
    print(f"{counts.line()}; rows in {options.output / 'results.csv'}{page}")
    return counts.exit_code


def _follow(
    options: argparse.Namespace,
    outputs: Outputs,
    model: Model,
    about: dict[str, object],
    stop: Stopping,
    thumbnails: Thumbnails | None,
) -> Counts:
    """Score what arrives until a signal comes, a line for each image.

    Returns:
        How many images have each status, and each verdict.

    Raises:
        OutputError: results can't be written; those that could are kept.
    """
    counts = Counts()
    flagged: Counter[bool] = Counter()
    learned = learned_by(model)
    limits = model.thresholds
    promised = None if limits is None else limits.calibration.review.false_rejects
    is_warned = False

    def on_row(finished: Finished) -> None:
        nonlocal is_warned
        row = finished.row
        counts.update(Counts.of([row]))
        print(_line(row), flush=True)
        # What is flagged whatever its score says nothing of the promise.
        if row.verdict and not row.reason and row.image_sha256 not in learned:
            flagged[row.verdict != "good"] += 1
        if promised is None or is_warned:
            return
        if line := flagged_line(flagged[True], flagged.total(), promised, str(options.model)):
            log.warning(line)
            is_warned = True

    journal = WatchJournal(
        options.output,
        about,
        regions=outputs.options.regions,
        mm_per_pixel=model.config.image.mm_per_pixel,
        seen=on_row,
    )
    outputs.write_scale(model)
    decoders = Decoders(Task(model.loading, outputs.pictures(model)))
    log.info("watching %s; Ctrl-C ends it", ", ".join(map(str, options.input)))
    with resumable(lambda: f"{counts['ok']} images are"), journal:
        watch(
            model,
            options.input,
            options.output,
            journal,
            decoders,
            settle=options.settle,
            stopped=lambda: stop.signal is not None,
            options=outputs.options,
            thumbnails=thumbnails,
            trouble=log.warning,
        )
    return counts


def _rows_so_far(output: Path) -> Iterator[Row]:
    """The rows written so far, of earlier runs there, too."""
    with (output / "results.jsonl").open(encoding="utf-8") as lines:
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


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Folders that lie in none of the others, compared by their real paths."""
    kept: dict[Path, Path] = {}  # by their real places
    for folder in folders:
        place = folder.resolve()
        if not any(_is_within(place, other) for other in kept):
            kept = {p: f for p, f in kept.items() if not _is_within(p, place)} | {place: folder}
    return list(kept.values())


def _is_within(place: Path, other: Path) -> bool:
    """True if following `other` shows the files in `place`; system folders are passed over."""
    return place.is_relative_to(other) and not any(
        map(left_by_system, place.relative_to(other).parts)
    )


def _check_watch(options: argparse.Namespace) -> None:
    if not 0 <= options.settle < math.inf:
        raise DataError(f"--settle is {options.settle:g}; it must be 0 or more seconds")
    if options.list is not None or not options.input:
        raise DataError("--watch follows folders; give them with --input, and leave out --list")
    for folder in options.input:
        if not is_folder(folder):
            raise DataError(f"--watch follows folders; --input {folder} isn't a folder")
    options.input = _outermost(options.input)
    if (options.output / JOURNAL).exists() and not options.overwrite:
        raise OutputError(
            f"{options.output} holds an interrupted run without --watch; give another "
            "--output, or --overwrite"
        )
    if (options.output / WATCHED).exists() and not (options.resume or options.overwrite):
        raise OutputError(
            f"{options.output} holds an earlier run with --watch; add --resume to continue it, "
            "--overwrite to start again, or give another --output"
        )
