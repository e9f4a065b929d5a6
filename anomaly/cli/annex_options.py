"""The options of the annexes' commands, as `anomaly.cli.options` has those of the core."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from anomaly.cli.options import add_device, add_output, number


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--to", choices=("onnx", "openvino"), required=True, help="the engine that will compute"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="write a second graph for other programs: up to patch scores or, with "
        "--pixels, the verdict",
    )
    parser.add_argument(
        "--pixels",
        type=_camera_size,
        metavar="WxH",
        help="with --whole: the graph takes raw camera images of this size (RGB, 8 bits) "
        "and returns verdict, score and map",
    )
    parser.add_argument(
        "--golden",
        type=Path,
        metavar="FOLDER",
        help="images on which export and model must give the same scores (default: some training "
        "images)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for the export, which is written to its model/",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export there")


def _features(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--backbone", metavar="NAME", help="any torchvision classification network")
    which.add_argument("--model", type=Path, help="a run, or its model/ folder: its hooked layers")
    parser.add_argument(
        "--layers",
        action="extend",
        nargs="+",
        metavar="LAYER",
        help="of --backbone, see `anomaly layers` (default: those of the first three stages)",
    )
    parser.add_argument(
        "--input",
        type=Path,
        action="extend",
        nargs="+",
        required=True,
        help="image files and folders of them",
    )
    parser.add_argument("--output", type=Path, required=True, help="the .npz file to write")
    parser.add_argument(
        "--pool",
        choices=("mean", "none"),
        default="mean",
        help="mean over a map's positions or a transformer's tokens (default), or none to keep "
        "the whole map",
    )
    parser.add_argument(
        "--weights",
        help="of --backbone: imagenet (default), random, or a .safetensors or .pth file",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier file there")


def _camera_size(text: str) -> tuple[int, int]:
    """(H0, W0) of a text like 1280x960."""
    match = re.fullmatch(r"([1-9]\d{0,5})[x×]([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't width x height in pixels, as 1280x960")
    return int(match[2]), int(match[1])


def _serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", type=Path, required=True, help="a folder of runs, or one run or model folder"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (8000)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="SQLite file that records every result (line.sqlite in the folder of --models)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a file with the token for requests; otherwise $ANOMALY_TOKEN, if set. Without a "
        "token only this machine has access",
    )
    parser.add_argument(
        "--webhook",
        metavar="URL",
        help="also post every row to this address, until it is accepted (default: "
        "$ANOMALY_WEBHOOK, if set)",
    )
    parser.add_argument(
        "--mqtt",
        metavar="URL",
        help="also publish every row at mqtt://HOST:PORT/TOPIC (default: $ANOMALY_MQTT, if set)",
    )
    more = parser.add_argument_group("limits")
    more.add_argument(
        "--max-body", type=number, default=64, metavar="MB", help="largest image file (64)"
    )
    more.add_argument(
        "--keep-good",
        type=number,
        default=0.02,
        metavar="SHARE",
        help="share of good parts whose picture is kept; flagged parts' always are (default: 0.02)",
    )
    more.add_argument(
        "--keep-pictures",
        type=int,
        default=2000,
        metavar="MB",
        help="space for pictures in the record; then the oldest are deleted, good parts first "
        "(default: 2000)",
    )
    add_device(parser)


def _deploy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="the new version: a run or a model folder")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="RUN", help="the run to deploy it to"
    )
    parser.add_argument(
        "--back", action="store_true", help="bring the previous version back instead"
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="deploy even if a known defect that is caught now would pass, or it may be another "
        "product's model",
    )


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        type=Path,
        required=True,
        metavar="FILE",
        help="the record of serve, or the output folder of infer",
    )
    parser.add_argument(
        "--model", type=Path, help="the run whose promises hold for the output of infer"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        required=True,
        metavar="TIME",
        help="a date or a time, in the time zone of this machine",
    )
    parser.add_argument(
        "--to",
        dest="end",
        metavar="TIME",
        help="the end: a date, whose whole day is included, or a time (default: now)",
    )
    parser.add_argument(
        "--prices",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=PRICE",
        help="price of each: false-reject, escape, review; currency=NAME is only displayed",
    )
    add_output(parser, "a folder for report.html and tables as CSV files", "an earlier report")


# By command.
ANNEX_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "export": _export,
    "features": _features,
    "serve": _serve,
    "deploy": _deploy,
    "report": _report,
}
