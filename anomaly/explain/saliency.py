"""Insight into networks: feature maps, Grad-CAM, gradients of scores and in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from anomaly.backbones.extractor import layout_of
from anomaly.errors import AnomalyError, LayerError
from anomaly.hooks import HookSet, capture
from anomaly.hooks.paths import Selector, match, resolve
from anomaly.maps.heatmap import RgbImage


def batch_of(image: Tensor, model: nn.Module | None = None) -> Tensor:
    """One image as a batch (1, 3, H, W).

    Args:
        image: (3, H, W), finite floats.
        model: network for the image, which is converted to the type of the network's weights.

    Raises:
        AnomalyError: the image has another type or shape, or a value that isn't finite.
    """
    if not (isinstance(image, Tensor) and image.ndim == 3 and image.is_floating_point()):
        given = f"a {type(image).__name__}"
        if isinstance(image, Tensor):
            given += f" of {str(image.dtype).removeprefix('torch.')}, shape {tuple(image.shape)}"
        raise AnomalyError(
            f"the image is {given}: give one image as a tensor (3, H, W) of floats, normalised as "
            "the network wants it"
        )
    if not image.isfinite().all():
        raise AnomalyError("the image holds NaN or infinite values, and so would every layer")
    weights = () if model is None else model.parameters()
    formats = (weight.dtype for weight in weights if weight.is_floating_point())
    return image[None].to(next(formats, image.dtype))


def map_of(output: Tensor, size: Sequence[int], layer: str) -> Tensor:
    """A layer's output as a feature map (1, C, h, w), reordered if channels come last.

    Args:
        output: a layer's output for one image: a map (1, C, h, w), a map (1, h, w, C) as Swin
            transformers have it, or tokens (1, N, C), of which those of patches are taken.
        size: (H, W) of the image.
        layer: path of the layer.

    Raises:
        LayerError: the output has another shape.
    """
    layout = layout_of(output.shape, size)
    values = layout.map_of(output, size) if layout else output
    if values.ndim != 4:
        raise LayerError(
            f"{layer!r} puts out shape {tuple(output.shape)}, not a feature map (1, C, h, w): "
            "choose a layer before the pooling"
        )
    return values


def check_eval(model: nn.Module) -> None:
    """Refuse a network with a batch norm or dropout in train mode.

    Raises:
        AnomalyError: the network has one.
    """
    changing = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if any(module.training and isinstance(module, changing) for module in model.modules()):
        raise AnomalyError(
            f"{type(model).__name__} is in train mode, in which batch norms would learn from the "
            "image and dropout would blur the answer: call model.eval() before"
        )


_TILE = 120  # longer side of a tile in pixels
_NARROWEST = 96  # pixels, enough for "channel 1234"
_COLUMNS = 6  # tiles in a row


def feature_map_pictures(
    model: nn.Module,
    image: Tensor,
    layers: Sequence[str],
    n_channels: int = 16,
    picture: RgbImage | None = None,
) -> dict[str, RgbImage]:
    """Pictures of an image's feature maps, by layer.

    Args:
        model: any network in eval mode.
        image: (C, H, W), normalised as the network wants it, on the network's device.
        layers: paths of layers that put out feature maps, see `anomaly.hooks.match`.
        n_channels: number of channels shown, the most active first.
        picture: the image before it was normalised, (H, W, 3) uint8 RGB, for the first tile; None
            takes the normalised image, whose colours differ, and no tile for an image that has
            neither 1 nor 3 channels.

    Returns:
        For each layer's path a picture (h', w', 3): the image, PCA to RGB, then the channels.

    Raises:
        LayerError: there is no such layer, or its output isn't a feature map of finite values.
        AnomalyError: the network is in train mode, or the image isn't (3, H, W) of finite floats.
    """
    check_eval(model)
    batch = batch_of(image, model)
    with torch.no_grad(), capture(model, layers, stop=True) as captured:
        captured.run(batch)
        outputs = captured.pop()
    size = image.shape[1:]
    maps = {layer: map_of(output, size, layer)[0] for layer, output in outputs.items()}
    if picture is None and len(image) in (1, 3):
        pixels = image.detach().expand(3, -1, -1).cpu().float().numpy()
        picture = levels(_stretched(pixels).transpose(1, 2, 0))
    return {
        layer: feature_map_picture(values.float().cpu().numpy(), layer, picture, n_channels)
        for layer, values in maps.items()
    }


def feature_map_picture(
    values: NDArray[Any], title: str, image: RgbImage | None = None, n_channels: int = 16
) -> RgbImage:
    """A picture of one feature map: the image, PCA to RGB, then channels.

    Args:
        values: feature map (C, h, w).
        title: first line of the picture.
        image: the network's input (H, W, 3); None leaves it out.
        n_channels: number of channels shown, the most active first.

    Raises:
        LayerError: the map holds NaN or infinite values.
    """
    if not np.isfinite(values).all():
        raise LayerError(f"{title}: the feature map holds NaN or infinite values; see the weights")
    _, height, width = values.shape
    longer, shorter = max(height, width), min(height, width)
    # A narrow map is enlarged until its shorter side is half a tile or its longer side is three.
    scale = max(_TILE / longer, min(_TILE / 2 / shorter, 3 * _TILE / longer))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    activity = np.abs(values.astype(np.float64)).mean(axis=(1, 2))
    channels = np.argsort(-activity, kind="stable")[:n_channels]
    tiles = [] if image is None else [("image", resized(image, *size))]
    tiles.append(("PCA to RGB", resized(pca_rgb(values), *size)))
    tiles += [(f"channel {c}", resized(colored(values[c]), *size)) for c in channels]
    rows = [
        beside(tiles[i : i + _COLUMNS], gap=4, narrowest=_NARROWEST)
        for i in range(0, len(tiles), _COLUMNS)
    ]
    heading = f"{title}: {values.shape[0]} channels of {height} x {width}"
    return stacked([text_line(heading, rows[0].shape[1]), *rows])


def pca_rgb(values: NDArray[Any]) -> RgbImage:
    """All channels in one picture: a position's first three principal components as its colour.

    Positions that the layer describes alike get the same colour. Components are those of this
    map's positions; each is stretched from its 1st to its 99th percentile.

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
        # The sign of a component is arbitrary: its largest value shall be positive.
        component = left[:, i] * (1.0 if left[np.abs(left[:, i]).argmax(), i] >= 0 else -1.0)
        low, high = np.percentile(component, [1, 99])
        rgb[:, i] = np.clip((component - low) / max(high - low, 1e-12), 0, 1)
    return levels(rgb.reshape(height, width, 3))


def _stretched(values: NDArray[Any]) -> NDArray[Any]:
    """Values scaled so that the lowest is 0 and the highest 1; all 0 if they are equal."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / max(high - low, 1e-30)


def levels(unit: NDArray[Any]) -> NDArray[np.uint8]:
    """Values in [0, 1] as 8-bit levels, such as a network's input (H, W, 3) as a picture."""
    return np.ascontiguousarray(np.rint(unit * 255).astype(np.uint8))


def image_gradient(score: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """The gradient of a score with respect to an image.

    Args:
        score: takes the image as a batch (1, 3, H, W) and returns one number; all of its operations
            are differentiable.
        image: (3, H, W), as `score` takes it.

    Returns:
        (3, H, W), in score units per unit of the image. Gradients of parameters are left alone.

    Raises:
        AnomalyError: the score isn't one number or can't be differentiated, or the image isn't
            (3, H, W) of finite floats.
    """
    batch = batch_of(image)
    # The caller may compute without gradients; a copy made here isn't an inference tensor.
    with torch.inference_mode(False), torch.enable_grad():
        batch = batch.detach().clone().requires_grad_()
        value = score(batch)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise AnomalyError(f"the score has shape {tuple(value.shape)}, not one number")
        gradient = None
        if isinstance(value, Tensor) and value.requires_grad:
            (gradient,) = torch.autograd.grad(value.sum(), batch, allow_unused=True)
        if gradient is None:
            raise AnomalyError(
                "the score doesn't depend on the image by differentiable operations: compute it "
                "in torch (not faiss or NumPy), outside no_grad and inference_mode"
            )
    return gradient[0]


def saliency_map(gradient: Tensor) -> NDArray[np.float32]:
    """Saliency of pixels: the largest absolute gradient of a pixel's colours.

    Simonyan et al., "Deep Inside Convolutional Networks", 2014, section 3.1. Divided by its 99.5th
    percentile, so that a few pixels don't darken the others.

    Args:
        gradient: (3, H, W).

    Returns:
        (H, W) in [0, 1].
    """
    strongest = gradient.detach().abs().amax(dim=0).float().cpu().numpy()
    # The percentile is 0 where fewer than 0.5 % of the pixels have a gradient.
    top = float(np.percentile(strongest, 99.5)) or float(strongest.max()) or 1.0
    return np.asarray(np.clip(strongest / top, 0, 1), np.float32)


def grad_cam(
    model: nn.Module, image: Tensor, layer: str, target_class: int | None = None
) -> NDArray[np.float32]:
    """Grad-CAM: the evidence for a class at each pixel.

    Selvaraju et al., "Grad-CAM", ICCV 2017, equations 1 and 2. The patch tokens of a transformer
    count as the positions of a map.

    Args:
        model: a classifier in eval mode, whose output for one image is (1, classes).
        image: (C, H, W), normalised as the network wants it, on the network's device.
        layer: path of a layer, usually the last one before the pooling (`features[-1]`, `layer4`).
        target_class: index of the class; None takes the one with the highest score.

    Returns:
        (H, W) in [0, 1], 1 where the evidence is strongest; all zero if there is none.

    Raises:
        LayerError: the path names no layer or several, or the output isn't a feature map.
        AnomalyError: the network isn't a classifier, is in train mode, or has no such class; or the
            image isn't (3, H, W) of finite floats.
    """
    check_eval(model)
    batch = batch_of(image, model)
    # The caller may compute without gradients; a copy made here isn't an inference tensor.
    with torch.inference_mode(False), torch.enable_grad():
        batch = batch.detach().clone().requires_grad_()
        with capture(model, layer, grad=True) as captured:
            score = _class_score(captured.run(batch), target_class)
            outputs = captured.pop()
            if len(outputs) != 1:
                raise LayerError(
                    f"Grad-CAM looks at one map, and {layer!r} names {len(outputs)}: "
                    f"{', '.join(outputs)}"
                )
            ((path, maps),) = outputs.items()
        (gradients,) = torch.autograd.grad(score, maps, materialize_grads=True)
    maps, gradients = (map_of(values, image.shape[1:], path) for values in (maps, gradients))
    weights = gradients.mean(dim=(2, 3), keepdim=True)  # eq. 1
    evidence = functional.relu((weights * maps).sum(dim=1, keepdim=True)).detach()  # eq. 2
    cam = functional.interpolate(evidence.float(), image.shape[1:], mode="bilinear")[0, 0]
    return np.asarray((cam / (float(cam.max()) or 1.0)).cpu().numpy(), np.float32)


def _class_score(output: object, target_class: int | None) -> Tensor:
    """The score of a class in a classifier's output (1, classes); None takes the highest."""
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 1:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise AnomalyError(f"Grad-CAM needs a classifier that puts out (1, classes), not {shape}")
    n_classes = output.shape[1]
    if target_class is None:
        return output[0].max()
    if not isinstance(target_class, Integral) or not 0 <= target_class < n_classes:
        raise AnomalyError(f"target_class={target_class!r}: the network has 0 to {n_classes - 1}")
    return output[0, target_class]


_LINE_HEIGHT, _INDENT = 18, 2  # pixels
_FONT, _FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.4
_PANEL = 160  # pixels, wide enough for most titles
BACKGROUND = 255
_INK = (40, 40, 40)


def colored(values: NDArray[Any]) -> RgbImage:
    """Finite numbers (H, W) as colours (H, W, 3): viridis, from dark blue (lowest) to yellow."""
    return _mapped(_stretched(values), cv2.COLORMAP_VIRIDIS)


def _mapped(unit: NDArray[Any], colours: int) -> RgbImage:
    """Values (H, W) in [0, 1] in the colours (H, W, 3) RGB of an OpenCV colour map."""
    return np.asarray(cv2.applyColorMap(levels(unit), colours)[..., ::-1], np.uint8)


def glowing(picture: RgbImage, values: NDArray[Any]) -> RgbImage:
    """An image in grey, coloured where a map is high.

    Args:
        picture: (H, W, 3).
        values: (h, w) in [0, 1], brought to the picture's size.

    Returns:
        (H, W, 3).
    """
    unit = cv2.resize(np.asarray(values, np.float32), picture.shape[1::-1]).clip(0, 1)
    heat = _mapped(unit, cv2.COLORMAP_INFERNO)
    grey = cv2.cvtColor(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    # The square root lets low values show, too.
    opacity = (0.85 * np.sqrt(unit))[..., None]
    return np.asarray(np.rint(heat * opacity + grey * 0.75 * (1 - opacity)), np.uint8)


def resized(
    picture: RgbImage, height: int, width: int, enlarging: int = cv2.INTER_NEAREST
) -> RgbImage:
    """A picture (H, W, 3) resized to (height, width, 3).

    It shrinks by area; where it has to grow, `enlarging` is OpenCV's interpolation.
    """
    larger = height * width >= picture.shape[0] * picture.shape[1]
    interpolation = enlarging if larger else cv2.INTER_AREA
    return np.asarray(cv2.resize(picture, (width, height), interpolation=interpolation), np.uint8)


def fitted(picture: RgbImage) -> RgbImage:
    """A picture (H0, W0, 3) resized so that its longer side has 420 pixels."""
    height, width = picture.shape[:2]
    scale = 420 / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return resized(picture, *size, cv2.INTER_CUBIC)


def _text_width(text: str) -> int:
    return 2 * _INDENT + cv2.getTextSize(text, _FONT, _FONT_SCALE, 1)[0][0]


def text_line(text: str, width: int) -> RgbImage:
    """A line of text, (18, width, 3); what doesn't fit is cut off."""
    line = np.full((_LINE_HEIGHT, width, 3), BACKGROUND, np.uint8)
    cv2.putText(line, text, (_INDENT, 13), _FONT, _FONT_SCALE, _INK, 1, cv2.LINE_AA)
    return line


def stacked(pictures: Sequence[RgbImage]) -> RgbImage:
    """Pictures below each other, left-aligned, with white to the right of narrow ones."""
    width = max(picture.shape[1] for picture in pictures)
    return np.vstack([_padded(picture, picture.shape[0], width) for picture in pictures])


def beside(
    panels: Sequence[tuple[str, RgbImage]], gap: int = 8, narrowest: int = _PANEL
) -> RgbImage:
    """Titled pictures next to each other, aligned at the top, with white around them.

    Args:
        panels: title and picture (H, W, 3).
        gap: pixels of white to the left, to the right and below.
        narrowest: least width of a panel in pixels; a longer title makes it wider.
    """
    tallest = max(picture.shape[0] for _, picture in panels)
    columns = [np.full((_LINE_HEIGHT + tallest + gap, gap, 3), BACKGROUND, np.uint8)]
    for title, picture in panels:
        width = max(picture.shape[1], narrowest, _text_width(title))
        column = stacked([text_line(title, width), picture])
        columns.append(_padded(column, len(columns[0]), width + gap))
    return np.hstack(columns)


def _padded(picture: RgbImage, height: int, width: int) -> RgbImage:
    """A picture with white below and to its right, (height, width, 3)."""
    missing = ((0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0))
    return np.pad(picture, missing, constant_values=BACKGROUND)


@dataclass(frozen=True)
class GradientRecord:
    """Gradients of S training steps in L layers.

    Attributes:
        layers: paths of the L layers.
        norms: (S, L), L2 norms of the gradients of the layers' own parameters; NaN or inf where a
            value wasn't finite, 0 where a layer got no gradient.
        nonfinite: (S, L), numbers of values that were NaN or infinite.
    """

    layers: tuple[str, ...]
    norms: NDArray[np.float64]
    nonfinite: NDArray[np.int64]


class GradientMonitor:
    """Records the gradients of each layer's parameters through tensor hooks, before any clipping.

    Example:
        with GradientMonitor(model) as monitor:
            for images, labels in batches:
                optimizer.zero_grad()
                loss(model(images), labels).backward()
                optimizer.step()
                monitor.step()
        print(monitor.record().norms)

    Several backward passes within one step add up: squared norms and counts.

    Args:
        model: any network.
        layers: patterns of layers, see `anomaly.hooks.match`; those that hold trainable parameters
            themselves are watched.

    Raises:
        LayerError: no such layer holds a trainable parameter, or one gets its weights in its first
            pass.
    """

    def __init__(self, model: nn.Module, layers: Selector | Sequence[Selector] = nn.Module) -> None:
        self._hooks = HookSet(model)
        # Hooks on parameters are called in compiled code, too, where those on layers aren't.
        patterns = [layers] if isinstance(layers, str | type) else layers
        paths = dict.fromkeys(path for pattern in patterns for path in match(model, pattern))
        own = {path: resolve(model, path)[1].parameters(recurse=False) for path in paths}
        trainable = {path: [p for p in each if p.requires_grad] for path, each in own.items()}
        self._parameters = {path: kept for path, kept in trainable.items() if kept}
        if not self._parameters:
            raise LayerError(
                f"no layer of {type(model).__name__} matching {layers!r} holds a "
                "parameter with requires_grad: name others, or unfreeze them"
            )
        if any(map(is_lazy, chain(*self._parameters.values()))):
            raise LayerError("layers have no weights before their first pass: run the network once")
        self._rows: list[NDArray[np.float64]] = []
        self._current = self._zeros()

    def __enter__(self) -> GradientMonitor:
        for index, parameters in enumerate(self._parameters.values()):
            for parameter in parameters:
                self._hooks.tensor(parameter, self._add, index)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.remove()

    def step(self) -> None:
        """End a training step: later gradients belong to the next step."""
        self._rows.append(np.stack([sums.cpu().numpy() for sums in self._current]))
        self._current = self._zeros()

    def record(self) -> GradientRecord:
        """The gradients of all steps that `step` has ended."""
        sums = np.array(self._rows).reshape(-1, len(self._parameters), 2)
        norms, nonfinite = np.sqrt(sums[..., 0]), sums[..., 1].astype(np.int64)
        return GradientRecord(tuple(self._parameters), norms, nonfinite)

    def _add(self, gradient: Tensor, index: int) -> None:
        """Add a gradient of a parameter to the sums of the layer at an index."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = values.detach().abs().double()
        # Added up on the gradient's device: reading numbers here would wait for the GPU.
        sums = torch.stack([values.square().sum(), (~values.isfinite()).sum()])
        self._current[index] = self._current[index].to(gradient.device) + sums

    def _zeros(self) -> list[Tensor]:
        """For each layer zeros (2,): a sum of squares and a count of non-finite values."""
        return [torch.zeros(2, dtype=torch.float64) for _ in self._parameters]
