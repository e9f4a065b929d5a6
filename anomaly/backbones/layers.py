"""A network's layers: what they put out, how that lies, and what it costs to get there.

A layer puts out a map, a map in Swin's order, or tokens: a transformer's block gives (B, N, C),
class and register tokens first, then the patches row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.errors import ConfigError, LayerError
from anomaly.hooks import HookSet, capture
from anomaly.hooks.capture import named_tensors

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
    """How a layer's output for one image lies; None where it is no grid of positions.

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


@dataclass(frozen=True)
class Layer:
    """One layer of a network.

    Attributes:
        path: as PyTorch prints it; empty for the network itself.
        kind: the name of its class.
        shape: of its output for one image, of the first tensor where there are several; None
            where it isn't run.
        layout: of that; None where it is no grid of positions.
        parameters: its own and those of the layers inside.
        multiply_adds: of the whole network up to the end of this layer: convolutions, matrix
            products and attention.
        share: that, as a share of the whole pass.
        finished: how many layers had ended before it; -1 where it isn't run.
        runs: how often it runs in one pass. A path doesn't say which run is meant.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None
    layout: Layout | None
    parameters: int
    multiply_adds: int
    share: float
    finished: int
    runs: int

    @property
    def stride(self) -> int | None:
        """Network pixels between positions of a feature map (1, C, h, w) of more than one."""
        several = self.shape is not None and self.shape[-1] > 1
        return self.layout.stride if several and self.layout and self.layout.axes == "map" else None


def layer_table(network: nn.Module, size: int) -> list[Layer]:
    """Run a network once and describe each of its layers.

    On the meta device, as `anomaly.backbones.networks.build` makes networks, nothing is computed.

    Args:
        network: in eval mode, takes images (1, 3, H, W).
        size: side of the square image that it is shown.

    Returns:
        The layers in the order in which PyTorch prints them, the network itself first.

    Raises:
        LayerError: the network doesn't take images of this size.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports a compiler, where there is one

    seen: dict[str, tuple[tuple[int, ...] | None, int]] = {}
    runs: Counter[str] = Counter()
    names = {module: path for path, module in network.named_modules()}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        path = names[module]
        tensors = named_tensors(output, path)
        seen.pop(path, None)  # of several calls the last one counts, also for the order
        shape = tuple(tensors[0][1].shape) if tensors else None
        seen[path] = shape, counter.get_total_flops() // 2
        runs[path] += 1

    with FlopCounterMode(display=False) as counter, HookSet(network) as hooks:
        hooks.forward(nn.Module, note)
        try:
            with torch.no_grad():
                network(_black(network, size, size))
        except (RuntimeError, AssertionError, ValueError):
            side = own_side(network) or 224
            raise LayerError(
                f"{type(network).__name__} doesn't take images of {size}×{size}; give another "
                f"size, such as {side}×{side}"
            ) from None
    order = {path: place for place, path in enumerate(seen)}
    total = max(seen[""][1], 1)
    table = []
    for module, path in names.items():
        shape, spent = seen.get(path, (None, 0))
        table.append(
            Layer(
                path=path,
                kind=type(module).__name__,
                shape=shape,
                layout=layout_of(shape or (), (size, size)),
                parameters=sum(p.numel() for p in module.parameters()),
                multiply_adds=spent,
                share=spent / total,
                finished=order.get(path, -1),
                runs=runs[path],
            )
        )
    return table


def _black(network: nn.Module, height: int, width: int) -> Tensor:
    """A black image (1, 3, H, W) where a network is, to see how its layers behave."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    return torch.zeros(1, 3, height, width, device=device)


def own_side(network: nn.Module) -> int | None:
    """The side of the square images that a network was trained with; None if it isn't known."""
    size = (getattr(network, "pretrained_cfg", None) or {}).get("input_size")  # timm states it
    return size[-1] if size else None


def takes(network: nn.Module, height: int, width: int, layers: Sequence[str] = ()) -> bool:
    """Whether a network takes images of a size.

    Args:
        network: as for `layer_table`.
        height: of the image.
        width: of the image.
        layers: whether it gets as far as the last of these; all the way if there are none.
    """
    try:
        with torch.no_grad(), capture(network, list(layers) or "", stop=True) as captured:
            captured.run(_black(network, height, width))
    except (LayerError, RuntimeError, AssertionError, ValueError):
        return False
    return True


def side_multiple(network: nn.Module, layers: Sequence[str] = ()) -> int | None:
    """What sides of images have to be multiples of; None for squares of one size only.

    Args:
        network: as for `layer_table`.
        layers: as for `takes`.
    """
    fits = (m for m in (32, 14) if takes(network, 7 * m, 8 * m, layers))
    return next(fits, None)


_FINISHED = attrgetter("finished")

# Sides of dry-run images: multiples of 32 both, the other one of patches of 14 pixels.
PROBES = (256, 224)


def probes(network: nn.Module) -> tuple[int, ...]:
    """Sides of square images to try on a network: `PROBES`, or the side its makers state."""
    return (*PROBES, own) if (own := own_side(network)) and own not in PROBES else PROBES


def default_layers(name: str, network: nn.Module, count: int) -> tuple[str, ...]:
    """The layers to hook when the config names none: those at strides 4, 8 and 16.

    Of a transformer whose blocks have one stride they are the blocks after half, three quarters
    and all of it.

    Args:
        name: of the network, for messages.
        network: as for `layer_table`.
        count: how many of the three, the coarsest first.

    Raises:
        ConfigError: the network has no such layers; the message says how to choose some.
    """
    for side in probes(network):
        with suppress(LayerError):
            table = layer_table(network, side)
            found = _at_strides(table, side) or _late_blocks(table)
            if found:
                return found[-count:]
    raise ConfigError(
        f"{name} has no default layers, since none are known to lie at strides 4, 8 and 16; "
        f"choose two or three of `anomaly layers --backbone {name}` and name them: "
        "--set 'backbone.layers=[first, second]', or --layers of `features`"
    )


def _at_strides(table: Sequence[Layer], side: int) -> tuple[str, ...]:
    """The last layers at strides 4, 8 and 16; empty unless all three lie whole strides apart.

    They are a network's parts and their parts; inside these, strides change early.
    """
    latest: dict[int, str] = {}
    for x in sorted(table, key=_FINISHED):
        layout = x.layout if x.path and x.runs == 1 and x.path.count(".") <= 1 else None
        if layout and (layout.axes == "tokens" or layout.stride * (x.shape or ())[-2] == side):
            latest[layout.stride] = x.path
    return tuple(latest[s] for s in (4, 8, 16)) if latest.keys() >= {4, 8, 16} else ()


def _late_blocks(table: Sequence[Layer]) -> tuple[str, ...]:
    """A transformer's blocks after half, three quarters and all of it; empty for other networks.

    Blocks are the outermost layers of one kind that put out tokens (1, N, C), four at least.
    """
    blocks: dict[tuple[int, str, str], list[str]] = {}
    for x in sorted(table, key=_FINISHED):
        if x.shape is not None and len(x.shape) == 3:
            key = x.path.count("."), x.path.rpartition(".")[0], x.kind
            blocks.setdefault(key, []).append(x.path)
    several = [key for key, layers in blocks.items() if len(layers) >= 4]
    if not several:
        return ()
    outermost = blocks[min(several)]
    return tuple(outermost[len(outermost) * quarter // 4 - 1] for quarter in (2, 3, 4))
