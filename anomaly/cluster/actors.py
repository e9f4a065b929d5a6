"""Processes on Ray, any of which may die, and the work that is shared out among them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anomaly.errors import AnomalyError, DataError, OutputError
from anomaly.runtime.parallel import cores

log = logging.getLogger(__name__)

_LOCAL = "local"


class Cluster:
    """A Ray cluster; `joined` makes one.

    Attributes:
        threads: processors of each actor.
    """

    def __init__(self, threads: int, most: int | None, device: str) -> None:
        self.threads = threads
        self._most = most
        self._options: dict[str, int] = {
            "num_cpus": threads,
            "num_gpus": int(device == "cuda"),
            "max_restarts": 0,
        }

    def room(self) -> int:
        """How many actors there may be now: more would wait for a processor or a GPU for ever."""
        machines = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        room = sum(map(self._room_on, machines))
        return room if self._most is None else min(room, self._most)

    def _room_on(self, there: Mapping[str, float]) -> int:
        """How many actors one machine has room for; none is spread over two."""
        needs = {"CPU": self._options["num_cpus"], "GPU": self._options["num_gpus"]}
        return min(int(there.get(kind, 0)) // count for kind, count in needs.items() if count)

    def put(self, value: Any) -> Any:
        """What stands for a large value among the arguments of many actors."""
        return _ray().put(value)

    def start(self, kind: type, *arguments: Any) -> Actor:
        """Start an actor; it waits for its place.

        Args:
            kind: a class on the module level.
            arguments: of its constructor. That should only keep them: what it raises says nothing
                of where it was.
        """
        return Actor(_ray().remote(**self._options)(kind).remote(*arguments))


class Actor:
    """An actor of a cluster."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method; the future raises `WorkerDied`, or what the method has raised."""
        answer: Future[Any] = Future()
        reference = getattr(self._handle, method).remote(*arguments)
        reference.future().add_done_callback(partial(_pass_on, answer))
        return answer

    def stop(self) -> None:
        """End it."""
        ray = _ray()
        with suppress(ray.exceptions.RayError):
            ray.kill(self._handle)


def _pass_on(answer: Future[Any], rays: Future[Any]) -> None:
    """Make Ray's answer ours: what the method raised, or why the worker is gone."""
    ray, error = _ray(), rays.exception()
    if error is None:
        answer.set_result(rays.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            cause = DataError(
                f"a machine of the cluster lacks {cause.name}; install anomaly there as it is here"
            )
        answer.set_exception(cause)
    elif "No module named 'anomaly" in str(error):
        answer.set_exception(
            DataError("a machine of the cluster lacks anomaly; install it there as it is here")
        )
    else:
        answer.set_exception(WorkerDied(type(error).__name__))


def _ray() -> Any:
    """Ray, whose decorators and functions have no types that hold."""
    import ray

    return ray


@contextmanager
def joined(address: str, threads: int, most: int | None, device: str) -> Iterator[Cluster]:
    """Join a Ray cluster, or start one on this machine that ends with the block.

    Args:
        address: `local`, or that of a cluster: `auto`, `HOST:PORT`, `ray://HOST:PORT`.
        threads: processors of each actor.
        most: how many actors there may be; None for as many as there is room for.
        device: as `--device`; with `cuda` each actor has a GPU.

    Raises:
        AnomalyError: Ray isn't installed, no cluster answers there, or this machine has no GPU.
    """
    try:
        import ray
    except ImportError:
        raise AnomalyError("--ray needs Ray: pip install 'anomaly[ray]'") from None
    # Workers' own lines would break into the progress line; a job sends nobody statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        count = most or max(1, cores() // threads)
        options |= {"num_cpus": count * threads, "include_dashboard": False}
    try:
        ray.init(address, **options)
    except Exception as error:  # Ray raises any kind, where it doesn't start in time that very one
        name = type(error).__name__
        if address == _LOCAL:
            raise AnomalyError(
                f"Ray doesn't start on this machine ({name}); see why in its logs (too much to do, "
                "too little memory?), and try again"
            ) from None
        raise AnomalyError(
            f"no Ray cluster answers at {address} ({name}); start one with "
            "'ray start --head', or give --ray local"
        ) from None
    try:
        cluster = Cluster(threads, most, device)
        if not cluster.room():
            if address == _LOCAL:  # has as many processors as were asked for
                raise AnomalyError("Ray finds no GPU on this machine; leave --device cuda out")
            log.warning(
                "no machine of the cluster at %s has %d processor%s%s, which each worker needs; "
                "waiting until one joins (fewer --threads need less)",
                address,
                threads,
                "" if threads == 1 else "s",
                " and a GPU" if device == "cuda" else "",
            )
        yield cluster
    finally:
        ray.shutdown()


_DEATHS = 2  # of workers at one chunk; then it is looked into
_FRUITLESS = 3  # times that a chunk was looked into, and no image was found
_WAIT = 1.0  # seconds until it is asked again whether to stop, and whether there is room


class WorkerDied(Exception):  # noqa: N818, no mistake of anybody's
    """The worker's process, or its machine, is gone."""


@dataclass(frozen=True)
class Work:
    """How workers do something with chunks of images; a worker does one thing at a time.

    Futures raise `WorkerDied`, or the `AnomalyError` that the worker has met.

    Attributes:
        hire: starts a worker, which needn't be ready yet.
        score: has a worker do a chunk, but for lost images: by index, with why they are lost.
        probe: has it read some images of a chunk and keep nothing: to see whether they kill it.
        take: called with each chunk and what `score` made of it.
        release: called with a worker that isn't needed any more.
    """

    hire: Callable[[], Any]
    score: Callable[[Any, int, Mapping[int, str]], Future[Any]]
    probe: Callable[[Any, int, Sequence[int]], Future[Any]]
    take: Callable[[int, Any], object]
    release: Callable[[Any], object] = lambda worker: worker.stop()


@dataclass
class _Chunk:
    """What is known of a chunk that isn't done.

    Attributes:
        number: of the manifest.
        remedy: what to do once it is mended that workers die.
        lost: its images that kill workers, by index, and what their rows say.
        deaths: of workers that scored it, since the last image was found.
        suspects: images among which one is looked for; None if none is.
        probed: those of them that a worker is being tried with.
        fruitless: times that it was looked into in vain.
    """

    number: int
    remedy: str
    lost: dict[int, str] = field(default_factory=dict)
    deaths: int = 0
    suspects: Sequence[int] | None = None
    probed: Sequence[int] = ()
    fruitless: int = 0

    def begin(self, work: Work, worker: Any) -> Future[Any]:
        """Give a worker the next thing that is to be done with this chunk."""
        if self.suspects is None:
            return work.score(worker, self.number, self.lost)
        return work.probe(worker, self.number, self.probed)

    def died(self, size: int) -> None:
        """A worker has died at it."""
        if self.suspects is None:
            self.deaths += 1
            if self.deaths == _DEATHS:
                self.suspects = [i for i in range(size) if i not in self.lost]
                self.probed = ()  # whether a worker lives that is given nothing
        elif not self.probed:
            raise OutputError(
                f"workers die at chunk {self.number} even without its images; see why in their "
                f"logs (out of memory?), then {self.remedy}"
            )
        elif len(self.probed) == 1:
            self.lost[self.probed[0]] = "every process that scored it crashed (out of memory?)"
            self.suspects, self.deaths = None, 0
        else:
            self.suspects = self.probed
            self._halve()

    def survived(self) -> None:
        """A worker has lived through what was probed."""
        assert self.suspects is not None
        left = [i for i in self.suspects if i not in set(self.probed)]
        if left:
            self.suspects = left
            self._halve()
            return
        self.fruitless += 1
        self.suspects, self.deaths = None, 0
        if self.fruitless == _FRUITLESS:
            raise OutputError(
                f"chunk {self.number} crashed {_FRUITLESS * _DEATHS} workers, but no single image "
                f"of it does; see why in their logs (out of memory?), then {self.remedy}"
            )

    def _halve(self) -> None:
        assert self.suspects is not None
        self.probed = self.suspects[: (len(self.suspects) + 1) // 2]


def dispatch(
    chunks: Iterable[int],
    sizes: Sequence[int],
    work: Work,
    room: Callable[[], int],
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    remedy: str = "continue with --resume",
) -> None:
    """Have chunks done by as many workers as there is room for.

    Args:
        chunks: their numbers.
        sizes: images in each chunk of the manifest.
        work: what is to be done.
        room: how many workers there may be now, which may change all the time.
        stopped: asked all the time; what is in hand is then given up.
        progress: called with images done, and how many there are to do.
        remedy: what to do once it is mended that workers die.

    Raises:
        AnomalyError: a worker has met it, or workers die whatever they are given; what was taken
            remains.
    """
    waiting = deque(_Chunk(chunk, remedy) for chunk in chunks)
    total, done = sum(sizes[chunk.number] for chunk in waiting), 0
    idle: list[Any] = []
    busy: dict[Future[Any], tuple[Any, _Chunk]] = {}
    try:
        while (waiting or busy) and not stopped():
            while waiting and (idle or len(busy) < max(1, room())):
                worker, chunk = idle.pop() if idle else work.hire(), waiting.popleft()
                busy[chunk.begin(work, worker)] = worker, chunk
            while idle and not waiting:  # a worker that waits for its place gets it
                work.release(idle.pop())
            for future in wait(busy, _WAIT, FIRST_COMPLETED).done:
                worker, chunk = busy.pop(future)
                try:
                    result = future.result()
                except WorkerDied:
                    worker.stop()
                    chunk.died(sizes[chunk.number])
                    waiting.appendleft(chunk)
                    continue
                except BaseException:
                    worker.stop()
                    raise
                idle.append(worker)
                if chunk.suspects is not None:
                    chunk.survived()
                    waiting.appendleft(chunk)
                    continue
                work.take(chunk.number, result)
                done += sizes[chunk.number]
                progress(done, total)
    finally:
        for worker in idle:
            work.release(worker)
        for worker, _ in busy.values():
            worker.stop()
