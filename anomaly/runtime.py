"""The running program: its version, threads, parallel work and devices.

Torch, faiss and numpy each have threads of their own; numbers of threads set here hold for all of
them. Network passes, blocks of positions and batches of images are shared among a few threads, each
of which computes alone.

Torch is imported only to ask for its devices: exported models are computed without it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from anomaly.errors import AnomalyError

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"

log = logging.getLogger(__name__)

# Called with (done, total), numbers of images or other pieces of work.
Progress: TypeAlias = Callable[[int, int], None]
# Called with (stage, done, total); the stage is a name such as `features`.
StageProgress: TypeAlias = Callable[[str, int, int], None]

_counting = threading.Lock()
# OpenBLAS's limit to one thread, listed once for each open block of `one_blas_thread`.
_limits: list[Any] = []


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit numpy's matrix products to one thread while the block runs.

    The threads of numpy's library (OpenBLAS) spin for 50 ms after each product, and on few cores
    they slow torch's threads down: on two cores the network's next pass took eight times as long.

    The limit holds for the whole process, from the first open block to the end of the last one.
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
    """Controller of all copies of OpenBLAS in this process, numpy's among them."""
    import numpy  # noqa: F401 – loads its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")


def cores() -> int:
    """Number of processors for this process: `OMP_NUM_THREADS`, if it is a number.

    Else those that the system and the container's quota allow, a fraction rounded up; at least 1.
    """
    if (asked := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdecimal():
        return max(1, int(asked))
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS lacks it
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(count, cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """Number of processors that Linux control groups (version 2) allow this process, as a fraction.

    Each group limits the groups inside it as well.

    Args:
        root: folder that holds `proc/self/cgroup` and `sys/fs/cgroup`.

    Returns:
        The lowest quota, such as 1.5; infinity where there is none.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    lowest = math.inf
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        # Seen from inside a container the path may be the host's: the mount is then the group.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is no number
                quota, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()
                lowest = min(lowest, int(quota) / int(period))
    return lowest


def use_threads(count: int) -> None:
    """Set the number of threads that the program computes with, in torch as well."""
    _counts.program = count
    set_threads(count)


def program_threads() -> int:
    """Number of threads that the program computes with; this thread may have fewer."""
    return _counts.program or cores()


def get_threads() -> int:
    """Number of threads that this thread computes with: torch's, where torch is imported."""
    if torch := imported_torch():
        return int(torch.get_num_threads())
    return getattr(_own, "threads", None) or program_threads()


def set_threads(count: int) -> None:
    """Set the number of threads that this thread computes with; 1 in some forks: `_after_fork`."""
    count = 1 if _counts.forked else count
    _own.threads = count
    if torch := imported_torch():
        torch.set_num_threads(count)


def imported_torch() -> ModuleType | None:
    """The torch module; None if it isn't imported, or another thread is still importing it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None


def apply_thread_limit() -> None:
    """Let the calling thread compute with as many threads as the program has; once for each thread.

    `torch.set_num_threads` holds for its own thread, and for threads that haven't used torch yet.
    A thread that begins while others are `single_threaded` would inherit their single thread, and
    the last digits of its scores could differ.
    """
    with _setting:
        if _counts.single and not getattr(_own, "known", False):
            set_threads(_counts.before)
        get_threads()  # by reading it, this thread takes over torch's present number
    _own.known = True


@contextmanager
def single_threaded(threads: int) -> Iterator[None]:
    """Let this thread compute with one thread while the block runs.

    Args:
        threads: number of threads before and after the block.
    """
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
        program: threads that `use_threads` has set; 0 for as many as there are cores.
        single: number of `single_threaded` blocks that are open.
        before: threads before the first of these blocks.
        forked: True if this process was forked from one that had threads of torch's or faiss's.
    """

    program: int = 0
    single: int = 0
    before: int = 1
    forked: bool = False


_setting, _counts = threading.Lock(), _Counts()
_own = threading.local()  # `threads` that it computes with; `known` once its limit was applied


def _after_fork() -> None:
    """Renew the locks of a forked process; if it has torch or faiss, make it compute in one thread.

    A fork lacks its parent's threads. OpenMP, with which torch and faiss compute, doesn't know, and
    would wait for their work for ever. Locks that another thread held would stay locked.
    """
    global _counting, _setting, _counts
    _counting, _setting = threading.Lock(), threading.Lock()
    _limits.clear()
    forked = _counts.forked or any(name in sys.modules for name in ("torch", "faiss"))
    _counts = _Counts(_counts.program, forked=forked)
    for lock in _property_locks:
        lock.renew()
    if forked:
        set_threads(1)
        if cv2 := sys.modules.get("cv2"):
            cv2.setNumThreads(1)


os.register_at_fork(after_in_child=_after_fork)


Item = TypeVar("Item")
Result = TypeVar("Result")

# map(task, items) returns [task(item) for item in items]; no call may depend on another.
ParallelMap = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def in_parallel(
    task: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Iterator[Result]:
    """Results of `task(item)` in the order of the items, several at once on a CPU.

    Torch's own threads share each operation and wait for one another at its end. Here each thread
    computes a whole batch alone: as fast on a quiet machine, and up to 1.6 times as fast where
    other programs use the same cores. Results don't depend on the number of threads. A GPU takes
    one item after another, and a CPU computes a single item with all threads.

    Args:
        task: function of one item; must not depend on the order of calls.
        items: read in the caller's thread, as many ahead as there are threads.
        device: the device on which the task computes.
    """
    source = iter(items)
    first = list(islice(source, 2))
    threads = get_threads()
    if device.type != "cpu" or threads == 1 or len(first) < 2:
        yield from map(task, first)
        yield from map(task, source)
        return
    with single_threaded(threads), ThreadPoolExecutor(threads, "lane", set_threads, (1,)) as pool:
        yield from prefetch(lambda item: pool.submit(task, item), chain(first, source), threads)


@contextmanager
def parallel_pool(device: torch.device) -> Iterator[ParallelMap]:
    """Threads that share pieces of work; each thread computes alone.

    Torch splits every operation among all threads, which then wait for one another: for operations
    of some microseconds that takes longer than the work. Here threads wait for the last piece only,
    and results don't depend on their number.

    Args:
        device: the device on which the task computes; a GPU takes one piece after another.

    Yields:
        The function that shares the work. In the block the caller's thread, too, computes alone.
    """
    threads = get_threads()
    if device.type != "cpu" or threads == 1:
        yield lambda task, items: list(map(task, items))
        return
    with (
        single_threaded(threads),
        ThreadPoolExecutor(threads, initializer=set_threads, initargs=(1,)) as pool,
    ):
        yield lambda task, items: list(pool.map(_in_this_mode(task), items))


def parallel_map(
    task: Callable[[Any], Any], items: Sequence[Any], device: torch.device
) -> list[Any]:
    """`[task(item) for item in items]` in a `parallel_pool` of its own."""
    with parallel_pool(device) as shared:
        return shared(task, items)


def _in_this_mode(task: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A task that runs in torch's inference mode in any thread, if the caller's thread is in it."""
    torch = imported_torch()
    if torch is None:
        return task
    enabled = torch.is_inference_mode_enabled()

    def work(item: Any) -> Any:
        with torch.inference_mode(enabled):
            return task(item)

    return work


_property_locks: list[locked_cached_property[Any]] = []  # one for each in the program's classes


class locked_cached_property(cached_property[Result]):  # noqa: N801 – used as a decorator
    """`functools.cached_property` with one lock for all instances, for values of seconds or of GB.

    Without the lock, which Python 3.12 has removed, threads that ask at the same time would each
    compute the value. Here they wait for the first thread's.
    """

    def __init__(self, compute: Callable[[Any], Result]) -> None:
        super().__init__(compute)
        self.renew()
        _property_locks.append(self)

    def renew(self) -> None:
        """Replace the lock, which a thread that a fork lacks may hold."""
        self._lock = threading.RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Result:  # type: ignore[override]
        with self._lock:
            value: Result = super().__get__(instance, owner)
            return value


_ASK_EVERY = 0.2  # seconds between two calls of `stopped`


class StoppedError(Exception):
    """A signal has come, so results that aren't there yet are dropped."""


def prefetch(
    submit: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    count: int,
    stopped: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """Results of items in order; work on the next `count` items has begun already.

    Args:
        submit: begins to work on an item, and returns its future result.
        items: items of work; `count` + 1 of them are read ahead.
        count: number of items in work besides the one whose result is next.
        stopped: called five times a second while a result is awaited; True ends the iteration.

    Raises:
        StoppedError: `stopped` has returned True.
    """
    waiting: deque[Future[Result]] = deque()

    def first() -> Result:
        while stopped is not None and not wait([waiting[0]], _ASK_EVERY).done:
            if stopped():
                raise StoppedError
        return waiting.popleft().result()

    try:
        for item in items:
            waiting.append(submit(item))
            if len(waiting) > count:
                yield first()
        while waiting:
            yield first()
    finally:  # the iteration may end early
        for future in waiting:
            future.cancel()


class _Processor(str):
    """The name of a device, with the `type` that a `torch.device` has."""

    type = "cpu"


# Stands for torch.device("cpu") where torch may be missing: with exported models.
CPU: torch.device = cast(Any, _Processor("cpu"))


def device_of(device: str | torch.device) -> torch.device:
    """Torch's device by its name: `auto` (the GPU where there is one), `cpu` or `cuda`.

    If torch is imported only now, it gets the program's number of threads; without such a number,
    its own, but at most `cores()`.

    Raises:
        AnomalyError: there is no such device here.
    """
    is_first = imported_torch() is None
    import torch

    if is_first:
        torch.set_num_threads(_counts.program or min(torch.get_num_threads(), cores()))
    has_gpu = torch.cuda.is_available()
    name = str(device)
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    chosen = None
    with suppress(RuntimeError):  # torch knows no such name
        chosen = torch.device(name)
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise AnomalyError(f"device {name!r}: give 'auto', 'cpu' or 'cuda'")
    if chosen.type == "cuda" and not has_gpu:
        raise AnomalyError(f"device {device}: torch finds no usable GPU here; use cpu or auto")
    log.debug("on %s (asked for: %s), %d threads", chosen, device, program_threads())
    return chosen


def check_fork(device: torch.device) -> None:
    """Refuse to compute on the GPU in a fork of the process that has put the model there.

    Raises:
        AnomalyError: the model lies on the GPU, which doesn't answer this process.
    """
    if device.type == "cuda":
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise AnomalyError(
                "the model was put on the GPU before this process was forked, which the GPU "
                "doesn't answer; load it in the new process, and start that by "
                "multiprocessing.get_context('spawn')"
            )


def has_bf16(device: torch.device) -> bool:
    """True if a device multiplies bfloat16 faster than float32.

    A CPU needs the instructions, and oneDNN must be allowed to use them: ONEDNN_MAX_CPU_ISA may
    forbid it.
    """
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # The oldest torch allowed lacks the function: then nothing is known of them.
    instructions: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    if not any(bool(instructions.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")):
        return False
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def release_memory() -> None:
    """Give free memory back to the system; takes some milliseconds.

    Large arrays of many sizes leave gaps in memory, which glibc keeps: without this call, a process
    that reads a few thousand images ends up with gigabytes of gaps.
    """
    if hasattr(c := ctypes.CDLL(None), "malloc_trim"):  # glibc's alone
        c.malloc_trim(0)


def peak_memory() -> int:
    """Highest memory use of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
