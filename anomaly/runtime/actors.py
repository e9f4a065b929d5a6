"""Ray actors: processes on the machines of a cluster.

Ray Core alone, and it neither restarts nor retries anything: an actor that has died is replaced by
`anomaly.runtime.dispatch`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from anomaly.errors import AnomalyError, DataError
from anomaly.runtime.dispatch import WorkerDied
from anomaly.runtime.threads import cores

log = logging.getLogger(__name__)

_LOCAL = "local"

Result = TypeVar("Result")


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
        told: Future[Any] = Future()
        reference = getattr(self._handle, method).remote(*arguments)
        reference.future().add_done_callback(partial(_tell, told))
        return told

    def stop(self) -> None:
        """End it."""
        ray = _ray()
        with suppress(ray.exceptions.RayError):
            ray.kill(self._handle)


def then(asked: Future[Any], after: Callable[[Any], Result]) -> Future[Result]:
    """What a function makes of an answer to come.

    Args:
        asked: the answer to come.
        after: called with it, in the thread that it comes in.

    Returns:
        What `after` returns; raises what it or `asked` raises.
    """
    made: Future[Result] = Future()

    def tell(found: Future[Any]) -> None:
        try:
            result = after(found.result())
        except BaseException as error:  # whoever waits has to be told
            made.set_exception(error)
        else:
            made.set_result(result)

    asked.add_done_callback(tell)
    return made


def _tell(told: Future[Any], found: Future[Any]) -> None:
    ray, error = _ray(), found.exception()
    if error is None:
        told.set_result(found.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            cause = DataError(
                f"a machine of the cluster lacks {cause.name}; install anomaly there as it is here"
            )
        told.set_exception(cause)
    elif "No module named 'anomaly" in str(error):
        told.set_exception(
            DataError("a machine of the cluster lacks anomaly; install it there as it is here")
        )
    else:
        told.set_exception(WorkerDied(type(error).__name__))


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
