"""Numpy's matrix products on one thread, while they are ours. Imports no torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any


def one_blas_thread() -> AbstractContextManager[Any]:
    """A block in which numpy computes matrix products in the thread that asks for them alone.

    The threads of its library (OpenBLAS) go on spinning for a twentieth of a second once a product
    is done. Where there are few cores they keep torch's threads from theirs: on two, the network's
    next pass took eight times as long.

    The number of threads is one for the whole process. Where several threads are in such blocks,
    the first one's sets it, and it holds until that one is left.
    """
    limited: AbstractContextManager[Any] = _openblas().limit(limits=1)
    return limited


@lru_cache(maxsize=1)
def _openblas() -> Any:
    """The copies of OpenBLAS that the process has loaded, numpy's among them if it has one."""
    import numpy  # noqa: F401 – loads its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")
