"""Your own functions as hooks at the layers of a network: one set, removed together."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from reprlib import repr as short
from types import FrameType
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.utils.hooks import BackwardHook, RemovableHandle

from anomaly.errors import LayerError, nearest
from anomaly.hooks.capture import (
    Attached,
    Hook,
    map_tensors,
    named_tensors,
    refuse_compiled,
    refuse_hidden,
)
from anomaly.hooks.paths import Selector, select


class _BackwardGates(threading.local):
    """A backward hook of one layer, as a pair of forward hooks: `enter` and `leave`.

    Each puts a gate into the autograd graph. The backward pass goes through the gate at the layer's
    output, where a hook of `backward_pre` may replace grad_output, and then through the one at its
    input, where a hook of `backward` may replace grad_input. Each thread has gates of its own.
    """

    def __init__(self, event: Event, hook: Hook) -> None:
        self._hooks = [hook] if event == "backward" else []
        self._pre_hooks = [hook] if event == "backward_pre" else []
        # Gates entered and not left, each with the id of its layer's frame on the call stack.
        self._open: list[tuple[int, BackwardHook]] = []

    def enter(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...] | None:
        """Put the gate at the layer's input, as a forward-pre hook; keyword tensors pass it, too.

        PyTorch gives no `kwargs` to global hooks.

        Returns:
            The inputs for the layer, or with `kwargs` (inputs, keyword inputs); None, which leaves
            them as they are, where no gradient is wanted.
        """
        frame: FrameType | None = sys._getframe(2)  # of the layer's call, behind `Attached`
        own = id(frame)
        callers = set()
        while self._open and frame is not None:
            frame = frame.f_back
            callers.add(id(frame))
        # Only layers whose calls are around this one are still open. A pass that was stopped or has
        # raised never came to `leave`: its frames are gone, and this frame may have the id of one.
        self._open = [entry for entry in self._open if entry[0] in callers - {own}]
        gate = BackwardHook(module, self._hooks, self._pre_hooks)
        self._open.append((own, gate))
        named = {k: v for k, v in (kwargs or {}).items() if isinstance(v, Tensor)}
        ungated = (*inputs, *named.values())
        gated = gate.setup_input_hook(ungated)  # type: ignore[no-untyped-call]
        if gated is ungated:  # no input takes part in the backward pass
            return None
        copies = map_tensors(Tensor.clone, gated)
        if kwargs is None:
            return copies  # type: ignore[no-any-return]
        named = dict(zip(named, copies[len(inputs) :], strict=True))
        return copies[: len(inputs)], {**kwargs, **named}

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Put the gate at the layer's output, as a forward hook.

        Returns:
            The output for the layers behind; None, which leaves it as it is, where no gradient is
            wanted.

        Raises:
            LayerError: the output is an object whose tensors can't be found.
        """
        entered = [place for place, (_, gate) in enumerate(self._open) if gate.module is module]
        if not entered:  # registered while the layer was running, or its gate is gone
            return None
        gate = self._open[entered[-1]][1]
        del self._open[entered[-1] :]  # and gates inside, whose forward pass raised
        ungated = tuple(tensor for _, tensor in named_tensors(output, ""))
        if not ungated:
            refuse_hidden(type(module).__name__, output)
        gated = gate.setup_output_hook(ungated)  # type: ignore[no-untyped-call]
        if gated is ungated:
            return None
        # A gate puts out views, which a layer that works in place mustn't change.
        copies = iter(map_tensors(Tensor.clone, gated))
        return map_tensors(lambda _: next(copies), output)


Layers: TypeAlias = Selector | Sequence[Selector]
Event: TypeAlias = Literal["forward", "forward_pre", "backward", "backward_pre"]

_Register: TypeAlias = Callable[[Hook], RemovableHandle]  # a function of PyTorch's
# Further arguments of a hook: by position and by name.
_Further: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

# Names of the arguments that PyTorch gives to the hooks of each event.
_ARGUMENTS: dict[Event, tuple[str, ...]] = {
    "forward": ("module", "inputs", "output"),
    "forward_pre": ("module", "inputs"),
    "backward": ("module", "grad_input", "grad_output"),
    "backward_pre": ("module", "grad_output"),
}


@dataclass(frozen=True)
class Handle:
    """A registered hook.

    Attributes:
        parts: PyTorch's handles: two for a backward hook, one for any other.
    """

    parts: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hook; a second time does nothing."""
        for part in self.parts:
            part.remove()


class HookSet:
    """Hooks on one network, all removed at the end of `with`, whatever happens inside.

    A function gets PyTorch's own arguments first, then the extra ones given when registering. Its
    result replaces the output, input or gradient; None leaves it as it is. A function that changes
    a tensor in place instead is an error: other layers may hold the same tensor.

    Example:
        def scale(module, inputs, output, factor):
            return output * factor

        with HookSet(model) as hooks:
            hooks.forward("layer*.0.conv?", scale, factor=0.5)
            model(images)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Handle | RemovableHandle] = []

    def __enter__(self) -> HookSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove every hook of this set; a second time does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(
        self, layers: Layers, hook: Hook, /, *extra: Any, with_kwargs: bool = False, **named: Any
    ) -> list[Handle]:
        """Call `hook(module, inputs, output, *extra, **named)` after a layer has run.

        Args:
            layers: paths, index forms, globs or types, see `match`.
            hook: the function; its result, unless None, replaces the output.
            *extra: further arguments of the hook.
            with_kwargs: call `hook(module, inputs, kwargs, output, *extra, **named)` instead.
            **named: further arguments of the hook by name.

        Returns:
            A handle for each layer; `handle.remove()` removes the layer's hook early.

        Raises:
            LayerError: there is no such layer, its hooks would never be called, or the hook takes
                other arguments.
        """
        return self._on_layers("forward", layers, hook, (extra, named), with_kwargs)

    def forward_pre(
        self, layers: Layers, hook: Hook, /, *extra: Any, with_kwargs: bool = False, **named: Any
    ) -> list[Handle]:
        """Call `hook(module, inputs, *extra, **named)` before a layer runs.

        Its result replaces the inputs: one tensor, or a tuple of all inputs by position. With
        `with_kwargs` it is called as `hook(module, inputs, kwargs, …)` and returns a pair
        (inputs, kwargs). Arguments, handles and errors are those of `forward`.
        """
        return self._on_layers("forward_pre", layers, hook, (extra, named), with_kwargs)

    def backward(self, layers: Layers, hook: Hook, /, *extra: Any, **named: Any) -> list[Handle]:
        """Call `hook(module, grad_input, grad_output, *extra, **named)` in the backward pass.

        `grad_input` is a tuple with an entry for each input by position, then for each keyword
        tensor; `grad_output` has one for each tensor in the output. An entry is None where there is
        no gradient. The hook's result replaces `grad_input`, which then flows on to the layers
        before. Layers that work in place, here or behind, are no obstacle. Arguments, handles and
        errors are those of `forward`.
        """
        return self._on_layers("backward", layers, hook, (extra, named))

    def backward_pre(
        self, layers: Layers, hook: Hook, /, *extra: Any, **named: Any
    ) -> list[Handle]:
        """Call `hook(module, grad_output, *extra, **named)` before the gradient enters a layer.

        Its result replaces `grad_output`, and with it the gradients of the layer's parameters.
        Arguments, handles and errors are those of `forward`.
        """
        return self._on_layers("backward_pre", layers, hook, (extra, named))

    def tensor(self, tensor: Tensor, hook: Hook, /, *extra: Any, **named: Any) -> Handle:
        """Call `hook(grad, *extra, **named)` when the gradient of a tensor is known.

        Its result, of the same shape, replaces the gradient. The tensor may be a parameter, or one
        captured with `grad=True`.

        Raises:
            LayerError: it isn't a tensor, gets no gradient, or the hook takes other arguments.
        """
        _check_tensor(tensor)
        if not tensor.requires_grad:
            raise LayerError(
                f"a tensor of shape {tuple(tensor.shape)} takes no part in the backward pass: make "
                "it with requires_grad=True, or capture it with grad=True outside no_grad"
            )
        call = _with_extra(hook, ("grad",), (extra, named))
        return self._add(tensor.register_hook(call))  # type: ignore[no-untyped-call]

    def accumulated(
        self, parameter: nn.Parameter, hook: Hook, /, *extra: Any, **named: Any
    ) -> Handle:
        """Call `hook(parameter, *extra, **named)` after a gradient was added to `parameter.grad`.

        That is the sum over the backward passes so far; the hook may replace it.

        Raises:
            LayerError: it isn't a parameter, gets no gradient, or the hook takes other arguments.
        """
        _check_tensor(parameter)
        if not (parameter.requires_grad and parameter.is_leaf):
            raise LayerError(
                f"a parameter of shape {tuple(parameter.shape)} gets no gradient: unfreeze it "
                "(requires_grad_())"
            )
        _check_call(hook, ("parameter",), (extra, named))

        # Not `_with_extra`, which would refuse a change of the parameter in place.
        def call(changed: Tensor) -> None:
            hook(changed, *extra, **named)

        return self._add(parameter.register_post_accumulate_grad_hook(call))  # type: ignore[no-untyped-call]

    def everywhere(self, event: Event, hook: Hook, /, *extra: Any, **named: Any) -> list[Handle]:
        """Call `hook` at every layer of every network in the process (global module hooks).

        `event` is the method of this class, by name, whose hooks have the same arguments and
        result. `extra` and `named` are further arguments of the hook. The list has one handle.

        Raises:
            LayerError: there is no such event, or the hook takes other arguments.
        """
        if event not in get_args(Event):
            raise LayerError(f"there is no hook event {event!r}; {nearest(event, get_args(Event))}")
        call = _with_extra(hook, _ARGUMENTS[event], (extra, named))
        before = torch_hooks.register_module_forward_pre_hook
        return [self._register(event, call, before, torch_hooks.register_module_forward_hook)]

    def _on_layers(
        self, event: Event, layers: Layers, hook: Hook, further: _Further, with_kwargs: bool = False
    ) -> list[Handle]:
        """Hook layers; while they are hooked, compiled networks around them refuse to run."""
        arguments = _ARGUMENTS[event]
        if with_kwargs:
            arguments = (*arguments[:2], "kwargs", *arguments[2:])
        call = _with_extra(hook, arguments, further)
        modules = list(select(self._model, layers).values())
        self._handles += refuse_compiled(self._model, modules)
        # The gate of a backward hook is put at keyword inputs, too.
        before = with_kwargs or event != "forward_pre"
        return [
            self._register(
                event,
                call,
                partial(module.register_forward_pre_hook, with_kwargs=before),
                partial(module.register_forward_hook, with_kwargs=with_kwargs),
            )
            for module in modules
        ]

    def _register(self, event: Event, call: Hook, before: _Register, after: _Register) -> Handle:
        """Register a hook by PyTorch's functions for forward-pre and forward hooks.

        A backward hook becomes one of each, see `_BackwardGates`.
        """
        if event == "forward":
            return self._add(after(Attached(call)))
        if event == "forward_pre":
            return self._add(before(Attached(call)))
        gates = _BackwardGates(event, call)
        return self._add(before(Attached(gates.enter)), after(Attached(gates.leave)))

    def _add(self, *parts: RemovableHandle) -> Handle:
        """The handle of a new hook, which `remove` removes, too."""
        handle = Handle(parts)
        self._handles.append(handle)
        return handle


def _check_tensor(value: object) -> None:
    if not isinstance(value, Tensor):
        raise LayerError(
            f"{value!r} is no tensor: give one, such as model.fc.weight; layers are hooked by name "
            "with forward, forward_pre, backward and backward_pre"
        )


def _check_call(hook: Hook, arguments: Sequence[str], further: _Further) -> None:
    """Refuse a hook that can't take these arguments: it would fail in the middle of a pass."""
    extra, named = further
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # torch's own functions have none
        return
    try:
        signature.bind(*arguments, *extra, **named)
    except TypeError as error:
        name = getattr(hook, "__name__", type(hook).__name__)
        more = [*map(short, extra), *(f"{key}={short(value)}" for key, value in named.items())]
        takes, given = ", ".join(signature.parameters), ", ".join([*arguments, *more])
        raise LayerError(f"{name}({takes}) can't be called as {name}({given}): {error}") from None


def _with_extra(hook: Hook, arguments: Sequence[str], further: _Further) -> Hook:
    """A function that gives a hook PyTorch's arguments, then its extra ones.

    Changes in place of the tensors shown to the hook are refused: other layers may hold the same
    tensor (a residual connection, a ReLU that keeps its output for the backward pass, autograd's
    own sums). Under `torch.inference_mode` tensors don't count their changes.

    Raises:
        LayerError: the hook takes other arguments; or, once called, it has changed a tensor.
    """
    _check_call(hook, arguments, further)
    extra, named = further

    @wraps(hook)
    def call(*args: Any) -> Any:
        tensors = [t for _, t in named_tensors(args, "") if not t.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = hook(*args, *extra, **named)
        if versions != [tensor._version for tensor in tensors]:
            raise LayerError(
                f"the hook {getattr(hook, '__qualname__', type(hook).__name__)} changed a tensor "
                "in place, which other layers may use as well: return the new value instead"
            )
        return result

    return call
