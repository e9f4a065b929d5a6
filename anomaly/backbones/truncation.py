"""Cut a network behind the last of the wanted layers: what it doesn't need isn't there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.backbones.extractor import FeatureExtractor, Layout, layout_of
from anomaly.backbones.layer_table import probes, takes
from anomaly.backbones.optimise import Reads, foldable
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
        probe, outputs = truncate_in_place(network, layers)
        paths = tuple(outputs)
        layouts = tuple(_layout(path, outputs[path].shape, probe) for path in paths)
        only_maps = all(layout.axes == "map" for layout in layouts)
        if not only_maps and not takes(network, probe, 2 * probe, paths):
            raise LayerError(
                f"{type(network).__name__} takes images of {probe}×{probe} only, so its tokens "
                "can't be placed on others; choose another network"
            )
        image = torch.empty(1, 3, probe, probe, device="meta")
        copies, pairs = _overwritten(network, paths, image), foldable(network, paths, image)
        return FeatureExtractor(network.eval(), paths, layouts, copies, pairs)


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
        LayerError: a layer doesn't exist, never runs, runs several times, so that its path doesn't
            say which output is meant, or puts out several tensors; or the network doesn't take
            images of this size.
    """
    *others, last = (probe,) if probe else probes(network)
    for side in others:
        with suppress(_SideError):
            return side, _truncated(network, layers, side)
    return last, _truncated(network, layers, last)


class _SideError(LayerError):
    """A network doesn't take images of this side."""


def _truncated(network: nn.Module, layers: Sequence[str], probe: int) -> dict[str, Tensor]:
    paths = list(dict.fromkeys(path for layer in layers for path in match(network, layer)))
    # One without weights may run again, as activations do, until the module that it is in ends.
    ends = [_around(network, path) for path in paths if not _tensors(network.get_submodule(path))]
    name = type(network).__name__
    calls: Counter[str] = Counter()  # in the order of the layers' first calls
    read, needed = Reads(), set[int]()

    names = {network.get_submodule(path): path for path in paths}

    def note(layer: nn.Module, *_: object) -> None:
        calls[names[layer]] += 1
        if len(calls) == len(paths):
            needed.update(read.count)

    try:
        with torch.no_grad(), torch.device("meta"), read, HookSet(network) as hooks:
            hooks.forward(paths, note)
            with capture(network, [*paths, *ends], stop=True) as captured:
                captured.run(torch.empty(1, 3, probe, probe, device="meta"))
                if silent := [path for path in paths if not calls[path]]:
                    raise LayerError(f"layer {silent[0]!r} of {name} never runs; choose another")
                outputs = captured.pop()
    except (RuntimeError, AssertionError, ValueError):
        raise _SideError(
            f"{name} doesn't take images of {probe}×{probe}; choose another network or size"
        ) from None
    for path in paths:
        if calls[path] > 1:
            raise LayerError(
                f"layer {path!r} of {name} runs {calls[path]} times in one pass, so its output is "
                "ambiguous; choose another layer"
            )
        if path not in outputs:
            raise LayerError(f"layer {path!r} gives several tensors; choose another layer")
    _drop_unused(network, needed, keep=paths)
    return {path: outputs[path] for path in calls}


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
        tensors = _tensors(child)
        wanted = any(p == inner or p.startswith(inner + ".") for p in keep)
        unused = tensors and not wanted and not any(id(t) in used for t in tensors)
        if unused and _is_called(child):  # else its members, which somebody goes through
            module.register_module(name, PassThrough())
        else:
            _drop_unused(child, used, keep, inner)
