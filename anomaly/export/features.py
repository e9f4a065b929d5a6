"""Images -> features of a network's layers, saved for other programs in one .npz file.

The file holds `paths` (n,) and an array (n, …) float32 for each layer, by its path; `numpy.load`
reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.extractor import layout_of, network_input
from anomaly.backbones.layers import default_layers, side_multiple, truncate_in_place
from anomaly.backbones.networks import backbone_of, build, load_state, read_weights
from anomaly.errors import ConfigError, DataError
from anomaly.files.writing import draft
from anomaly.hooks import capture
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, by_shape
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import DEFAULT
from anomaly.storage.models import load_model

log = logging.getLogger(__name__)

Array: TypeAlias = NDArray[np.float32]

_AT_ONCE = 8  # images in a batch
_SIDE = 224  # pixels: images are resized to the area of a square with this side, or to this square
_STRIDE = 32  # pixels: sides that are multiples of it suit every network of torchvision
_MOST_BYTES = 4 * 1024**3  # limit of features, which memory holds twice until they are written


@dataclass(frozen=True, eq=False)
class Source:
    """A network and how its images are loaded.

    Attributes:
        layers: paths of the layers.
        loading: files -> network inputs.
        outputs: B network inputs of one size -> the layers' outputs (B, …).
    """

    layers: Sequence[str]
    loading: Preprocessing
    outputs: Callable[[Sequence[NetworkInput]], Sequence[Tensor]]


def from_model(folder: Path, device: torch.device) -> Source:
    """The hooked layers of a trained model.

    Args:
        folder: the run, or its model folder.
        device: where to compute.

    Raises:
        AnomalyError: there is no model, or the model cuts images into tiles.
    """
    model = load_model(folder, device)
    if model.loading.sizing.tile is not None:
        raise ConfigError(
            f"{folder} cuts its images into tiles, but features are of whole images; use "
            f"--backbone {model.config.backbone.name}"
        )
    if model.region is not None:
        log.warning("%s inspects a region of each image, but features are of whole images", folder)
    return Source(model.extractor.layers, model.loading, model.embedder.maps)


def from_backbone(
    name: str, weights: str, device: torch.device, layers: Sequence[str] | None = None
) -> Source:
    """Layers of a network of torchvision or timm.

    Args:
        name: the network's name.
        weights: `imagenet`, `random`, or a file.
        device: where to compute.
        layers: names or patterns of layers; by default the ends of the first three stages.

    Raises:
        AnomalyError: there is no such network, layer or weights file.
    """
    network = build(name)
    layers = layers or default_layers(name, network, 3)
    paths = list(truncate_in_place(network, layers).outputs)
    # Untruncated: it says which keys a weights file may have, and which sides images need.
    whole = build(name)
    multiple = side_multiple(whole, layers)
    tensors, _ = read_weights(name, weights, seed=0)
    load_state(network, tensors, whole, f"the weights file for {name}")
    network = network.to(device).to(memory_format=torch.channels_last)
    normalise = backbone_of(name).normalisation()

    def outputs(batch: Sequence[NetworkInput]) -> list[Tensor]:
        images = network_input(batch, normalise, device)
        with torch.inference_mode(), capture(network, paths, stop=True) as captured:
            captured.run(images)
            by_path = captured.pop()
        return [by_path[path] for path in paths]

    # A network without a multiple takes squares of one size only.
    sizing = Sizing(_SIDE if multiple is None else None, None, _SIDE, multiple or _STRIDE)
    return Source(paths, Preprocessing(sizing, DEFAULT), outputs)


def save_features(
    source: Source,
    paths: Sequence[Path],
    file: Path,
    *,
    pool: str = "mean",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[UnusableImage]:
    """Save a network's features of images; the file appears when they are complete.

    Args:
        source: the network.
        paths: image files.
        file: the .npz file; replaced if it is there.
        pool: `mean` over a map's positions, or `none` to keep the whole map.
        progress: called with (stage, done, total).

    Returns:
        The files that can't be used.

    Raises:
        DataError: none of the files can be used, their maps have several shapes, or together they
            are too large.
        OutputError: the file can't be written.
    """
    by_layer: list[list[Array]] = [[] for _ in source.layers]
    used, refused = list[int](), list[UnusableImage]()
    decoders = Decoders(source.loading)
    for batch in by_shape(decoders.load_all(enumerate(paths)), _AT_ONCE):
        if isinstance(batch, UnusableImage):
            refused.append(batch)
        else:
            for maps, output in zip(by_layer, source.outputs(batch), strict=True):
                values = pooled(output, batch[0].view.size) if pool == "mean" else output
                maps += [*values.float().cpu().numpy()]
            used += [item.index for item in batch]
            _check_maps(by_layer, len(paths))
        progress("features", len(used) + len(refused), len(paths))
    if not used:
        raise DataError(f"no image can be used: {refused[0].reason}")
    content: dict[str, Any] = {"paths": np.array([str(paths[index]) for index in used])}
    content |= {name: np.stack(maps) for name, maps in zip(source.layers, by_layer, strict=True)}
    with draft(file) as unfinished, unfinished.open("wb") as written:
        np.savez(written, **content)
    return refused


def _check_maps(by_layer: Sequence[Sequence[Array]], images: int) -> None:
    """Refuse features that don't fit one array for each layer; called after each batch.

    Raises:
        DataError: shapes of an array's rows differ, or the arrays of all `images` are too large.
    """
    if any(maps[0].shape != maps[-1].shape for maps in by_layer):
        raise DataError(
            "the images differ in size, and so do their maps; save those of each size by "
            "themselves, or --pool mean"
        )
    size = images * sum(maps[0].nbytes for maps in by_layer)
    if size > _MOST_BYTES:
        raise DataError(
            f"the features of {images} images take {size / 1e9:.0f} GB of memory; save fewer "
            "images at a time, or --pool mean"
        )


def pooled(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Means over positions or tokens, (B, C); vectors stay as they are.

    Args:
        values: a feature map (B, C, h, w), Swin's form of one (B, h, w, C), a transformer's tokens
            (B, N, C), or vectors (B, C).
        size: (H, W) of the images.
    """
    layout = layout_of(values.shape, size)
    is_last = values.ndim == 3 or (layout is not None and layout.axes == "channels_last")
    channels = values.ndim - 1 if is_last else 1
    positions = [axis for axis in range(1, values.ndim) if axis != channels]
    return values.mean(dim=positions) if positions else values
