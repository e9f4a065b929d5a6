"""`anomaly deploy`, `anomaly drift` and `anomaly feedback`."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from anomaly.calibration import Thresholds
from anomaly.calibration.rates import percent
from anomaly.cli.common_options import agreed, chosen_device
from anomaly.cli.logging_setup import NOTE, ProgressLine
from anomaly.errors import AnomalyError, DataError
from anomaly.evaluation.price import evaluated_on, known_parts, price, unlike_training
from anomaly.files.writing import like
from anomaly.line import report, serve
from anomaly.line.drift import HORIZON, Drift, levels_of, read_scores
from anomaly.line.feedback import judgements, safe_name, save_pictures
from anomaly.line.registry import back, check, deploy, earlier, holds
from anomaly.scoring.pipeline import Model
from anomaly.storage.exported import read_folder
from anomaly.storage.folder import (
    MANIFEST,
    find_model,
    model_id,
)
from anomaly.storage.load import load_model
from anomaly.storage.thresholds import read_thresholds, thresholds_alone_differ
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)


def _deploy(options: argparse.Namespace) -> int:
    """Check and deploy the new version, or bring back the previous one.

    Returns:
        0 done, 1 refused, because known defects that the line's model catches would pass or the
        model may be another product's; nothing was changed.
    """
    if options.back == (options.model is not None):
        raise AnomalyError("give either --model, the new version, or --back")
    line = options.to / "model"
    folder = earlier(options.to) / "model" if options.back else find_model(options.model)
    if holds(line, folder):
        print(f"{options.to} holds this model already; nothing was changed")
        return 0
    device = chosen_device(options)
    model = load_model(folder, device)
    print(f"checked: {check(model, folder)}")
    replaces = (line / MANIFEST).is_file()
    if replaces and not agreed(_doubts(model, line), options):
        return 1
    if options.back:
        back(options.to)
    else:
        deploy(folder, options.to)
    print(f"{options.to} holds model {model.model_id} now")
    if replaces and not options.back:
        log.info(f"To undo: anomaly deploy --to {options.to} --back")
    log.info("A running service switches to it after checking it, too.")
    return 0


def _doubts(model: Model, line: Path) -> list[str]:
    """Print the price of a version; why a person has to agree to it.

    Args:
        model: the new version.
        line: the model folder that it is to replace.
    """
    try:
        before = load_model(line, model.device)
    except AnomalyError as error:
        return [f"nothing can be compared with the line's model: {error}"]
    test = [*evaluated_on(before), *evaluated_on(model)]
    with ProgressLine() as progress:
        known = known_parts([before, model], test)
        cost = price(before, model, known, progress=progress)
    print("\n".join(cost.lines()))
    name = training_record(line).get("name", model.name)
    if name != model.name:
        log.warning(
            "the new version is named %s, the previous one %s; check that both are for the same "
            "product",
            model.name,
            name,
        )
    return [cost.refusal, cost.unlike or unlike_training(before, model)]


def _drift(options: argparse.Namespace) -> int:
    """Measure the drift of a stream of scores.

    Returns:
        0 without an alarm, 1 with one.
    """
    thresholds = _thresholds(options)
    folder = find_model(options.model)
    if options.rows.is_dir():  # the output of infer
        options.rows /= "results.csv"
    stream = read_scores(options.rows, {model_id(folder), *thresholds_alone_differ(folder)})
    try:
        levels = levels_of(thresholds, defects=options.defects, false_alarms=options.false_alarms)
    except ValueError:
        raise DataError(
            f"--defects is {options.defects:g} (must be 0 to 0.5) and --false-alarms is "
            f"{options.false_alarms:g} (must be between 0 and 1)"
        ) from None
    drift = Drift(levels).add_all(stream.scores)
    for line in stream.notes:
        log.log(NOTE, line)
    lines = [
        *drift.lines(),
        f"chance of a false alarm in {HORIZON} parts: at most {percent(options.false_alarms)}; "
        f"assumed share of defective parts: {percent(options.defects)}; levels from "
        f"{thresholds.images} good images",
    ]
    lines.extend(filter(None, drift.flagged(thresholds.calibration.review, str(options.model))[1:]))
    print("\n".join(lines))
    alarm = drift.alarm
    if alarm is None:
        print("no drift")
        return 0
    when = stream.times[alarm.alarm or 0]
    at = f" ({when})" if when else ""
    print(f"alarm: the parts have drifted, seen at part {(alarm.alarm or 0) + 1}{at}")
    return 1


def _thresholds(options: argparse.Namespace) -> Thresholds:
    folder = find_model(options.model)
    read_folder(folder)
    thresholds = read_thresholds(folder)
    if thresholds is None:
        raise DataError(
            f"{options.model} has no thresholds, so drift can't be measured; set them with "
            "anomaly calibrate"
        )
    return thresholds


def _feedback(options: argparse.Namespace) -> int:
    """List judgements, or write judged pictures."""
    if not options.record.is_file():
        raise DataError(f"there is no record {options.record}{like(options.record)}")
    if options.pictures is None:
        for entry in judgements(options.record):
            print(json.dumps(entry))
        return 0
    for model, counts in save_pictures(options.record, options.pictures).items():
        lost = f", {counts['lost']} more without a picture" if counts["lost"] else ""
        place = options.pictures / safe_name(model)
        print(f"{model}: {counts['good']} good, {counts['defect']} defective{lost}; in {place}")
    return 0


COMMANDS = {
    "serve": serve.run,
    "deploy": _deploy,
    "drift": _drift,
    "report": report.run,
    "feedback": _feedback,
}
