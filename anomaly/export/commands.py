"""`anomaly export`, `features` and `register`: models and features for other programs."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anomaly.backbones.engine import ENGINES
from anomaly.backbones.weights import check_weights
from anomaly.cli.common_options import Command, add_device, add_paths, device_and_threads
from anomaly.cli.logging_setup import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, ConfigError, counted, first_of
from anomaly.export.equality import Camera
from anomaly.export.feature_files import FeatureWriter
from anomaly.export.mlflow_model import register
from anomaly.export.models import ExportOptions, check_export, export_model
from anomaly.files.outputs import locked
from anomaly.storage.exported import check_layers

log = logging.getLogger(__name__)

_AGREES = 0.9  # correlation of two models' scores of good images


def _add_export(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
        "--bgr",
        action="store_true",
        help="with --pixels: channels are in the order blue, green, red",
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
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "int8"),
        default="fp32",
        help="number format (default: fp32); if it isn't the model's, the export is a new model, "
        "trained again on the training images",
    )
    parser.add_argument(
        "--keep-thresholds",
        action="store_true",
        help="don't train again if the model was trained in another number format",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        help="the data sets' folder, if it has moved since training",
    )
    images = "folders with training images that aren't in the data set"
    add_paths(parser, "--training-images", images, "FOLDER")
    parser.add_argument("--threads", type=int, metavar="N", help="processor threads")


def _camera_size(text: str) -> tuple[int, int]:
    """(H0, W0) of a text like 1280x960."""
    match = re.fullmatch(r"([1-9]\d{0,5})[x×]([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} isn't width x height in pixels, as 1280x960")
    return int(match[2]), int(match[1])


def _export(options: argparse.Namespace) -> int:
    """Export a model, or report how the export differs."""
    if options.pixels and not options.whole:
        raise ConfigError("--pixels is for the whole graph; add --whole")
    if options.bgr and not options.pixels:
        raise ConfigError("--bgr needs --pixels; add --pixels WxH")
    if options.keep_thresholds and options.precision == "int8":
        raise ConfigError("an int8 export always gets new thresholds; leave out --keep-thresholds")
    wanted = ExportOptions(
        options.to,
        precision=options.precision,
        keep_thresholds=options.keep_thresholds,
        whole=options.whole,
        camera=Camera(options.pixels, options.bgr) if options.pixels else None,
        golden=options.golden,
        data_root=options.data_root,
        further=options.training_images,
        overwrite=options.overwrite,
    )
    check_export(options.model, options.output, wanted)  # before torch is imported
    with locked(options.output):
        options.device = "cpu"
        _, threads = device_and_threads(options)
        with ProgressLine() as progress:
            exported = export_model(
                options.model, options.output, wanted, workers=threads, progress=progress
            )
    _print_export(exported, options.output / "model")
    return 0


def _print_export(values: dict[str, Any], folder: Path) -> None:
    """Print the facts of export.json."""
    equal, again = values["equality"], values.get("learned_again")
    engine = f"{ENGINES[values['engine']][0]} {values['engine_version']}"
    print(f"exported model {values['model_id']} for {engine} in {values['precision']}: {folder}")
    if again is None:
        print(
            f"compared with the trained model on {counted(len(equal['images']), 'golden image')}: "
            f"same verdicts; scores differ by {equal['largest_difference']:.1g} of their value at "
            "most"
        )
        model = shlex.quote(str(folder.parent))
        print(f"Use it: anomaly infer --model {model} --input FOLDER --output FOLDER")
        return
    changed, correlation = again["verdicts_changed"], again["correlation"]
    print(
        f"The export is a new model, trained again on the training images of "
        f"{values['source_model_id']}, with new thresholds."
    )
    print(
        f"On {again['golden_images']} golden images, {len(changed)} verdicts differ; the scores' "
        f"median difference is {100 * again['shift']:+.1f} %"
        + ("" if correlation is None else f", correlation {correlation:.3f}")
    )
    if correlation is not None and correlation < _AGREES:
        log.warning(
            "the two models score these images differently: evaluate both on images with defects "
            "before you use the export"
        )
    for change in changed:
        before, after = change["scores"]
        what = f"{change['before']} -> {change['after']} ({before:.4g} -> {after:.4g})"
        print(f"  {change['image']}: {what}")
    print(
        "To see the changes on the test split, run `anomaly evaluate` on both models with "
        "--compare."
    )


def _add_features(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--backbone", metavar="NAME", help="any torchvision classification network")
    which.add_argument(
        "--model", type=Path, help="a run, or its model/ folder: its network and size"
    )
    parser.add_argument(
        "--layers",
        action="extend",
        nargs="+",
        metavar="LAYER",
        help="see `anomaly layers`; default: the hooked ones",
    )
    parser.add_argument(
        "--input",
        type=Path,
        action="extend",
        nargs="+",
        required=True,
        help="image files and folders of them",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the features")
    parser.add_argument(
        "--pool",
        choices=("mean", "max", "none"),
        default="mean",
        help="pool over a map's positions or a transformer's tokens: mean (default), max, "
        "or none to keep the whole map",
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "npy"),
        default="safetensors",
        help="format of the feature files (safetensors)",
    )
    parser.add_argument(
        "--weights",
        help="of --backbone: imagenet (default), random, or a .safetensors or .pth file",
    )
    parser.add_argument(
        "--input-size",
        type=int,
        metavar="N",
        help="of --backbone: images keep their aspect, at the area of a square of side N (224)",
    )
    parser.add_argument(
        "--square",
        action="store_true",
        help="of --backbone: squash images to N×N instead, as vision transformers need",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="images computed together (8)"
    )
    parser.add_argument("--shard-size", type=int, default=1024, metavar="N", help="images a shard")
    parser.add_argument(
        "--overwrite", action="store_true", help="start again instead of continuing an earlier run"
    )
    add_device(parser)


def _features(options: argparse.Namespace) -> int:
    """Save features; a second run continues where the first one ended."""
    for name in ("input_size", "batch_size", "shard_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise AnomalyError(f"--{name.replace('_', '-')} must be 1 or more")
    if "" in (options.layers or ()):
        raise AnomalyError("--layers has an empty name; name layers, such as layer3")
    if options.model is None:
        options.weights = options.weights or "imagenet"
        options.input_size = options.input_size or 224
        check_weights(options.weights)
    else:
        for name in ("weights", "input_size", "square"):
            if getattr(options, name):
                option = f"--{name.replace('_', '-')}"
                raise AnomalyError(f"{option} needs --backbone; a model already has it")
        check_layers(options.model)
    paths = find_inputs(options.input).paths
    with locked(options.output):
        return _save_features(options, paths)


def _save_features(options: argparse.Namespace, paths: Sequence[Path]) -> int:
    # Importing torch takes seconds, so options are checked before.
    from anomaly.export.features import Computing, from_backbone, from_model, save_features

    device, threads = device_and_threads(options)
    if options.model is None:
        source = from_backbone(
            options.backbone,
            options.weights,
            options.input_size,
            square=options.square,
            layers=options.layers,
        )
    else:
        source = from_model(options.model, options.layers)
    settings = source.settings | {"pool": options.pool, "format": options.format}
    writer = FeatureWriter(
        options.output, settings, options.shard_size, overwrite=options.overwrite
    )
    before = len(writer.done)
    with ProgressLine() as progress:
        how = Computing(device, options.pool, options.batch_size, threads)
        refused = save_features(source, paths, writer, how, progress=progress)
    new = len(writer.done) - before
    present = f", {before} were saved already" if before else ""
    print(f"{new} {'image' if new == 1 else 'images'} saved{present}")
    reasons = [f"{status}: {reason}" for _, status, reason in refused]
    for line in first_of(reasons, ", all in skipped.csv"):
        print(f"  {line}")
    index = options.output / "index.csv"
    print(f"layers: {', '.join(source.layers)}; the files of the rows: {index}")
    saved = len({str(path) for path in paths} & writer.done.keys())
    return 0 if saved == len(paths) else 3 if saved else 2


def _add_register(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, required=True, help="the run, or its model/ folder")
    parser.add_argument(
        "--name", help="name of the registered model (default: the name in the model's config)"
    )
    parser.add_argument(
        "--store",
        metavar="ADDRESS",
        help="address of MLflow's tracking server (default: $MLFLOW_TRACKING_URI)",
    )


def _register(options: argparse.Namespace) -> int:
    """Log and register a model, and print how to load it."""
    missing = [name for name in ("mlflow", "pandas") if find_spec(name) is None]
    if missing:
        raise AnomalyError(
            f"register needs {', '.join(missing)}, which aren't installed: "
            "pip install 'anomaly[mlflow]'"
        )
    address = register(options.model, options.name, options.store)
    print(f"registered as {address}")
    print(f"To load it: mlflow.pyfunc.load_model({address!r}).predict(['part.png'])")
    return 0


COMMANDS = {
    "export": Command(_add_export, _export),
    "features": Command(_add_features, _features),
    "register": Command(_add_register, _register),
}
