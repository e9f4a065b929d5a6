"""`anomaly explain`: why an image was flagged or passed, as a page."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from anomaly.cli.common import chosen_device
from anomaly.desk.golden import keep_missed
from anomaly.errors import AnomalyError, DataError
from anomaly.explain.page import PAGE, claim_folder, next_steps
from anomaly.files.writing import locked, short_name
from anomaly.storage.folder import find_model
from anomaly.storage.models import load_model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Write the page about one image, and its pictures."""
    if not options.image.is_file():
        raise AnomalyError(f"{options.image} isn't a file; explain takes one image")
    find_model(options.model, exported=False)  # refuses exported models before torch is imported
    if options.output is None:
        options.output = Path("explained") / short_name(options.image.stem)
    with locked(options.output):
        return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    from anomaly.explain.evidence import explained  # needs torch

    device, output = chosen_device(options), options.output
    claim_folder(output, overwrite=options.overwrite)
    why = explained(load_model(options.model, device), options.image, *options.good)
    why.save(output, overwrite=options.overwrite)
    facts = why.facts()
    if facts["verdict"]:
        reason = f": {facts['reason']}" if facts["reason"] else ""
        print(f"{facts['verdict']}, score {facts['image_score']:.4g}{reason}")
    print(f"{', '.join(facts['pictures'])} and explanation.json in {output}")
    for note in why.notes:
        log.info(f"not shown: {note}")
    print(f"Look at {output / PAGE}")
    if options.keep:
        _keep(options.model, options.image, facts["verdict"])
    elif facts["verdict"] == "good":
        for text, command in next_steps(why):
            print(f"{text} {command}".rstrip())
    return 0


def _keep(model: Path, image: Path, verdict: str) -> None:
    """Make a defect that was called good a known defect of the run."""
    if verdict != "good":
        raise DataError(
            f"{image} wasn't kept: only a defect that the model calls good is a missed one, and "
            f"the verdict is {verdict or 'unknown without thresholds'}"
        )
    print(f"kept as {keep_missed(find_model(model), image.name, image.read_bytes())}")
