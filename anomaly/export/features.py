"""Images -> features of a network's layers, saved for other programs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from anomaly.backbones.layer_table import show, side_multiple
from anomaly.backbones.registry import (
    Normalisation,
    build,
    default_layers,
    load_state,
    normalisation,
    read_weights,
)
from anomaly.backbones.truncation import truncate_in_place
from anomaly.errors import ConfigError, LayerError, ModelError, OutputError
from anomaly.export.feature_files import FeatureWriter
from anomaly.files.writing import sha256_of
from anomaly.hooks import capture
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import Preprocessing, UnusableImage, by_shape
from anomaly.imaging.read import MAX_PIXELS
from anomaly.storage.load import load_model
from anomaly.training.fit import StageProgress

log = logging.getLogger(__name__)

Pooling: TypeAlias = Literal["mean", "max", "none"]

_STRIDE = 32  # a side that is a multiple of it suits every network of torchvision


@dataclass(frozen=True, eq=False)
class Source:
    """A network and how its images are loaded.

    Attributes:
        network: with its weights, up to the last needed layer.
        layers: canonical paths, and the axis of the output that holds the channels.
        loading: files -> network inputs.
        normalise: normalises the network's input.
        settings: all settings that change the features.
    """

    network: nn.Module
    layers: dict[str, int]
    loading: Preprocessing
    normalise: Normalisation
    settings: dict[str, Any]


def from_model(folder: Path, layers: Sequence[str] | None = None) -> Source:
    """A trained model's network.

    Args:
        folder: the run, or its model folder.
        layers: names or patterns of layers; by default the model's hooked layers.

    Raises:
        AnomalyError: there is no model, no such layer, or the model cuts its images into tiles.
    """
    detector = load_model(folder, torch.device("cpu"))
    name = detector.config.backbone.name
    if detector.loading.sizing.tile is not None:
        raise ConfigError(
            f"{folder} cuts its images into tiles, but features are of whole images; use "
            f"--backbone {name} with an --input-size"
        )
    if detector.region is not None:
        log.warning("%s inspects a region of each image, but features are of whole images", folder)
    layers = layers or detector.extractor.layers
    network = build(name)
    side, outputs = truncate_in_place(network, layers)
    axes = _channel_axes(network, side, outputs)
    kept = detector.extractor.network.state_dict()
    missing = [key for key in network.state_dict() if key not in kept]
    if missing:
        raise ModelError(
            f"{folder} keeps its network only up to {detector.extractor.layers[-1]}, but "
            f"{', '.join(outputs)} needs {missing[0]}; name earlier layers, or use --backbone "
            f"{name}"
        )
    load_state(network, kept, build(name), str(folder))
    settings = {"model_id": detector.model_id, "network": name, "layers": list(outputs)}
    loading = detector.loading
    return Source(network, axes, loading, detector.normalise, settings)


def from_backbone(
    name: str, weights: str, size: int, *, square: bool = False, layers: Sequence[str] | None = None
) -> Source:
    """A network of torchvision or timm.

    Args:
        name: of the network.
        weights: `imagenet`, `random`, or a file.
        size: images are resized to the area of a square with this side.
        square: squash images to that square instead.
        layers: names or patterns of layers; by default those of the first three stages.

    Raises:
        AnomalyError: there is no such network, layer or weights file, or it takes squares only.
    """
    layers = layers or _default_layers(name)
    network = build(name)
    _, outputs = truncate_in_place(network, layers, size)
    axes = _channel_axes(network, size, outputs)
    multiple = side_multiple(build(name), layers)
    if not square and multiple is None:
        raise ConfigError(
            f"{name} takes square images only; add --square to squash them to {size}×{size}"
        )
    state, sha256 = read_weights(name, weights, 0)
    load_state(network, state, build(name), f"the weights file for {name}")
    settings = {
        "network": name,
        "weights": weights if sha256 is None else sha256,
        "layers": list(outputs),
        "input_size": size,
        "square": square,
    }
    sizing = Sizing(size if square else None, None, size, multiple or _STRIDE)
    loading = Preprocessing(sizing, None, MAX_PIXELS)
    return Source(network, axes, loading, normalisation(name), settings)


@dataclass(frozen=True)
class Computing:
    """How features are computed.

    Attributes:
        device: where to compute.
        pool: over the positions of a map; `none` keeps the whole map.
        batch_size: images at once.
        workers: decoding processes.
    """

    device: torch.device
    pool: Pooling = "mean"
    batch_size: int = 8
    workers: int = 2


def save_features(
    source: Source,
    paths: Sequence[Path],
    writer: FeatureWriter,
    how: Computing,
    *,
    progress: StageProgress = lambda stage, done, total: None,
) -> list[tuple[str, str, str]]:
    """Save a network's features of images without saved features.

    Args:
        source: the network.
        paths: image files.
        writer: of a folder whose settings are the source's.
        how: device, pooling, batches and workers.
        progress: called with (stage, images done, all of them).

    Returns:
        Path, status and reason of each file that can't be used; skipped.csv has them, too.

    Raises:
        OutputError: a file has changed since its features were saved, or the disk is full.
    """
    todo = _todo(paths, writer.done, how.workers, progress)
    with writer:
        refused = _save(source, todo, writer, how, progress)
    rows = sorted((str(todo[r.index]), r.status, r.reason) for r in refused)
    writer.skipped(rows)
    return rows


def _default_layers(name: str) -> Sequence[str]:
    network = build(name)
    try:
        return default_layers(name, network, 3)
    except ConfigError:
        raise ConfigError(
            f"{name} has no default layers; name some of `anomaly layers --backbone {name}` with "
            f"--layers"
        ) from None


def _channel_axes(network: nn.Module, side: int, outputs: dict[str, Tensor]) -> dict[str, int]:
    """The axis of each layer's output that holds the channels.

    Args:
        network: as long as it is on the meta device, where showing it an image costs nothing.
        side: of the square image that the outputs are of.
        outputs: of the layers.
    """
    shapes = {layer: tuple(output.shape) for layer, output in outputs.items()}
    cubes = [
        layer for layer, shape in shapes.items() if len(shape) == 4 and len(set(shape[1:])) == 1
    ]
    if cubes:  # as many channels as rows: try another image size
        with suppress(LayerError), capture(network, cubes, stop=True) as captured:
            show(network, 2 * side, 2 * side, captured.run)
            shapes |= {layer: tuple(output.shape) for layer, output in captured.pop().items()}
    return {layer: channel_axis(shape) for layer, shape in shapes.items()}


def _todo(
    paths: Sequence[Path], done: dict[str, str], threads: int, progress: StageProgress
) -> list[Path]:
    """The files without saved features; raises OutputError if another has changed."""
    again = [path for path in paths if str(path) in done]
    with ThreadPoolExecutor(threads) as pool:
        for i, (path, sha256) in enumerate(zip(again, pool.map(_sha256, again), strict=True)):
            if sha256 not in (done[str(path)], None):
                raise OutputError(
                    f"{path} has changed since its features were saved; add --overwrite to make "
                    f"all features again, or give another --output"
                )
            progress("checking", i + 1, len(again))
    return [path for path in paths if str(path) not in done]


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None  # saved is saved


def _save(
    source: Source,
    todo: Sequence[Path],
    writer: FeatureWriter,
    how: Computing,
    progress: StageProgress,
) -> list[UnusableImage]:
    """Compute the features of files and write them; returns refused files."""
    network = source.network.to(how.device).to(memory_format=torch.channels_last)
    refused: list[UnusableImage] = []
    count = 0
    with Decoders(min(how.workers, len(todo)), Task(source.loading)) as decoders:
        for batch in by_shape(decoders.load_all(enumerate(todo)), how.batch_size):
            if isinstance(batch, UnusableImage):
                refused.append(batch)
            else:
                pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
                images = source.normalise(pixels.permute(0, 3, 1, 2).to(how.device))
                with (
                    torch.inference_mode(),
                    capture(network, list(source.layers), stop=True) as maps,
                ):
                    maps.run(images)
                    values = {
                        layer: pooled(value, source.layers[layer], how.pool).float().cpu().numpy()
                        for layer, value in maps.pop().items()
                    }
                for i, item in enumerate(batch):
                    rows = {layer: value[i] for layer, value in values.items()}
                    writer.add(str(todo[item.index]), item.sha256, rows)
                count += len(batch)
            progress("features", count + len(refused), len(todo))
    return refused


def channel_axis(shape: Sequence[int]) -> int:
    """The axis of a layer's output that holds the channels, from one square image's shape.

    Args:
        shape: (1, C, h, h) is a feature map, (1, h, h, C) Swin's form of one, (1, tokens, C) a
            transformer's, (1, C) a vector.
    """
    channels_last = len(shape) == 4 and shape[1] == shape[2] != shape[3]
    return len(shape) - 1 if channels_last or len(shape) == 3 else 1


def pooled(values: Tensor, axis: int, how: Pooling) -> Tensor:
    """Pool over positions or tokens.

    Args:
        values: (B, …) with the channels on `axis`.
        axis: see `channel_axis`.
        how: `mean`, `max`, or `none` to leave the values as they are.

    Returns:
        (B, C) for `mean` and `max`; vectors stay as they are.
    """
    positions = [i for i in range(1, values.ndim) if i != axis]
    if how == "none" or not positions:
        return values
    return values.mean(dim=positions) if how == "mean" else values.amax(dim=positions)
