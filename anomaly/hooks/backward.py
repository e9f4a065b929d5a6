"""Full backward hooks that in-place layers can't break.

PyTorch's `register_full_backward_hook` hands the layers around it views that mustn't be changed in
place, and so raises on most networks: a ReLU6 behind a batch norm, or `out += identity` behind one.
Here PyTorch's own mechanism is put in place by a forward-pre and a forward hook, which hand on
copies instead of the views.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from anomaly.hooks.guard import Hook
from anomaly.hooks.nested import map_tensors, named_tensors, refuse_hidden


class BackwardGates(threading.local):
    """A pair of forward hooks, `enter` and `leave`, that put gates around a layer.

    The backward pass goes through the gate at the layer's output, where `pre_hook` may replace
    grad_output, and then through the one at its input, where `hook` may replace grad_input.
    """

    def __init__(self, hook: Hook | None = None, pre_hook: Hook | None = None) -> None:
        self._hooks = [hook] if hook else []
        self._pre_hooks = [pre_hook] if pre_hook else []
        self._open: list[tuple[int, BackwardHook]] = []  # with its layer's frame on the call stack

    def enter(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...] | None:
        """Forward-pre hook: the gate at the input, through which keyword inputs go, too.

        Returns:
            The inputs, and with `kwargs` these beside them; None where no gradient is wanted.
        """
        frame: FrameType | None = sys._getframe(2)  # of the layer's call, behind `Attached`
        own, around = id(frame), set()
        while self._open and frame is not None:
            frame = frame.f_back
            around.add(id(frame))
        # A pass that was stopped, or has raised, never came to `leave`; its frames are gone, and
        # this one may have taken the place of one of them.
        self._open = [entry for entry in self._open if entry[0] in around - {own}]
        gate = BackwardHook(module, self._hooks, self._pre_hooks)
        self._open.append((own, gate))
        names = [name for name, value in (kwargs or {}).items() if isinstance(value, Tensor)]
        given = (*inputs, *((kwargs or {})[name] for name in names))
        gated = gate.setup_input_hook(given)  # type: ignore[no-untyped-call]
        if gated is given:
            return None
        copies = _copies(gated)
        if kwargs is None:
            return copies  # type: ignore[no-any-return]
        named = zip(names, copies[len(inputs) :], strict=True)
        return copies[: len(inputs)], {**kwargs, **dict(named)}

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Forward hook: the gate at the output."""
        entered = [place for place, (_, gate) in enumerate(self._open) if gate.module is module]
        if not entered:  # hooked, or let go, while it was running
            return None
        gate = self._open[entered[-1]][1]
        del self._open[entered[-1] :]  # with those behind, whose forward pass raised
        nested = isinstance(output, tuple) and any(
            isinstance(item, tuple | list | Mapping) for item in output
        )
        if isinstance(output, Tensor | tuple) and not nested:
            gated = gate.setup_output_hook(output)  # type: ignore[no-untyped-call]
            return None if gated is output else _copies(gated)
        tensors = tuple(tensor for _, tensor in named_tensors(output, ""))
        if not tensors:
            refuse_hidden(type(module).__name__, output)
            return None
        gated = iter(_copies(gate.setup_output_hook(tensors)))  # type: ignore[no-untyped-call]
        return map_tensors(lambda _: next(gated), output)


def _copies(value: Any) -> Any:
    return map_tensors(Tensor.clone, value)
