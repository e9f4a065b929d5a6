"""Limits of time and memory for processes that decode images. Imports no torch.

Nobody knows what a parser does with a damaged file. A decoding process therefore limits itself
before it opens one: the kernel refuses memory beyond the limit, and ends the process when its
computing time is over. Computing is what counts, so that neither a slow network folder nor a busy
machine ends it. On the clock, the process that waits for the answer sets a longer limit
(`decoder_pool`); on Windows that one is the only limit.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from anomaly.errors import AnomalyError

if sys.platform != "win32":
    import resource

# For an image of up to `MODEST_PIXELS`; a larger one gets more time in proportion. Decoding that
# many takes 4 s and 0.7 GB at most, all that can be drawn of them 8 s.
MODEST_PIXELS = 25_000_000
COMPUTING_SECONDS = 9.0
CLOCK_SECONDS = 60.0
DRAWING = 3  # times the usual limits: drawing follows no file's orders

MEMORY_SETTING = "ANOMALY_DECODER_MEMORY"
_MEGABYTES = 1000
_LEAST_MEGABYTES = 200  # an interpreter with its libraries takes 70

_memory = 0  # bytes that this process may take; 0 where it doesn't decode for another one
_patience = _share = 1.0
_on_large_image: Callable[[float], None] | None = None


def memory_limit() -> int:
    """Bytes that a decoding process may take: 1 GB, or as many megabytes as the environment says.

    Raises:
        AnomalyError: `ANOMALY_DECODER_MEMORY` isn't a number of megabytes.
    """
    text = os.environ.get(MEMORY_SETTING, str(_MEGABYTES))
    if not text.isdecimal() or int(text) < _LEAST_MEGABYTES:
        raise AnomalyError(
            f"{MEMORY_SETTING} is {text!r}; it must be a whole number of megabytes, "
            f"{_LEAST_MEGABYTES} or more"
        )
    return int(text) * 1_000_000


def limit_this_process(memory: int, on_large_image: Callable[[float], None]) -> None:
    """Make this a decoding process: from here on, limits hold in it.

    Args:
        memory: bytes that it may take, whatever the file.
        on_large_image: called with the factor by which an image gets more time than usual, before
            it is decoded.
    """
    global _memory, _on_large_image
    _memory, _on_large_image = memory, on_large_image
    if sys.platform != "win32":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process


def begin_request(patience: float) -> None:
    """Set the limits for what a decoding process does next.

    Args:
        patience: how many times the usual computing time it may take.
    """
    global _patience, _share
    _patience, _share = patience, 1.0
    _limit_memory(_memory)
    _limit_computing()


def allow_pixels(pixels: int) -> None:
    """Give a decoding process time in proportion for a large image; elsewhere this does nothing."""
    global _share
    if _on_large_image is not None and pixels > MODEST_PIXELS * _share:
        _share = pixels / MODEST_PIXELS
        _limit_computing()
        _on_large_image(_patience * _share)


def lift_memory_limit() -> None:
    """Let a decoding process take what it needs, until its next request."""
    _limit_memory(None)


def out_of_memory() -> str:
    """What is wrong with an image that this process has no memory for, and what to do."""
    if not _memory:
        return "there isn't enough memory to decode it"
    return (
        f"it takes more than the {_memory / 1e9:.1f} GB of memory that a decoding process may use; "
        f"if the file is sound, set the environment variable {MEMORY_SETTING} to more megabytes"
    )


def resident_bytes(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system doesn't say."""
    with suppress(OSError, IndexError, ValueError):
        # proc(5): the second number is the resident pages.
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limit_computing() -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, COMPUTING_SECONDS * _patience * _share)


def _limit_memory(most: int | None) -> None:
    if sys.platform != "win32":
        # Not RLIMIT_AS, which counts the libraries' files, too, and room that is only reserved.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if most is None or (hard != resource.RLIM_INFINITY and most > hard):
            most = hard
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
