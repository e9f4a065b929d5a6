"""What every hook goes through: copies of a network get none, nothing is changed in place.

Compiled code calls no hooks that are registered later: while there are any, it mustn't run.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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


Hook = Callable[..., Any]

_private: WeakSet[nn.Module] = WeakSet()


class Attached:
    """A hook as it stands in PyTorch's tables.

    A network that is copied or pickled while it is hooked takes along a hook that does nothing:
    whoever made this one removes it from the original alone.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._hook(*args)

    def __reduce__(self) -> tuple[type[Detached], tuple[()]]:
        return Detached, ()


class Detached:
    """What a copy of a network has in place of a hook."""

    def __call__(self, *_: Any) -> None:
        """Change nothing."""


def unmodified(hook: Hook) -> Hook:
    """The hook, watched: a tensor that it was shown must be as it was.

    Other layers may hold the same tensor (a residual connection, a ReLU that keeps its output for
    the backward pass, autograd's own sums). Tensors made under `torch.inference_mode` don't count
    their changes and can't be watched.

    Raises:
        LayerError: when the hook has run and changed one.
    """

    @wraps(hook)
    def guarded(*args: Any) -> Any:
        tensors = [t for _, t in named_tensors(args, "") if not t.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = hook(*args)
        if versions != [tensor._version for tensor in tensors]:
            raise LayerError(
                f"the hook {_name(hook)} changed a tensor in place, which other layers may use as "
                "well: return the new value instead"
            )
        return result

    return guarded


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def private(network: nn.Module) -> nn.Module:
    """The network, remembered as one that nobody else holds, and nobody has given to torch.compile.

    Hooks come and go quickly there, see `refuse_compiled`.
    """
    _private.add(network)
    return network


def refuse_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Make each compiled network that contains any of some layers raise where it is run.

    Hooks on these layers go unnoticed there; the network that was given to `torch.compile` stays
    as it is. Once any code has run compiled, compiled networks are looked for among all objects of
    the process, which takes some 100 ms, unless `model` is `private`.

    Args:
        model: the network that is hooked.
        modules: its hooked layers.

    Returns:
        Handles that let it run again.
    """
    if model in _private:
        return []
    frames = sys.modules.get("torch._dynamo.convert_frame")
    compiled = getattr(getattr(frames, "input_codes", None), "seen", None)
    if frames is None or compiled == []:
        return []  # nothing has run compiled
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    hooked = {id(module) for module in modules}
    return [
        network.register_forward_pre_hook(_refuse)
        for network in gc.get_referrers(kind)
        if isinstance(network, kind) and hooked & {id(module) for module in network.modules()}
    ]


def _refuse(network: nn.Module, _: Any) -> None:
    raise LayerError(
        "this network is compiled, and layers of it are hooked: compiled code doesn't see their "
        "hooks. Run the network that was given to torch.compile (`compiled._orig_mod(...)`, or "
        "`captured.run(...)` of a capture on it)"
    )
