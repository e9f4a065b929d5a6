"""Read the wanted layers of a truncated network through forward hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anomaly.features.folding import Pair, folded
from anomaly.features.fusing import fused
from anomaly.features.tokens import Layout
from anomaly.hooks import capture
from anomaly.hooks.guard import private
from anomaly.runtime.once import made_once

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
        pairs: convolutions and batch norms to fold, see `anomaly.features.folding`.
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
