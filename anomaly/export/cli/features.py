"""`anomaly features`: what layers make of images, saved for classifiers of your own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from anomaly.backbones.weights import check_weights
from anomaly.cli.common_options import add_device, device_and_threads
from anomaly.cli.logging_setup import ProgressLine
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import AnomalyError, first_of
from anomaly.export.feature_files import FeatureWriter
from anomaly.files.outputs import locked
from anomaly.storage.exported import check_layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--output", type=Path, required=True, help="where the features go")
    parser.add_argument(
        "--pool",
        choices=("mean", "max", "none"),
        default="mean",
        help="over the positions of a map, or all tokens of a transformer: mean (default), max, or "
        "none to keep the whole map",
    )
    parser.add_argument("--format", choices=("safetensors", "npy"), default="safetensors")
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
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--shard-size", type=int, default=1024, metavar="N", help="images a shard")
    parser.add_argument("--overwrite", action="store_true", help="begin anew instead of going on")
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Save features; a second run goes on where the first one ended."""
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
                raise AnomalyError(f"{option} is for --backbone; a model brings its own")
        check_layers(options.model)
    paths = find_inputs(options.input).paths
    with locked(options.output):
        return _run(options, paths)


def _run(options: argparse.Namespace, paths: Sequence[Path]) -> int:
    from anomaly.export.features import from_backbone, from_model, save_features

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
        refused = save_features(
            source,
            paths,
            writer,
            pool=options.pool,
            batch_size=options.batch_size,
            device=device,
            workers=threads,
            progress=progress,
        )
    layers = list(source.layers)
    _say(before, len(writer.done) - before, refused, layers, options.output)
    saved = len({str(path) for path in paths} & writer.done.keys())
    return 0 if saved == len(paths) else 3 if saved else 2


def _say(
    before: int,
    new: int,
    refused: Sequence[tuple[str, str, str]],
    layers: Sequence[str],
    output: Path,
) -> None:
    images = "image" if new == 1 else "images"
    print(f"{new} {images} saved{f', {before} were there already' if before else ''}")
    reasons = [f"{status}: {reason}" for _, status, reason in refused]
    for line in first_of(reasons, ", all in skipped.csv"):
        print(f"  {line}")
    print(f"layers {', '.join(layers)}; which row is which file: {output / 'index.csv'}")
