"""torchvision and its networks without torch's compiler: two seconds less in each program's start.

Nothing here is compiled, but two things import the compiler, `torch._dynamo`, with sympy and more.
An operator for detection in torchvision has a question for it when it is used: while torchvision is
imported, stand-ins take the compiler's place, and whoever asks later gets the real one. And the
meta device goes by way of it to fill a tensor, or to find the shape that a batch norm gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COMPILER = "torch._dynamo"
_ASKED = f"{_COMPILER}.utils"


def import_torchvision() -> Any:
    """The package torchvision.

    Where torchvision wants more of the compiler than that question, both are imported as usual.
    """
    if _COMPILER in sys.modules or "torchvision" in sys.modules:
        return import_module("torchvision")
    stand_ins = {name: ModuleType(name) for name in (_COMPILER, _ASKED)}
    stand_ins[_COMPILER].__path__ = []  # a package, without modules of its own
    stand_ins[_ASKED].is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        return import_module("torchvision")
    except ImportError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return import_module("torchvision")


def _is_compile_supported(device_type: str) -> bool:
    answer: bool = import_module(_ASKED).is_compile_supported(device_type)
    return answer


_ATEN = torch.ops.aten
# What leaves its first tensor's shape as it is. That the meta device computes in Python, by way of
# the compiler, where it doesn't even compute.
_IN_PLACE = {
    *(_ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.fill_.Scalar, _ATEN.zero_.default),
    *(_ATEN.hardtanh_.default, _ATEN.hardswish_.default, _ATEN.silu_.default),
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
            return torch.empty_like(args[0])
        if operation in _JOINED and isinstance(args[1], torch.Tensor):
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
        if operation in _NORMS:
            return torch.empty_like(args[0]), args[0].new_empty(0), args[0].new_empty(0)
        return operation(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """A context for networks on the meta device: they are built, and run, for shapes alone."""
    with torch.device("meta"), _Shapes():  # type: ignore[no-untyped-call]
        yield


torchvision = import_torchvision()
