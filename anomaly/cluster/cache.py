"""Features of training images on a cluster: workers compute and keep features, and go on with them.

Images are cut into shards of a fixed number, whatever the workers. A worker leaves a shard's
feature maps in the run's folder, which all machines see, so that it doesn't matter which one goes
on with them, or whether it lives. Beside them it leaves what a bank is selected from: that is read
here, in the order of the images, so that the selection is one machine's; whatever meets all of the
feature maps again is done by workers. Methods that take sums read the features here, in the same
order. So a model doesn't depend on there being a cluster.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2

from anomaly.cluster.actors import Actor, Cluster, Work, dispatch
from anomaly.errors import AnomalyError, DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image
from anomaly.methods.base import PatchSet, Progress, Result, Scorer
from anomaly.runtime.devices import device_of
from anomaly.runtime.parallel import use_threads
from anomaly.scoring.build import loading_of
from anomaly.scoring.pipeline import Model
from anomaly.training.cross_fitting import Suspect, Suspects, scores_of
from anomaly.training.feature_cache import (
    CachedFeatures,
    FeatureCache,
    TrainingSetup,
    joined_features,
)
from anomaly.training.fit import SharedFeaturesOf

# Images of a shard, in whole batches, so that these are as one machine's; fewer where that leaves
# workers without any.
_MOST = 64
_LEAST_SHARDS = 10
_FOLDER = "features-"
_SCORED = 16  # images at once
_Ask = Callable[[Actor, int, Any], "Future[Any]"]


def computed_by(cluster: Cluster) -> SharedFeaturesOf:
    """Have a cluster's workers compute the features of a training."""
    return lambda model, images, scratch, progress: ClusterCache(
        model, images, cluster, scratch, progress
    )


class ClusterCache:
    """A `FeatureCache` whose features are computed by workers.

    Args:
        model: whose network and alignment make the embeddings, by its settings.
        images: files, or pixels that are decoded already, by their numbers, ascending.
        cluster: where the workers are.
        scratch: an existing folder that all machines see.
        progress: called with images done, and how many there are.

    Attributes:
        shard: how many images make one.
    """

    def __init__(
        self,
        model: TrainingSetup,
        images: Mapping[int, Path | Image],
        cluster: Cluster,
        scratch: Path,
        progress: Progress,
    ) -> None:
        self._images = images
        self._cluster = cluster
        self._progress = progress
        batch = model.embedder.max_batch_size(model.config.batch_size)
        wanted = min(_MOST, -(-len(images) // _LEAST_SHARDS))
        self.shard = -(-wanted // batch) * batch
        for left in scratch.glob(f"{_FOLDER}*"):  # by a training that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._folder = tempfile.TemporaryDirectory(prefix=_FOLDER, dir=scratch.absolute())
        job = ShardJob(model, images, self.shard, cluster.threads, Path(self._folder.name))
        self._shards = job.shards()
        self._job = cluster.put(job)
        self._idle: list[Actor] = []
        self._used: list[list[int]] = []
        self._features: list[Any] = []

    def build(self) -> CachedFeatures:
        """Compute all features on other machines.

        Raises:
            AnomalyError: a worker has met it, or workers die whatever they are given.
        """
        killed: dict[int, Mapping[int, str]] = {}

        def ask(actor: Actor, chunk: int, lost: Mapping[int, str]) -> Future[Any]:
            killed[chunk] = lost
            return actor.ask("learn", chunk, lost)

        def attempt(actor: Actor, chunk: int, places: Sequence[int]) -> Future[Any]:
            return actor.ask("try_images", chunk, places)

        built: list[CachedFeatures] = self._pass(
            [len(shard) for shard in self._shards], ask, attempt, self._progress
        )
        self._features = [self._cluster.put(features) for features in built]
        self._used = [sorted(features.hashes) for features in built]
        joined = joined_features(built)
        refused = list(joined.refused)
        for chunk, lost in killed.items():
            for place, reason in lost.items():
                i = self._shards[chunk][place]
                refused.append(UnusableImage(i, "failed", f"{self._images[i]}: {reason}"))
        refused.sort(key=lambda item: item.index)
        return replace(joined, refused=tuple(refused), run_each=self.run_each)

    def run_each(
        self, images: Container[int], function: Callable[[PatchSet], Result]
    ) -> Iterator[Result]:
        """What a function makes of some of the images, a shard at a time, at the workers."""
        sent = self._cluster.put(function)
        yield from self._on_images("apply", self._units(images), sent, lambda done, total: None)

    def score(
        self,
        detector: Model,
        features: CachedFeatures,
        views: Mapping[int, AnyView],
        *,
        suspects: Suspects | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> dict[int, tuple[float, float]]:
        """Have all patches of some images scored; see `cross_fitting.scores_of`."""
        units = [
            shard[i : i + _SCORED]
            for shard in self._units(features.images)
            for i in range(0, len(shard), _SCORED)
        ]
        pairs: dict[int, tuple[float, float]] = {}
        sent = self._cluster.put(detector.scorer.to("cpu"))  # and without what it has derived
        results = self._on_images("score", units, sent, lambda done, _: progress(done))
        for scores, worst in results:
            pairs |= scores
            if suspects is not None:
                suspects.take(worst)
        return pairs

    def close(self) -> None:
        """End the workers and delete the features."""
        while self._idle:
            self._idle.pop().stop()
        self._folder.cleanup()

    def _units(self, images: Container[int]) -> list[list[int]]:
        """Those of some images that have patches, shard by shard."""
        shards = ([i for i in used if i in images] for used in self._used)
        return [shard for shard in shards if shard]

    def _on_images(
        self, method: str, units: Sequence[Sequence[int]], sent: Any, progress: Progress
    ) -> list[Any]:
        """What a worker's method says of images, with what was sent beside them."""

        def ask(actor: Actor, unit: int, lost: Mapping[int, str]) -> Future[Any]:
            images = units[unit]
            if lost:
                name, why = self._images[images[min(lost)]], lost[min(lost)]
                raise AnomalyError(f"{name}: {why}; train without it")
            return on(actor, images)

        def attempt(actor: Actor, unit: int, places: Sequence[int]) -> Future[Any]:
            return on(actor, [units[unit][place] for place in places])

        def on(actor: Actor, images: Sequence[int]) -> Future[Any]:
            features = self._features[images[0] // self.shard if images else 0]
            return actor.ask(method, features, images, sent)

        return self._pass([len(images) for images in units], ask, attempt, progress)

    def _pass(
        self, sizes: Sequence[int], ask: _Ask, attempt: _Ask, progress: Progress
    ) -> list[Any]:
        """What workers say of each of several units of work."""
        results: dict[int, Any] = {}

        def hire() -> Actor:
            return self._idle.pop() if self._idle else self._cluster.start(ShardWorker, self._job)

        # An actor outlives a pass: its decoders are started, and the next pass goes on with it.
        work = Work(hire, ask, attempt, results.__setitem__, self._idle.append)
        units, room = range(len(sizes)), self._cluster.room
        dispatch(units, sizes, work, room, progress=progress, remedy="train again")
        return [results[unit] for unit in units]


@dataclass(frozen=True)
class ShardJob:
    """What every worker of a training has to know.

    Attributes:
        model: before it has learned; of its device, a worker's own of that type is meant.
        images: all training images, by number.
        shard: how many of them make a shard.
        threads: of each worker.
        scratch: a folder for feature maps that all machines see.
        folder: the working folder, where relative paths begin.
    """

    model: TrainingSetup
    images: Mapping[int, Path | Image]
    shard: int
    threads: int
    scratch: Path
    folder: Path = field(default_factory=Path.cwd)

    def shards(self) -> list[range]:
        """The numbers of each shard's images."""
        count = len(self.images)
        return [range(i, min(i + self.shard, count)) for i in range(0, count, self.shard)]


class ShardWorker:
    """The actor. Nothing is made before the first call, so that errors come back as they are."""

    def __init__(self, job: ShardJob) -> None:
        self._job = job
        self._decoders: Any = None

    def learn(self, chunk: int, lost: Mapping[int, str]) -> CachedFeatures:
        """Compute and keep a shard's features, and what a bank is selected from.

        Args:
            chunk: which shard.
            lost: its images that aren't touched, by place.

        Raises:
            DataError: none of the images is there.
        """
        self._begin()
        shard = self._job.shards()[chunk]
        self._check_there(shard)
        # The first shard stands for all of them where it is asked whether the disk has room.
        expected = len(self._job.images) if chunk == 0 else None
        return self._build([i for place, i in enumerate(shard) if place not in lost], expected)

    def _check_there(self, shard: Sequence[int]) -> None:
        """See that this machine has the images' disk."""
        files = [file for i in shard if isinstance(file := self._job.images[i], Path)]
        if files and not any(file.exists() for file in files):
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {files[0]}, nor any of "
                f"{len(files)} images; with --ray, all machines need the same paths"
            )

    def try_images(self, chunk: int, places: Sequence[int]) -> None:
        """Compute features of some of a shard's images, and keep nothing."""
        self._begin()
        shard = self._job.shards()[chunk]
        self._build([shard[place] for place in places])

    def score(
        self, features: CachedFeatures, images: Container[int], scorer: Scorer
    ) -> tuple[dict[int, tuple[float, float]], tuple[Suspect, ...]]:
        """Scores of some images by a scorer that hasn't seen them; see `scores_of`."""
        self._begin()
        detector = self._model.detector(scorer.to(self._model.device))
        suspects = Suspects(features.views)
        scores = scores_of(detector, features.only(images), features.views, suspects=suspects)
        return scores, suspects.worst()

    def apply(
        self,
        features: CachedFeatures,
        images: Container[int],
        function: Callable[[PatchSet], Result],
    ) -> Result:
        """What a function makes of some images."""
        self._begin()
        return function(features.only(images))

    def _build(self, images: Sequence[int], expected: int | None = None) -> CachedFeatures:
        model, job = self._model, self._job
        chosen = {i: job.images[i] for i in images}
        cache = FeatureCache(model, model.fitter, self._decoders, job.scratch)
        with closing(cache):
            return cache.build(chosen, among=expected or len(images))

    def _begin(self) -> None:
        if self._decoders is not None:
            return
        job = self._job
        if not job.scratch.is_dir():
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {job.scratch.parent}; with --ray, "
                "the run's folder has to be on a disk that all machines share (--output)"
            )
        with suppress(OSError):
            os.chdir(job.folder)
        use_threads(job.threads)
        cv2.setNumThreads(1)
        model = job.model
        self._model = replace(model, device=device_of(model.device.type))
        stride, patch = model.extractor.coarsest_stride, model.extractor.patch
        loading = loading_of(
            model.config, stride, model.region, model.aspect, patch, model.reference
        )
        self._decoders = Decoders(job.threads, Task(loading, looks=True)).__enter__()
