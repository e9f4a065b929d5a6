"""The running program: its version, its threads and work side by side on them, its devices.

Torch, faiss and numpy each have threads of their own; what is set here holds for all of them.
Passes of a network, blocks of positions and batches of images are handed out to a few threads, each
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

# Called with (done, total), numbers of pieces of work.
Progress: TypeAlias = Callable[[int, int], None]
# As well, with the name of the stage first.
StageProgress: TypeAlias = Callable[[str, int, int], None]

_counting = threading.Lock()
# Limits of OpenBLAS to one thread: the same one, once for each open block of `one_blas_thread`.
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
    """Processors that this process may use: those that `OMP_NUM_THREADS` asks for, if it is set.

    Without it, at most as many as its container's quota pays for.
    """
    if (asked := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdecimal():
        return max(1, int(asked))
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS lacks it
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(count, cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """Processors' worth of time that the Linux control groups (version 2) of this process allow it.

    A group's own quota and those of all groups around it hold.

    Args:
        root: folder that holds `proc/self/cgroup` and `sys/fs/cgroup`.

    Returns:
        The least quota, such as 1.5; infinity where there is none.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    least = math.inf
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        # Seen from inside a container the path may be the host's: the mount is then the group.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is no number
                quota, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()
                least = min(least, int(quota) / int(period))
    return least


def use_threads(count: int) -> None:
    """Set how many threads the program computes with, in torch as well."""
    _counts.program = count
    set_threads(count)


def program_threads() -> int:
    """Number of threads that the program computes with, whatever this thread does."""
    return _counts.program or cores()


def get_threads() -> int:
    """The number of threads that this thread computes with: torch's, where torch is imported."""
    if torch := imported_torch():
        return int(torch.get_num_threads())
    return getattr(_own, "threads", None) or program_threads()


def set_threads(count: int) -> None:
    """Set how many threads this thread computes with: 1 in a forked process, see `_after_fork`."""
    count = 1 if _counts.forked else count
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
    """Make a forked process compute with one thread.

    A fork has none of its parent's threads, but OpenMP, with which torch and faiss compute, still
    counts on them, and waits for ever for what they ought to have done. Locks that another thread
    held stay locked.
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

# Called as map(task, items): [task(item) for item in items]. No task may depend on another.
ParallelMap = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


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
    """Share pieces of work among single-threaded workers.

    Torch's own way splits every single operation and has all threads meet at its end. For
    operations of some microseconds the meeting costs more than the work, and where another
    program uses a core, ten times more. Here nobody waits before the last piece, and results
    don't depend on the number of threads.

    Args:
        device: the device on which the work is done. A GPU takes one piece after another.

    Yields:
        The function that hands out. Inside the context this thread, too, computes alone.
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
    """A task for other threads, in which torch tracks gradients if it does so in this one."""
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
    """`functools.cached_property` for what takes seconds or much memory to compute.

    Since Python 3.12 that has no lock: as many threads as ask at the same time each compute their
    own. Here the others wait for the first one's.
    """

    def __init__(self, compute: Callable[[Any], Result]) -> None:
        super().__init__(compute)
        self.renew()
        _property_locks.append(self)

    def renew(self) -> None:
        """Take a fresh lock."""
        self._lock = threading.RLock()

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Result:  # type: ignore[override]
        with self._lock:
            value: Result = super().__get__(instance, owner)
            return value


_ASK_EVERY = 0.2  # seconds: how long a stop may go unnoticed


class StoppedError(Exception):
    """The results aren't wanted any more: a signal has come."""


def prefetch(
    submit: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    count: int,
    stopped: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """The results of each item, in order, begun up to `count` items ahead.

    Args:
        submit: begins to work on an item.
        items: read no further ahead than that.
        count: results that may be on their way besides the one that is waited for.
        stopped: asked five times a second while a result is waited for; True ends it.

    Raises:
        StoppedError: `stopped` has said so.
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
    finally:
        for future in waiting:
            future.cancel()


@dataclass(frozen=True)
class _Processor:
    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


# What stands for torch.device("cpu") where torch may be absent: with exported models.
CPU: torch.device = cast(Any, _Processor())


def device_of(device: str | torch.device) -> torch.device:
    """Torch's device by its name: `auto` (the GPU where there is one), `cpu` or `cuda`.

    Where this is what imports torch, torch computes with as many threads as the program, and with
    no more than there are processors for it.

    Raises:
        AnomalyError: there is no such device here.
    """
    first = imported_torch() is None
    import torch

    if first:
        torch.set_num_threads(_counts.program or min(torch.get_num_threads(), cores()))
    has_gpu = torch.cuda.is_available()
    name = str(device)
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    place = None
    with suppress(RuntimeError):
        place = torch.device(name)
    if place is None or place.type not in ("cpu", "cuda"):
        raise AnomalyError(f"device {name!r}: give 'auto', 'cpu' or 'cuda'")
    if place.type == "cuda" and not has_gpu:
        raise AnomalyError(f"device {device}: torch finds no usable GPU here; use cpu or auto")
    log.debug("on %s (asked for: %s), %d threads", place, device, program_threads())
    return place


def check_fork(device: torch.device) -> None:
    """Refuse a model's GPU in a process that was forked, which the GPU doesn't answer.

    Raises:
        AnomalyError: the model was put on the GPU before the fork.
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

    On a CPU both have to be there: the processor's instructions, and oneDNN's leave to use them,
    which ONEDNN_MAX_CPU_ISA takes away.
    """
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    instructions: dict[str, object] = read()
    if not any(bool(instructions.get(name)) for name in ("avx512_bf16", "amx_bf16", "arm_bf16")):
        return False
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def release_memory() -> None:
    """Give free memory back to the system.

    Large arrays of many sizes that come and go leave gaps, which glibc keeps: without this, a
    process that reads a few thousand images ends up holding gigabytes of them. Takes some
    milliseconds.
    """
    if hasattr(c := ctypes.CDLL(None), "malloc_trim"):  # only glibc has the call
        c.malloc_trim(0)


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
