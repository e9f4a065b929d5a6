"""torchvision, imported without torch's compiler.

One of its operators, for detectors, has a question for the compiler and imports it beforehand,
which takes 2 s and 150 MB. Here the compiler is imported when the question is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch  # noqa: F401 - before, since it may use the compiler

_PACKAGE, _UTILS = "torch._dynamo", "torch._dynamo.utils"


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let other modules stand in for the compiler's; they import it when it is used."""
    if _PACKAGE in sys.modules:
        yield
        return
    standing_in = {name: ModuleType(name) for name in (_PACKAGE, _UTILS)}

    def leave() -> None:
        for name, module in standing_in.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def attribute(name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        leave()
        return getattr(import_module(_UTILS), name)

    def is_compile_supported(device_type: str) -> bool:
        return bool(attribute("is_compile_supported")(device_type))

    vars(standing_in[_PACKAGE]).update(__path__=[])
    vars(standing_in[_UTILS]).update(
        is_compile_supported=is_compile_supported, __getattr__=attribute
    )
    sys.modules.update(standing_in)
    try:
        yield
    finally:
        leave()


with _without_compiler():
    import torchvision

__all__ = ["torchvision"]
