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
    _counts.program = count
    set_threads(count)


def wanted_threads() -> int:
    """How many threads `use_threads` has set; 0 where it wasn't called."""
    return _counts.program


def get_threads() -> int:
    """How many threads this thread computes with: torch's setting, where torch is imported."""
    if torch := imported_torch():
        return int(torch.get_num_threads())
    return getattr(_own, "threads", None) or _counts.program or cores()


def set_threads(count: int) -> None:
    """Set how many threads this thread computes with."""
    _own.threads = count
    if torch := imported_torch():
        torch.set_num_threads(count)


def imported_torch() -> ModuleType | None:
    """Torch, if the program has imported it, and is done with that."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None


def apply_thread_limit() -> None:
    """Have a thread of the caller's compute with as many threads as the program has.

    What `torch.set_num_threads` sets holds for its own thread, and for threads that haven't used
    torch yet. One that comes while others compute alone would stay alone, and its last digits
    could differ.
    """
    with _setting:
        if _counts.single and not getattr(_own, "known", False):
            set_threads(_counts.before)
        get_threads()  # takes over what holds now
    _own.known = True


@contextmanager
def single_threaded(threads: int) -> Iterator[None]:
    """Have this thread, which computes with so many threads, compute with one."""
    with _setting:
        if not _counts.single:
            _counts.before = threads
        _counts.single += 1
        set_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        with _setting:
            set_threads(threads)
            _counts.single -= 1


@dataclass
class _Counts:
    """Numbers of threads that hold for the whole process.

    Attributes:
        program: what `use_threads` has set; 0 for as many as there are cores.
        single: how many `single_threaded` blocks are open.
        before: how many threads there were before the first of them.
    """

    program: int = 0
    single: int = 0
    before: int = 1


_setting, _counts = threading.Lock(), _Counts()
_own = threading.local()  # `threads` that it computes with; `known` once its limit was applied
