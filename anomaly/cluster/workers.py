"""Workers on Ray that compute scores and features of training images; any of them may die.

To score, the command's own process decodes, gathers batches, draws and writes, as without a
cluster; workers compute. So batches, and with them rows, are those of one process, and only it
needs the images.

To train, images are cut into shards of a fixed number, whatever the workers. A worker leaves a
shard's feature maps in the run's folder, which all machines see, so that any other one can go on
with them. Beside them it leaves the projected patches from which a bank is selected: the command
reads these in the order of the images, as on one machine. Methods that take sums read the features
in the command's process, in the same order. So the model is the same with and without a cluster.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import cv2

from anomaly.datasets.samples import none_usable
from anomaly.errors import AnomalyError, DataError, ModelError, OutputError
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.imaging.read import Image
from anomaly.inference.results import about_model
from anomaly.methods.base import PatchSet, Result, Scorer
from anomaly.runtime import Progress, StoppedError, cores, device_of, use_threads
from anomaly.scoring.model import Model, Prediction
from anomaly.storage.models import load_model
from anomaly.training.features import CachedFeatures, HeldOutScores, TrainingSetup, cached_features

log = logging.getLogger(__name__)

_LOCAL = "local"


class WorkerDied(Exception):  # noqa: N818, nobody made a mistake
    """The worker's process, or its machine, is gone."""


class Cluster:
    """A Ray cluster that gives each actor a processor and, for `cuda`, a GPU; see `joined`."""

    def __init__(self, device: str) -> None:
        self._gpus = int(device == "cuda")

    def room(self) -> int:
        """Largest number of actors that the living machines can run at once, busy ones included."""
        needs = ("CPU", "GPU") if self._gpus else ("CPU",)
        machines = [node["Resources"] for node in _ray().nodes() if node["Alive"]]
        # An actor needs its processor and its GPU on one machine.
        return sum(min(int(resources.get(kind, 0)) for kind in needs) for resources in machines)

    def put(self, value: Any) -> Any:
        """Store a value in the cluster; its reference, returned, stands for it in arguments."""
        return _ray().put(value)

    def start(self, kind: type, *arguments: Any) -> Actor:
        """Start an actor; returns at once, also while the actor waits for a processor.

        Args:
            kind: a class on the module level.
            arguments: the constructor's arguments. The constructor should only keep them: Ray
                reports its errors without the place that raised them.
        """
        remote = _ray().remote(num_cpus=1, num_gpus=self._gpus, max_restarts=0)
        return Actor(remote(kind).remote(*arguments))


class Actor:
    """An actor of a cluster.

    Attributes:
        placed: true once the actor has answered: it has its processor.
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
        """End the actor's process."""
        ray = _ray()
        with suppress(ray.exceptions.RayError):
            ray.kill(self._handle)


def _pass_on(answer: Future[Any], ray_future: Future[Any]) -> None:
    """Copy the result or error of Ray's finished future into the future that callers wait for.

    The error is the method's own, `WorkerDied` where the process is gone, or DataError where a
    machine lacks a package.
    """
    error = ray_future.exception()
    if error is None:
        answer.set_result(ray_future.result())
        return
    from_method = isinstance(error, _ray().exceptions.RayTaskError)
    cause = error.cause if from_method else WorkerDied(type(error).__name__)  # type: ignore[attr-defined]
    if isinstance(cause, ModuleNotFoundError) or "No module named 'anomaly" in str(error):
        lacking = getattr(cause, "name", None) or "anomaly"
        cause = DataError(
            f"a machine of the cluster lacks {lacking}; install anomaly there as it is here"
        )
    answer.set_exception(cause)


def _ray() -> Any:
    """The module `ray`, untyped: its own annotations are wrong."""
    import ray  # optional, and slow to import

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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to Ray's makers
    # Workers' own lines would break into the progress line.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        options |= {"num_cpus": cores(), "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        ray.init(address, **options)
    except Exception as error:  # Ray raises many types, this one if it starts too slowly
        remedy = "start one with 'ray start --head', or give --ray local"
        if address == _LOCAL:
            remedy = "see why in Ray's logs (too much to do, too little memory?), and try again"
        raise AnomalyError(
            f"no Ray cluster answers at {address} ({type(error).__name__}); {remedy}"
        ) from None
    with suppress(ValueError):  # not in the main thread, where Ray takes no signal
        signal.signal(signal.SIGTERM, handler)
    try:
        cluster = Cluster(device)
        if not cluster.room():
            if address == _LOCAL:  # which always has a processor
                raise AnomalyError("Ray finds no GPU on this machine; leave --device cuda out")
            kind = "GPU" if device == "cuda" else "processor"
            problem = "no machine of the cluster at %s has a free %s; waiting until one joins"
            log.warning(problem, address, kind)
        yield cluster
    finally:
        ray.shutdown()


# Reason why an image at which workers died is refused.
CRASHED = "every process that handled it crashed (out of memory?)"
# Units in progress for each worker: results are yielded in order, so a slow one holds up others.
_AHEAD = 3
_DEATHS = 2  # workers to try on the same images: the first may have died for another reason
_DIED = object()  # stands for the answer of a worker that died
_WAIT = 1.0  # seconds between two looks at the stop signal and at the cluster's room

# Sends images to an actor; with none, it only shows that the actor lives.
Ask: TypeAlias = "Callable[[Actor, Sequence[Any]], Future[Any]]"


class Done(NamedTuple):
    """A unit's result.

    Attributes:
        result: the worker's result for the images that aren't lost.
        lost: positions in the unit of the images at which workers die.
    """

    result: Any
    lost: list[int]


class _Unit:
    """Images that one worker handles together, and the next step of handling them.

    Attributes:
        images: the images for the next worker: all of the unit's, some, or none.
        done: the unit's result; None until it is complete.
    """

    def __init__(self, images: Sequence[Any]) -> None:
        self._steps = _steps_of(images)
        self.images: list[Any] = next(self._steps)
        self.done: Done | None = None

    def advance(self, answer: Future[Any]) -> None:
        """Take the next step with a worker's finished answer.

        Raises:
            OutputError: workers die, and no single image causes it.
            Exception: the error of the actor's method.
        """
        try:
            self.images = self._steps.send(answer)
        except StopIteration as end:
            self.done = end.value


def _steps_of(images: Sequence[Any]) -> Generator[list[Any], Future[Any], Done]:
    """The steps of a unit: yields images for a worker, is sent its answer, returns the result.

    Where workers die at the images, each image is tried alone, then those without a death together.
    """
    lost: list[int] = []
    result = yield from _answered(list(images))
    if result is _DIED:
        # Without images workers die only of another fault.
        if (yield from _answered([])) is _DIED:
            raise OutputError(
                "workers die even when they are given no image; see why in Ray's logs (out of "
                "memory?)"
            )
        for place, image in enumerate(images):
            if (yield from _answered([image])) is _DIED:
                lost.append(place)
        result = yield from _answered([images[i] for i in range(len(images)) if i not in lost])
    if result is _DIED:
        raise OutputError(
            f"{len(images)} images crashed {2 * _DEATHS} workers, but none of them does so alone; "
            "see why in Ray's logs (out of memory?)"
        )
    return Done(result, lost)


def _answered(images: list[Any]) -> Generator[list[Any], Future[Any], Any]:
    """Give images to `_DEATHS` workers in turn; returns the first answer, `_DIED` if all die."""
    for _ in range(_DEATHS):
        answer = yield images
        with suppress(WorkerDied):
            return answer.result()
    return _DIED


class Workers:
    """Actors of one class, started as the cluster has room for them; any may die.

    Args:
        cluster: the cluster that the actors run on.
        kind: the actors' class, see `Cluster.start`.
        arguments: the arguments of each actor's constructor.
    """

    def __init__(self, cluster: Cluster, kind: type, *arguments: Any) -> None:
        self._cluster, self._kind, self._arguments = cluster, kind, arguments
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
            units: images that belong together; at most `_AHEAD` units a worker are read ahead.
            ask: sends the images of a unit, some of them, or none to a worker.
            stopped: called at least once a second; true ends the work.

        Yields:
            Each unit's result, in order.

        Raises:
            StoppedError: `stopped` returned true; units in progress are given up.
            AnomalyError: a worker raised it, or workers die and no single image causes it.
        """
        unread = map(_Unit, units)
        begun: deque[_Unit] = deque()  # units read and not yet yielded, in order
        waiting: deque[_Unit] = deque()  # units that no worker has at the moment
        try:
            while True:
                room = max(1, self._cluster.room())  # without machines, an actor waits for one
                # Each unit is given out before the next is read: reading may decode images.
                while not waiting and len(begun) < _AHEAD * room and (unit := next(unread, None)):
                    begun.append(unit)
                    waiting.append(unit)
                    self._give(waiting, ask, room)
                self._give(waiting, ask, room)  # also units that need a further step
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
        """Give waiting units to idle workers, and to new ones while the cluster has room."""
        while waiting and (self._idle or len(self._busy) < room):
            if not self._idle:
                self._idle.append(self._cluster.start(self._kind, *self._arguments))
            worker, unit = self._idle.pop(), waiting.popleft()
            self._busy[ask(worker, unit.images)] = worker, unit

    def _answers(self) -> list[_Unit]:
        """Units that need a further step, from the answers that come within `_WAIT` seconds."""
        finished = wait(self._busy, _WAIT, FIRST_COMPLETED).done
        if not finished and not all(worker.placed for worker, _ in self._busy.values()):
            self.close()  # an idle worker may hold the place that a new one waits for
        unfinished = []
        for future in finished:
            worker, unit = self._busy.pop(future)
            if future.exception() is None:
                worker.placed = True
                self._idle.append(worker)
            else:
                worker.stop()
            unit.advance(future)
            if unit.done is None:
                unfinished.append(unit)
        return unfinished

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
    """Predictions of a cluster's workers, in order, as `Model.predict_batches` gives them.

    Args:
        cluster: the cluster that the workers run on.
        model: a model loaded from a folder that all machines see.
        stopped: called at least once a second; true ends the work.
        batches: batches of images of one size, from `by_shape`, and images that can't be used.

    Yields:
        A prediction for each image, or the reason why there is none.

    Raises:
        StoppedError: `stopped` returned true.
        AnomalyError: a worker raised it, or workers die even without an image.
    """
    assert model.folder is not None  # the command has loaded it from there
    begun: deque[list[NetworkInput] | UnusableImage] = deque()

    def units() -> Iterator[list[NetworkInput]]:
        for batch in batches:
            begun.append(batch)
            # An empty unit keeps the place of an image that can't be used.
            yield [] if isinstance(batch, UnusableImage) else batch

    arguments = model.folder.resolve(), model.device.type, about_model(model)
    with closing(Workers(cluster, ScoringWorker, *arguments)) as workers:
        for results, lost in workers.share_out(
            units(), lambda actor, batch: actor.ask("predict", batch), stopped
        ):
            if isinstance(batch := begun.popleft(), UnusableImage):
                yield batch
                continue
            scored = iter(results)
            for place, item in enumerate(batch):
                crashed = UnusableImage(item.index, "failed", f"{item.name}: {CRASHED}")
                yield crashed if place in lost else next(scored)


class ScoringWorker:
    """Actor that scores batches; its first call loads the model, so that callers get its errors.

    Args:
        folder: the model folder, at the same path on all machines.
        device: `cpu` or `cuda`.
        about: the facts that scores depend on, from the command's own `about_model`.
    """

    def __init__(self, folder: Path, device: str, about: Mapping[str, object]) -> None:
        self._folder, self._device, self._about = folder, device, about
        self._model: Model | None = None

    def predict(self, batch: list[NetworkInput]) -> list[Prediction | UnusableImage]:
        """Score a batch, which may be empty; predictions come without the decoded images.

        Raises:
            ModelError: this machine doesn't see the model folder.
            DataError: the model, program or device isn't that of the command.
        """
        self._model = model = self._model or self._load()
        results = model.predict_batches([batch] if batch else [])
        return [r if isinstance(r, UnusableImage) else replace(r, image=None) for r in results]

    def _load(self) -> Model:
        """Load the model, and check that it is the command's, as are program and device."""
        host, expected = socket.gethostname(), self._about
        _use_one_thread()
        try:
            model = load_model(self._folder, self._device)
        except ModelError as error:
            raise ModelError(
                f"the worker on {host}: {error} (all machines need the model folder)"
            ) from None
        about = about_model(model)
        if differing := [key for key in about if about[key] != expected[key]]:
            key = differing[0]
            raise DataError(
                f"the worker on {host} has another {', '.join(differing)} than this command "
                f"({about[key]!r}, not {expected[key]!r}); all machines need the same model "
                "folder, program and device"
            )
        return model


_SHARD_IMAGES = 64  # rounded up to whole batches, so that batches are those of one machine
_LEAST_SHARDS = 10  # fewer than 640 images make smaller shards: work for many workers
_FOLDER = "features-"


@contextmanager
def cluster_features(
    cluster: Cluster,
    setup: TrainingSetup,
    images: Mapping[int, Path | Image],
    scratch: Path,
    progress: Progress,
) -> Iterator[CachedFeatures]:
    """Features of training images, which workers compute and keep while the block runs.

    Args:
        cluster: the cluster that the workers run on.
        setup: the stages that make the embeddings, and the method's fitter.
        images: files or decoded pixels by image number, ascending.
        scratch: an existing folder that all machines see.
        progress: called with (images done, number of images).

    Raises:
        DataError: no image can be used.
        AnomalyError: a worker raised it, or workers die and no single image causes it.
    """
    for abandoned in scratch.glob(f"{_FOLDER}*"):  # by a training that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    batch = setup.embedder.max_batch_size(setup.config.batch_size)
    size = min(_SHARD_IMAGES, -(-len(images) // _LEAST_SHARDS))  # rounded up
    size = -(-size // batch) * batch  # up to whole batches
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=scratch.absolute()) as folder:
        sent = cluster.put(setup), cluster.put(images)
        # Actors are kept for all passes over the images: starting their decoders takes time.
        with closing(Workers(cluster, ShardWorker, *sent, Path(folder), Path.cwd())) as workers:
            yield _sharded(cluster, workers, images, size, progress)


def _sharded(
    cluster: Cluster,
    workers: Workers,
    images: Mapping[int, Path | Image],
    size: int,
    progress: Progress,
) -> ShardedFeatures:
    """Features of images, which workers compute and keep in shards of `size` images."""
    numbers = list(images)
    units = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    shards: list[CachedFeatures] = []
    refused: list[UnusableImage] = []
    results = workers.share_out(units, lambda actor, unit: actor.ask("learn", unit))
    for done, (unit, (features, lost)) in enumerate(zip(units, results, strict=True), 1):
        shards.append(features)
        refused += features.refused
        refused += [
            UnusableImage(unit[place], "failed", f"{images[unit[place]]}: {CRASHED}")
            for place in lost
        ]
        progress(min(done * size, len(numbers)), len(numbers))
    facts = {i: image for features in shards for i, image in features.facts.items()}
    refused.sort(key=lambda item: item.index)
    if not facts:
        raise none_usable([item.reason for item in refused])
    return ShardedFeatures(
        files=tuple(file for features in shards for file in features.files),
        points=tuple(points for features in shards for points in features.points),
        refused=tuple(refused),
        facts=facts,
        channels=max(features.channels for features in shards),  # 0 of a shard without features
        align=shards[0].align,
        region=shards[0].region,
        images=facts,
        shard=size,
        cluster=cluster,
        workers=workers,
        sources=images,
        shards=[(sorted(features.facts), cluster.put(features)) for features in shards],
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedFeatures(CachedFeatures):
    """Features of training images that workers have computed in shards, and work on.

    Attributes:
        workers: actors of `ShardWorker`.
        sources: files or decoded pixels by image number.
        shards: numbers of the usable images of each shard, ascending, and the cluster's reference
            to its `CachedFeatures`.
    """

    cluster: Cluster
    workers: Workers
    sources: Mapping[int, Path | Image]
    shards: Sequence[tuple[Sequence[int], Any]]

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """Results of a function of the patches, shard by shard, computed by workers."""
        yield from self._on_shards("apply", function)

    def scores(
        self, model: Model, progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, HeldOutScores]:
        """Scores, by number, of images that the model hasn't learned from, computed by workers."""
        known: dict[int, HeldOutScores] = {}
        # The CPU's tensors can be sent to any machine; what the scorer has derived stays here.
        for scores in self._on_shards("scores", model.scorer.to("cpu")):
            known |= scores
            progress(len(known))
        return known

    def _on_shards(self, method: str, argument: Any) -> Iterator[Any]:
        """Results of a method of `ShardWorker` for each shard that has any of the images.

        The method takes the shard's features, image numbers, and the argument. An image at which
        workers die is an AnomalyError.
        """
        sent = self.cluster.put(argument)

        def ask(actor: Actor, unit: Sequence[int]) -> Future[Any]:
            # Images are numbered from 0 without gaps. An empty unit, which only tests the worker,
            # takes any features.
            _, features = self.shards[unit[0] // self.shard if unit else 0]
            return actor.ask(method, features, unit, sent)

        selected = ([i for i in usable if i in self.images] for usable, _ in self.shards)
        units = [unit for unit in selected if unit]
        for unit, (result, lost) in zip(units, self.workers.share_out(units, ask), strict=True):
            if lost:
                raise AnomalyError(f"{self.sources[unit[lost[0]]]}: {CRASHED}; train without it")
            yield result


class ShardWorker:
    """Actor that computes, keeps and reads features.

    Its first call prepares it, so that callers get the errors.

    Args:
        setup: all stages but the scorer; its device stands for one of that type on this machine.
        images: all training images, by number.
        scratch: the folder for feature maps, which all machines see.
        folder: the command's working folder, where relative paths begin.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        images: Mapping[int, Path | Image],
        scratch: Path,
        folder: Path,
    ) -> None:
        self._setup, self._images = setup, images
        self._scratch, self._folder = scratch, folder
        self._is_prepared = False

    def learn(self, images: Sequence[int]) -> CachedFeatures:
        """Compute features of images, by number, and leave them in files.

        Raises:
            DataError: this machine sees none of several image files, or not the run's folder.
        """
        self._prepare()
        self._check_disk(images)
        # Room on the disk is checked for `total` images: by the first shard for all shards.
        total = len(self._images) if 0 in images else len(images)
        mine = {i: self._images[i] for i in images}
        # With `cluster_images` the files outlive the block; the command deletes them.
        with cached_features(self._setup, mine, self._scratch, cluster_images=total) as features:
            return features

    def _check_disk(self, images: Sequence[int]) -> None:
        """Check that this machine has the images' disk; one file alone may be missing."""
        files = [file for i in images if isinstance(file := self._images[i], Path)]
        if len(files) > 1 and not any(file.exists() for file in files):
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {files[0]}, nor any of "
                f"{len(files)} images; with --ray, all machines need the same paths"
            )

    def apply(
        self,
        features: CachedFeatures,
        images: Sequence[int],
        function: Callable[[PatchSet], Result],
    ) -> Result:
        """Result of a function of the features of some images, by number."""
        self._prepare()
        return function(features.only(images))

    def scores(
        self, features: CachedFeatures, images: Sequence[int], scorer: Scorer
    ) -> dict[int, HeldOutScores]:
        """Scores, by number, of images that the scorer hasn't learned from."""
        self._prepare()
        return features.only(images).scores(self._setup.model(scorer.to(self._setup.device)))

    def _prepare(self) -> None:
        """Set threads, device and working folder, once."""
        if self._is_prepared:
            return
        if not self._scratch.is_dir():
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {self._scratch.parent}; with --ray, "
                "the run's folder has to be on a disk that all machines share (--output)"
            )
        with suppress(OSError):  # absolute paths work without it
            os.chdir(self._folder)
        _use_one_thread()
        self._setup = replace(self._setup, device=device_of(self._setup.device.type))
        self._is_prepared = True


def _use_one_thread() -> None:
    """Compute with one thread: Ray gives each actor one processor."""
    use_threads(1)
    cv2.setNumThreads(1)
