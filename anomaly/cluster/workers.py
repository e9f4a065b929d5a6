"""Processes on Ray, any of which may die; work that is shared out among them; scores by them.

To score, the command's own process decodes, gathers batches, draws and writes, as without a
cluster; workers compute. So batches, and with them rows, are those of one process, and only it
needs the images.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import cv2

from anomaly.errors import AnomalyError, DataError, ModelError, OutputError
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.inference.outputs import about_model
from anomaly.runtime import StoppedError, cores, use_threads
from anomaly.scoring.model import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.load import load_model

log = logging.getLogger(__name__)

_LOCAL = "local"


class WorkerDied(Exception):  # noqa: N818, no mistake of anybody's
    """The worker's process, or its machine, is gone."""


class Cluster:
    """A Ray cluster, each of whose actors has a processor; `joined` makes one.

    Args:
        device: `cpu`, or `cuda`, where each actor has a GPU, too.
    """

    def __init__(self, device: str) -> None:
        self._gpus = int(device == "cuda")

    def room(self) -> int:
        """How many actors there may be now: more would wait for a processor or a GPU for ever."""
        needs = ("CPU", "GPU") if self._gpus else ("CPU",)
        machines = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        # None is spread over two machines.
        return sum(min(int(there.get(kind, 0)) for kind in needs) for there in machines)

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
        remote = _ray().remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)
        return Actor(remote(kind).remote(*arguments))


class Actor:
    """An actor of a cluster.

    Attributes:
        placed: whether it runs: it has answered once.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.placed = False

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
    error = rays.exception()
    if error is None:
        answer.set_result(rays.result())
        return
    of_method = isinstance(error, _ray().exceptions.RayTaskError)
    cause = error.cause if of_method else WorkerDied(type(error).__name__)  # type: ignore[attr-defined]
    if isinstance(cause, ModuleNotFoundError) or "No module named 'anomaly" in str(error):
        lacking = getattr(cause, "name", None) or "anomaly"
        cause = DataError(
            f"a machine of the cluster lacks {lacking}; install anomaly there as it is here"
        )
    answer.set_exception(cause)


def _ray() -> Any:
    """Ray, whose decorators and functions have no types that hold."""
    import ray

    return ray


@contextmanager
def joined(address: str, device: str) -> Iterator[Cluster]:
    """Join a Ray cluster, or start one on this machine that ends with the block.

    Args:
        address: `local`, or that of a cluster: `auto`, `HOST:PORT`, `ray://HOST:PORT`.
        device: `cpu`, or `cuda`, where each actor has a GPU.

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
        options |= {"num_cpus": cores(), "include_dashboard": False}
    stopping = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **options)
    except Exception as error:  # Ray raises any kind, where it doesn't start in time that very one
        remedy = "start one with 'ray start --head', or give --ray local"
        if address == _LOCAL:
            remedy = "see why in Ray's logs (too much to do, too little memory?), and try again"
        raise AnomalyError(
            f"no Ray cluster answers at {address} ({type(error).__name__}); {remedy}"
        ) from None
    with suppress(ValueError):  # not in the main thread, where Ray takes no signal
        signal.signal(signal.SIGTERM, stopping)
    try:
        cluster = Cluster(device)
        if not cluster.room():
            if address == _LOCAL:  # has as many processors as were asked for
                raise AnomalyError("Ray finds no GPU on this machine; leave --device cuda out")
            log.warning(
                "no machine of the cluster at %s has a free %s; waiting until one joins",
                address,
                "GPU" if device == "cuda" else "processor",
            )
        yield cluster
    finally:
        ray.shutdown()


# Why an image is lost.
CRASHED = "every process that handled it crashed (out of memory?)"
_AHEAD = 3  # units for each worker that may be begun, or done, before the first isn't done
_DEATHS = 2  # of workers at the same images
_SEARCHES = 2  # among a unit's images, for one that ends workers
_DIED = object()  # instead of an answer
_WAIT = 1.0  # seconds until it is asked again whether to stop, and whether there is room

# Has a worker handle some images, which may be none.
Ask: TypeAlias = "Callable[[Actor, Sequence[Any]], Future[Any]]"


class Done(NamedTuple):
    """A unit's result.

    Attributes:
        result: what the worker made of its images, without the lost ones.
        lost: places of the images that end workers.
    """

    result: Any
    lost: list[int]


class _Unit:
    """Images that one worker handles together, with what is to be done with them next.

    Args:
        images: what stands for each.

    Attributes:
        wanted: the images that the next worker is given.
        done: the result, once there is one.
    """

    def __init__(self, images: Sequence[Any]) -> None:
        self._steps = _handling(images)
        self.wanted: list[Any] = next(self._steps)
        self.done: Done | None = None

    def take(self, answer: Future[Any]) -> None:
        """Go on with a worker's answer.

        Raises:
            OutputError: workers die, and that isn't the images' fault.
        """
        try:
            try:
                result = answer.result()
            except WorkerDied as error:
                self.wanted = self._steps.throw(error)
            else:
                self.wanted = self._steps.send(result)
        except StopIteration as end:
            self.done = end.value


def _handling(images: Sequence[Any]) -> Generator[list[Any], Any, Done]:
    """The steps of a unit: yields what a worker is to be given, and is sent its answer.

    Where workers die at the images, each is handled alone: so one is found that ends workers.
    """
    lost: list[int] = []
    for search in range(_SEARCHES + 1):
        kept = [place for place in range(len(images)) if place not in lost]
        result = yield from _handled([images[place] for place in kept])
        if result is not _DIED:
            return Done(result, lost)
        if search == _SEARCHES:
            break
        if (yield from _handled([])) is _DIED:
            raise OutputError(
                "workers die even when they are given no image; see why in Ray's logs (out of "
                "memory?)"
            )
        for place in kept:
            answer = yield from _handled([images[place]])
            if answer is _DIED:
                lost.append(place)
    raise OutputError(
        f"{len(images)} images crashed {_DEATHS * (_SEARCHES + 1)} workers, but none of them does "
        "so alone; see why in Ray's logs (out of memory?)"
    )


def _handled(images: list[Any]) -> Generator[list[Any], Any, Any]:
    """Give images to one worker after another; what the first survivor answers, or `_DIED`."""
    for _ in range(_DEATHS):
        try:
            return (yield images)
        except WorkerDied:
            continue
    return _DIED


class Workers:
    """Actors of one class, hired as there is room for them; any may die.

    Args:
        cluster: where they are.
        kind: their class, see `Cluster.start`.
        arguments: of its constructor.
    """

    def __init__(self, cluster: Cluster, kind: type, *arguments: Any) -> None:
        self._cluster = cluster
        self._kind = kind
        self._arguments = arguments
        self._idle: list[Actor] = []
        self._busy: dict[Future[Any], tuple[Actor, _Unit]] = {}

    def share_out(
        self,
        units: Iterable[Sequence[Any]],
        ask: Ask,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Done]:
        """Have units of images handled, each by one worker.

        Args:
            units: images that belong together; read a bounded number ahead.
            ask: has a worker handle the images of a unit, or some of them.
            stopped: asked all the time.

        Yields:
            What came of each unit, in order.

        Raises:
            StoppedError: `stopped` has said so; what is in hand is given up.
            AnomalyError: a worker has met it, or workers die whatever they are given.
        """
        rest = map(_Unit, units)
        begun: deque[_Unit] = deque()  # in order, until they are yielded
        waiting: deque[_Unit] = deque()
        try:
            while True:
                room = max(1, self._cluster.room())
                while not waiting and len(begun) < _AHEAD * room and (unit := next(rest, None)):
                    begun.append(unit)
                    waiting.append(unit)
                    self._give(waiting, ask, room)
                self._give(waiting, ask, room)
                if not begun:
                    return
                while begun and (done := begun[0].done) is not None:
                    begun.popleft()
                    yield done
                if stopped():
                    raise StoppedError
                if begun:
                    waiting.extendleft(self._answers())
        finally:
            for worker, _ in self._busy.values():
                worker.stop()
            self._busy.clear()

    def _give(self, waiting: deque[_Unit], ask: Ask, room: int) -> None:
        """Give units to workers, as far as there are any or there is room for more."""
        while waiting and (self._idle or len(self._busy) < room):
            if not self._idle:
                self._idle.append(self._cluster.start(self._kind, *self._arguments))
            worker, unit = self._idle.pop(), waiting.popleft()
            self._busy[ask(worker, unit.wanted)] = worker, unit

    def _answers(self) -> list[_Unit]:
        """Wait for workers; the units that something is still to be done with."""
        finished = wait(self._busy, _WAIT, FIRST_COMPLETED).done
        if not finished and not all(worker.placed for worker, _ in self._busy.values()):
            self.close()  # one may wait for the place that another, idle one has
        again = []
        for future in finished:
            worker, unit = self._busy.pop(future)
            if future.exception() is None:
                worker.placed = True
                self._idle.append(worker)
            else:
                worker.stop()
            unit.take(future)
            if unit.done is None:
                again.append(unit)
        return again

    def close(self) -> None:
        """End the workers that have nothing to do."""
        while self._idle:
            self._idle.pop().stop()


def predict(
    cluster: Cluster,
    model: Model,
    stopped: Callable[[], bool],
    batches: Iterable[list[NetworkInput] | UnusableImage],
) -> Iterator[Prediction | UnusableImage]:
    """Have a cluster's workers score batches, instead of `Model.predict_batches`.

    Args:
        cluster: where the workers are.
        model: loaded from a folder that all machines see.
        stopped: asked all the time.
        batches: as `by_shape` gathers them.
    """
    assert model.folder is not None
    begun: deque[list[NetworkInput] | UnusableImage] = deque()

    def usable() -> Iterator[list[NetworkInput]]:
        for batch in batches:
            begun.append(batch)
            if not isinstance(batch, UnusableImage):
                yield batch

    needs = model.folder.resolve(), model.device.type, about_model(model)
    with closing(Workers(cluster, ScoringWorker, *needs)) as workers:
        for results, lost in workers.share_out(
            usable(), lambda actor, batch: actor.ask("predict", batch), stopped
        ):
            while isinstance(batch := begun.popleft(), UnusableImage):
                yield batch
            scored = iter(results)
            for place, item in enumerate(batch):
                crashed = UnusableImage(item.index, "failed", f"{item.name}: {CRASHED}")
                yield crashed if place in lost else next(scored)
    for refused in begun:
        assert isinstance(refused, UnusableImage)
        yield refused


class ScoringWorker:
    """The actor. Its model is loaded by the first call, so that errors come back as they are.

    Args:
        folder: the model folder, as it is on all machines.
        device: `cpu` or `cuda`.
        about: what scores depend on, see `about_model`.
    """

    def __init__(self, folder: Path, device: str, about: Mapping[str, object]) -> None:
        self._folder, self._device, self._about = folder, device, about
        self._model: Model | None = None

    def predict(self, batch: list[NetworkInput]) -> list[Prediction | UnusableImage]:
        """Score a batch, which may be empty.

        Raises:
            DataError: the model, program or device isn't that of the command.
        """
        self._model = model = self._model or self._load()
        results = model.predict_batches([batch] if batch else [])
        return [r if isinstance(r, UnusableImage) else replace(r, image=None) for r in results]

    def _load(self) -> Model:
        host, expected = socket.gethostname(), self._about
        use_threads(1)
        cv2.setNumThreads(1)
        try:
            model = load_model(self._folder, self._device)
        except ModelError as error:
            raise ModelError(
                f"the worker on {host}: {error} (all machines need the model folder)"
            ) from None
        about = about_model(model)
        if other := [key for key in about if about[key] != expected[key]]:
            raise DataError(
                f"the worker on {host} has another {', '.join(other)} than this command "
                f"({about[other[0]]!r}, not {expected[other[0]]!r}); all machines need the same "
                "model folder, program and device"
            )
        return model
