"""`anomaly infer`: images -> results.csv, results.jsonl and heatmaps."""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import ExitStack, suppress
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli import annex, infer_watch
from anomaly.cli.common_options import (
    check_cluster,
    device_and_threads,
    joined_cluster,
    wanted_threads,
)
from anomaly.cli.logging_setup import NOTE, ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.datasets.inputs import find_inputs, say_passed_over
from anomaly.errors import DataError, first_of, visible
from anomaly.evaluation.weaknesses import JudgedImage, Run, lines, of_images
from anomaly.files.outputs import DONE, FOLDERS, HEATMAPS, JOURNAL, locked
from anomaly.files.writing import remove_drafts
from anomaly.imaging.decoder_pool import Decoders
from anomaly.inference.journal import RunJournal, exit_code_of
from anomaly.inference.outputs import OutputOptions, Outputs, about_model
from anomaly.inference.rows import counts_of, learned_by, say_counts
from anomaly.inference.run import Predict, infer_files, resumable
from anomaly.report.gallery import write_gallery
from anomaly.report.tables import passed_in_evaluation
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model
from anomaly.training.runs import training_record

if TYPE_CHECKING:
    from anomaly.cluster.actors import Cluster
    from anomaly.inference.rows import Row
    from anomaly.scoring.pipeline import Model
    from anomaly.scoring.prediction import Prediction

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
            return infer_watch.run(options, outputs)
        return _run(options, outputs)


def _run(options: argparse.Namespace, outputs: Outputs) -> int:
    begun = time.perf_counter()
    found = find_inputs(options.input, options.list)
    total = len(found.paths)
    if found.passed_over:
        log.log(NOTE, say_passed_over(found.passed_over))
    is_complete = outputs.begin(resume=options.resume, overwrite=options.overwrite)
    # The decoding processes start while this one imports torch.
    with (
        Decoders(min(wanted_threads(options), total)) as decoders,
        Stopping() as stop,
        ExitStack() as opened,
    ):
        device, _ = device_and_threads(options)
        model = load_model(options.model, device, options.precision)
        about = outputs.about(model, found.sha256)
        if is_complete:
            code = exit_code_of(options.output / DONE, about)
            print(f"the run in {options.output} is complete; there is nothing to resume")
            return code
        cluster = opened.enter_context(joined_cluster(options, device))
        predict = None if cluster is None else _predict_on(cluster, options, model, stop)
        if not options.resume:
            outputs.clear(model)
        journal = RunJournal(options.output / JOURNAL, about)
        with resumable(lambda: f"{len(journal.done)} of {total} images are"):
            learned = learned_by(model)
            judged: list[JudgedImage] = []
            with ProgressLine() as progress:
                thumbnails = infer_files(
                    model,
                    found,
                    [] if options.list else options.input,
                    outputs,
                    journal,
                    decoders,
                    stopped=lambda: stop.signal is not None,
                    progress=partial(progress, "scoring"),
                    scored=partial(_judge, learned, judged),
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
            _print_weaknesses(model, options, judged)
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


def _judge(learned: frozenset[str], judged: list[JudgedImage], prediction: Prediction) -> None:
    """Note what an image that the model hasn't learned from says of the model."""
    if prediction.sha256 not in learned and prediction.path is not None:
        judged.append(JudgedImage.of(prediction, prediction.path))


def _print_weaknesses(model: Model, options: argparse.Namespace, judged: list[JudgedImage]) -> None:
    production = options.input or ["FOLDER"]
    run = Run(model, options.model, training_record(options.model), production=production)
    for line in lines(of_images(run, judged)):
        log.info(line)


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
    scored = sum(row.status == "ok" for row in rows)
    code = 0 if scored == len(rows) else 3 if scored else 2
    when = {
        "model_name": model_name,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "milliseconds": round(1000 * (time.perf_counter() - begun), 1),
    }
    journal.finish(output / DONE, code, when)
    remove_drafts(output, FOLDERS)  # of decoding processes that were killed
    return code


def _print_rows(rows: list[Row], total: int, output: Path, page: Path | None) -> None:
    print(say_counts(counts_of(rows), total))
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
