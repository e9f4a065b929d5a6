"""Outputs of layers, kept during a forward pass, which may end after the last of these layers.

The second half is for all hooks. A copy of a hooked network has none. Compiled code calls no hooks
that are registered later, so compiled networks don't run while their layers are hooked.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anomaly.errors import LayerError
from anomaly.hooks.paths import Detached, Selector, select


class Capture:
    """The outputs of layers; use it in a `with` statement, in which its hooks live.

    Only forward passes of the thread that entered `with` are recorded, so that threads may share
    a network.

    Example:
        with capture(model, ["layer2", "layer3"], stop=True) as captured:
            captured.run(images)
            maps = captured.pop()  # {"layer2": (B, 512, 28, 28), "layer3": (B, 1024, 14, 14)}

    Args:
        model: any network.
        layers: paths, index forms, globs or types, see `match`.
        stop: end each forward pass as soon as every layer named has run once; passes are begun
            with `run`, and calling the network itself is an error.
        grad: keep the autograd graph: the tensor captured is the one that the rest of the network
            uses, so that it can stand in a loss or be differentiated by.
        clone: copy outputs, so that a later in-place layer (ReLU6, `out += identity`) can't
            overwrite them. Without it `pop` raises if that happened (except for tensors made under
            `torch.inference_mode`, whose changes PyTorch doesn't count).
        device: the device that outputs are moved to.
        dtype: floating-point type that outputs are converted to; indices stay as they are.
        keep: number of the latest calls kept of each layer; None keeps all.
        max_bytes: most bytes of all outputs kept; the first output beyond it raises LayerError.

    Raises:
        LayerError: a layer doesn't exist, can't be hooked, or the options contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Selector | Sequence[Selector],
        *,
        stop: bool = False,
        grad: bool = False,
        clone: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        keep: int | None = 1,
        max_bytes: int | None = None,
    ) -> None:
        if grad and (device is not None or dtype is not None or not clone):
            raise LayerError(
                "grad=True keeps the very tensor that the network uses: leave clone, device and "
                "dtype as they are and convert what `pop` returns"
            )
        if keep is not None and keep < 1:
            raise LayerError(f"keep={keep}: keep at least 1 call of each layer, or None for all")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LayerError(f"dtype={dtype!r}: give one of torch's, such as torch.float16")
        try:
            self._device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise LayerError(f"device={device!r} is no device: {reason}") from None
        self._model = model
        self._modules = select(model, layers)
        if not self._modules:
            raise LayerError("no layer to capture: name at least one")
        self._stop, self._grad, self._clone, self._dtype = stop, grad, clone, dtype
        self._kept_calls, self._max_bytes = keep, max_bytes
        self._handles: list[RemovableHandle] = []
        self._pending: set[str] = set()  # paths that haven't run in this pass
        self._calls: dict[str, deque[list[_Kept]]] = {}
        self._thread = 0
        self._running = False

    def __enter__(self) -> Capture:
        if self._handles:
            raise LayerError("this capture is already open: make a second one with capture(…)")
        self._thread = threading.get_ident()
        self._reset()
        self._handles += refuse_compiled(self._model, self._modules.values())
        for path, module in self._modules.items():
            hook = Attached(partial(self._record, path))
            self._handles.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network; its output, or None where the pass was stopped after the last layer.

        Raises:
            LayerError: the capture isn't open.
        """
        if not self._handles:
            raise LayerError("nothing is hooked: call run inside `with capture(…) as captured:`")
        self._pending = set(self._modules)
        self._running = True
        try:
            return self._model(*args, **kwargs)
        except _Stopped as stopped:
            if stopped.args != (self,):  # another capture's, around this one
                raise
            return None
        finally:
            self._running = False

    def pop(self) -> dict[str, Tensor]:
        """Each layer's latest output; all outputs are forgotten.

        Returns:
            Path to tensor, in the order in which the layers were named. Outputs that hold several
            tensors give an entry for each: `lstm:0`, `lstm:1.0`, `head:out`.

        Raises:
            LayerError: a layer hasn't run since the last `pop`, or its tensor was overwritten.
        """
        return {name: tensors[-1] for name, tensors in self.pop_calls().items()}

    def pop_calls(self) -> dict[str, list[Tensor]]:
        """The outputs of all calls kept, which are forgotten.

        Returns:
            Path to tensors, oldest first, in the order in which the layers were named.

        Raises:
            LayerError: a layer hasn't run since the last `pop`, or a tensor was overwritten.
        """
        calls = self._calls
        self._reset()
        if silent := [repr(path) for path, outputs in calls.items() if not outputs]:
            raise LayerError(
                f"{', '.join(silent)} didn't run: the forward pass doesn't come through there, was "
                "stopped before, ran in another thread or compiled, or was already read"
            )
        tensors: dict[str, list[Tensor]] = {}
        for kept in chain.from_iterable(chain.from_iterable(calls.values())):
            tensors.setdefault(kept.name, []).append(kept.checked())
        return tensors

    def pop_numpy(self) -> dict[str, NDArray[Any]]:
        """`pop` as NumPy arrays on the CPU; bfloat16, which NumPy lacks, becomes float32."""
        arrays = {}
        for name, tensor in self.pop().items():
            plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            arrays[name] = np.asarray(plain.detach().cpu().numpy(), order="C")  # not channels last
        return arrays

    def _reset(self) -> None:
        self._calls = {path: deque(maxlen=self._kept_calls) for path in self._modules}

    def _record(self, path: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        """The forward hook of a layer: keeps its output, and ends the pass after the last layer.

        With `grad` it returns a copy of the output for the layers behind.
        """
        if threading.get_ident() != self._thread:  # another thread runs the shared network
            return None
        self._pending.discard(path)
        last = self._stop and not self._pending
        call = [self._prepared(name, tensor) for name, tensor in named_tensors(output, path)]
        if not call:
            refuse_hidden(repr(path), output)
            raise LayerError(f"{path!r} put out {type(output).__name__}, which has no tensor")
        self._calls[path].append(call)
        # Without a limit no size is read: a traced tensor has none.
        if self._max_bytes is not None:
            self._check_memory(self._max_bytes)
        if last and not self._running:
            raise LayerError(
                "with stop=True the capture has to run the network: call captured.run(...) instead "
                "of the network"
            )
        if last:
            raise _Stopped(self)
        # A layer behind that works in place then changes the clone, not the captured tensor.
        return map_tensors(Tensor.clone, output) if self._grad else None

    def _prepared(self, name: str, tensor: Tensor) -> _Kept:
        """An output's tensor as it is kept: detached, copied and converted as the options say."""
        if self._grad:
            if not torch.is_grad_enabled():
                raise LayerError("grad=True needs autograd: leave torch.no_grad or inference_mode")
            return _Kept(name, tensor, None)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._clone or self._device is not None or self._dtype is not None:
            dtype = self._dtype if tensor.is_floating_point() else None
            tensor = tensor.to(self._device, dtype, copy=self._clone)
        return _Kept(name, tensor, None if tensor.is_inference() else tensor._version)

    def _check_memory(self, limit: int) -> None:
        """Raise LayerError if the tensors kept take more than `limit` bytes."""
        outputs = chain.from_iterable(chain.from_iterable(self._calls.values()))
        held = sum(kept.tensor.nbytes for kept in outputs)
        if held > limit:
            raise LayerError(
                f"captured tensors take {held} bytes, more than max_bytes={limit}: name fewer "
                "layers, lower keep, use a smaller dtype or batch, or read them more often"
            )


capture = Capture  # reads as a verb in a `with` statement


class _Stopped(BaseException):
    """Raised by a capture, its argument, to end a forward pass.

    It isn't an Exception, so that no `except Exception` of a network catches it.
    """


class _Kept(NamedTuple):
    """A tensor that is kept, with its name."""

    name: str
    tensor: Tensor
    version: int | None  # PyTorch's count of changes in place when it was kept; None: not checked

    def checked(self) -> Tensor:
        """The tensor; one that was changed in place since it was kept is refused."""
        if self.version is not None and self.tensor._version != self.version:
            raise LayerError(
                f"the output of {self.name!r} was overwritten in place by a later layer: "
                "capture it with clone=True"
            )
        return self.tensor


def named_tensors(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of a layer's output, each with a name; anything else in it is left out.

    A lone tensor has the layer's `name`. Inside containers, indices and keys follow a colon:
    `lstm:0`, `lstm:1.0`, `head:out`. Keys with dots, brackets or quotes are quoted, and those that
    aren't strings stand in brackets: `head:'a.b'`, `head:[3]`.
    """
    return [(f"{name}:{'.'.join(keys)}" if keys else name, t) for keys, t in _tensors_in(value, ())]


def refuse_hidden(layer: str, output: Any) -> None:
    """Refuse a layer's output that keeps tensors where `named_tensors` doesn't look.

    Raises:
        LayerError: the output is an object, such as a dataclass, with a tensor as an attribute.
    """
    if any(isinstance(value, Tensor) for value in getattr(output, "__dict__", {}).values()):
        raise LayerError(
            f"{layer} puts out {type(output).__name__}, whose tensors aren't found: only tuples, "
            "lists and mappings are looked into; hook a layer inside"
        )


def _tensors_in(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The indices and keys that lead to each tensor inside a value, and the tensor."""
    if isinstance(value, Tensor):
        yield keys, value
    elif isinstance(value, MutableMapping):
        for key, item in value.items():
            yield from _tensors_in(item, (*keys, _spelled(key)))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors_in(item, (*keys, str(index)))


def _spelled(key: Any) -> str:
    """A mapping's key in a name, spelled so that no two names are equal."""
    if not isinstance(key, str):
        return f"[{key!r}]"
    return key if key and not set(key) & set(".[]'\"\\") else repr(key)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of a value (tensor, tuple, list, mapping) with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        same = copy.copy(value)  # a defaultdict can't be made of its class and items alone
        for key, item in value.items():  # `update` is refused by Hugging Face's ModelOutput
            same[key] = map_tensors(function, item)
        return same
    if isinstance(value, tuple | list):
        mapped = [map_tensors(function, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


Hook = Callable[..., Any]

_private: WeakSet[nn.Module] = WeakSet()  # networks given to `mark_private`


class Attached:
    """A hook as it stands in PyTorch's tables, with PyTorch's arguments.

    A copy or pickle of a hooked network gets `Detached`, which does nothing, in its place: the
    owner of the hook could not remove it there.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._hook(*args)

    def __reduce__(self) -> tuple[type[Detached], tuple[()]]:
        return Detached, ()


def mark_private(network: nn.Module) -> nn.Module:
    """Mark a network as one that nobody else holds or compiles; returns it.

    So `refuse_compiled` doesn't search, which would take 100 ms for each batch.
    """
    _private.add(network)
    return network


def refuse_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Make compiled networks that contain hooked layers raise an error where they are run.

    They would run past the hooks. The network that was given to `torch.compile` runs as before.
    Once any code has run compiled, compiled networks are searched among all objects of the process,
    which takes some 100 ms, unless `mark_private` was called.

    `modules` are the hooked layers of `model`. The handles returned let the compiled networks run
    again when they are removed.
    """
    if model in _private:
        return []
    # Looked up, not imported: the compiler takes 2 s to import.
    frames = sys.modules.get("torch._dynamo.convert_frame")
    compiled = getattr(getattr(frames, "input_codes", None), "seen", None)
    if frames is None or compiled == []:  # nothing has run compiled
        return []
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    hooked = {id(module) for module in modules}
    # Each object refers to its class, so these include all compiled networks of the process.
    return [
        network.register_forward_pre_hook(_refuse)
        for network in gc.get_referrers(kind)
        if isinstance(network, kind) and hooked & {id(module) for module in network.modules()}
    ]


def _refuse(network: nn.Module, _: Any) -> None:
    """The forward-pre hook of a compiled network: refuses to run it."""
    raise LayerError(
        "this network is compiled, and layers of it are hooked: compiled code doesn't see their "
        "hooks. Run the network that was given to torch.compile (`compiled._orig_mod(...)`, or "
        "`captured.run(...)` of a capture on it)"
    )
