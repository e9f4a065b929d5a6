"""The memory of this process: how much it has held, and free memory given back."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _library() -> Any:
    """The C library where it can give memory back when asked (glibc), else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def release_memory() -> None:
    """Give free memory back to the system.

    Large arrays of many sizes that come and go leave gaps, which glibc keeps: without this, a
    process that reads a few thousand images ends up holding gigabytes of them. Takes some
    milliseconds.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes; 0 where the system can't say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
