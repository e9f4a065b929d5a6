"""What a layer sees: its most active channels, and all channels at once as three colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anomaly.backbones.extractor import Layout, layout_of
from anomaly.errors import AnomalyError, LayerError
from anomaly.explain.pictures import RgbImage, beside, colored, resized, stacked, text_line
from anomaly.hooks import capture


def batch_of(image: Tensor, model: nn.Module | None = None) -> Tensor:
    """One image as a batch (1, 3, H, W).

    Args:
        image: (3, H, W), finite floats.
        model: the network that is to see it, whose number format it takes on.

    Raises:
        AnomalyError: it is something else.
    """
    if not isinstance(image, Tensor):
        raise AnomalyError(
            f"the image is a {type(image).__name__}: give a tensor (3, H, W), normalised as the "
            "network wants it; the transforms of its weights make one"
        )
    if image.ndim != 3:
        hint = ", images[0] say" if image.ndim == 4 else ""
        raise AnomalyError(
            f"the image has shape {tuple(image.shape)}: give one image, (3, H, W){hint}"
        )
    if not image.is_floating_point():
        raise AnomalyError(
            f"the image holds {str(image.dtype).removeprefix('torch.')}: give floats, normalised "
            "as the network wants them"
        )
    if not image.isfinite().all():
        raise AnomalyError("the image holds NaN or infinite values: every layer would, too")
    weights = () if model is None else model.parameters()
    formats = (weight.dtype for weight in weights if weight.is_floating_point())
    return image[None].to(next(formats, image.dtype))


def map_of(output: Tensor, size: Sequence[int]) -> Tensor:
    """A layer's output as a feature map (1, C, h, w), reordered if channels come last.

    Args:
        output: of one image: a map, Swin's form of one (1, h, w, C), or a transformer's tokens
            (1, N, C), of which those of the patches are taken. Anything else stays as it is.
        size: (H, W) of the image.
    """
    layout = layout_of(output.shape, size)
    return layout.map_of(output, size) if layout else output


def check_map(shape: Sequence[int], layer: str) -> None:
    """See that a layer's output is a feature map of one image.

    Raises:
        LayerError: it has another number of axes.
    """
    if len(shape) != 4:
        raise LayerError(
            f"{layer!r} puts out shape {tuple(shape)}, not a feature map (1, C, h, w): "
            "choose a layer before the pooling"
        )


def check_eval(model: nn.Module) -> None:
    """See that a pass leaves a network as it is: in train mode batch norms learn from each one.

    Raises:
        AnomalyError: it is in train mode.
    """
    moved = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if any(module.training and isinstance(module, moved) for module in model.modules()):
        raise AnomalyError(
            f"{type(model).__name__} is in train mode, in which batch norms would learn from the "
            "image and dropout would blur the answer: call model.eval() before"
        )


_TILE = 120
_NARROWEST = 96  # enough for "channel 1234"
_COLUMNS = 6


def feature_map_pictures(
    model: nn.Module,
    image: Tensor,
    layers: Sequence[str],
    n_channels: int = 16,
    layouts: Sequence[Layout] | None = None,
    picture: RgbImage | None = None,
) -> dict[str, RgbImage]:
    """Draw what each layer makes of an image.

    Args:
        model: any network in eval mode.
        image: (3, H, W), normalised as the network wants it, on the network's device.
        layers: paths of layers that put out feature maps, see `anomaly.hooks.match`.
        n_channels: how many channels are shown, the most active first.
        layouts: how each layer's output becomes a feature map; by its shape if None.
        picture: the image before it was normalised, (H, W, 3) uint8 RGB, for the first tile; by
            default the normalised one, stretched, whose colours aren't the image's (none where it
            has neither 1 nor 3 channels).

    Returns:
        For each layer's path a picture (h', w', 3): the image, PCA to RGB, then the channels.

    Raises:
        LayerError: no such layer, or its output isn't a feature map of finite values.
        AnomalyError: the network is in train mode, or it isn't an image (3, H, W) of finite floats.
    """
    check_eval(model)
    batch = batch_of(image, model)
    with torch.no_grad(), capture(model, layers, stop=True) as captured:
        captured.run(batch)
        outputs = captured.pop()
    if layouts is None:
        outputs = {layer: map_of(output, image.shape[1:]) for layer, output in outputs.items()}
    else:
        outputs = {
            layer: layout.map_of(outputs[layer], image.shape[1:])
            for layer, layout in zip(layers, layouts, strict=True)
        }
    for layer, output in outputs.items():
        check_map(output.shape, layer)
    shown = picture
    if picture is None and len(image) in (1, 3):
        shown = _stretched(image.detach().expand(3, -1, -1).cpu().float().numpy())
    return {
        layer: feature_map_picture(output[0].float().cpu().numpy(), layer, shown, n_channels)
        for layer, output in outputs.items()
    }


def feature_map_picture(
    values: NDArray[Any], title: str, image: RgbImage | None = None, n_channels: int = 16
) -> RgbImage:
    """Draw one feature map.

    Args:
        values: (C, h, w) floats.
        title: the first line.
        image: what the network looked at, (H, W, 3).
        n_channels: how many channels are shown, the most active first.

    Raises:
        LayerError: it holds NaN or infinite values.
    """
    if not np.isfinite(values).all():
        raise LayerError(f"{title}: the feature map holds NaN or infinite values; see the weights")
    _, height, width = values.shape
    longer, shorter = max(height, width), min(height, width)
    scale = max(_TILE / longer, min(_TILE / 2 / shorter, 3 * _TILE / longer))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    channels = most_active(values, n_channels)
    tiles = [] if image is None else [("image", resized(image, *size))]
    tiles.append(("PCA to RGB", resized(pca_rgb(values), *size)))
    tiles += [(f"channel {c}", resized(colored(values[c]), *size)) for c in channels]
    rows = [
        beside(tiles[i : i + _COLUMNS], gap=4, narrowest=_NARROWEST)
        for i in range(0, len(tiles), _COLUMNS)
    ]
    heading = f"{title}: {values.shape[0]} channels of {height} x {width}"
    return stacked([text_line(heading, rows[0].shape[1]), *rows])


def most_active(values: NDArray[Any], n: int) -> list[int]:
    """The n channels of (C, h, w) with the largest mean absolute value, largest first."""
    activity = np.abs(values.astype(np.float64)).mean(axis=(1, 2))
    return [int(c) for c in np.argsort(-activity, kind="stable")[:n]]


def pca_rgb(values: NDArray[Any]) -> RgbImage:
    """Show all channels at once: each position's first three principal components as a colour.

    Positions that the layer describes alike get the same colour. Components run over the positions
    of this map; each is stretched from its 1st to its 99th percentile.

    Args:
        values: (C, h, w) floats.

    Returns:
        (h, w, 3) RGB; components that a map doesn't have are mid-grey.
    """
    n_channels, height, width = values.shape
    positions = values.reshape(n_channels, -1).T.astype(np.float64)
    positions = positions - positions.mean(axis=0)
    left, strength, _ = np.linalg.svd(positions, full_matrices=False)
    rgb = np.full((height * width, 3), 0.5)
    for i in range(min(3, len(strength))):
        if strength[i] <= strength[0] * 1e-6:
            break
        component = left[:, i] * (1.0 if left[np.abs(left[:, i]).argmax(), i] >= 0 else -1.0)
        low, high = np.percentile(component, [1, 99])
        rgb[:, i] = np.clip((component - low) / max(high - low, 1e-12), 0, 1)
    return np.asarray(np.rint(rgb.reshape(height, width, 3) * 255), np.uint8)


def _stretched(image: NDArray[np.float32]) -> RgbImage:
    """A normalised image (3, H, W) stretched to what the eye can see."""
    low, high = float(image.min()), float(image.max())
    unit = (image - low) / max(high - low, 1e-12)
    return np.ascontiguousarray(np.rint(unit * 255).astype(np.uint8).transpose(1, 2, 0))
