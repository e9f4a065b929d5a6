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
from types import ModuleType

from anomaly.runtime.blas import one_blas_thread


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Set how many threads the program computes with, in torch as well."""
    _program.threads = count
    set_threads(count)


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


def import_torch() -> None:
    """Import torch, which from then on computes with as many threads as the program."""
    first = imported_torch() is None
    import torch

    if first and _program.threads:
        torch.set_num_threads(_program.threads)


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
