"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly import __version__
from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.cli.stopping import Stopping

if TYPE_CHECKING:
    from anomaly.checkpoint import Model
    from anomaly.results import Row

JOURNAL = "results.partial.jsonl"
OUTPUTS = ("results.csv", "results.jsonl", "heatmaps", "heatmap_scale.png", JOURNAL)


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
        help="a text file that names an image on each line; - reads the names from standard input",
    )
    parser.add_argument("--output", type=Path, required=True, help="where results go")
    parser.add_argument(
        "--heatmap",
        choices=("overlay", "side-by-side"),
        default="overlay",
        help="pictures of the image under its heatmap, or of image, heatmap and colour bar",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--overwrite", action="store_true", help="replace earlier results there")
    start.add_argument(
        "--resume", action="store_true", help="go on where an earlier run there was broken off"
    )
    machine.add_precision(parser)
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Score images."""
    from anomaly.decoding import Decoders
    from anomaly.errors import OutputError
    from anomaly.files import claim, remove_drafts
    from anomaly.inputs import find_inputs, picture_names

    paths = find_inputs(options.input, options.list)
    unfinished = (options.output / JOURNAL).exists()
    if options.resume and not unfinished and (options.output / "results.csv").exists():
        print(f"the run in {options.output} is complete; there is nothing to resume")
        return 0
    if unfinished and not (options.resume or options.overwrite):
        raise OutputError(
            f"{options.output} holds a run that was broken off; add --resume to go on with it, "
            "--overwrite to start again, or give another --output"
        )
    claim(options.output, () if options.resume else OUTPUTS, overwrite=options.overwrite)
    remove_drafts(options.output)
    # The decoding processes start while this one imports torch.
    with Decoders(min(machine.wanted_threads(options), len(paths))) as decoders, Stopping() as stop:
        from anomaly.checkpoint import load
        from anomaly.inference import Inputs, infer
        from anomaly.journal import Journal

        device, _ = machine.settle(options)
        model = load(options.model, device, options.precision)
        about = {
            "list of images": _hash(paths),
            "model": model.model_id,
            "software version": __version__,
            "device": str(device),
            "precision": model.detector.extractor.precision,
            "pictures": options.heatmap,
        }
        journal = Journal(options.output / JOURNAL, about)
        _write_scale(options.output, model)
        inputs = Inputs(paths, picture_names(paths, [] if options.list else options.input))
        try:
            with journal, ProgressLine() as progress:
                infer(
                    model,
                    inputs,
                    options.output / "heatmaps",
                    journal,
                    decoders,
                    side_by_side=options.heatmap == "side-by-side",
                    stopped=lambda: stop.signal is not None,
                    progress=lambda done, total: progress("scoring", done, total),
                )
        except OutputError as error:
            raise OutputError(f"{error}; once that is mended, go on with --resume") from None
        finally:
            # Whatever stopped the run, the rows that exist are kept.
            _write(options.output, journal.rows())
    rows = journal.rows()
    _say(rows, len(paths), options.output)
    if len(rows) < len(paths):
        print("stopped; go on with --resume")
        return stop.exit_code
    journal.remove()
    scored = sum(row.status == "ok" for row in rows)
    return 0 if scored == len(paths) else 3 if scored else 2


def _hash(paths: list[Path]) -> str:
    return hashlib.sha256("\0".join(map(str, paths)).encode("utf-8", "surrogateescape")).hexdigest()


def _write(output: Path, rows: list[Row]) -> None:
    from anomaly.files import write
    from anomaly.results import as_csv, as_jsonl

    if rows:
        write(output / "results.csv", as_csv(rows))
        write(output / "results.jsonl", as_jsonl(rows))


def _write_scale(output: Path, model: Model) -> None:
    """What the heatmaps' colours mean, once: it is the same for every picture."""
    from anomaly.colour_bar import colour_bar
    from anomaly.files import write
    from anomaly.heatmap import encode_png

    thresholds = model.detector.thresholds
    if thresholds is not None:
        bar = colour_bar(480, thresholds.pixel, model.detector.unit)
        write(output / "heatmap_scale.png", encode_png(bar))


def _say(rows: list[Row], total: int, output: Path) -> None:
    counts = {v: sum(row.verdict == v for row in rows) for v in ("good", "review", "reject")}
    scored = sum(row.status == "ok" for row in rows)
    said = "no verdicts, for the model has no thresholds"
    if any(counts.values()):
        said = f"{counts['good']} good, {counts['review']} to review, {counts['reject']} rejected"
    print(f"{scored} of {total} images scored: {said}")
    for row in [row for row in rows if row.verdict == "review" and row.reason][:5]:
        print(f"  review: {row.path}: {row.reason}")
    bad = [row for row in rows if row.status != "ok"]
    for row in bad[:5]:
        print(f"  {row.status}: {row.reason}")
    if len(bad) > 5:
        print(f"  … and {len(bad) - 5} more, all in results.csv")
    print(f"rows in {output / 'results.csv'}, pictures in {output / 'heatmaps'}")
