"""Numpy's matrix products on one thread, while they are ours. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
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
