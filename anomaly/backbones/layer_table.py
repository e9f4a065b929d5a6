"""What a network consists of: its layers, what they put out, and what it costs to get there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.errors import LayerError
from anomaly.hooks import HookSet, capture
from anomaly.hooks.guard import named_tensors


@dataclass(frozen=True)
class Layer:
    """One layer of a network.

    Attributes:
        path: as PyTorch prints it; empty for the network itself.
        kind: the name of its class.
        shape: of its output for one image, of the first tensor where there are several; None
            where it isn't run.
        stride: network pixels between neighbouring positions, where it puts out a feature map
            (1, C, h, w) of more than one position.
        parameters: its own and those of the layers inside.
        multiply_adds: of the whole network up to the end of this layer: convolutions, matrix
            products and attention.
        share: that, as a share of the whole pass.
        finished: how many layers had ended before it; None where it isn't run.
        runs: how often it runs in one pass. A path doesn't say which run is meant.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None
    stride: int | None
    parameters: int
    multiply_adds: int | None
    share: float | None
    finished: int | None
    runs: int


def layer_table(network: nn.Module, size: int) -> list[Layer]:
    """Run a network once and describe each of its layers.

    On the meta device, as `anomaly.backbones.registry.build` makes networks, nothing is computed.

    Args:
        network: in eval mode, takes images (1, 3, H, W).
        size: side of the square image that it is shown.

    Returns:
        The layers in the order in which PyTorch prints them, the network itself first.

    Raises:
        LayerError: the network doesn't take images of this size.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports a compiler, where there is one

    seen: dict[str, tuple[int, tuple[int, ...] | None, int]] = {}
    runs: Counter[str] = Counter()

    names = {module: path for path, module in network.named_modules()}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        path = names[module]
        tensors = [tensor for _, tensor in named_tensors(output, path)]
        shape = tuple(tensors[0].shape) if tensors else None
        seen.pop(path, None)  # of several calls the last one counts, also for the order
        seen[path] = len(seen), shape, counter.get_total_flops() // 2
        runs[path] += 1

    with FlopCounterMode(display=False) as counter, HookSet(network) as hooks:
        hooks.forward(nn.Module, note)
        show(network, size, size)
    order = {path: place for place, path in enumerate(seen)}
    total = max(seen[""][2], 1)
    table = []
    for module, path in names.items():
        shape, spent = seen[path][1:] if path in seen else (None, None)
        table.append(
            Layer(
                path=path,
                kind=type(module).__name__,
                shape=shape,
                stride=_stride(shape, size),
                parameters=sum(p.numel() for p in module.parameters()),
                multiply_adds=spent,
                share=None if spent is None else spent / total,
                finished=order.get(path),
                runs=runs[path],
            )
        )
    return table


def show(
    network: nn.Module, height: int, width: int, run: Callable[[Tensor], Any] | None = None
) -> Any:
    """Show a network a black image, to see how its layers behave.

    Args:
        network: the network.
        height: of the image.
        width: of the image.
        run: what passes the image through it; the network itself by default.

    Returns:
        The network's output.

    Raises:
        LayerError: the network doesn't take images of this size.
    """
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad():
            return (run or network)(torch.zeros(1, 3, height, width, device=device))
    except (RuntimeError, AssertionError, ValueError):
        side = own_side(network) or 224
        raise LayerError(
            f"{type(network).__name__} doesn't take images of {height}×{width}; give another size, "
            f"such as {side}×{side}"
        ) from None


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
        with capture(network, list(layers) or "", stop=True) as captured:
            show(network, height, width, captured.run)
    except LayerError:
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


def stages(table: Sequence[Layer]) -> list[str]:
    """The last feature map of each stride from 4 up, in running order.

    Of the outermost layers that have the stride: the first convolution of the next stage often
    still has it too.
    """
    latest: dict[int, Layer] = {}
    for layer in sorted(table, key=lambda layer: (-_depth(layer), _finished(layer))):
        if layer.path and layer.runs == 1 and layer.stride is not None and layer.stride >= 4:
            latest[layer.stride] = layer
    return [layer.path for layer in sorted(latest.values(), key=_finished)]


def last_map(table: Sequence[Layer]) -> str | None:
    """The last feature map of a network, where Grad-CAM looks.

    Returns:
        The outermost layer that puts it out; None where there is none in the second half of the
        work, as in a transformer whose only map is that of its patches.
    """
    late = [
        x
        for x in table
        if x.path and x.runs == 1 and x.stride is not None and x.share is not None and x.share > 0.5
    ]
    return max(late, key=_finished).path if late else None


def token_layer(table: Sequence[Layer]) -> str | None:
    """The last but one of a transformer's blocks, where gradients still reach each patch's token.

    A class is read from the class token, so the last block's other tokens count for nothing.

    Returns:
        Of the outermost layers of one kind that put out tokens (1, N, C), four at least; None
        where there are none.
    """
    blocks: dict[tuple[int, str, str], list[Layer]] = {}
    for x in sorted(table, key=_finished):
        if x.shape is not None and len(x.shape) == 3:
            key = _depth(x), x.path.rpartition(".")[0], x.kind
            blocks.setdefault(key, []).append(x)
    several = [key for key, layers in blocks.items() if len(layers) >= 4]
    return blocks[min(several)][-2].path if several else None


def _depth(layer: Layer) -> int:
    return layer.path.count(".")


def _finished(layer: Layer) -> int:
    return -1 if layer.finished is None else layer.finished


def _stride(shape: tuple[int, ...] | None, size: int) -> int | None:
    # A square image gives a square map; (1, h, w, C) and tokens aren't feature maps here.
    if shape is None or len(shape) != 4 or shape[2] != shape[3] or shape[3] < 2:
        return None
    return max(1, round(size / shape[3]))
