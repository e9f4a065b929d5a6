"""The machine: what the processor has, passes side by side on threads, memory given back.

`actors` and `dispatch` are about many machines: processes on Ray, any of which may die.

Imports torch only to ask for its devices: exported models are computed without it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from anomaly.errors import AnomalyError
from anomaly.prefetch import ahead
from anomaly.runtime.blas import one_blas_thread

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

# Called as spread(task, items): [task(item) for item in items]. No task may depend on another.
Spread = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class _Processor:
    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


# What stands for torch.device("cpu") where torch may be absent: with exported models.
CPU: torch.device = cast(Any, _Processor())


def device_of(device: str | torch.device) -> torch.device:
    """The device that is meant by `auto` (the GPU where there is one), `cpu`, `cuda` or by itself.

    Raises:
        AnomalyError: there is no such device here.
    """
    first = _torch() is None
    import torch

    if first and _program.threads:  # from its first import on it computes with the program's
        torch.set_num_threads(_program.threads)
    has_gpu = torch.cuda.is_available()
    name = str(device)
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError:
        raise AnomalyError(f"device {device!r}: give 'auto', 'cpu' or 'cuda'") from None
    if found.type == "cuda" and not has_gpu:
        raise AnomalyError(f"device {device}: torch finds no usable GPU here; use cpu or auto")
    return found


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 faster than float32.

    On a CPU both have to be there: the processor's instructions, and oneDNN's leave to use them,
    which ONEDNN_MAX_CPU_ISA takes away.
    """
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    if not any(bool(found.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")):
        return False
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int) -> None:
    """Set how many threads the program computes with, in torch as well."""
    _program.threads = count
    _set_threads(count)


def get_threads() -> int:
    """How many threads this thread computes with: torch's setting, where torch is imported."""
    if torch := _torch():
        return int(torch.get_num_threads())
    return getattr(_own, "threads", None) or _program.threads or cores()


def _set_threads(count: int) -> None:
    """Set how many threads this thread computes with."""
    _own.threads = count
    if torch := _torch():
        torch.set_num_threads(count)


def _torch() -> ModuleType | None:
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
            _set_threads(_setting_of.threads)
        get_threads()  # takes over what holds now
    _met.before = True


@contextmanager
def _alone(threads: int) -> Iterator[None]:
    """Have this thread, which has so many threads, compute with one."""
    with _setting:
        if not _setting_of.narrowed:
            _setting_of.threads = threads
        _setting_of.narrowed += 1
        _set_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        with _setting:
            _set_threads(threads)
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


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes; 0 where the system can't say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_parallel(
    task: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Iterator[Result]:
    """`map(task, items)`, several at once on a CPU, in order.

    Torch's own threads share each operation and wait for one another at its end. Here each of as
    many threads as the program has carries a batch through alone: as fast on a quiet machine, and
    up to 1.6 times as fast where decoding or another program uses the same cores. Results don't
    depend on the number of threads.

    While there are items left, the caller's thread computes alone, too. A GPU takes one item after
    another, and so does a CPU when there is only one.

    Args:
        task: may not depend on the order of calls.
        items: read in the caller's thread, no further ahead than there are threads.
        device: where the task computes.
    """
    source = iter(items)
    first = list(islice(source, 2))
    threads = get_threads()
    if device.type != "cpu" or threads == 1 or len(first) < 2:
        yield from map(task, first)
        yield from map(task, source)
        return
    with (
        _alone(threads),
        ThreadPoolExecutor(threads, "lane", _set_threads, (1,)) as pool,
    ):
        yield from ahead(lambda item: pool.submit(task, item), chain(first, source), threads)


@contextmanager
def spreading(device: torch.device) -> Iterator[Spread]:
    """Hand out pieces of work to as many threads as there are, each of which computes alone.

    Torch's own way splits every single operation and has all threads meet at its end. For
    operations of some microseconds the meeting costs more than the work, and where another
    program uses a core, ten times more. Here nobody waits before the last piece, and results
    don't depend on the number of threads.

    Args:
        device: where the work is done. A GPU takes one piece after another.

    Yields:
        The function that hands out. Inside the context this thread, too, computes alone.
    """
    threads = get_threads()
    if device.type != "cpu" or threads == 1:
        yield _in_turn
        return
    with (
        _alone(threads),
        ThreadPoolExecutor(threads - 1, initializer=_set_threads, initargs=(1,)) as pool,
    ):
        yield lambda task, items: _spread(pool, threads, task, items)


def spread(task: Callable[[Any], Any], items: Sequence[Any], device: torch.device) -> list[Any]:
    """`[task(item) for item in items]` in a `spreading` of its own."""
    with spreading(device) as hand_out:
        return hand_out(task, items)


def _in_turn(task: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [task(item) for item in items]


def _spread(
    pool: ThreadPoolExecutor, threads: int, task: Callable[[Any], Any], items: Sequence[Any]
) -> list[Any]:
    if len(items) < 2:
        return _in_turn(task, items)
    mode = _inference_mode()
    results: list[Any] = [None] * len(items)
    # One iterator for all: whoever is done takes the next piece.
    remaining = iter(range(len(items)))

    def work() -> None:
        with mode():
            for i in remaining:
                results[i] = task(items[i])

    helpers = [pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()
    return results


def _inference_mode() -> Callable[[], AbstractContextManager[Any]]:
    """Makes a context like this thread's: whether torch keeps track of gradients."""
    torch = _torch()
    if torch is None:
        return nullcontext
    enabled = torch.is_inference_mode_enabled()
    return lambda: torch.inference_mode(enabled)
