"""How many threads the program computes with, in torch, in numpy's products and in its own passes.

Imports no torch, but tells torch where the program has imported it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

_counting = threading.Lock()
# What holds OpenBLAS down, one for all the blocks that threads are in.
_limits: list[Any] = []


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """A block in which numpy computes matrix products in the thread that asks for them alone.

    The threads of its library (OpenBLAS) go on spinning for a twentieth of a second once a product
    is done. Where there are few cores they keep torch's threads from theirs: on two, the network's
    next pass took eight times as long.

    The number of threads is the whole process's: it is 1 while any thread is in such a block, and
    what it was before once the last one has left.
    """
    with _counting:
        _limits.append(_limits[0] if _limits else _openblas().limit(limits=1))
    try:
        yield
    finally:
        with _counting:
            limit = _limits.pop()
            if not _limits:
                limit.restore_original_limits()


@lru_cache(maxsize=1)
def _openblas() -> Any:
    """The copies of OpenBLAS that the process has loaded, numpy's among them if it has one."""
    import numpy  # noqa: F401 – loads its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Set how many threads the program computes with, in torch as well."""
    _program.threads = count
    set_threads(count)


def wanted_threads() -> int | None:
    """How many threads `use_threads` was told; None where it wasn't."""
    return _program.threads


def get_threads() -> int:
    """How many threads this thread computes with: torch's setting, where torch is imported."""
    if torch := imported_torch():
        return int(torch.get_num_threads())
    return getattr(_own, "threads", None) or _program.threads or cores()


def set_threads(count: int) -> None:
    """Set how many threads this thread computes with."""
    _own.threads = count
    if torch := imported_torch():
        torch.set_num_threads(count)


def imported_torch() -> ModuleType | None:
    """Torch, if the program has imported it, and is done with that."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None


def take_threads() -> None:
    """Have a thread of the caller's compute with as many threads as the program has.

    What `torch.set_num_threads` sets holds for its own thread, and for threads that haven't used
    torch yet. One that comes while others compute alone would stay alone, and its last digits
    could differ.
    """
    with _setting:
        if _setting_of.narrowed and not getattr(_met, "before", False):
            set_threads(_setting_of.threads)
        get_threads()  # takes over what holds now
    _met.before = True


@contextmanager
def alone(threads: int) -> Iterator[None]:
    """Have this thread, which has so many threads, compute with one."""
    with _setting:
        if not _setting_of.narrowed:
            _setting_of.threads = threads
        _setting_of.narrowed += 1
        set_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        with _setting:
            set_threads(threads)
            _setting_of.narrowed -= 1


@dataclass
class _Setting:
    """How many contexts compute alone now, and how many threads there were before."""

    narrowed: int = 0
    threads: int = 1


@dataclass
class _Program:
    """How many threads the program was told to compute with; 0 for as many as there are cores."""

    threads: int = 0


_setting, _setting_of, _met = threading.Lock(), _Setting(), threading.local()
_program, _own = _Program(), threading.local()
