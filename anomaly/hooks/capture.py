"""Keep what layers put out during a forward pass, and end the pass after the last of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anomaly.errors import LayerError
from anomaly.hooks.guard import Attached, map_tensors, named_tensors, refuse_compiled, refuse_hidden
from anomaly.hooks.paths import Selector, select


class Policy(NamedTuple):
    """In what form captured tensors are kept; `capture` explains each field."""

    grad: bool = False
    clone: bool = True
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    keep: int | None = 1
    max_bytes: int | None = None


def capture(
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
) -> Capture:
    """Capture the outputs of layers; use it in a `with` statement.

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
        clone: copy, so that a later in-place layer (ReLU6, `out += identity`) can't overwrite what
            was captured. Without it nothing is copied, and `pop` raises if that happened (which
            PyTorch can't tell for tensors made under `torch.inference_mode`).
        device: move to this device.
        dtype: convert to this dtype; integers stay what they are.
        keep: how many of the latest calls of each layer are kept; None keeps all.
        max_bytes: refuse to hold more than this.

    Raises:
        LayerError: a layer doesn't exist, can't be hooked, or the options contradict each other.
    """
    if grad and (device is not None or dtype is not None or not clone):
        raise LayerError(
            "grad=True keeps the very tensor that the network uses: leave clone, device and dtype "
            "as they are and convert what `pop` returns"
        )
    if keep is not None and keep < 1:
        raise LayerError(f"keep={keep}: keep at least 1 call of each layer, or None for all")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LayerError(f"dtype={dtype!r}: give one of torch's, such as torch.float16")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LayerError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from None
    modules = select(model, layers)
    if not modules:
        raise LayerError("no layer to capture: name at least one")
    return Capture(model, modules, Policy(grad, clone, place, dtype, keep, max_bytes), stop)


class Capture:
    """Hooks that keep the outputs of layers, made by `capture`. Its hooks live inside `with`.

    Only forward passes of the thread that entered `with` are heard, so that threads may share
    a network.
    """

    def __init__(
        self, model: nn.Module, modules: dict[str, nn.Module], policy: Policy, stop: bool
    ) -> None:
        self._model = model
        self._modules = modules
        self._policy = policy
        self._stop = stop
        self._handles: list[RemovableHandle] = []
        self._pending: set[str] = set()
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
            self._handles.append(module.register_forward_hook(Attached(self._hook(path))))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network.

        Returns:
            The network's output; None where the pass was stopped after the last layer wanted.

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
            if stopped.owner is not self:
                raise
            return None
        finally:
            self._running = False

    def pop(self) -> dict[str, Tensor]:
        """Return each layer's latest output and forget all outputs.

        Returns:
            Path to tensor, in the order in which the layers were named. Outputs that hold several
            tensors give an entry for each: `lstm:0`, `lstm:1.0`, `head:out`.

        Raises:
            LayerError: a layer hasn't run since the last `pop`, or its tensor was overwritten.
        """
        return {name: tensors[-1] for name, tensors in self.pop_calls().items()}

    def pop_calls(self) -> dict[str, list[Tensor]]:
        """Take out the outputs of all calls kept, and forget them.

        Returns:
            Path to tensors, oldest first, in the order in which the layers were named.

        Raises:
            LayerError: a layer hasn't run since the last `pop`, or a tensor was overwritten.
        """
        calls, silent = self._calls, []
        self._reset()
        result: dict[str, list[Tensor]] = {}
        for path, layer in calls.items():
            if not layer:
                silent.append(path)
            for call in layer:
                for kept in call:
                    result.setdefault(kept.name, []).append(kept.checked())
        if silent:
            raise LayerError(
                f"{', '.join(map(repr, silent))} didn't run: the forward pass doesn't come through "
                "there, was stopped before, ran in another thread or compiled, or was already read"
            )
        return result

    def pop_numpy(self) -> dict[str, NDArray[Any]]:
        """`pop` as NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""
        return {name: _to_numpy(tensor) for name, tensor in self.pop().items()}

    def _reset(self) -> None:
        self._pending = set(self._modules)
        self._calls = {path: deque(maxlen=self._policy.keep) for path in self._modules}

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], Any]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> Any:
            if threading.get_ident() != self._thread:
                return None
            self._pending.discard(path)
            last = self._stop and not self._pending
            call = [self._keep(name, tensor) for name, tensor in named_tensors(output, path)]
            if not call:
                refuse_hidden(repr(path), output)
                raise LayerError(f"{path!r} put out {type(output).__name__}, which has no tensor")
            self._calls[path].append(call)
            if self._policy.max_bytes is not None:
                self._check_memory(self._policy.max_bytes)
            if last and not self._running:
                raise LayerError(
                    "the network was called itself, and stop=True ends only passes that the "
                    "capture runs: call captured.run(...) instead"
                )
            if last:
                raise _Stopped(self)
            return map_tensors(Tensor.clone, output) if self._policy.grad else None

        return keep

    def _keep(self, name: str, tensor: Tensor) -> _Kept:
        policy = self._policy
        if policy.grad:
            if not torch.is_grad_enabled():
                raise LayerError("grad=True needs autograd: leave torch.no_grad or inference_mode")
            return _Kept(name, tensor, None)
        clone = policy.clone
        if tensor.requires_grad:
            tensor = tensor.detach()
        if clone or policy.device is not None or policy.dtype is not None:
            whole = not (tensor.is_floating_point() or tensor.is_complex())  # indices stay exact
            tensor = tensor.to(policy.device, None if whole else policy.dtype, copy=clone)
        return _Kept(name, tensor, None if tensor.is_inference() else tensor._version)

    def _check_memory(self, limit: int) -> None:
        held = sum(k.tensor.nbytes for layer in self._calls.values() for c in layer for k in c)
        if held > limit:
            raise LayerError(
                f"captured tensors take {held} bytes, more than max_bytes={limit}: name fewer "
                "layers, lower keep, use a smaller dtype or batch, or read them more often"
            )


class _Stopped(BaseException):
    """Ends a forward pass. Not an Exception, so that no `except Exception` of a network eats it."""

    def __init__(self, owner: Capture) -> None:
        self.owner = owner


class _Kept(NamedTuple):
    name: str
    tensor: Tensor
    version: int | None

    def checked(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise LayerError(
                f"the output of {self.name!r} was overwritten in place by a later layer: "
                "capture it with clone=True"
            )
        return self.tensor


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.ascontiguousarray(array)
