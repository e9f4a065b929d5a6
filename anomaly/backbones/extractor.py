"""Network input -> feature maps -> patch embeddings, through forward hooks; and their precision.

A hooked layer puts out a map (B, C, h, w), a map in Swin's order (B, h, w, C), or a transformer's
tokens (B, N, C): class and register tokens first, then the patches row by row. The network that
runs is a copy with fewer passes over memory: batch norms folded, activations fused.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from anomaly.errors import LayerError
from anomaly.hooks import capture
from anomaly.hooks.capture import mark_private
from anomaly.imaging.loading import NetworkInput
from anomaly.runtime import has_bf16, locked_cached_property

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of RGB in [0, 1], per channel; by default ImageNet's."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1], normalised."""
        mean = torch.tensor(self.mean, device=images.device).view(3, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(3, 1, 1)
        return (images - mean) / std


_LARGEST_PATCH = 64  # pixels
_MOST_PREFIX = 16  # class and register tokens before the patches; networks have up to 5


@dataclass(frozen=True)
class Layout:
    """The axes, channels and stride of a layer's output.

    Attributes:
        axes: `map` (B, C, h, w), `channels_last` (B, h, w, C) or `tokens` (B, N, C).
        channels: C.
        stride: network pixels between neighbouring positions, rounded, at least 1.
    """

    axes: str
    channels: int
    stride: int

    def map_of(self, output: Tensor, size: Sequence[int]) -> Tensor:
        """The layer's output as a feature map (B, C, h, w).

        Args:
            output: the layer's output, in the order of `axes`.
            size: (H, W) of the network's input.
        """
        if self.axes == "map":
            return output
        if self.axes == "tokens":
            height, width = size[0] // self.stride, size[1] // self.stride
            patches = output[:, output.shape[1] - height * width :]  # class tokens stand before
            # Not len(patches): a plain number would fix the batch size in a traced graph.
            output = patches.reshape(patches.shape[0], height, width, -1).contiguous()
        return output.permute(0, 3, 1, 2)  # (B, h, w, C)


def layout_of(shape: Sequence[int], size: Sequence[int]) -> Layout | None:
    """The layout of a layer's output; None where it is no grid of positions.

    A shape that fits both orders (a square image, as many channels as rows) is taken for a map
    (B, C, h, w).

    Args:
        shape: the output's shape for one image.
        size: (H, W) of the image.
    """
    height, width = size
    if len(shape) == 3 and (stride := token_stride(shape[1], size)):
        return Layout("tokens", shape[2], stride)
    if len(shape) == 4:
        _, first, middle, last = shape
        # A grid has the image's aspect, apart from the rounding of strides and borders.
        slack = 0 if height == width else 2 * max(height, width)
        if abs(middle * width - last * height) <= slack:
            return Layout("map", first, max(1, round(width / last)))
        if abs(first * width - middle * height) <= slack:
            return Layout("channels_last", last, max(1, round(width / middle)))
    return None


def token_stride(count: int, size: Sequence[int]) -> int | None:
    """The side of a transformer's patches, 2 to 64 pixels; None where tokens aren't patches.

    Args:
        count: number of tokens N: up to 16 class or register tokens (at most N / 2), then patches.
        size: (H, W) of the network's input.
    """
    height, width = size
    for stride in range(2, _LARGEST_PATCH + 1):
        if height % stride == width % stride == 0:
            prefix = count - height * width // stride**2
            if prefix >= 0:  # larger strides leave only more tokens without a patch
                return stride if prefix <= min(_MOST_PREFIX, count // 2) else None
    return None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


ConvNorm = tuple[str, str]  # paths of a convolution and of the batch norm behind it


@dataclass(frozen=True)
class Truncation:
    """The part of a network that some layers need, as dry runs have shown; manifests hold it.

    Attributes:
        layers: paths of the hooked layers as PyTorch prints them, in the order in which they run.
        layouts: the layout of each layer's output.
        dropped: paths of the modules that aren't needed.
        copies: true where a later layer overwrites a wanted output in place, so outputs are copied.
        pairs: paths of each convolution and of the batch norm to fold into it.
    """

    layers: tuple[str, ...]
    layouts: tuple[Layout, ...]
    dropped: tuple[str, ...]
    copies: bool
    pairs: tuple[ConvNorm, ...]


@dataclass(frozen=True, eq=False)
class FeatureExtractor(Truncation):
    """A network up to its last wanted layer, read through forward hooks.

    `anomaly.backbones.layers.truncate` makes one without weights; `load_state` fills its network,
    and `to` moves it to the device that computes. Threads may share one.

    Attributes:
        network: the truncated network, in eval mode. A copy of it runs, with its batch norms folded
            and, on the CPU, its activations fused.
        precision: `fp32` or `bf16`, the number format that the network runs in.
    """

    network: nn.Module
    precision: str = "fp32"
    engine: ClassVar[str] = "torch"

    @property
    def channels(self) -> tuple[int, ...]:
        """C of each layer."""
        return tuple(layout.channels for layout in self.layouts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Network pixels between neighbouring positions, of each layer."""
        return tuple(layout.stride for layout in self.layouts)

    @property
    def patch(self) -> int | None:
        """The side of the patches that a transformer cuts images into; None for other networks."""
        return next((each.stride for each in self.layouts if each.axes == "tokens"), None)

    def to(self, device: torch.device | str, precision: str) -> FeatureExtractor:
        """The extractor in `fp32` or `bf16`; its network moves to the device, in place."""
        network = self.network.to(device).requires_grad_(False)
        return replace(self, network=network, precision=precision)

    @locked_cached_property
    def _network_that_runs(self) -> nn.Module:
        """The copy that runs, made at the first pass."""
        network = folded(self.network, self.pairs, DTYPES[self.precision])
        fuse_activations(network, self.layers)
        return mark_private(network)

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Feature maps of images; the network runs up to the last hooked layer.

        Args:
            images: normalised images (B, 3, H, W).

        Returns:
            A map (B, C, h, w) for each layer, in the order of `layers` and in the extractor's
            precision.

        Raises:
            LayerError: the network doesn't take such images.
        """
        network = self._network_that_runs
        images = images.to(DTYPES[self.precision], memory_format=torch.channels_last)
        try:
            with (
                torch.inference_mode(),
                capture(network, self.layers, stop=True, clone=self.copies) as captured,
            ):
                captured.run(images)
                return self.maps_of(captured.pop(), images)
        except torch.OutOfMemoryError:  # a RuntimeError, too, but not the network's
            raise
        except (RuntimeError, AssertionError, ValueError, AttributeError) as error:
            height, width = images.shape[2:]
            raise LayerError(
                f"{type(self.network).__name__} can't compute an image of {width}×{height} "
                f"({str(error).partition(chr(10))[0] or 'it fails'}); choose another size or "
                "network, or train the model again"
            ) from error

    def maps_of(self, outputs: Mapping[str, Tensor], images: Tensor) -> list[Tensor]:
        """Feature maps (B, C, h, w), in the order of `layers`.

        Args:
            outputs: outputs of the layers by path.
            images: the network's input (B, 3, H, W).
        """
        return [
            layout.map_of(outputs[layer], images.shape[2:])
            for layer, layout in zip(self.layers, self.layouts, strict=True)
        ]


# Images that a CPU computes together. Eight take 10 % more memory, and in float32 more time.
_CPU_BATCH = 4


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings.

    Attributes:
        extractor: the truncated backbone.
        normalise: the normalisation that the backbone's weights were trained with.
        align: function from the layers' feature maps (B, C_i, h_i, w_i) to embeddings (B, h, w, D)
            float32.
        device: the device that holds the backbone.
    """

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Callable[[Sequence[Tensor]], Tensor]
    device: torch.device

    def maps(self, batch: Sequence[NetworkInput]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return self.extractor(network_input(batch, self.normalise, self.device))

    def __call__(self, batch: Sequence[NetworkInput]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))

    def max_batch_size(self, wanted: int) -> int:
        """Images in a batch: the number wanted, on a CPU at most `_CPU_BATCH`."""
        return min(wanted, _CPU_BATCH) if self.device.type == "cpu" else wanted

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A `torch.inference_mode` context, in which nothing is recorded for gradients."""
        return torch.inference_mode()

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels; computes a black image."""
        with torch.inference_mode():
            black = torch.zeros(1, 3, *size, device=self.device)
            height, width = self.align(self.extractor(black)).shape[1:3]
        return height, width


def network_input(
    batch: Sequence[NetworkInput], normalise: Normalisation, device: torch.device
) -> Tensor:
    """Rendered images of one size as a normalised batch (B, 3, H, W) float32 on a device."""
    pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
    if device.type == "cuda":  # from pinned memory the copy doesn't hold up this thread
        pixels = pixels.pin_memory().to(device, non_blocking=True)
    # (B, H, W, 3) is what torch calls channels_last.
    return normalise(pixels.permute(0, 3, 1, 2))


# The standard deviation that rounding may add, as a share of the maps' own: 1 % of their variance.
# ResNet-50 stays at 0.03 to 0.08. The effect on scores: docs/reproducibility.md.
MOST_ROUNDING = 0.1


def choose_precision(extractor: FeatureExtractor, images: Tensor) -> str:
    """`bf16` where the device has it and it changes maps by at most `MOST_ROUNDING`, else `fp32`.

    Args:
        extractor: the extractor with its weights, on its device.
        images: a few normalised training images (B, 3, H, W), on the same device.
    """
    device = images.device
    if not has_bf16(device):
        log.debug("fp32: %s has no bf16", device)
        return "fp32"
    share = rounding_share(extractor, images)
    precision = "bf16" if share <= MOST_ROUNDING else "fp32"
    log.debug("%s: bf16 rounding is %.1f %% of the maps' variation", precision, 100 * share)
    return precision


def rounding_share(extractor: FeatureExtractor, images: Tensor) -> float:
    """The change of feature maps by bf16, relative to their own variation: 0.1 is 10 %.

    Args:
        extractor: the extractor with its weights.
        images: normalised images (B, 3, H, W).

    Returns:
        The largest share of a layer: the root mean square of the change, divided by the standard
        deviation between positions and images (variances averaged over channels); infinite where
        bf16 overflows or a layer's maps are constant.
    """
    exact = extractor.to(images.device, "fp32")(images)
    rounded = extractor.to(images.device, "bf16")(images)
    shares = []
    for full, short in zip(exact, rounded, strict=True):
        change = (short.float() - full).square().mean()
        variation = full.var(dim=(0, 2, 3)).mean()
        shares.append(float((change / variation).sqrt().nan_to_num(torch.inf, posinf=torch.inf)))
    return max(shares)


def folded(network: nn.Module, pairs: Sequence[ConvNorm], dtype: torch.dtype) -> nn.Module:
    """A copy of a network for inference: batch norms folded, in a type, channels last.

    Folding makes ResNet-50 at 256 px (two cores) 20 % faster in float32 and 33 % in bfloat16.
    Modules keep their paths, so layers are hooked as before.

    Args:
        network: a network in eval mode, with its weights.
        pairs: paths of each convolution and of its batch norm, as `DryRun` finds them.
        dtype: the type of weights and activations.

    Raises:
        LayerError: a pair isn't a convolution and a batch norm of as many channels.
    """
    network = copy.deepcopy(network)
    for conv_path, norm_path in pairs:
        convolution, batch_norm = map(network.get_submodule, (conv_path, norm_path))
        if not (
            isinstance(convolution, nn.Conv2d)
            and isinstance(batch_norm, nn.BatchNorm2d)
            and convolution.out_channels == batch_norm.num_features
        ):
            raise LayerError(
                f"{conv_path} and {norm_path} aren't a convolution and its batch norm, as the "
                "model's manifest says; copy the whole model folder again"
            )
        joined = fuse_conv_bn_eval(convolution, batch_norm)
        activation = dict(batch_norm.named_children())  # only timm's BatchNormAct2d has one
        if activation:  # in a sequence behind its convolution, where `fuse_activations` finds it
            network.set_submodule(conv_path, nn.Identity())
            sequence = OrderedDict(convolution=joined, **activation)
            network.set_submodule(norm_path, nn.Sequential(sequence))
        else:
            network.set_submodule(conv_path, joined)
            network.set_submodule(norm_path, nn.Identity())
    network.requires_grad_(False)
    return network.to(dtype).to(memory_format=torch.channels_last)


# Activations that oneDNN, which computes torch's convolutions on the CPU, applies before it writes
# the output; else the whole feature map goes to memory and back. By type: oneDNN's name and its
# arguments.
_ACTIVATIONS: dict[type[nn.Module], tuple[str, list[float]]] = {
    nn.ReLU: ("relu", []),
    nn.ReLU6: ("hardtanh", [0.0, 6.0]),
}


def fuse_activations(network: nn.Module, layers: Sequence[str]) -> None:
    """Join each convolution in an `nn.Sequential` with the activation behind it, in place.

    At 256 px, MobileNetV2 and EfficientNet-Lite2 are 14 % faster in float32, 20 to 27 % in
    bfloat16. Nothing changes off the CPU, or where oneDNN is missing or can't compute the network's
    bf16 on this processor.

    Args:
        network: a network for inference, its batch norms folded. It has no gradients afterwards.
        layers: paths of hooked layers; their outputs stay unchanged.
    """
    parameters = list(network.parameters())
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    if not on_cpu or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    rounded = any(p.dtype == torch.bfloat16 for p in parameters)
    if rounded and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for path, module in list(network.named_modules()):
        if type(module).forward is nn.Sequential.forward:
            _fuse_sequence(module, f"{path}." if path else "", layers)


class _ActivatedConvolution(nn.Module):
    """A convolution and its activation in one pass: (B, C, h, w) -> (B, C', h', w')."""

    def __init__(self, conv: nn.Conv2d, activation: type[nn.Module]) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._geometry = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        name, values = self._activation
        run = torch.ops.mkldnn._convolution_pointwise
        result: Tensor = run(x, self.weight, self.bias, *self._geometry, name, values, "")
        return result


def _fuse_sequence(sequence: nn.Module, prefix: str, layers: Sequence[str]) -> None:
    """Do as `fuse_activations` in one sequence; `prefix` begins the paths of its children."""
    children = dict(sequence.named_children())
    # Folding left an `nn.Identity` between a convolution and its activation.
    running = [
        name
        for name, child in children.items()
        if prefix + name in layers or type(child) is not nn.Identity
    ]
    for name, after in pairwise(running):
        convolution, activation = children[name], type(children[after])
        if (
            type(convolution) is nn.Conv2d
            and convolution.padding_mode == "zeros"  # as oneDNN pads
            and isinstance(convolution.padding, tuple)
            and activation in _ACTIVATIONS
            and prefix + name not in layers
        ):
            sequence.register_module(name, _ActivatedConvolution(convolution, activation))
            sequence.register_module(after, nn.Identity())
