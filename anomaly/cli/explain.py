"""`anomaly explain`: why an image was flagged or passed, as a page; what a classifier sees."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anomaly.backbones.weights import check_weights
from anomaly.cli.common import chosen_device
from anomaly.desk.golden import keep_missed
from anomaly.errors import AnomalyError, DataError
from anomaly.explain.page import PAGE, claim_folder, next_steps, save_explanation
from anomaly.files.writing import locked, short_name
from anomaly.maps.heatmap import RgbImage
from anomaly.storage.folder import find_model
from anomaly.storage.load import load_model

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Draw everything that can be shown about one image."""
    if options.model is None and options.backbone is None:
        raise AnomalyError("give --model, --backbone, or both")
    if options.backbone is None and options.weights:
        raise AnomalyError("--weights needs a classifier; give --backbone too, or leave it out")
    if options.model is None and (options.good or options.keep):
        raise AnomalyError(
            f"{'--good' if options.good else '--keep'} needs a model; give --model too"
        )
    if not options.image.is_file():
        raise AnomalyError(f"{options.image} isn't a file; explain takes one image")
    if options.model is not None:
        find_model(options.model, exported=False)
    options.weights = options.weights or "imagenet"
    if options.backbone is not None:
        check_weights(options.weights)
    if options.output is None:
        options.output = Path("explained") / short_name(options.image.stem)
    with locked(options.output):
        return _explain(options)


def _explain(options: argparse.Namespace) -> int:
    from anomaly.explain.evidence import explained  # needs torch
    from anomaly.explain.saliency import explain_class

    device = chosen_device(options)
    claim_folder(options.output, overwrite=options.overwrite)
    facts: dict[str, Any] = {"image": str(options.image)}
    pictures: dict[str, RgbImage] = {}
    notes: list[str] = []
    page, steps = "", list[tuple[str, str]]()
    if options.model is not None:
        why = explained(load_model(options.model, device), options.image, *options.good)
        facts |= why.facts()
        pictures |= {f"{name}.png": picture for name, picture in why.pictures.items()}
        notes += why.notes
        page = why.html()
        if why.prediction.verdict == "good":
            steps = next_steps(why)
    if options.backbone is not None:
        seen, drawn, unseen = explain_class(
            options.backbone,
            options.image,
            weights=options.weights,
            device=device,
            # Beside a model's pictures, whose layers may have the same names.
            before="" if options.model is None else "classifier_",
        )
        facts |= seen
        pictures |= drawn
        notes += unseen
    output = options.output
    facts = save_explanation(output, facts, pictures, notes, page, overwrite=options.overwrite)
    _print_facts(facts, output)
    if page:
        print(f"Look at {output / PAGE}")
    for text, command in steps:
        print(f"{text} {command}".rstrip())
    if options.keep:
        _keep(options.model, options.image, facts["verdict"])
    return 0


def _keep(model: Path, image: Path, verdict: str) -> None:
    """Make a defect that was called good a known defect of the run."""
    if verdict != "good":
        raise DataError(
            f"{image} wasn't kept: only a defect that the model calls good is a missed one, and "
            f"the verdict is {verdict or 'unknown without thresholds'}"
        )
    print(f"kept as {keep_missed(find_model(model), image.name, image.read_bytes())}")


def _print_facts(facts: Mapping[str, Any], output: Path) -> None:
    if facts.get("verdict"):
        reason = f": {facts['reason']}" if facts["reason"] else ""
        print(f"{facts['verdict']}, score {facts['image_score']:.4g}{reason}")
    for seen in facts.get("classes", ()):
        name = f" {seen['name']}" if seen["name"] else ""
        print(f"class {seen['index']}{name}: {100 * seen['probability']:.1f} %")
    print(f"{', '.join(facts['pictures'])} and explanation.json in {output}")
    for note in facts["not_shown"]:
        log.info(f"not shown: {note}")
