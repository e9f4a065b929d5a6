"""`anomaly export`: a trained model for ONNX Runtime or OpenVINO."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine


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
        choices=("fp32", "bf16"),
        default="fp32",
        help="compute in this number format (fp32); bf16 only with openvino, where the processor "
        "has it",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads")


def run(options: argparse.Namespace) -> int:
    """Export, or say why the export isn't equal."""
    from anomaly.files.output_lock import locked

    with locked(options.output):
        options.device = "cpu"
        _, threads = machine.device_and_threads(options)
        from anomaly.export.models import export_model

        with ProgressLine() as progress:
            said = export_model(
                options.model,
                options.output,
                options.to,
                precision=options.precision,
                whole=options.whole,
                golden=options.golden,
                workers=threads,
                overwrite=options.overwrite,
                progress=progress,
            )
    equal = said["equality"]
    print(
        f"model {said['source_model_id']} for {options.to} {said['engine_version']} in "
        f"{said['precision']}: {options.output / 'model'}"
    )
    print(
        f"{len(equal['images'])} golden images have the same verdicts, and scores within "
        f"{equal['largest_difference']:.1g} of torch's"
    )
    return 0
