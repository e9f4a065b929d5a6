"""torchvision, timm and their networks without torch's compiler: seconds less at each start.

Nothing here is compiled, but three things import the compiler, `torch._dynamo`, with sympy and
more. An operator for detection in torchvision has a question for it when it is used, and timm wants
a function left alone by it: while either is imported, stand-ins take the compiler's place, and
whoever asks later gets the real one. And the meta device goes by way of it to fill a tensor, or to
find the shape that a batch norm gives (and by way of sympy, for a convolution's).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COMPILER = "torch._dynamo"
_ASKED = f"{_COMPILER}.utils"


def import_without_compiler(package: str) -> Any:
    """The package, torchvision or timm.

    Where it wants more of the compiler than is known here, both are imported as usual.

    Raises:
        ModuleNotFoundError: it isn't installed.
    """
    if _COMPILER in sys.modules or package in sys.modules:
        return import_module(package)
    stand_ins = {name: ModuleType(name) for name in (_COMPILER, _ASKED)}
    stand_ins[_COMPILER].__path__ = []  # a package, without modules of its own
    stand_ins[_COMPILER].disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    stand_ins[_ASKED].is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        return import_module(package)
    except (ImportError, AttributeError):
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return import_module(package)


def _is_compile_supported(device_type: str) -> bool:
    answer: bool = import_module(_ASKED).is_compile_supported(device_type)
    return answer


_ATEN = torch.ops.aten
# What leaves its first tensor's shape as it is. That the meta device computes in Python, by way of
# the compiler, where it doesn't even compute.
_IN_PLACE = {
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.fill_.Scalar, _ATEN.zero_.default),
    *(_ATEN.hardtanh_.default, _ATEN.hardswish_.default, _ATEN.silu_.default),
    *(_ATEN.add_.Tensor, _ATEN.mul_.Tensor),
}
_LIKE = {
    *(_ATEN.hardtanh.default, _ATEN.hardswish.default, _ATEN.hardsigmoid.default),
    *(_ATEN.silu.default, _ATEN.sigmoid.default, _ATEN.gelu.default),
}
_JOINED = {_ATEN.add.Tensor, _ATEN.mul.Tensor}
_NORMS = {
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit_no_training.default,
}


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What sees every operation on tensors, for subclasses; the compiler isn't told of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Shapes(Dispatch):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation in _IN_PLACE:
            return args[0]
        if operation in _LIKE:
            return args[0].new_empty(args[0].shape)
        if operation in _JOINED and isinstance(args[1], Tensor):
            return args[0].new_empty(np.broadcast_shapes(args[0].shape, args[1].shape))
        if operation in _NORMS:
            return args[0].new_empty(args[0].shape), args[0].new_empty(0), args[0].new_empty(0)
        if operation in _WINDOWED and (found := _WINDOWED[operation](*args)) is not None:
            return found
        return operation(*args, **(kwargs or {}))


def _convolved(
    maps: Tensor,
    weight: Tensor,
    _: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    __: Sequence[int],
    groups: int,
) -> Tensor | None:
    """What a convolution puts out; None where the meta device is to say."""
    if transposed or maps.shape[1] != weight.shape[1] * groups:
        return None
    sides = _sides(maps.shape[2:], weight.shape[2:], stride, padding, dilation)
    return maps.new_empty(len(maps), len(weight), *sides) if min(sides) > 0 else None


def _pooled(
    maps: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """What a maximum over windows puts out; None where the meta device is to say."""
    if ceil_mode or maps.ndim != 4 or len(kernel) + len(padding) + len(dilation) != 6:
        return None
    sides = _sides(maps.shape[2:], kernel, stride or kernel, padding, dilation)
    shape = (*maps.shape[:2], *sides)
    if min(sides) <= 0:
        return None
    return maps.new_empty(shape), maps.new_empty(shape, dtype=torch.int64)


def _sides(
    sides: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """How many positions a window has along each side, by the formula of `torch.nn.Conv2d`."""
    return [
        (side + 2 * pad - step * (width - 1) - 1) // by + 1
        for side, width, by, pad, step in zip(sides, kernel, stride, padding, dilation, strict=True)
    ]


_WINDOWED: dict[Any, Callable[..., Any]] = {
    _ATEN.convolution.default: _convolved,
    _ATEN.max_pool2d_with_indices.default: _pooled,
}


@contextmanager
def without_values() -> Iterator[None]:
    """A context for networks on the meta device: they are built, and run, for shapes alone."""
    with torch.device("meta"), _Shapes():  # type: ignore[no-untyped-call]
        yield


torchvision = import_without_compiler("torchvision")
