"""`anomaly infer --watch`: rows as files arrive, for as long as the shift lasts."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli.common_options import device_and_threads, wanted_threads
from anomaly.cli.infer_page import write_page
from anomaly.cli.logging_setup import NOTE
from anomaly.cli.stopping import Stopping
from anomaly.datasets.inputs import passed_over, say_passed_over
from anomaly.errors import DataError, OutputError
from anomaly.files.outputs import FOLDERS, INFER, JOURNAL, WATCHED
from anomaly.files.writing import claim, remove_drafts
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.listing import is_folder
from anomaly.inference.rows import Row, counts_of, say_counts, total_of
from anomaly.inference.watch import WatchJournal, stamp_of, watch
from anomaly.maps.encoding import Thumbnails
from anomaly.storage.folder import MANIFEST, model_id
from anomaly.storage.load import load

if TYPE_CHECKING:
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.inference.journal import Finished
    from anomaly.inference.outputs import Outputs
    from anomaly.inference.rows import Row
    from anomaly.maps.encoding import Thumbnails
    from anomaly.scoring.predictor import AnyModel

log = logging.getLogger(__name__)


def run(options: argparse.Namespace, outputs: Outputs) -> int:
    """Score what arrives until a signal comes."""
    _check(options)
    resume = options.resume and (options.output / WATCHED).exists()
    claim(options.output, () if resume else INFER, overwrite=options.overwrite)
    remove_drafts(options.output, FOLDERS)
    _say_passed_over(options)
    with Decoders(wanted_threads(options)) as decoders, Stopping() as stop:
        device, _ = device_and_threads(options)
        model = load(options.model, device, options.precision, options.product)
        about = outputs.about(model)
        about["folders"] = sorted(str(folder.absolute()) for folder in options.input)
        if not resume:
            outputs.clear(model)
        thumbnails = None if options.no_page else Thumbnails()
        counts = _follow(options, outputs, model, about, decoders, stop, thumbnails)
        page = ""
        if thumbnails is not None:
            page = write_page(options, model, lambda: _rows(options), thumbnails, about)
    remove_drafts(options.output, FOLDERS)  # of decoding processes that were killed
    print(f"{say_counts(counts)}; rows in {options.output / 'results.csv'}{page}")
    return 0 if counts["ok"] == total_of(counts) else 3 if counts["ok"] else 2


def _follow(
    options: argparse.Namespace,
    outputs: Outputs,
    model: AnyModel,
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

    def seen(finished: Finished) -> None:
        counts.update(counts_of([finished.row]))
        print(_line(finished.row), flush=True)

    journal = WatchJournal(
        options.output,
        about,
        regions=options.regions,
        mm_per_pixel=model.reference_model.config.image.mm_per_pixel,
        seen=seen,
    )
    outputs.write_scale(model)
    decoders.begin(Task(model.reference_model.loading, outputs.pictures(model)))
    log.info("watching %s; Ctrl-C ends it", ", ".join(map(str, options.input)))
    try:
        with journal:
            watch(
                model,
                options.input,
                options.output,
                journal,
                decoders,
                settle=options.settle,
                stopped=lambda: stop.signal is not None,
                heatmaps=outputs.heatmaps,
                thumbnails=thumbnails,
                trouble=log.warning,
                looking=_saying_changes(model),
            )
    except OutputError as error:
        told = OutputError(f"{error}; once that is mended, go on with --resume")
        told.exit_code = 3 if counts["ok"] else 2
        raise told from None
    return counts


def _saying_changes(model: AnyModel) -> Callable[[], None]:
    """What warns when a folder holds another model than the one that was loaded from it."""
    now = {one.folder: one.model_id for one in model.models.values() if one.folder is not None}
    stamps = {folder: stamp_of(folder / MANIFEST) for folder in now}

    def look() -> None:
        for folder, known in now.items():
            stamp = stamp_of(folder / MANIFEST)
            if stamp in (None, stamps[folder]):
                continue
            stamps[folder] = stamp
            with suppress(OSError):  # replaced once more
                now[folder] = model_id(folder)
            if now[folder] != known:
                log.warning(
                    "the model in %s was changed: it is %s now. What arrives is still scored as "
                    "%s was; to take the new one, end this and start again with another --output",
                    folder,
                    now[folder],
                    known,
                )

    return look


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """The rows written so far, of earlier runs there, too."""
    with (options.output / "results.jsonl").open(encoding="utf-8") as lines:
        yield from (Row(**json.loads(line)) for line in lines)


def _say_passed_over(options: argparse.Namespace) -> None:
    with suppress(DataError):  # a folder that can't be listed now is tried again
        if count := sum(passed_over(folder) for folder in options.input):
            log.log(NOTE, say_passed_over(count))


def _line(row: Row) -> str:
    """What is said of one image, on one line whatever its name."""
    said = f"{row.verdict or row.status:<12}"
    if row.image_score is None:
        said += row.reason
    else:
        said += f"{row.image_score:.4g}"
        said += f" = {row.image_score / row.threshold:.2f} x reject" if row.threshold else ""
        said += f"  {row.product}" if row.product else ""
        said += f"  {row.path}" + (f": {row.reason}" if row.reason else "")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
    return f"{row.time[11:19]} UTC  {shown}"


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Folders without those that are, or lie in, another one, by whatever name they are called."""
    kept: dict[Path, Path] = {}  # by their real places
    for folder in folders:
        place = folder.resolve()
        if not any(_is_within(place, other) for other in kept):
            kept = {p: f for p, f in kept.items() if not _is_within(p, place)} | {place: folder}
    return list(kept.values())


def _is_within(place: Path, other: Path) -> bool:
    """Whether who follows one folder sees what is in another; hidden ones are passed over."""
    return place.is_relative_to(other) and not any(
        part.startswith(".") for part in place.relative_to(other).parts
    )


def _check(options: argparse.Namespace) -> None:
    if not 0 <= options.settle < math.inf:
        raise DataError(f"--settle is {options.settle:g}; it must be 0 or more seconds")
    if options.list is not None or not options.input:
        raise DataError("--watch follows folders: give them with --input, and no --list")
    for folder in options.input:
        if not is_folder(folder):
            raise DataError(f"--watch follows folders, and --input {folder} is none")
    options.input = _outermost(options.input)
    if options.parquet:
        raise OutputError("--parquet is written at the end of a run, which --watch doesn't have")
    if (options.output / JOURNAL).exists() and not options.overwrite:
        raise OutputError(
            f"{options.output} holds a run without --watch that was broken off; give another "
            "--output, or --overwrite"
        )
    if (options.output / WATCHED).exists() and not (options.resume or options.overwrite):
        raise OutputError(
            f"{options.output} holds what was watched before; add --resume to go on with it, "
            "--overwrite to start again, or give another --output"
        )
