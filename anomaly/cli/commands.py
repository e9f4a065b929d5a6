"""The table of commands: help, two examples, options, and the module of the command's function.

It imports little, so that help and refusals are quick.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Option: TypeAlias = Callable[[argparse._ActionsContainer], object]
"""Adds an option, or a group of them, to a parser."""


@dataclass(frozen=True)
class Command:
    """A command of the program.

    Attributes:
        help: the command's line in the overview.
        examples: two command lines; only their files and folders are made up.
        options: the command's own options, without those that every command takes.
        home: module below `anomaly` with the command's function, which is named `run_` and the
            command; empty for the module of `anomaly.cli` that has the command's name.
    """

    help: str
    examples: tuple[str, str]
    options: tuple[Option, ...]
    home: str


def _command(about: str, first: str, second: str, *options: Option, home: str = "") -> Command:
    return Command(about, (first, second), options, home)


def _value(name: str, text: str, metavar: str | None = None, **more: Any) -> Option:
    return lambda parser: parser.add_argument(name, help=text, metavar=metavar, **more)


def _path(name: str, text: str, metavar: str | None = None, **more: Any) -> Option:
    return _value(name, text, metavar, type=Path, **more)


def _several(name: str, text: str, metavar: str = "PATH", **more: Any) -> Option:
    """An option that takes several values, by default paths, and may be repeated."""
    kind = {"type": Path, "default": [], **more}  # argparse copies the default before extending it
    return _value(name, text, metavar, action="extend", nargs="+", **kind)


def _number(name: str, text: str, metavar: str, default: float | None = None) -> Option:
    return _value(name, text, metavar, type=_parsed_number, default=default)


def _flag(name: str, text: str, action: str = "store_true", **more: Any) -> Option:
    return lambda parser: parser.add_argument(name, help=text, action=action, **more)


def _one_of(*options: Option, required: bool = True) -> Option:
    """Options that exclude each other."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for option in options:
            option(group)

    return add


def _parsed_number(text: str) -> float:
    """The value of an option as a number, for `argparse`: 0.02, or 2% for the same."""
    plain = text.strip()
    with suppress(ValueError):
        return float(plain[:-1]) / 100 if plain.endswith("%") else float(plain)
    raise argparse.ArgumentTypeError(f"{text!r} is no number; write it like 0.02 or 2%")


_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _duration(text: str) -> float:
    """The value of an option in seconds, above 0, for `argparse`: 90s, 10m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a time; write it like 90s, 10m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def _camera_size(text: str) -> tuple[int, int]:
    """The value of an option, width x height, as (H0, W0), for `argparse`: 1280x960."""
    match = re.fullmatch(r"([1-9]\d{0,5})[x×]([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't width x height in pixels, as 1280x960")
    return int(match[2]), int(match[1])


def _overwrite(replaces: str) -> Option:
    return _flag("--overwrite", f"replace {replaces} there")


def _output(text: str, replaces: str = "an earlier run", **more: Any) -> Option:
    """The options --output and --overwrite; an earlier run there stays without --overwrite."""

    def add(parser: argparse._ActionsContainer) -> None:
        _path("--output", text, **{"required": True, **more})(parser)
        _overwrite(replaces)(parser)

    return add


# Options that several commands share.
_SET = _value(
    "--set",
    "override a setting, e.g. --set model.kind=padim; may be repeated",
    "KEY=VALUE",
    dest="overrides",
    action="append",
    default=[],
)
_CONFIG = _value("--config", "a YAML file, or a bare name looked up in configs/", required=True)
_MODEL = _path("--model", "the run's folder, or its model/ folder", required=True)
_ANY_MODEL = _path("--model", "a run's folder, or its model/ folder")
_NETWORK = _value("--backbone", "any torchvision classification network", "NAME")
_WEIGHTS = _value("--weights", "with --backbone: imagenet, random, or a .safetensors or .pth file")
_DEVICE = _value(
    "--device",
    "auto takes the GPU where there is one",
    choices=("auto", "cpu", "cuda"),
    default="auto",
)
_RAY = _value("--ray", "compute on this Ray cluster (auto, HOST:PORT, ray://…, local)", "ADDRESS")
# Values of --write, listed here so that help needn't import the module that writes them.
_WRITTEN = ("heatmaps", "flagged-heatmaps", "page", "masks", "regions", "maps", "none")
_IMAGES = "image files and folders of them"

COMMANDS = {
    "start": _command(
        "from a folder of images to a trained model and a page, in one go",
        "start photographs",
        "start photographs --output runs/part --set image.area=512",
        _path("folder", "your images, or a CSV list of them"),
        _value("--format", "layout of the folder, if it isn't recognised: mvtec, folder, …"),
        _output("output folder (default: runs/<name>)", "an earlier start", required=False),
        _value("--name", "name of the run and its model (default: the folder's)"),
        _flag("--no-open", "leave the page closed"),
        _SET,
        _DEVICE,
    ),
    "demo": _command(
        "try all of it on a generated product",
        "demo",
        "demo --output runs/tried",
        _path("--output", "for the models and their results", default=Path("runs/demo")),
        home="cli.start",
    ),
    "check": _command(
        "look at a data set before training: counts, sizes, faults",
        "check --config part.yaml",
        "check --config part.yaml --region photographs/001.png",
        _CONFIG,
        _SET,
        _path("--region", "instead, draw on this image the region to inspect", "IMAGE"),
        home="cli.start",
    ),
    "train": _command(
        "learn what good looks like from a folder of good images",
        "train --config part.yaml",
        "train --config folder.yaml --set data.root=photographs/good --output runs/part",
        _CONFIG,
        _SET,
        _output("the run's folder (default: runs/<name>)", required=False),
        _flag("--no-calibrate", "skip thresholds; results will have no verdicts"),
        _RAY,
        _DEVICE,
    ),
    "evaluate": _command(
        "measure trained models on their test splits, or check known parts before a shift",
        "evaluate --model runs/part --output figures/part",
        "evaluate --model line/part --golden golden",
        _several("--model", "runs, their model/ folders, or folders of runs", required=True),
        _output("where the reports go", "earlier reports or golden scores", required=False),
        _several("--good", "good images to test with, instead of the data set's", "FOLDER"),
        _several("--defects", "defects to test with; subfolders name their types", "FOLDER"),
        _path("--golden", "instead, compare these parts with their recorded scores", "FOLDER"),
        _number("--tolerance", "with --golden: largest change of a score (1%%)", "SHARE", 0.01),
        _DEVICE,
    ),
    "calibrate": _command(
        "choose a trained model's thresholds, without training it again",
        "calibrate --model runs/part --false-reject-rate 0.005",
        "calibrate --model runs/part --production monday --at-most-defective 5%",
        _MODEL,
        _several("--good", "good images that it hasn't learned from (default: stored scores)"),
        _several("--production", "production images that nobody has sorted"),
        _number("--at-most-defective", "largest share of --production, e.g. 5%%", "SHARE"),
        _several("--defects", "images of defects: counts those that are caught"),
        _number("--false-reject-rate", "share of good parts that may be rejected", "R"),
        _number("--review-rate", "share of good parts that may not be called good", "R"),
        _number("--threshold", "reject above this image score", "X"),
        _number("--review-threshold", "review above this (default: X)", "Y"),
        _flag("--undo", "bring the previous thresholds back", "store_const", const=True),
        _flag("--yes", "save even if known defects would pass, or the threshold rises too far"),
        home="cli.change",
    ),
    "tune": _command(
        "try settings and keep those that catch more of the known defects",
        "tune --config part.yaml --output part_tuned.yaml",
        "tune --config part.yaml --defects defects --budget 30m --output part_tuned.yaml",
        _CONFIG,
        _SET,
        _several("--defects", "known defects (default: those of the test split)", "FOLDER"),
        _value("--budget", "time limit: 90s, 10m (default), 1h", type=_duration, default="10m"),
        _output("the config to write (<config>_tuned.yaml)", "an earlier file", required=False),
        _DEVICE,
        home="cli.change",
    ),
    "update": _command(
        "let a model learn good parts that people have confirmed",
        "update --model runs/part --good confirmed --output runs/part_2",
        "update --model runs/part --feedback line.sqlite --output runs/part_2",
        _MODEL,
        _several("--good", "images that a person has confirmed as good"),
        _path("--feedback", "the record of serve: also learns parts that were judged", "FILE"),
        _several("--defects", "images of defects: the update may lose none that is caught now"),
        _output("the new run's folder; the old one isn't changed"),
        _flag("--include-suspects", "also learn images that look unlike all others"),
        _flag("--yes", "write the model even if a known defect that is caught now would pass"),
        home="cli.change",
    ),
    "infer": _command(
        "score images: verdicts in results.csv, heatmaps beside them",
        "infer --model runs/part --input monday --output results/monday",
        "infer --model runs/part --input camera --output results/camera --watch",
        _MODEL,
        _several("--input", f"{_IMAGES}, and lists of them: .txt, .csv or -", required=True),
        _flag("--watch", "follow the folders of --input and score what arrives, until Ctrl-C"),
        _path("--output", "where results go", required=True),
        _one_of(
            _overwrite("earlier results"),
            _flag("--resume", "continue an interrupted run there"),
            required=False,
        ),
        _RAY,
        _several(
            "--write",
            "any of heatmaps, flagged-heatmaps (of images not called good), page (results.html), "
            "masks (PNG), regions (regions.csv), maps (TIFF), or none; default: heatmaps page",
            "KIND",
            type=str,
            choices=_WRITTEN,
        ),
        _DEVICE,
    ),
    "explain": _command(
        "show why an image was flagged, or what would have caught a missed defect",
        "explain --model runs/part part.png --output why",
        "explain --model runs/part complaint.png --keep",
        _MODEL,
        _path("image", "one image file", "IMAGE"),
        _output("for the page and the pictures (default: explained/IMAGE)", required=False),
        _several("--good", "folders of the training images, if these moved", "FOLDER"),
        _flag("--keep", "make this missed defect a golden part, which no later model may lose"),
    ),
    "export": _command(
        "write a trained model for ONNX Runtime or OpenVINO",
        "export --model runs/part --to onnx --output runs/part_onnx",
        "export --model runs/part --to openvino --output runs/part_openvino",
        _MODEL,
        _value("--to", "the engine that will compute", choices=("onnx", "openvino"), required=True),
        _value(
            "--pixels",
            "also write a graph from raw camera images of this size (RGB, 8 bits) to the verdict",
            "WxH",
            type=_camera_size,
        ),
        _path("--golden", "images to compare with (default: some training images)", "FOLDER"),
        _output("folder for the export, which is written to its model/", "an earlier export"),
        home="export.commands",
    ),
    "serve": _command(
        "answer over HTTP, record every answer, and show a page to the line",
        "serve --models line --record line.sqlite",
        "serve --models line --host 0.0.0.0 --token-file token --webhook http://plc.example",
        _path("--models", "a folder of runs, or one run or model folder", required=True),
        _value("--host", "address to listen at (127.0.0.1)", default="127.0.0.1"),
        _value("--port", "port to listen at (8000)", type=int, default=8000),
        _path("--record", "SQLite file of all results (default: MODELS/line.sqlite)", "FILE"),
        _path("--token-file", "holds the token that requests need (or $ANOMALY_TOKEN)", "FILE"),
        _value("--webhook", "also post every row there (or $ANOMALY_WEBHOOK)", "URL"),
        _value("--mqtt", "also publish at mqtt://HOST:PORT/TOPIC (or $ANOMALY_MQTT)", "URL"),
        _number("--keep-good", "share of good parts whose pictures are kept (2%%)", "SHARE", 0.02),
        _number("--keep-pictures", "space for pictures, good parts' go first (2000)", "MB", 2000),
        _DEVICE,
        home="line.commands",
    ),
    "deploy": _command(
        "replace a model on the line by a new version, or bring the old version back",
        "deploy --model runs/part_2 --to line/part",
        "deploy --back --to line/part",
        _path("--model", "the new version: a run or a model folder"),
        _path("--to", "the run to deploy it to", "RUN", required=True),
        _flag("--back", "bring the previous version back instead"),
        _flag("--yes", "deploy even if a known defect would pass, or another product's model"),
        home="line.commands",
    ),
    "report": _command(
        "write up a shift, a day or a month of a line: yield, judgements, drift, cost",
        "report --record line.sqlite --from '2026-11-27 06:00' --output shift",
        "report --record results/monday --model runs/part --from 2026-11-02 --output drift",
        _path("--record", "the record of serve, or infer's output folder", "FILE", required=True),
        _path("--model", "the run whose promises hold for the output of infer"),
        _value("--from", "a date, or a time of this machine", "TIME", dest="begin", required=True),
        _value("--to", "the end: a date, with its whole day, or a time (now)", "TIME", dest="end"),
        _several(
            "--prices",
            "price of each: false-reject, escape, review; currency=NAME is only displayed",
            "NAME=PRICE",
            type=str,
        ),
        _output("a folder for report.html and tables as CSV files", "an earlier report"),
        home="line.report",
    ),
    "layers": _command(
        "list a network's layers: shapes, strides, parameters, compute",
        "layers --backbone resnet50",
        "layers --model runs/part",
        _one_of(_NETWORK, _ANY_MODEL),
        _value("--input-size", "side of the image (default: 224)", "N", type=int, default=224),
        home="cli.explain",
    ),
    "features": _command(
        "save a network's features of images, for classifiers of your own",
        "features --backbone resnet50 --layers layer3 --input monday --output features.npz",
        "features --model runs/part --input photographs --output maps.npz --pool none",
        _one_of(_NETWORK, _ANY_MODEL),
        _several("--layers", "with --backbone (default: ends of stages 1-3)", "LAYER", type=str),
        _several("--input", _IMAGES, required=True),
        _output("the .npz file to write", "an earlier file"),
        _value("--pool", "the mean of each map, or none", choices=("mean", "none"), default="mean"),
        _WEIGHTS,
        home="export.commands",
    ),
}

GROUPS = {
    "start": ("start", "demo", "check"),
    "train and judge": ("train", "evaluate", "calibrate", "tune", "update"),
    "run": ("infer", "explain", "export"),
    "the line": ("serve", "deploy", "report"),
    "inside a network": ("layers", "features"),
}


def overview() -> str:
    """The help's overview: all commands by group, a line each."""
    width = max(map(len, COMMANDS))
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:{width}}  {COMMANDS[name].help}" for name in names)])
        for title, names in GROUPS.items()
    ]
    return "\n\n".join([*blocks, "anomaly COMMAND --help shows its options, and examples."])
