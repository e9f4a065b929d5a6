"""`anomaly infer --watch`: rows as files arrive, for as long as the shift lasts."""

from __future__ import annotations

import argparse
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from anomaly.calibration.production import flagged_line
from anomaly.cli.common_options import device_and_threads, wanted_threads
from anomaly.cli.logging_setup import NOTE
from anomaly.cli.stopping import Stopping
from anomaly.datasets.inputs import passed_over, say_passed_over
from anomaly.errors import DataError, OutputError, visible
from anomaly.files.outputs import FOLDERS, INFER, JOURNAL, WATCHED, left_by_system
from anomaly.files.writing import claim, from_json, remove_drafts
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.listing import is_folder
from anomaly.inference.journal import Finished
from anomaly.inference.outputs import Outputs
from anomaly.inference.rows import (
    Row,
    counts_of,
    learned_by,
    say_counts,
    total_of,
)
from anomaly.inference.run import resumable
from anomaly.inference.watch import WatchJournal, stamp_of, watch
from anomaly.maps.encoding import Thumbnails
from anomaly.report.gallery import write_gallery
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import MANIFEST, model_id
from anomaly.storage.load import load_model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace, outputs: Outputs) -> int:
    """Score what arrives until a signal comes."""
    _check(options)
    resume = options.resume and (options.output / WATCHED).exists()
    claim(options.output, () if resume else INFER, overwrite=options.overwrite)
    remove_drafts(options.output, FOLDERS)
    with suppress(DataError):  # a folder that can't be listed now is tried again
        if others := [file for folder in options.input for file in passed_over(folder)]:
            log.log(NOTE, say_passed_over(others))
    with Decoders(wanted_threads(options)) as decoders, Stopping() as stop:
        device, _ = device_and_threads(options)
        model = load_model(options.model, device, options.precision)
        about = outputs.about(model)
        about["folders"] = sorted(str(folder.absolute()) for folder in options.input)
        if not resume:
            outputs.clear(model)
        thumbnails = Thumbnails() if options.page else None
        counts = _follow(options, outputs, model, about, decoders, stop, thumbnails)
        page = ""
        if thumbnails is not None:
            rows, named = _rows(options.output), ", ".join(map(str, options.input))
            file = write_gallery(
                model, options.model, named, rows, options.output, thumbnails, about
            )
            page = f", all shown in {file}"
    remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
    print(f"{say_counts(counts)}; rows in {options.output / 'results.csv'}{page}")
    return 0 if counts["ok"] == total_of(counts) else 3 if counts["ok"] else 2


def _follow(
    options: argparse.Namespace,
    outputs: Outputs,
    model: Model,
    about: dict[str, object],
    decoders: Decoders,
    stop: Stopping,
    thumbnails: Thumbnails | None,
) -> Counter[str]:
    """Score what arrives until a signal comes, a line for each image.

    Returns:
        How many images have each status, and each verdict.

    Raises:
        OutputError: results can't be written; those that could are kept.
    """
    counts: Counter[str] = Counter()
    flagged: Counter[bool] = Counter()
    learned = learned_by(model)
    limits = model.thresholds
    promised = None if limits is None else limits.calibration.review.false_rejects
    is_warned = False

    def on_row(finished: Finished) -> None:
        nonlocal is_warned
        row = finished.row
        counts.update(counts_of([row]))
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
    decoders.begin(Task(model.loading, outputs.pictures(model)))
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
            looking=_warner_of_changes(model),
        )
    return counts


def _warner_of_changes(model: Model) -> Callable[[], None]:
    """A function that warns when a folder holds another model than was loaded from it."""
    folder, current = model.folder, model.model_id
    assert folder is not None  # it was loaded
    known = stamp_of(folder / MANIFEST)

    def look() -> None:
        nonlocal current, known
        stamp = stamp_of(folder / MANIFEST)
        if stamp in (None, known):
            return
        known, before = stamp, current
        with suppress(OSError):  # replaced once more
            current = model_id(folder)
        if current != before:
            log.warning(
                "the model in %s has changed to %s. Images are still scored with model %s; "
                "to use the new one, stop this and start again with another --output",
                folder,
                current,
                model.model_id,
            )

    return look


def _rows(output: Path) -> Iterator[Row]:
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
    """Folders without those that are, or lie in, another one, by whatever name they are called."""
    kept: dict[Path, Path] = {}  # by their real places
    for folder in folders:
        place = folder.resolve()
        if not any(_is_within(place, other) for other in kept):
            kept = {p: f for p, f in kept.items() if not _is_within(p, place)} | {place: folder}
    return list(kept.values())


def _is_within(place: Path, other: Path) -> bool:
    """Whether who follows one folder sees what is in another; a system's are passed over."""
    return place.is_relative_to(other) and not any(
        map(left_by_system, place.relative_to(other).parts)
    )


def _check(options: argparse.Namespace) -> None:
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
