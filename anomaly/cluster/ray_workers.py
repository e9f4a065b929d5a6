"""Ray actors that score chunks: each loads the model once and writes its parts itself."""

from __future__ import annotations

import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anomaly.cluster.actors import Actor, Cluster, Worker, WorkerDied
from anomaly.cluster.shards import infer_shard, probe, shard_outputs
from anomaly.datasets.image_manifest import read_manifest
from anomaly.errors import AnomalyError, DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.inference.outputs import OutputOptions
from anomaly.runtime.threads import use_threads
from anomaly.storage.load import load


@dataclass(frozen=True)
class RayJob:
    """What every worker has to know; paths as they are on all machines.

    Attributes:
        model: model or run folder.
        manifest: the list of images.
        dest: where parts and pictures go.
        outputs: what to write.
        device: as `--device`.
        precision: instead of the model's own; None for that.
        product: that all images show, where there are models of several; None tells each image's.
        threads: of each worker.
    """

    model: str
    manifest: str
    dest: str
    outputs: OutputOptions
    device: str = "auto"
    precision: str | None = None
    product: str | None = None
    threads: int = 1


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
        dest = self._job.dest
        # Of this chunk alone: a worker is ended without a word, and would leave its folder behind.
        with tempfile.TemporaryDirectory(prefix="anomaly-out-") as folder:
            outputs = shard_outputs(self._job.outputs, self._model, dest, Path(folder))
            where = (self._model, self._manifest, [chunk], dest, outputs, about)
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

        job = self._job
        use_threads(job.threads)
        cv2.setNumThreads(1)
        self._manifest = read_manifest(job.manifest)
        self._model = load(job.model, job.device, job.precision, job.product)
        outputs = shard_outputs(job.outputs, self._model, job.dest, Path())
        self._about = outputs.about(self._model, self._manifest.id)
        self._decoders = Decoders(job.threads).__enter__()
        self._begun = True


class RayWorkers:
    """The workers of a job on a Ray cluster.

    Args:
        cluster: where they run.
        job: what each of them has to know.
    """

    def __init__(self, cluster: Cluster, job: RayJob) -> None:
        self._cluster = cluster
        self._job = job
        self._about: dict[str, Any] = {}
        self._first: Actor | None = None

    def about(self, stopped: Callable[[], bool]) -> dict[str, Any] | None:
        """What the rows depend on, as the first worker says; None if it is stopped before.

        Raises:
            AnomalyError: it has met it, or has died.
        """
        self._first = self._cluster.start(_Scorer, self._job)
        asked = self._first.ask("about")
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

    def hire(self) -> Worker:
        """A worker; it waits for its place."""
        first, self._first = self._first, None
        return _RayWorker(first or self._cluster.start(_Scorer, self._job), self._about)


class _RayWorker:
    def __init__(self, actor: Actor, about: Mapping[str, Any]) -> None:
        self._actor = actor
        self._about = about
        self.stop = actor.stop

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        """Have the actor score a chunk and write its part; counts its images by status."""
        return self._actor.ask("score", chunk, self._about, lost)

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        """Have the actor load some images of a chunk, to see whether it survives them."""
        return self._actor.ask("probe", chunk, images)
