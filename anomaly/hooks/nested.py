"""Tensors inside a layer's output, which may be a tensor, a tuple, a list or a dict of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from anomaly.errors import LayerError


def named_tensors(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of an output with a name for each.

    A lone tensor has the name given; inside containers the way to it follows a colon:
    `lstm:0`, `lstm:1.0`, `head:out`. Keys with dots, brackets or quotes are quoted, and those that
    aren't strings stand in brackets: `head:'a.b'`, `head:[3]`. What isn't a tensor is passed over.
    """
    if isinstance(value, Tensor):
        return [(name, value)]
    return [(f"{name}:{'.'.join(way)}", tensor) for way, tensor in _walk(value, ())]


def refuse_hidden(layer: str, output: Any) -> None:
    """Refuse an output that keeps tensors where `named_tensors` doesn't look.

    Raises:
        LayerError: it is an object, such as a dataclass, with a tensor among its attributes.
    """
    if any(isinstance(value, Tensor) for value in getattr(output, "__dict__", {}).values()):
        raise LayerError(
            f"{layer} puts out {type(output).__name__}, whose tensors aren't found: only tuples, "
            "lists and mappings are looked into; hook a layer inside"
        )


def _walk(value: Any, way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield way, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*way, _step(key)))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _walk(item, (*way, str(index)))


def _step(key: Any) -> str:
    """A mapping's key such that no two ways read alike."""
    if not isinstance(key, str):
        return f"[{key!r}]"
    return key if key and not set(key) & set(".[]'\"\\") else repr(key)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with each tensor replaced by `function` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if hasattr(value, "to_tuple"):
            return type(value)(**items)
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]
        same = copy.copy(value)  # its class alone doesn't make another defaultdict
        same.update(items)
        return same
    if isinstance(value, tuple | list):
        mapped = [map_tensors(function, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value
