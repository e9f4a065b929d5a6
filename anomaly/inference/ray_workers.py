"""Ray actors that score chunks: each loads the model once and writes its parts itself.

Ray Core alone: an actor is hired again where one has died, by `anomaly.inference.dispatch`, and
Ray itself neither restarts nor retries anything.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anomaly.datasets.image_manifest import read_manifest
from anomaly.errors import AnomalyError, DataError
from anomaly.inference.dispatch import Worker, WorkerDied
from anomaly.inference.outputs import ShardPictures
from anomaly.inference.shards import infer_shard, probe
from anomaly.runtime import cores

_LOCAL = "local"


@dataclass(frozen=True)
class RayJob:
    """What every worker has to know; paths as they are on all machines.

    Attributes:
        model: model or run folder.
        manifest: the list of images.
        dest: where parts and pictures go.
        device: as `--device`.
        precision: instead of the model's own; None for that.
        threads: of each worker.
        pictures: which to write.
    """

    model: str
    manifest: str
    dest: str
    device: str = "auto"
    precision: str | None = None
    threads: int = 1
    pictures: ShardPictures = field(default_factory=ShardPictures)


class _Scorer:
    """The actor. Its model is loaded by the first call, so that errors come back as they are."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._begun = False

    def about(self) -> dict[str, Any]:
        """What its rows depend on."""
        self._begin()
        return self._about

    def score(self, chunk: int, about: Mapping[str, Any], lost: Mapping[int, str]) -> Counter[str]:
        """Score a chunk and write its part.

        Raises:
            DataError: its model, version or device isn't that of the job.
        """
        self._begin()
        if other := [key for key in about if self._about.get(key) != about[key]]:
            raise DataError(
                f"the worker on {socket.gethostname()} has another {', '.join(other)} than the job "
                f"({self._about.get(other[0])!r}, not {about[other[0]]!r}); all machines need the "
                "same model folder, program and device"
            )
        where = (self._model, self._manifest, [chunk], self._job.dest, self._outputs, about)
        return infer_shard(*where, self._decoders, lost=lost)

    def probe(self, chunk: int, images: Sequence[int]) -> Counter[str]:
        """Score some images of a chunk and keep nothing."""
        self._begin()
        probe(self._model, self._manifest, chunk, images, self._decoders)
        return Counter()

    def _begin(self) -> None:
        if self._begun:
            return
        import cv2

        from anomaly.imaging.decoder_pool import Decoders
        from anomaly.model.checkpoint import load
        from anomaly.runtime import use_threads

        job = self._job
        use_threads(job.threads)
        cv2.setNumThreads(1)
        self._manifest = read_manifest(job.manifest)
        self._model = load(job.model, job.device, job.precision)
        self._folder = tempfile.TemporaryDirectory(prefix="anomaly-out-")
        folder = Path(self._folder.name)
        self._outputs = job.pictures.outputs(self._model, job.dest, folder)
        self._about = self._outputs.about(self._model, self._manifest.id)
        self._decoders = Decoders(job.threads).__enter__()
        self._begun = True


class RayWorkers:
    """The workers of a job on a Ray cluster; `joined` makes one.

    Args:
        job: what each of them has to know.
        most: how many there may be; None for as many as the cluster has room for.
    """

    def __init__(self, job: RayJob, most: int | None) -> None:
        self._job = job
        self._most = most
        gpus = int(job.device == "cuda")
        options = {"num_cpus": job.threads, "num_gpus": gpus, "max_restarts": 0}
        self._actor = _ray().remote(**options)(_Scorer)
        self._about: dict[str, Any] = {}
        self._first: _RayWorker | None = None

    def about(self, stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """What the rows depend on, as the first worker says; None if it is stopped before.

        Raises:
            AnomalyError: it has met it, or has died.
        """
        self._first = _RayWorker(self._actor.remote(self._job), self._about)
        asked = self._first.ask_about()
        while not stopped():
            with suppress(TimeoutError):
                try:
                    self._about.update(asked.result(1.0))
                except WorkerDied as error:
                    raise AnomalyError(
                        f"the first worker died while it loaded the model ({error}); see why in "
                        "Ray's logs"
                    ) from None
                return self._about
        return None

    def room(self) -> int:
        """How many workers the cluster has room for now."""
        there = int(_ray().cluster_resources().get("CPU", 0)) // self._job.threads
        return there if self._most is None else min(there, self._most)

    def hire(self) -> Worker:
        """A worker; it waits for its place."""
        first, self._first = self._first, None
        return first or _RayWorker(self._actor.remote(self._job), self._about)


class _RayWorker:
    def __init__(self, actor: Any, about: Mapping[str, Any]) -> None:
        self._actor = actor
        self._about = about

    def ask_about(self) -> Future[dict[str, Any]]:
        """What its rows depend on."""
        return _told(self._actor.about.remote())

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        """See `Worker`."""
        return _told(self._actor.score.remote(chunk, self._about, lost))

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        """See `Worker`."""
        return _told(self._actor.probe.remote(chunk, images))

    def stop(self) -> None:
        """See `Worker`."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)


def _ray() -> Any:
    """Ray, whose decorators and functions have no types that hold."""
    import ray

    return ray


def _told(reference: Any) -> Future[Any]:
    """A Ray result as a future that raises what `Worker` promises."""
    told: Future[Any] = Future()
    reference.future().add_done_callback(partial(_tell, told))
    return told


def _tell(told: Future[Any], found: Future[Any]) -> None:
    import ray

    error = found.exception()
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


@contextmanager
def joined(address: str, job: RayJob, most: int | None) -> Iterator[RayWorkers]:
    """Join a Ray cluster, or start one on this machine that ends with the block.

    Args:
        address: `local`, or that of a cluster: `auto`, `HOST:PORT`, `ray://HOST:PORT`.
        job: what the workers have to know.
        most: how many there may be; None for as many as there is room for.

    Raises:
        AnomalyError: Ray isn't installed, or no cluster answers there.
    """
    try:
        import ray
    except ImportError:
        raise AnomalyError("--ray needs Ray: pip install 'anomaly[ray]'") from None
    # Workers' own lines would break into the progress line; a job sends nobody statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        count = most or max(1, cores() // job.threads)
        options |= {"num_cpus": count * job.threads, "include_dashboard": False}
    try:
        ray.init(address, **options)
    except (ConnectionError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        raise AnomalyError(
            f"no Ray cluster answers at {address} ({type(error).__name__}); start one with "
            "'ray start --head', or give --ray local"
        ) from None
    try:
        yield RayWorkers(job, most)
    finally:
        ray.shutdown()
