"""Features of training images on a cluster: workers compute and keep features, and go on with them.

Images are cut into shards of a fixed number, whatever the workers. A worker leaves a shard's
feature maps in the run's folder, which all machines see, so that it doesn't matter which one goes
on with them, or whether it lives. Beside them it leaves what a bank is selected from: that is read
here, in the order of the images, so that the selection is one machine's; whatever meets all of the
feature maps again is done by workers. Methods that take sums read the features here, in the same
order. So a model doesn't depend on there being a cluster.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from anomaly.cluster.actors import Actor, Cluster, Worker, dispatch, then
from anomaly.cluster.shard_worker import ShardJob, ShardWorker
from anomaly.errors import AnomalyError
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image
from anomaly.methods.base import PatchSet, Progress, Result
from anomaly.scoring.pipeline import Model
from anomaly.training.cross_fitting import Suspects
from anomaly.training.feature_cache import CachedFeatures, joined_features
from anomaly.training.fit import SharedFeaturesOf, TrainingSetup

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
        """Have all features computed.

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

        def hire() -> Worker:
            start = self._cluster.start
            actor = self._idle.pop() if self._idle else start(ShardWorker, self._job)
            return _ShardWorker(actor, ask, attempt, results, self._idle)

        units, room = range(len(sizes)), self._cluster.room
        dispatch(units, sizes, hire, room, progress=progress, remedy="train again")
        return [results[unit] for unit in units]


class _ShardWorker:
    """A worker of one pass, whose actor outlives it."""

    def __init__(
        self, actor: Actor, ask: _Ask, attempt: _Ask, results: dict[int, Any], idle: list[Actor]
    ) -> None:
        self._actor = actor
        self._ask = ask
        self._attempt = attempt
        self._results = results
        self._idle = idle
        self._last: Future[Counter[str]] = Future()

    def score(self, chunk: int, lost: Mapping[int, str]) -> Future[Counter[str]]:
        """Have the actor compute a chunk, and keep what it answers; nothing is counted."""

        def kept(result: Any) -> Counter[str]:
            self._results[chunk] = result
            return Counter()

        self._last = then(self._ask(self._actor, chunk, lost), kept)
        return self._last

    def probe(self, chunk: int, images: Sequence[int]) -> Future[Counter[str]]:
        """Have the actor read some images of a chunk, to see whether it survives them."""
        self._last = then(self._attempt(self._actor, chunk, images), lambda _: Counter())
        return self._last

    def stop(self) -> None:
        """Leave the actor to the next pass, unless it has died or is busy."""
        if self._last.done() and self._last.exception() is None:
            self._idle.append(self._actor)
        else:
            self._actor.stop()
