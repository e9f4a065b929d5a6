"""Network input -> feature maps (B, C, h, w) of the wanted layers, through forward hooks.

A hooked layer puts out a map, a map in Swin's order, or tokens: a transformer's block gives
(B, N, C), class and register tokens first, then the patches row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anomaly.backbones.optimise import Pair, folded, fused
from anomaly.errors import ConfigError
from anomaly.hooks import capture
from anomaly.hooks.guard import private
from anomaly.runtime.parallel import made_once

_LARGEST_PATCH = 64
_MOST_PREFIX = 16  # class and register tokens; networks have up to 5


@dataclass(frozen=True)
class Layout:
    """How a layer's output lies, and what it stands for.

    Attributes:
        axes: of its outputs: `map` (B, C, h, w), `channels_last` (B, h, w, C) or `tokens`
            (B, N, C).
        channels: C.
        stride: network pixels between neighbouring positions.
    """

    axes: str
    channels: int
    stride: int

    @property
    def patch(self) -> int | None:
        """The side of the squares that images are cut into, of which sides are multiples."""
        return self.stride if self.axes == "tokens" else None

    def map_of(self, output: Tensor, size: Sequence[int]) -> Tensor:
        """An output as a feature map (B, C, h, w).

        Args:
            output: of the layer.
            size: (H, W) of the network's input.
        """
        if self.axes == "map":
            return output
        if self.axes == "tokens":
            height, width = size[0] // self.stride, size[1] // self.stride
            patches = output[:, output.shape[1] - height * width :]
            # Its length as a shape's, which stays free in a traced graph; len() is a plain number.
            output = patches.reshape(patches.shape[0], height, width, -1).contiguous()
        return output.permute(0, 3, 1, 2)


def layout_of(shape: Sequence[int], size: Sequence[int]) -> Layout | None:
    """How a layer's output lies, told by that of one image; None where it is no grid of positions.

    What may be both is taken for a map (B, C, h, w): of a square image, as many channels as rows.

    Args:
        shape: of the output.
        size: (H, W) of the image.
    """
    height, width = size
    if len(shape) == 3 and (stride := token_stride(shape[1], size)):
        return Layout("tokens", shape[2], stride)
    if len(shape) == 4:
        _, a, b, c = shape
        slack = 0 if height == width else 2 * max(height, width)  # strides and borders round
        if abs(b * width - c * height) <= slack:
            return Layout("map", a, max(1, round(width / c)))
        if abs(a * width - b * height) <= slack:
            return Layout("channels_last", c, max(1, round(width / b)))
    return None


def token_stride(count: int, size: Sequence[int]) -> int | None:
    """The side of the patches that N tokens stand for, few others before them; None for none.

    Args:
        count: N.
        size: (H, W) of the network's input.
    """
    height, width = size
    for stride in range(2, _LARGEST_PATCH + 1):
        if height % stride == width % stride == 0:
            others = count - height * width // stride**2
            if others >= 0:
                return stride if others <= min(_MOST_PREFIX, count // 2) else None
    return None


def check_side(key: str, side: int, layouts: Sequence[Layout]) -> None:
    """See that images of a given side can be cut into a network's patches.

    Raises:
        ConfigError: they can't.
    """
    for patch in {layout.patch for layout in layouts} - {None}:
        if patch and side % patch:
            low = side // patch * patch
            raise ConfigError(
                f"{key} is {side}, but the network cuts images into patches of {patch} pixels; "
                f"choose {f'{low} or ' if low else ''}{low + patch}"
            )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FeatureMap:
    """What one layer makes of a batch.

    Attributes:
        layer: its path, as PyTorch prints it.
        values: (B, C, h, w).
        stride: network pixels between neighbouring positions.
    """

    layer: str
    values: Tensor
    stride: int


class FeatureExtractor:
    """The part of a network up to the last wanted layer, read through forward hooks.

    Threads may share one.

    Args:
        network: an already truncated network (see `truncate`), with its weights in float32. It is
            put in eval mode and its weights take no gradients any more; `to` moves it. What runs is
            a copy with its batch norms folded and, on the CPU, its activations fused.
        layers: canonical paths, in the order in which they run.
        layouts: how each layer's output lies.
        copies: whether a later layer overwrites a wanted one in place.
        pairs: convolutions and batch norms to fold, see `anomaly.backbones.optimise`.
        precision: `fp32` or `bf16`, the number format that the network runs in.

    Attributes:
        engine: what computes.
    """

    engine = "torch"

    def __init__(
        self,
        network: nn.Module,
        layers: Sequence[str],
        layouts: Sequence[Layout],
        copies: bool,
        pairs: Sequence[Pair],
        precision: str = "fp32",
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.layers = tuple(layers)
        self.layouts = tuple(layouts)
        self.channels = tuple(layout.channels for layout in layouts)
        self.strides = tuple(layout.stride for layout in layouts)
        self.precision = precision
        self._copies = copies
        self.pairs = tuple(pairs)

    @property
    def coarsest_stride(self) -> int:
        """The largest stride of the hooked layers."""
        return max(self.strides)

    @property
    def patch(self) -> int | None:
        """The side of the patches that a transformer cuts images into; None for other networks."""
        return next((layout.patch for layout in self.layouts if layout.patch), None)

    def to(self, device: torch.device | str, precision: str) -> FeatureExtractor:
        """The same extractor in a number format, on a device to which its network is moved."""
        return FeatureExtractor(
            self.network.to(device),
            self.layers,
            self.layouts,
            self._copies,
            self.pairs,
            precision,
        )

    @made_once
    def _engine(self) -> nn.Module:
        copy = folded(self.network, self.pairs, DTYPES[self.precision])
        return private(fused(copy, self.layers))

    def __call__(self, images: Tensor) -> list[FeatureMap]:
        """Run the network as far as needed.

        Args:
            images: (B, 3, H, W), normalised.

        Returns:
            One map for each layer, in the order of `layers`, in the extractor's number format.
        """
        engine = self._engine
        images = images.to(DTYPES[self.precision], memory_format=torch.channels_last)
        with (
            torch.inference_mode(),
            capture(engine, self.layers, stop=True, clone=self._copies) as captured,
        ):
            captured.run(images)
            maps = self.maps_of(captured.pop(), images)
        return [
            FeatureMap(layer, values, stride)
            for layer, values, stride in zip(self.layers, maps, self.strides, strict=True)
        ]

    def maps_of(self, outputs: Mapping[str, Tensor], images: Tensor) -> list[Tensor]:
        """Feature maps (B, C, h, w) of the layers, in their order.

        Args:
            outputs: what the layers put out, by path.
            images: (B, 3, H, W), what the network was shown.
        """
        return [
            layout.map_of(outputs[layer], images.shape[2:])
            for layer, layout in zip(self.layers, self.layouts, strict=True)
        ]
