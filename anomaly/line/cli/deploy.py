"""`anomaly deploy`: another version of a model in the place of a run's, and back to the one before.

A service that runs takes it over by itself.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from anomaly.cli.common_options import add_device, device_and_threads
from anomaly.errors import AnomalyError
from anomaly.line.registry import back, check, deploy
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model
from anomaly.training.runs import training_record

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, help="the new version: a run or a model folder")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="RUN", help="the run that is to hold it"
    )
    parser.add_argument(
        "--back", action="store_true", help="put the version before in use again instead"
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Check the new version, and put it in its place; or put the old one back."""
    if options.back == (options.model is not None):
        raise AnomalyError("give either --model, the new version, or --back")
    if options.back:
        print(f"{options.to} holds model {back(options.to)} again")
    else:
        folder = find_model(options.model)
        device, threads = device_and_threads(options)
        model = load_model(folder, device)
        print(f"checked: {check(model, folder, threads)}")
        before = training_record(options.to).get("name")
        replaced = deploy(folder, options.to)
        print(f"{options.to} holds model {model.model_id} now")
        if before and before != model.config.name:
            log.warning(
                "%s was called %s, the version before %s: is it of the same product?",
                options.model,
                model.config.name,
                before,
            )
        if replaced:
            log.info(f"back: anomaly deploy --to {options.to} --back")
    log.info("a service that runs takes it over once it has passed the checks there, too")
    return 0
