"""What becomes of memory that is free again, where the C library lets a program say (glibc)."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

# Of mallopt, and the most that each takes: blocks from this size on are mapped on their own, and
# memory beyond this that is free at the end goes back to the system.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAPPED, _TRIMMED = 1 << 25, (1 << 31) - 1


@lru_cache(maxsize=1)
def _library() -> Any:
    """The C library where it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None


def keep_memory() -> None:
    """Have this process keep what is free again, for the next arrays of that size.

    By default large arrays go back to the system one by one, which has to fill each new one with
    zeros: that takes as long as a product in 8-bit numbers whose result it is. For programs of our
    own; a caller's process decides for itself.
    """
    library = _library()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, _MAPPED)
        library.mallopt(_TRIM_THRESHOLD, _TRIMMED)


def release_memory() -> None:
    """Give free memory back to the system.

    Large arrays of many sizes that come and go leave gaps, which glibc keeps: without this, a
    process that reads a few thousand images ends up holding gigabytes of them. Takes some
    milliseconds.
    """
    library = _library()
    if library is not None:
        library.malloc_trim(0)
