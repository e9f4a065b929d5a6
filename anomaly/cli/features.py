"""`anomaly features`: what layers make of images, saved for classifiers of your own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.cli import machine
from anomaly.cli.progress import ProgressLine
from anomaly.errors import AnomalyError, ConfigError, ModelError, OutputError
from anomaly.files.writing import sha256_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from anomaly.export.feature_writer import FeatureWriter
    from anomaly.features.backbones import Normalisation
    from anomaly.imaging.preprocessing import Loading

_STRIDE = 32  # a side that is a multiple of it suits every network of torchvision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--backbone", metavar="NAME", help="any torchvision classification network")
    which.add_argument(
        "--model", type=Path, help="a run, or its model/ folder: its network and size"
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="LAYER",
        help="see `anomaly layers`; default: the hooked ones",
    )
    parser.add_argument(
        "--input", type=Path, nargs="+", required=True, help="image files and folders of them"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the features go")
    parser.add_argument(
        "--pool",
        choices=("mean", "max", "none"),
        default="mean",
        help="over the positions of a map: mean (default), max, or none to keep the whole map",
    )
    parser.add_argument("--format", choices=("safetensors", "npy"), default="safetensors")
    parser.add_argument(
        "--weights",
        default="imagenet",
        help="of --backbone: imagenet (default), random, or a .safetensors or .pth file",
    )
    parser.add_argument(
        "--input-size",
        type=int,
        default=224,
        metavar="N",
        help="of --backbone: images keep their aspect, at the area of a square of side N",
    )
    parser.add_argument(
        "--square",
        action="store_true",
        help="of --backbone: squash images to N×N instead, as vision transformers need",
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--shard-size", type=int, default=1024, metavar="N", help="images a shard")
    parser.add_argument("--overwrite", action="store_true", help="begin anew instead of going on")
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Save features; a second run goes on where the first one ended."""
    from anomaly.files.output_lock import locked

    for name in ("input_size", "batch_size", "shard_size"):
        if getattr(options, name) < 1:
            raise AnomalyError(f"--{name.replace('_', '-')} must be 1 or more")
    with locked(options.output):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    from anomaly.datasets.inputs import find_inputs
    from anomaly.export.feature_writer import FeatureWriter

    paths = find_inputs(options.input).paths
    device, threads = machine.settle(options)
    source = _from_backbone(options) if options.model is None else _from_model(options)
    settings = source.settings | {"pool": options.pool, "format": options.format}
    writer = FeatureWriter(
        options.output, settings, options.shard_size, overwrite=options.overwrite
    )
    before = len(writer.done)
    with ProgressLine() as progress:
        todo = _todo(paths, writer.done, threads, progress)
        with writer:
            refused = _save(source, todo, writer, options, device, threads, progress)
    rows = sorted((str(todo[r.index]), r.status, r.reason) for r in refused)
    writer.skipped(rows)
    _say(len(paths), before, len(writer.done) - before, rows, source, options.output)
    wanted = {str(path) for path in paths}
    saved = len(wanted & writer.done.keys())
    return 0 if saved == len(paths) else 3 if saved else 2


@dataclass(frozen=True, eq=False)
class _Source:
    """A network and how it wants its images.

    Attributes:
        network: with its weights; what isn't needed is cut away.
        layers: canonical paths, and the axis of the output that holds the channels.
        loading: files -> network inputs.
        normalise: what the network expects of its input.
        settings: what the features hang on.
    """

    network: nn.Module
    layers: dict[str, int]
    loading: Loading
    normalise: Normalisation
    settings: dict[str, Any]


def _from_model(options: argparse.Namespace) -> _Source:
    import torch

    from anomaly.features.backbones import build, fill
    from anomaly.features.extractor import trim
    from anomaly.model.checkpoint import load

    detector = load(options.model, torch.device("cpu"))
    name = detector.config.backbone.name
    if detector.loading.sizing.tile is not None:
        raise ConfigError(
            f"{options.model} cuts its images into tiles, and features are saved for whole images; "
            f"use --backbone {name} with an --input-size"
        )
    layers = options.layers or detector.extractor.layers
    network = build(name)
    outputs = trim(network, layers, 256)
    kept = detector.extractor.network.state_dict()
    missing = [key for key in network.state_dict() if key not in kept]
    if missing:
        raise ModelError(
            f"{options.model} keeps its network up to {detector.extractor.layers[-1]} only, and "
            f"{', '.join(outputs)} needs {missing[0]}; name earlier layers, or use "
            f"--backbone {name}"
        )
    fill(network, kept, build(name), str(options.model))
    settings = {"model_id": detector.model_id, "network": name, "layers": list(outputs)}
    loading = detector.loading
    return _Source(network, _channel_axes(outputs), loading, detector.normalise, settings)


def _from_backbone(options: argparse.Namespace) -> _Source:
    from anomaly.features.backbones import build, fill, normalisation, read_weights
    from anomaly.features.extractor import trim
    from anomaly.features.layer_table import takes_oblong
    from anomaly.imaging.geometry import Sizing
    from anomaly.imaging.image import MAX_PIXELS
    from anomaly.imaging.preprocessing import Loading

    name, size = options.backbone, options.input_size
    layers = options.layers or _default_layers(name)
    network = build(name)
    outputs = trim(network, layers, size)
    if not (options.square or takes_oblong(build(name), layers)):
        raise ConfigError(
            f"{name} takes square images only; add --square to squash them to {size}×{size}"
        )
    state, sha256 = read_weights(name, options.weights, 0)
    fill(network, state, build(name), f"the weights file for {name}")
    settings = {
        "network": name,
        "weights": options.weights if sha256 is None else sha256,
        "layers": list(outputs),
        "input_size": size,
        "square": options.square,
    }
    sizing = Sizing(size if options.square else None, None, size, _STRIDE)
    loading = Loading(sizing, None, MAX_PIXELS)
    return _Source(network, _channel_axes(outputs), loading, normalisation(name), settings)


def _default_layers(name: str) -> Sequence[str]:
    from anomaly.features.backbones import build, default_layers

    try:
        return default_layers(name, build(name), 3)
    except ConfigError:
        raise ConfigError(
            f"{name} has no default layers; choose some of `anomaly layers --backbone {name}` and "
            "name them with --layers"
        ) from None


def _channel_axes(outputs: dict[str, Tensor]) -> dict[str, int]:
    from anomaly.features.pooling import channel_axis

    return {layer: channel_axis(output.shape) for layer, output in outputs.items()}


def _todo(
    paths: Sequence[Path], done: dict[str, str], threads: int, progress: Callable[..., None]
) -> list[Path]:
    """The files that aren't saved yet; those that are must not have changed."""
    again = [path for path in paths if str(path) in done]
    with ThreadPoolExecutor(threads) as pool:
        for i, (path, sha256) in enumerate(zip(again, pool.map(_sha256, again), strict=True)):
            if sha256 not in (done[str(path)], None):
                raise OutputError(
                    f"{path} has changed since its features were saved; add --overwrite to make "
                    "all of them anew, or give another --output"
                )
            progress("checking", i + 1, len(again))
    return [path for path in paths if str(path) not in done]


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None  # saved is saved


def _save(
    source: _Source,
    todo: Sequence[Path],
    writer: FeatureWriter,
    options: argparse.Namespace,
    device: torch.device,
    threads: int,
    progress: Callable[..., None],
) -> list[Any]:
    """Run the network over files and hand what it makes to the writer; returns refused files."""
    import numpy as np
    import torch

    from anomaly.features.pooling import pooled
    from anomaly.hooks import capture
    from anomaly.imaging.decoder_pool import Decoders
    from anomaly.imaging.decoder_worker import Task
    from anomaly.imaging.preprocessing import Refused, by_shape

    network = source.network.to(device).to(memory_format=torch.channels_last)
    refused: list[Refused] = []
    count = 0
    with Decoders(min(threads, len(todo)), Task(source.loading)) as decoders:
        for batch in by_shape(decoders.load_all(enumerate(todo)), options.batch_size):
            if isinstance(batch, Refused):
                refused.append(batch)
            else:
                pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
                images = source.normalise(pixels.permute(0, 3, 1, 2).to(device))
                with (
                    torch.inference_mode(),
                    capture(network, list(source.layers), stop=True) as maps,
                ):
                    maps.run(images)
                    values = {
                        layer: pooled(value, source.layers[layer], options.pool)
                        .float()
                        .cpu()
                        .numpy()
                        for layer, value in maps.pop().items()
                    }
                for i, item in enumerate(batch):
                    rows = {layer: value[i] for layer, value in values.items()}
                    writer.add(str(todo[item.index]), item.sha256, rows)
                count += len(batch)
            progress("features", count + len(refused), len(todo))
    return refused


def _say(
    total: int,
    before: int,
    new: int,
    refused: Sequence[tuple[str, str, str]],
    source: _Source,
    output: Path,
) -> None:
    images = "image" if new == 1 else "images"
    print(f"{new} {images} saved{f', {before} were there already' if before else ''}")
    for _, status, reason in refused[:5]:
        print(f"  {status}: {reason}")
    if len(refused) > 5:
        print(f"  … and {len(refused) - 5} more, all in skipped.csv")
    layers = ", ".join(source.layers)
    print(f"layers {layers}; which row is which file: {output / 'index.csv'}")
