"""`anomaly deploy` and `anomaly feedback`."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from anomaly.cli.common_options import agreed, chosen_device
from anomaly.cli.logging_setup import ProgressLine
from anomaly.errors import AnomalyError, DataError
from anomaly.evaluation.price import evaluated_on, known_parts, price, unlike_training
from anomaly.files.writing import like
from anomaly.line import report, serve
from anomaly.line.feedback import judgements, safe_name, save_pictures
from anomaly.line.registry import back, check, deploy, earlier, holds
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import (
    MANIFEST,
    find_model,
)
from anomaly.storage.load import load_model
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
    "report": report.run,
    "feedback": _feedback,
}
