"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli import infer_outputs, machine
from anomaly.cli.progress import ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.files.own_outputs import DONE, HEATMAPS, INFER, JOURNAL, WATCHED

if TYPE_CHECKING:
    from anomaly.datasets.inputs import Found
    from anomaly.errors import OutputError
    from anomaly.inference.rows import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", type=Path, required=True, help="the run's folder, or its model/ folder"
    )
    parser.add_argument(
        "--input", type=Path, nargs="+", default=[], help="image files and folders of them"
    )
    parser.add_argument(
        "--list",
        metavar="FILE",
        help="a text file that names an image on each line, or a CSV file with the columns path "
        "and group (the part that it shows), or a results.csv; - reads it from standard input",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow the folders given with --input and score what arrives, until Ctrl-C",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="of --watch: a file that nobody has written to for so long is fully written (0.5)",
    )
    parser.add_argument("--output", type=Path, required=True, help="where results go")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--overwrite", action="store_true", help="replace earlier results there")
    start.add_argument(
        "--resume", action="store_true", help="go on where an earlier run there was broken off"
    )
    infer_outputs.add_arguments(parser)
    machine.add_precision(parser)
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Score images."""
    from anomaly.files.output_lock import locked

    with locked(options.output):
        if options.watch:
            from anomaly.cli import infer_watch

            return infer_watch.run(options)
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from anomaly.datasets.inputs import find_inputs, picture_names, say_passed_over
    from anomaly.errors import OutputError
    from anomaly.files.writing import claim, remove_drafts
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.imaging.decoder_worker import Task

    begun = time.perf_counter()
    infer_outputs.check(options)
    found = find_inputs(options.input, options.list)
    paths = found.paths
    if found.passed_over:
        print(f"note: {say_passed_over(found.passed_over)}", file=sys.stderr)
    is_complete = _is_complete(options)
    claim(options.output, () if options.resume else INFER, overwrite=options.overwrite)
    remove_drafts(options.output)
    # The decoding processes start while this one imports torch.
    with Decoders(min(machine.wanted_threads(options), len(paths))) as decoders, Stopping() as stop:
        from anomaly.inference.journal import Journal, finished
        from anomaly.inference.run import Inputs, infer
        from anomaly.maps.thumbnails import Thumbnails
        from anomaly.model.checkpoint import load

        device, _ = machine.settle(options)
        model = load(options.model, device, options.precision)
        about = {"list of images": _hash(found)} | infer_outputs.about(options, model, device)
        if is_complete:
            code = finished(options.output / DONE, about)
            print(f"the run in {options.output} is complete; there is nothing to resume")
            return code
        journal = Journal(options.output / JOURNAL, about)
        names = picture_names(paths, [] if options.list else options.input)
        inputs = Inputs(paths, names, options.heatmap)
        thumbnails = None if options.no_page else Thumbnails(len(paths))
        decoders.begin(Task(model.loading, infer_outputs.pictures(options, model)))
        mm_per_pixel = model.config.image.mm_per_pixel
        failure: OutputError | None = None
        try:
            with journal, ProgressLine() as progress:
                infer_outputs.write_scale(options, model)
                infer(
                    model,
                    inputs,
                    journal,
                    decoders,
                    stopped=lambda: stop.signal is not None,
                    progress=lambda done, total: progress("scoring", done, total),
                    thumbnails=thumbnails,
                )
        except OutputError as error:
            failure = error
        finally:
            # Whatever stopped the run, the rows that exist are kept.
            tables = infer_outputs.write_tables(options, journal, found.groups, mm_per_pixel)
    rows = journal.rows()
    if (failed := failure or tables) is not None:
        raise _broken_off(failed, len(rows), len(paths))
    page = ""
    if len(rows) == len(paths):
        page = infer_outputs.write_page(options, model, rows, thumbnails, about)
    _say(rows, len(paths), options.output, page)
    if len(rows) < len(paths):
        print("stopped; go on with --resume")
        return stop.exit_code
    scored = sum(row.status == "ok" for row in rows)
    code = 0 if scored == len(paths) else 3 if scored else 2
    when = {
        "model_name": model.config.name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "milliseconds": round(1000 * (time.perf_counter() - begun), 1),
    }
    journal.finish(options.output / DONE, code, when)
    remove_drafts(options.output)  # of decoding processes that were killed
    return code


def _is_complete(options: argparse.Namespace) -> bool:
    """Whether there is nothing left to do in the output folder.

    Raises:
        OutputError: it holds another run, and nothing is said of what is to become of that.
    """
    from anomaly.errors import OutputError

    unfinished = (options.output / JOURNAL).exists()
    if options.resume and (options.output / WATCHED).exists():
        raise OutputError(f"{options.output} holds a run with --watch; resume it with --watch")
    if unfinished and not (options.resume or options.overwrite):
        raise OutputError(
            f"{options.output} holds a run that was broken off; add --resume to go on with it, "
            "--overwrite to start again, or give another --output"
        )
    return options.resume and not unfinished and (options.output / "results.csv").exists()


def _hash(found: Found) -> str:
    listed = [f"{path}\0{found.groups.get(str(path), '')}" for path in found.paths]
    return hashlib.sha256("\0".join(listed).encode("utf-8", "surrogateescape")).hexdigest()


def _broken_off(failure: OutputError, done: int, total: int) -> OutputError:
    """What to tell of a run that couldn't write."""
    from anomaly.errors import OutputError

    told = OutputError(
        f"{failure}; {done} of {total} images are done and kept: once that is mended, go on with "
        "--resume"
    )
    told.exit_code = 3 if done else 2
    return told


def _say(rows: list[Row], total: int, output: Path, page: str) -> None:
    counts = {v: sum(row.verdict == v for row in rows) for v in ("good", "review", "reject")}
    scored = sum(row.status == "ok" for row in rows)
    said = ": no verdicts, for the model has no thresholds" if scored else ""
    if any(counts.values()):
        said = f": {counts['good']} good, {counts['review']} to review, {counts['reject']} rejected"
    print(f"{scored} of {total} images scored{said}")
    for row in [row for row in rows if row.verdict == "review" and row.reason][:5]:
        print(f"  review: {row.path}: {row.reason}")
    bad = [row for row in rows if row.status != "ok"]
    for row in bad[:5]:
        print(f"  {row.status}: {row.reason}")
    if len(bad) > 5:
        print(f"  … and {len(bad) - 5} more, all in results.csv")
    drawn = f", pictures in {output / HEATMAPS}" if any(row.heatmap for row in rows) else ""
    if rows:
        print(f"rows in {output / 'results.csv'}{drawn}{page}")
