"""`anomaly export`: a trained model for ONNX Runtime or OpenVINO."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from anomaly.cli import common_options as machine
from anomaly.cli.logging_setup import ProgressLine
from anomaly.errors import ConfigError
from anomaly.export.models import check_arguments
from anomaly.files.lock import locked

log = logging.getLogger(__name__)

_AGREES = 0.9  # correlation of two models' scores of good images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--to", choices=("onnx", "openvino"), required=True, help="the engine that will compute"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="write a second graph, from images to patch scores, for programs other than this one",
    )
    parser.add_argument(
        "--golden",
        type=Path,
        metavar="FOLDER",
        help="images that both have to score alike (default: some of the training images)",
    )
    parser.add_argument("--output", type=Path, required=True, help="gets the folder model/")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "int8"),
        default="fp32",
        help="compute in this number format (fp32); bf16 only with openvino, where the processor "
        "has it; int8 makes another model, which learns again from the training images",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        help="with int8: the data sets' folder, where it has moved since training",
    )
    parser.add_argument(
        "--training-images",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="with int8: folders with training images that aren't in the data set",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads")


def run(options: argparse.Namespace) -> int:
    """Export, or say why the export isn't equal."""
    if (options.data_root or options.training_images) and options.precision != "int8":
        raise ConfigError("--data-root and --training-images need --precision int8, which learns")
    asked: dict[str, Any] = {
        "precision": options.precision,
        "whole": options.whole,
        "golden": options.golden,
        "data_root": options.data_root,
        "further": options.training_images,
        "overwrite": options.overwrite,
    }
    check_arguments(options.model, options.output, options.to, **asked)  # before torch is imported
    with locked(options.output):
        options.device = "cpu"
        _, threads = machine.device_and_threads(options)
        from anomaly.export.models import export_model

        with ProgressLine() as progress:
            said = export_model(
                options.model,
                options.output,
                options.to,
                **asked,
                workers=threads,
                progress=progress,
            )
    _say(said, options.output / "model")
    return 0


def _say(said: dict[str, Any], folder: Path) -> None:
    """What export.json says, for people."""
    equal, quantised = said["equality"], said.get("quantised")
    by = f"{said['engine']} {said['engine_version']} in {said['precision']}"
    print(f"model {said['model_id']} for {by}: {folder}")
    if quantised is None:
        count = len(equal["images"])
        images = "1 golden image has the same verdict"
        if count != 1:
            images = f"{count} golden images have the same verdicts"
        print(f"{images}, and scores within {equal['largest_difference']:.1g} of torch's")
        return
    changed, correlation = quantised["verdicts_changed"], quantised["correlation"]
    print(
        f"it is another model than {said['source_model_id']}, whose training images it has learned "
        "again, and has thresholds of its own"
    )
    print(
        f"on {quantised['golden_images']} golden images {len(changed)} verdicts differ; scores are "
        f"{100 * quantised['shift']:+.1f} % apart in the median"
        + ("" if correlation is None else f", correlation {correlation:.3f}")
    )
    if correlation is not None and correlation < _AGREES:
        log.warning(
            "the two see these images differently: evaluate both on images with defects before "
            "the quantised one is used"
        )
    for one in changed:
        before, after = one["scores"]
        what = f"{one['before']} -> {one['after']} ({before:.4g} -> {after:.4g})"
        print(f"  {one['image']}: {what}")
    print(
        "`anomaly evaluate` of both, and --compare of these, shows what changed on the test split"
    )
