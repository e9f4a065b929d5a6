"""Cut a network behind the last of the wanted layers: what it doesn't need isn't there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anomaly.backbones.extractor import FeatureExtractor, Layout, layout_of
from anomaly.backbones.layer_table import probes, takes
from anomaly.backbones.optimise import Pair
from anomaly.errors import LayerError
from anomaly.hooks import HookSet, capture, match


class PassThrough(nn.Module):
    """Stands where a part was that isn't needed: gives back its first argument."""

    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        """Whatever else the part was called with."""
        return first


def truncate(network: nn.Module, layers: Sequence[str]) -> FeatureExtractor:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    A dry run on the meta device, which computes nothing, shows which parameters are touched before
    the last wanted layer has run; modules none of whose parameters are touched are replaced.

    Args:
        network: on the meta device.
        layers: paths or patterns, as `anomaly.hooks.match` takes them.

    Returns:
        The extractor, still without weights.

    Raises:
        LayerError: a layer doesn't exist, doesn't run exactly once, or gives neither a map nor
            tokens; or it gives something else than a map (B, C, h, w), of a network that takes
            squares only.
    """
    with torch.device("meta"):
        run = truncate_in_place(network, layers)
        side, paths = run.side, tuple(run.outputs)
        layouts = tuple(_layout(path, output.shape, side) for path, output in run.outputs.items())
        only_maps = all(layout.axes == "map" for layout in layouts)
        if not only_maps and not takes(network, side, 2 * side, paths):
            raise LayerError(
                f"{type(network).__name__} takes images of {side}×{side} only, so its tokens "
                "can't be placed on others; choose another network"
            )
        return FeatureExtractor(network.eval(), paths, layouts, run.copies, run.pairs)


def describe(extractor: FeatureExtractor) -> dict[str, Any]:
    """The findings of `truncate`'s dry runs as plain values, from which `truncate_again` starts."""
    modules = extractor.network.named_modules()
    return {
        "layers": list(extractor.layers),
        "channels": list(extractor.channels),
        "strides": list(extractor.strides),
        "axes": [layout.axes for layout in extractor.layouts],
        "dropped": [path for path, module in modules if isinstance(module, PassThrough)],
        "copies": extractor.copies,
        "folded": [list(pair) for pair in extractor.pairs],
    }


def truncate_again(network: nn.Module, described: Mapping[str, Any]) -> FeatureExtractor:
    """Truncate a network in place as before, without dry runs, which import torch's compiler (2 s).

    Args:
        network: on the meta device.
        described: what `describe` gave.
    """
    for path in described["dropped"]:
        network.set_submodule(path, PassThrough(), strict=True)
    layouts = zip(described["axes"], described["channels"], described["strides"], strict=True)
    return FeatureExtractor(
        network.eval(),
        tuple(described["layers"]),
        tuple(Layout(*values) for values in layouts),
        described["copies"],
        tuple((convolution, norm) for convolution, norm in described["folded"]),
    )


def _layout(path: str, shape: Sequence[int], probe: int) -> Layout:
    if layout := layout_of(shape, (probe, probe)):
        return layout
    raise LayerError(
        f"layer {path!r} gives {tuple(shape)}, not a feature map (B, C, h, w), nor a token for "
        "each patch; choose another layer"
    )


def truncate_in_place(network: nn.Module, layers: Sequence[str], side: int | None = None) -> DryRun:
    """Drop every part of a network that isn't needed to compute `layers`, in place.

    Args:
        network: on the meta device.
        layers: paths in any form that `anomaly.hooks.resolve` takes.
        side: of the square dry-run image; by default the first of `probes` that it takes.

    Raises:
        LayerError: a layer doesn't exist, never runs, runs several times, so that its path doesn't
            say which output is meant, or puts out several tensors; or the network doesn't take
            images of this size.
    """
    paths = list(dict.fromkeys(path for layer in layers for path in match(network, layer)))
    sides = [side] if side else list(probes(network))
    while True:
        try:
            run = DryRun(network, paths, sides.pop(0))
        except _SideError:
            if not sides:
                raise
        else:
            _drop_unused(network, set(run.reads), keep=paths)
            return run


class _SideError(LayerError):
    """A network doesn't take images of this side."""


# By name, for timm isn't imported without need. Its `Conv2dSame` pads as TensorFlow does, its
# `BatchNormAct2d` is a batch norm that applies an activation itself.
_CONVOLUTIONS = ("Conv2d", "Conv2dSame")
_NORMS = ("BatchNorm2d", "BatchNormAct2d")


class DryRun(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A pass of a network up to the last wanted layer, of one black image on the meta device.

    It sees operations, also those that no module call would show, so that it doesn't matter how
    the network names or nests its modules.

    Args:
        network: on the meta device.
        paths: of the wanted layers.
        side: of the square image.

    Attributes:
        side: as given.
        outputs: by path, in the order in which the layers run.
        reads: how many operations read each tensor, by its id; parameters are among them.
        copies: whether a later layer overwrites a wanted output in place.

    Raises:
        LayerError: as `truncate_in_place`.
    """

    def __init__(self, network: nn.Module, paths: Sequence[str], side: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.side = side
        self.outputs: dict[str, Tensor] = {}
        self.reads: Counter[int] = Counter()
        self.copies = False
        self._paths = paths
        self._names = {module: path for path, module in network.named_modules()}
        self._calls: Counter[str] = Counter()
        self._reads: Counter[int] = Counter()
        self._versions: dict[str, int] = {}
        self._made: dict[int, str] = {}  # convolutions by what they put out
        self._joined: list[tuple[int, str]] = []  # what goes into a batch norm, and its path
        self._alive: list[Any] = []  # so that no two tensors of the run share an id
        self._run(network, type(network).__name__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._alive += tensors
        self._reads.update(map(id, tensors))
        return func(*args, **(kwargs or {}))

    def _run(self, network: nn.Module, name: str) -> None:
        # One without weights may run again, as activations do, until the module around it ends.
        bare = [path for path in self._paths if not _tensors(network.get_submodule(path))]
        ends = [_around(network, path) for path in bare]
        image = torch.empty(1, 3, self.side, self.side, device="meta")
        try:
            with torch.no_grad(), torch.device("meta"), self, HookSet(network) as hooks:
                hooks.forward(nn.Module, self._note)
                with capture(network, [*self._paths, *ends], stop=True) as captured:
                    captured.run(image)
        except (RuntimeError, AssertionError, ValueError):
            raise _SideError(
                f"{name} doesn't take images of {self.side}×{self.side}; choose another network or "
                "size"
            ) from None
        for path in self._paths:
            if not self._calls[path]:
                raise LayerError(f"layer {path!r} of {name} never runs; choose another")
            if self._calls[path] > 1:
                raise LayerError(
                    f"layer {path!r} of {name} runs {self._calls[path]} times in one pass, so its "
                    "output is ambiguous; choose another layer"
                )
            if path not in self.outputs:
                raise LayerError(f"layer {path!r} gives several tensors; choose another layer")

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path, kind = self._names[module], type(module).__name__
        self._calls[path] += 1
        if self.reads:  # behind the last wanted layer
            return
        self._alive.extend((inputs, output))
        if isinstance(module, nn.Conv2d) and kind in _CONVOLUTIONS:
            self._made[id(output)] = path
        elif kind in _NORMS and getattr(module, "running_mean", None) is not None:
            self._joined.append((id(inputs[0]), path))
        if path in self._paths and isinstance(output, Tensor):
            self.outputs[path], self._versions[path] = output, output._version
        if all(self._calls[wanted] for wanted in self._paths):
            self.reads.update(self._reads)
            kept = self.outputs.items()
            self.copies = any(values._version != self._versions[key] for key, values in kept)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The convolutions whose output goes into a batch norm and nowhere else, with that."""
        wanted = {id(output) for output in self.outputs.values()}
        return tuple(
            (self._made[entering], norm)
            for entering, norm in self._joined
            if entering in self._made.keys() - wanted
            and self._calls[self._made[entering]] == self._calls[norm] == 1
            and self.reads[entering] == 1
        )


def _around(network: nn.Module, path: str) -> str:
    """The path of the innermost module that a layer is in and that is called."""
    path = path.rpartition(".")[0]
    while path and not _is_called(network.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a pass of its own: a list or a dict of modules has none."""
    return type(module).forward is not nn.Module.forward


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _drop_unused(module: nn.Module, used: set[int], keep: Sequence[str], path: str = "") -> None:
    for name, child in list(module.named_children()):
        inner = f"{path}.{name}" if path else name
        tensors = _tensors(child)
        wanted = any(p == inner or p.startswith(inner + ".") for p in keep)
        unused = tensors and not wanted and not any(id(t) in used for t in tensors)
        if unused and _is_called(child):  # else its members, which somebody goes through
            module.register_module(name, PassThrough())
        else:
            _drop_unused(child, used, keep, inner)
