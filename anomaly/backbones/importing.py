"""torchvision and timm, imported without torch's compiler, which takes 2 s and 150 MB.

torchvision's `roi_align` asks the compiler whether it supports a device, and timm marks methods as
not to be compiled. Here the compiler is imported only when one of these is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch  # before, since it may use the compiler

_PACKAGE, _UTILS = "torch._dynamo", "torch._dynamo.utils"


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Put placeholders in the place of the compiler's modules; using one imports the compiler."""
    if _PACKAGE in sys.modules:
        yield
        return
    placeholders = {name: ModuleType(name) for name in (_PACKAGE, _UTILS)}

    def remove_placeholders() -> None:
        for name, module in placeholders.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        remove_placeholders()
        return getattr(import_module(_UTILS), name)

    def is_compile_supported(device_type: str) -> bool:
        return bool(attribute("is_compile_supported")(device_type))

    vars(placeholders[_PACKAGE]).update(__path__=[])
    vars(placeholders[_UTILS]).update(
        is_compile_supported=is_compile_supported, __getattr__=attribute
    )
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        remove_placeholders()


with _without_compiler():
    import torchvision


def import_timm() -> Any:
    """Import timm.

    Returns:
        The package.

    Raises:
        ModuleNotFoundError: it isn't installed.
    """
    disable = torch.compiler.disable

    def disable_when_called(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        if fn is None:
            return partial(disable_when_called, recursive=recursive, **options)

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            marked: Any = disable(fn, recursive, **options)  # type: ignore[no-untyped-call]
            return marked(*args, **kwargs)

        return call

    torch.compiler.disable = disable_when_called
    try:
        import timm
    finally:
        torch.compiler.disable = disable
    return timm


__all__ = ["import_timm", "torchvision"]
