"""Layers of a network: their outputs and cost, those to hook by default, the cut behind the last.

Dry runs, in which nothing is computed, show all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anomaly.backbones.extractor import ConvNorm, FeatureExtractor, Layout, Truncation, layout_of
from anomaly.errors import ConfigError, LayerError
from anomaly.hooks import HookSet, capture, match
from anomaly.hooks.capture import named_tensors


@dataclass(frozen=True)
class Layer:
    """One layer of a network.

    Attributes:
        path: the layer's path as PyTorch prints it; empty for the network itself.
        kind: the name of its class.
        shape: shape of its output for one image, of the first tensor where there are several; None
            where the layer isn't run or puts out no tensor.
        layout: the output's layout; None where the output is no grid of positions.
        parameters: number of parameters, those of the layers inside included.
        multiply_adds: multiply-adds of the whole network up to the end of this layer, in
            convolutions, matrix products and attention; 0 where the layer isn't run.
        share: `multiply_adds` as a share of the whole pass, 0 to 1.
        finished: number of layers that end before it; -1 where the layer isn't run.
        runs: number of runs in one pass. With several, the path doesn't say which run is meant.
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
        """Network pixels between positions of a map (B, C, h, w); None for others and for 1×1."""
        wide = self.shape is not None and self.shape[-1] > 1
        return self.layout.stride if wide and self.layout and self.layout.axes == "map" else None


def layer_table(network: nn.Module, size: int) -> list[Layer]:
    """The layers of a network, each described by a dry run.

    Args:
        network: on the meta device, in eval mode.
        size: side of the square image of the dry run, in pixels.

    Returns:
        The layers in the order in which PyTorch prints them, the network itself first.

    Raises:
        LayerError: the network doesn't take images of this size.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports a compiler, where there is one

    # Output shape of each layer, and multiply-adds up to its end, in the order in which they end.
    ended: dict[str, tuple[tuple[int, ...] | None, int]] = {}
    runs: Counter[str] = Counter()
    paths = {module: path for path, module in network.named_modules()}

    def record(module: nn.Module, _: Any, output: Any) -> None:
        path = paths[module]
        tensors = named_tensors(output, path)
        ended.pop(path, None)  # of several calls the last one counts, also for the order
        shape = tuple(tensors[0][1].shape) if tensors else None
        ended[path] = shape, counter.get_total_flops() // 2  # a multiply-add is two operations
        runs[path] += 1

    with FlopCounterMode(display=False) as counter, HookSet(network) as hooks:
        hooks.forward(nn.Module, record)
        _run_dry(network, size, size, network)
    order = {path: place for place, path in enumerate(ended)}
    total = max(ended[""][1], 1)  # a network without such layers has 0
    table = []
    for module, path in paths.items():
        shape, multiply_adds = ended.get(path, (None, 0))
        table.append(
            Layer(
                path=path,
                kind=type(module).__name__,
                shape=shape,
                layout=layout_of(shape or (), (size, size)),
                parameters=sum(p.numel() for p in module.parameters()),
                multiply_adds=multiply_adds,
                share=multiply_adds / total,
                finished=order.get(path, -1),
                runs=runs[path],
            )
        )
    return table


def _run_dry(network: nn.Module, height: int, width: int, run: Callable[[Tensor], Any]) -> None:
    """Run a network on an image (1, 3, H, W) on the meta device, which has shapes and no values.

    `run` is the network itself, or the `run` of a capture that stops the pass early.
    """
    try:
        with torch.no_grad(), torch.device("meta"):
            run(torch.empty(1, 3, height, width))
    except Exception as error:  # of any type: foreign code runs on a size it wasn't written for
        side = own_side(network) or 224
        raise LayerError(
            f"{type(network).__name__} doesn't take images of {height}×{width}; give another size, "
            f"such as {side}×{side}, or choose another network"
        ) from error


def own_side(network: nn.Module) -> int | None:
    """The side of the square images that a network was trained with; None where it isn't known."""
    size = (getattr(network, "pretrained_cfg", None) or {}).get("input_size")  # timm states it
    return size[-1] if size else None


def takes_size(network: nn.Module, height: int, width: int, layers: Sequence[str] = ()) -> bool:
    """True if a network on the meta device takes images of a size in pixels; a dry run shows it.

    The pass ends after the last of the layers, given by path; without any it is a whole pass.
    """
    with suppress(LayerError), capture(network, list(layers) or "", stop=True) as captured:
        _run_dry(network, height, width, captured.run)
        return True
    return False


def side_multiple(network: nn.Module, layers: Sequence[str] = ()) -> int | None:
    """32 or else 14: a number whose multiples a network takes as sides of images; None if neither.

    Networks that take squares of one size only have none. A dry run on sides of 7 and 8 times the
    number shows it, up to the last of the layers.
    """
    return next((m for m in (32, 14) if takes_size(network, 7 * m, 8 * m, layers)), None)


# Sides of dry-run images: both multiples of 32, and 224 also of 14, a usual side of patches.
PROBES = (256, 224)


def probes(network: nn.Module) -> tuple[int, ...]:
    """Sides of square images to try on a network: `PROBES`, then its own training size."""
    return (*PROBES, own) if (own := own_side(network)) and own not in PROBES else PROBES


def default_layers(name: str, network: nn.Module, count: int) -> tuple[str, ...]:
    """Paths of the layers to hook where the config names none: those at strides 4, 8 and 16.

    A transformer's blocks all have one stride; there they are the blocks after half, three quarters
    and all of it. Either way in the order in which they run.

    Args:
        name: the network's name, for messages.
        network: on the meta device, in eval mode.
        count: number of layers, 1 to 3; fewer than 3 are the last ones.

    Raises:
        ConfigError: the network has no such layers; the message says how to choose some.
    """
    for side in probes(network):
        with suppress(LayerError):
            table = layer_table(network, side)
            if layers := _at_strides(table, side) or _late_blocks(table):
                return layers[-count:]
    raise ConfigError(
        f"{name} has no default layers, since none are known to lie at strides 4, 8 and 16; "
        f"choose two or three of `anomaly layers --backbone {name}` and name them: "
        "--set 'backbone.layers=[first, second]', or --layers of `features`"
    )


def _at_strides(table: Sequence[Layer], side: int) -> tuple[str, ...]:
    """Paths of the last layers at strides 4, 8 and 16; empty unless there is one at each.

    Only layers that run once count, and only the network's parts and the parts of these: further
    inside, a stride begins before the network's features of that stride are complete. A stride has
    to divide the side of the image.
    """
    latest: dict[int, str] = {}
    for layer in sorted(table, key=attrgetter("finished")):
        path, shape = layer.path, layer.shape or ()
        layout = layer.layout if path and layer.runs == 1 and path.count(".") <= 1 else None
        if layout and (layout.axes == "tokens" or layout.stride * shape[-2] == side):
            latest[layout.stride] = path
    return tuple(latest[s] for s in (4, 8, 16)) if latest.keys() >= {4, 8, 16} else ()


def _late_blocks(table: Sequence[Layer]) -> tuple[str, ...]:
    """Paths of a transformer's blocks after half, three quarters and all; empty for others.

    Blocks are the outermost layers of one kind that put out tokens (1, N, C), four at least.
    """
    # By depth, the layer around them, and kind.
    blocks: dict[tuple[int, str, str], list[str]] = {}
    for layer in sorted(table, key=attrgetter("finished")):
        if layer.shape is not None and len(layer.shape) == 3:
            key = layer.path.count("."), layer.path.rpartition(".")[0], layer.kind
            blocks.setdefault(key, []).append(layer.path)
    stacks = [key for key, paths in blocks.items() if len(paths) >= 4]
    if not stacks:
        return ()
    outermost = blocks[min(stacks)]  # the least depth
    return tuple(outermost[len(outermost) * quarter // 4 - 1] for quarter in (2, 3, 4))


class PassThrough(nn.Module):
    """A module in the place of a dropped one."""

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        """The first argument; the dropped module may have taken others, too."""
        return first


def truncate(network: nn.Module, layers: Sequence[str]) -> FeatureExtractor:
    """The extractor of some layers: a network without the parts that these layers don't need.

    Args:
        network: on the meta device; truncated in place.
        layers: paths or patterns, as `anomaly.hooks.match` takes them.

    Returns:
        The extractor, still without weights.

    Raises:
        LayerError: a layer doesn't exist, doesn't run exactly once, or puts out neither a map nor
            tokens; or the network takes none of the sizes tried, or has tokens or maps (B, h, w, C)
            and takes squares of one size only.
    """
    run = truncate_in_place(network, layers)
    side, paths = run.side, tuple(run.outputs)
    layouts = []
    for path, output in run.outputs.items():
        layout = layout_of(output.shape, (side, side))
        if layout is None:
            raise LayerError(
                f"layer {path!r} gives {tuple(output.shape)}, not a feature map (B, C, h, w), "
                "nor a token for each patch; choose another layer"
            )
        layouts.append(layout)
    only_maps = all(layout.axes == "map" for layout in layouts)
    if not only_maps and not takes_size(network, side, 2 * side, paths):
        raise LayerError(
            f"{type(network).__name__} takes images of {side}×{side} only, so its tokens "
            "can't be placed on others; choose another network"
        )
    return FeatureExtractor(
        paths, tuple(layouts), run.dropped, run.copies, run.pairs, network.eval()
    )


_DESCRIPTION = TypeAdapter(Truncation)


def describe(extractor: FeatureExtractor) -> dict[str, Any]:
    """The fields of an extractor's `Truncation` as JSON values, for a manifest."""
    return cast(dict[str, Any], _DESCRIPTION.dump_python(extractor, mode="json"))


def truncate_again(network: nn.Module, described: Mapping[str, Any]) -> FeatureExtractor:
    """The extractor that a manifest describes, without dry runs, which take 2 s.

    Args:
        network: the whole network on the meta device; truncated in place.
        described: the result of `describe`.

    Raises:
        Exception: of any type, where the values belong to another network.
    """
    truncation = _DESCRIPTION.validate_python(described)
    _drop(network, truncation.dropped)
    paths = (*truncation.layers, *chain(*truncation.pairs))
    if not all(paths):
        raise LayerError("an empty path names the whole network, which is no layer of it")
    for path in paths:
        network.get_submodule(path)  # a missing layer raises here, not in the first pass
    return FeatureExtractor(**vars(truncation), network=network.eval())


def _drop(network: nn.Module, paths: Iterable[str]) -> None:
    """Put a `PassThrough` in the place of each of these modules."""
    for path in paths:
        network.set_submodule(path, PassThrough(), strict=True)


def truncate_in_place(network: nn.Module, layers: Sequence[str]) -> DryRun:
    """Drop every part of a network that some layers don't need, in place.

    A dry run shows which parameters and buffers are read before the last wanted layer has run. A
    module that has some, none read, is replaced by `PassThrough`.

    Args:
        network: on the meta device.
        layers: paths or patterns, as `anomaly.hooks.match` takes them.

    Returns:
        The dry run, with the layers' paths and outputs.

    Raises:
        LayerError: a layer doesn't exist, doesn't run exactly once, or puts out several tensors; or
            the network takes none of the sizes tried.
    """
    paths = list(dict.fromkeys(path for layer in layers for path in match(network, layer)))
    sides = (each for each in probes(network) if takes_size(network, each, each, paths))
    run = DryRun(network, paths, next(sides, PROBES[0]))  # raises if none fits
    _drop(network, run.dropped)
    return run


# By name, because importing timm takes a second. Its `Conv2dSame` pads as TensorFlow does, its
# `BatchNormAct2d` is a batch norm that applies an activation itself.
_CONVOLUTIONS = ("Conv2d", "Conv2dSame")
_NORMS = ("BatchNorm2d", "BatchNormAct2d")


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A pass of a network over one image on the meta device, watched up to the last wanted layer.

    It sees each operation, also outside modules, however the network names or nests these.

    Args:
        network: on the meta device.
        paths: paths of the wanted layers.
        side: side of the square image in pixels.

    Attributes:
        side: as given.
        outputs: the wanted layers' outputs by path, in the order in which the layers run.
        reads: number of operations that read each tensor, by its id, parameters included, until the
            last wanted layer has run.
        copies: true where a later layer overwrites a wanted output in place.
        dropped: paths of the modules that the wanted layers don't need.

    Raises:
        LayerError: a layer doesn't run exactly once or puts out several tensors, or the network
            doesn't take this size.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str], side: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.side, self.copies = side, False
        self.outputs: dict[str, Tensor] = {}
        self.reads: Counter[int] = Counter()
        self._waiting = set(paths)
        self._paths = {module: path for path, module in network.named_modules()}
        self._calls: Counter[str] = Counter()
        self._versions: dict[str, int] = {}  # PyTorch's counts of an output's changes in place
        self._conv_outputs: dict[int, str] = {}  # id of an output -> the convolution's path
        self._norm_inputs: list[tuple[int, str]] = []  # id of an input, and the batch norm's path
        self._alive: list[Any] = []  # so that no two tensors of the run share an id
        try:
            with self, HookSet(network) as hooks:
                hooks.forward(nn.Module, self._record)
                _run_dry(network, side, side, network)
        except LayerError:
            if self._waiting:  # behind the last wanted layer no error matters
                raise
        self._check_wanted(sorted(paths), type(network).__name__)
        self.dropped = tuple(_unused(network, set(self.reads), paths))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._waiting:  # until the last wanted layer has run
            leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._alive += tensors
            self.reads.update(map(id, tensors))
        return func(*args, **(kwargs or {}))

    def _check_wanted(self, paths: Sequence[str], name: str) -> None:
        """Refuse wanted layers that haven't run exactly once or put out several tensors."""
        for path in paths:
            if not self._calls[path]:
                raise LayerError(f"layer {path!r} of {name} never runs; choose another")
            if self._calls[path] > 1:
                raise LayerError(
                    f"layer {path!r} of {name} runs {self._calls[path]} times in one pass, so its "
                    "output is ambiguous; choose another layer"
                )
            if path not in self.outputs:
                raise LayerError(f"layer {path!r} gives several tensors; choose another layer")

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """The forward hook of every module."""
        path, kind = self._paths[module], type(module).__name__
        self._calls[path] += 1  # also behind the last wanted layer: a second call is refused
        if not self._waiting:
            return
        self._alive.extend((inputs, output))
        if isinstance(module, nn.Conv2d) and kind in _CONVOLUTIONS:
            self._conv_outputs[id(output)] = path
        elif kind in _NORMS and getattr(module, "running_mean", None) is not None:
            self._norm_inputs.append((id(inputs[0]), path))
        if path in self._waiting and isinstance(output, Tensor):
            self.outputs[path], self._versions[path] = output, output._version
        self._waiting.discard(path)
        if not self._waiting:
            kept = self.outputs.items()
            self.copies = any(values._version != self._versions[key] for key, values in kept)

    @property
    def pairs(self) -> tuple[ConvNorm, ...]:
        """Paths of each convolution whose output only a batch norm reads, and of that norm."""
        # `between` is the id of the tensor that a convolution puts out and a norm takes in.
        wanted = {id(output) for output in self.outputs.values()}
        return tuple(
            (self._conv_outputs[between], norm)
            for between, norm in self._norm_inputs
            if between in self._conv_outputs.keys() - wanted
            and self._calls[self._conv_outputs[between]] == self._calls[norm] == 1
            and self.reads[between] == 1
        )


def _unused(
    module: nn.Module, read: set[int], wanted: Sequence[str], path: str = ""
) -> Iterator[str]:
    """Paths of the outermost modules inside one that have parameters or buffers, none of them read.

    Args:
        module: the network, or a module of it.
        read: ids of the tensors that are read.
        wanted: paths of layers, which are needed in any case.
        path: the module's path, empty for the network.
    """
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        tensors = [*child.parameters(), *child.buffers()]
        needed = any(f"{layer}.".startswith(f"{inner}.") for layer in wanted)
        unread = tensors and not any(id(tensor) in read for tensor in tensors)
        # A list or a dict of modules is never called: its owner loops over its members.
        if unread and not needed and type(child).forward is not nn.Module.forward:
            yield inner
        else:
            yield from _unused(child, read, wanted, inner)
