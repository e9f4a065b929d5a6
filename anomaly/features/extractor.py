"""Hook the wanted layers of a network and run nothing behind the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.errors import LayerError
from anomaly.features.folding import Pair, Reads, foldable, folded
from anomaly.features.fusing import fused
from anomaly.features.layer_table import takes
from anomaly.features.timm_networks import own_side
from anomaly.features.tokens import Layout, layout_of
from anomaly.features.vision import without_values
from anomaly.hooks import HookSet, capture, match
from anomaly.hooks.guard import private
from anomaly.runtime.once import made_once

# Sides of dry-run images: multiples of 32 both, the other one of patches of 14 pixels.
PROBES = (256, 224)
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


class Nothing(nn.Module):
    """Stands where a part was that isn't needed: gives back its first argument."""

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        """Whatever else the part was called with."""
        return first


@dataclass(frozen=True)
class Truncated:
    """A network cut behind its last wanted layer, still without weights.

    Attributes:
        network: on the meta device; what doesn't run before the last layer is gone.
        layers: canonical paths, in the order in which they run.
        layouts: how each layer's output lies.
        copies: whether a later layer overwrites a wanted one in place.
        pairs: convolutions and batch norms that inference may fold.
    """

    network: nn.Module
    layers: tuple[str, ...]
    layouts: tuple[Layout, ...]
    copies: bool
    pairs: tuple[Pair, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """C of each layer."""
        return tuple(layout.channels for layout in self.layouts)

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride of each layer."""
        return tuple(layout.stride for layout in self.layouts)

    def extractor(self) -> FeatureExtractor:
        """The extractor, once the network has its weights."""
        return FeatureExtractor(self.network, self.layers, self.layouts, self.copies, self.pairs)


@without_values()
def truncate(network: nn.Module, layers: Sequence[str]) -> Truncated:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    A dry run on the meta device, which computes nothing, shows which parameters are touched before
    the last wanted layer has run; modules none of whose parameters are touched are replaced.

    Args:
        network: on the meta device.
        layers: paths or patterns, as `anomaly.hooks.match` takes them.

    Raises:
        LayerError: a layer doesn't exist, never runs, or gives neither a map nor tokens; or it
            gives something else than a map (B, C, h, w), of a network that takes squares only.
    """
    probe, outputs = truncate_in_place(network, layers)
    layouts = tuple(layout_of(path, output, probe) for path, output in outputs.items())
    oblong = all(layout.axes == "map" for layout in layouts) or takes(
        network, probe, 2 * probe, list(outputs)
    )
    if not oblong:
        raise LayerError(
            f"{type(network).__name__} takes images of {probe}×{probe} only, so its tokens can't "
            "be placed on others; choose another network"
        )
    image = torch.empty(1, 3, probe, probe, device="meta")
    return Truncated(
        network,
        tuple(outputs),
        layouts,
        _overwritten(network, list(outputs), image),
        foldable(network, list(outputs), image),
    )


def truncate_in_place(
    network: nn.Module, layers: Sequence[str], probe: int | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    Args:
        network: on the meta device.
        layers: paths in any form that `anomaly.hooks.resolve` takes.
        probe: side of the square dry-run image; by default the first of `probes` that it takes.

    Returns:
        That side; and what each layer puts out for one such image, on the meta device, by canonical
        path, in the order in which they run.

    Raises:
        LayerError: a layer doesn't exist, never runs, or puts out several tensors; or the network
            doesn't take images of this size.
    """
    *others, last = (probe,) if probe else probes(network)
    for side in others:
        with suppress(LayerError):
            return side, _truncated(network, layers, side)
    return last, _truncated(network, layers, last)


def probes(network: nn.Module) -> tuple[int, ...]:
    """Sides of square images of which a network should take one: `PROBES`, or its makers' own."""
    return (*PROBES, own) if (own := own_side(network)) and own not in PROBES else PROBES


@without_values()
def _truncated(network: nn.Module, layers: Sequence[str], probe: int) -> dict[str, Tensor]:
    paths = list(dict.fromkeys(path for layer in layers for path in match(network, layer)))
    order: list[str] = []
    used = Reads()
    try:
        with torch.no_grad(), used, HookSet(network) as hooks:
            for path in paths:
                hooks.forward(path, lambda *_, path: order.append(path), path=path)
            with capture(network, paths, stop=True) as captured:
                captured.run(torch.empty(1, 3, probe, probe, device="meta"))
                outputs = captured.pop()
    except (RuntimeError, AssertionError, ValueError):
        raise LayerError(
            f"{type(network).__name__} doesn't take images of {probe}×{probe}; choose another "
            "network or size"
        ) from None
    if several := [path for path in paths if path not in outputs]:
        raise LayerError(f"layer {several[0]!r} gives several tensors; choose another layer")
    _drop_unused(network, set(used.count), keep=paths)
    return {path: outputs[path] for path in dict.fromkeys(order)}


def _overwritten(network: nn.Module, paths: Sequence[str], image: Tensor) -> bool:
    with torch.no_grad(), capture(network, paths, stop=True, clone=False) as captured:
        captured.run(image)
        try:
            captured.pop()
        except LayerError:
            return True
    return False


def _drop_unused(module: nn.Module, used: set[int], keep: Sequence[str], path: str = "") -> None:
    for name, child in list(module.named_children()):
        inner = f"{path}.{name}" if path else name
        tensors = [*child.parameters(), *child.buffers()]
        wanted = any(p == inner or p.startswith(inner + ".") for p in keep)
        if tensors and not wanted and not any(id(t) in used for t in tensors):
            module.register_module(name, Nothing())
        else:
            _drop_unused(child, used, keep, inner)
