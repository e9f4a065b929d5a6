"""Find layers by path, index form, glob or type, and say which of them can be hooked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn.modules import module as torch_hooks

from anomaly.errors import LayerError, nearest

Selector: TypeAlias = str | type[nn.Module]

_INDEX = re.compile(r"\[(-?\d+)\]")
# The names of PyTorch's tables of hooks.
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def resolve(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """One layer of a network, found by its path.

    Args:
        model: any network.
        path: as PyTorch prints it (`layer1.2`, `features.13`), or in index form, where a number
            in brackets counts the children and may be negative (`layer1[-1]`,
            `features[3].conv[0]`). The empty path is the network itself.

    Returns:
        The path as PyTorch prints it, and the layer.

    Raises:
        LayerError: the network has no such layer; names the nearest ones.
    """
    _refuse_module(model, path)
    return _steps_to(model, path)[-1]


def match(model: nn.Module, pattern: Selector) -> list[str]:
    """The paths of all layers that a pattern names.

    Args:
        model: any network.
        pattern: a path in either form of `resolve`, a glob (`layer*.0.conv?`: `?` is one
            character and `*` any number, neither a dot; `**` crosses dots too), or a type such
            as `nn.Conv2d`.

    Returns:
        The paths as PyTorch prints them, in the network's order, each layer once.

    Raises:
        LayerError: nothing matches.
    """
    _refuse_module(model, pattern)
    if _is_path(pattern):
        return [resolve(model, pattern)[0]]
    if isinstance(pattern, type):
        known, wanted = {type(module).__name__ for module in model.modules()}, pattern.__name__
        paths = [name for name, module in model.named_modules() if isinstance(module, pattern)]
    else:
        known, wanted, regex = set(_paths(model)), pattern, re.compile(_regex(pattern))
        paths = [name for name in _paths(model) if regex.fullmatch(name)]
    if not paths:
        raise LayerError(
            f"no layer of {type(model).__name__} matches {wanted!r}; {nearest(wanted, known)}"
        )
    return paths


def select(model: nn.Module, layers: Selector | Sequence[Selector]) -> dict[str, nn.Module]:
    """The layers that patterns name; all of them can be hooked.

    Args:
        model: any network.
        layers: one pattern of `match` or several.

    Returns:
        Path to layer; in the order of the patterns, each path once.

    Raises:
        LayerError: nothing matches, a layer's hooks would never be called, or two of the paths lead
            to the same layer.
    """
    _refuse_unhookable(model, model, "")
    selected: dict[str, nn.Module] = {}
    names: dict[int, str] = {}  # the path by which each layer, by its id, was selected
    for pattern in [layers] if isinstance(layers, str | type | nn.Module) else layers:
        for path in match(model, pattern):
            module = model
            for step, module in _steps_to(model, path):
                _refuse_unhookable(model, module, step, pattern)
            if (earlier := names.setdefault(id(module), path)) != path:
                raise LayerError(
                    f"{earlier!r} and {path!r} are one layer under two names, so that its calls "
                    "can't be told apart: name it once"
                )
            selected[path] = module
    return selected


def _refuse_module(model: nn.Module, layer: object) -> None:
    """Refuse a layer given instead of its path, and name that path."""
    if isinstance(layer, nn.Module):
        paths = [name for name, module in model.named_modules() if module is layer]
        known = f": {paths[0]!r}" if paths else f", which {type(model).__name__} doesn't hold"
        raise LayerError(f"give the path of this {type(layer).__name__}{known}")


class Detached:
    """A hook that does nothing, in the place of a hook in a copy of a network."""

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


def live_hooks(model: nn.Module) -> int:
    """Number of hooks that a forward or backward pass of a network would call.

    They stand in PyTorch's tables: of every module, of every parameter, and the global ones.
    """
    modules = list(model.modules())
    tables: list[object] = [getattr(m, name) for m in modules for name in _OF_MODULES]
    tables += [getattr(p, name, None) for p in model.parameters() for name in _OF_TENSORS]
    tables += [getattr(torch_hooks, f"_global{name}") for name in _OF_MODULES]
    hooks = [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    return sum(not isinstance(hook, Detached) for hook in hooks)


def _is_path(pattern: Selector) -> TypeGuard[str]:
    """True for a path in either form, which names one layer; False for a glob or a type."""
    return isinstance(pattern, str) and "*" not in pattern and "?" not in pattern


def _steps_to(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The network and each layer on the way to a layer, with their paths as PyTorch prints them.

    Raises:
        LayerError: the network has no such layer; names the nearest ones.
    """
    # `layer1[-1].conv1` -> `layer1.[-1].conv1`, one step a dot.
    spelled = path
    if "[" in path:
        spelled = _INDEX.sub(r".\g<0>", path).removeprefix("." if path.startswith("[") else "")
    steps = [("", model)]
    for step in spelled.split(".") if path else []:
        above, module = steps[-1]
        name = _child_at(module, step) if step.startswith("[") else step
        children = module._modules  # those of a scripted module have no `get`
        child = children[name] if name in children else None  # noqa: SIM401
        if child is None:
            known = nearest(path, _paths(model))
            raise LayerError(f"{type(model).__name__} has no layer {path!r}; {known}")
        steps.append((f"{above}.{name}" if above else name, child))
    return steps


def _child_at(module: nn.Module, step: str) -> str:
    """The name of the child that an index (`[-1]`) means; empty where there is none."""
    # Not named_children(), which leaves out a module that it has met before.
    names = [name for name, child in module._modules.items() if child is not None]
    index = _INDEX.fullmatch(step)
    position = int(index[1]) if index else len(names)  # out of range: `[x]` is no index
    return names[position] if -len(names) <= position < len(names) else ""


def _regex(glob: str) -> str:
    """The regular expression of a glob over paths."""
    meaning = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return "".join(meaning.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*|\?)", glob))


def _paths(model: nn.Module) -> Iterable[str]:
    """The paths of all layers inside a network, as PyTorch prints them."""
    return (name for name, _ in model.named_modules() if name)


def _refuse_unhookable(
    model: nn.Module, module: nn.Module, path: str, pattern: Selector = ""
) -> None:
    """Refuse a module whose hooks would never be called, such as compiled or scripted code.

    Args:
        model: the network, for the message.
        module: the network itself or a layer of it.
        path: the layer's path; empty for the network.
        pattern: the pattern that led to the layer; a glob or type may name others that will do.
    """
    if reason := _why_unhookable(module):
        name = f"layer {path!r} of {type(model).__name__}" if path else type(model).__name__
        remedy = "" if not path or _is_path(pattern) else "; or name the other layers"
        raise LayerError(f"{name} {reason}{remedy}")


def _why_unhookable(module: nn.Module) -> str:
    """The reason why a module's hooks wouldn't be called, with a remedy; empty if they would."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return (
            "is compiled, and compiled code doesn't see hooks registered later: "
            "hook the network that was given to torch.compile and run it itself "
            "(`compiled._orig_mod`)"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted and can't be hooked: hook the original network"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return (
            f"is copied to {len(module.device_ids)} GPUs, whose hooks run at the same time: "
            "hook the network inside (`parallel.module`)"
        )
    return ""
