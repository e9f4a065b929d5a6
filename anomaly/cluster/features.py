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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2

from anomaly.cluster.workers import CRASHED, Actor, Cluster, Workers
from anomaly.datasets.samples import none_usable
from anomaly.errors import AnomalyError, DataError
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image
from anomaly.methods.base import PatchSet, Result, Scorer
from anomaly.runtime import Progress, device_of, use_threads
from anomaly.scoring.model import Model
from anomaly.training.features import CachedFeatures, HeldOutScores, TrainingSetup, cached_features

# Images of a shard, in whole batches, so that these are as one machine's; fewer where that leaves
# workers without any.
_MOST = 64
_LEAST_SHARDS = 10
_FOLDER = "features-"


@contextmanager
def cluster_features(
    cluster: Cluster,
    setup: TrainingSetup,
    images: Mapping[int, Path | Image],
    scratch: Path,
    progress: Progress,
) -> Iterator[CachedFeatures]:
    """Have workers compute the features of training images, and keep them while the block runs.

    Args:
        cluster: the cluster that the workers run on.
        setup: the stages that make the embeddings, and the method's fitter.
        images: files or decoded pixels by image number, ascending.
        scratch: an existing folder that all machines see.
        progress: called with (images done, number of images).

    Raises:
        AnomalyError: a worker raised it, or workers die even without an image.
    """
    for left in scratch.glob(f"{_FOLDER}*"):  # by a training that was killed
        shutil.rmtree(left, ignore_errors=True)
    batch = setup.embedder.max_batch_size(setup.config.batch_size)
    wanted = min(_MOST, -(-len(images) // _LEAST_SHARDS))
    size = -(-wanted // batch) * batch
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=scratch.absolute()) as folder:
        sent = cluster.put(setup), cluster.put(images)
        # An actor outlives a pass over the images: its decoders are started.
        with closing(Workers(cluster, ShardWorker, *sent, Path(folder), Path.cwd())) as workers:
            yield _sharded(cluster, workers, images, size, progress)


def _sharded(
    cluster: Cluster,
    workers: Workers,
    images: Mapping[int, Path | Image],
    size: int,
    progress: Progress,
) -> ShardedFeatures:
    """Have workers compute and keep the features of all images.

    Args:
        cluster: the cluster that the workers run on.
        workers: actors of `ShardWorker`.
        images: files or decoded pixels by image number, ascending.
        size: images in a shard.
        progress: called with (images done, number of images).
    """
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
        channels=max(features.channels for features in shards),
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
    """Features of training images that workers keep in shards, and go on with.

    Attributes:
        cluster: the cluster that the workers run on.
        workers: actors of `ShardWorker`.
        sources: files or decoded pixels by image number.
        shards: usable images of each shard, ascending, and a reference to its `CachedFeatures`.
    """

    cluster: Cluster
    workers: Workers
    sources: Mapping[int, Path | Image]
    shards: Sequence[tuple[Sequence[int], Any]]

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """Results of a function of the patches, shard by shard, computed by workers."""
        yield from self._on_shards(partial(_of_patches, function))

    def scores(
        self, model: Model, progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, HeldOutScores]:
        """Scores of the images by a model that hasn't learned from them, computed by workers."""
        known: dict[int, HeldOutScores] = {}
        # The CPU's tensors can be sent to any machine; what the scorer has derived stays here.
        for scores in self._on_shards(partial(_scores, model.scorer.to("cpu"))):
            known |= scores
            progress(len(known))
        return known

    def _on_shards(self, function: Callable[..., Any]) -> Iterator[Any]:
        """Workers' results of a function for each shard that has any of the images.

        Args:
            function: called with the training setup and the shard's features.

        Raises:
            AnomalyError: an image ends every worker that handles it.
        """
        sent = self.cluster.put(function)

        def ask(actor: Actor, unit: Sequence[int]) -> Future[Any]:
            # An empty unit only tests the worker: any features will do.
            _, features = self.shards[unit[0] // self.shard if unit else 0]
            return actor.ask("apply", features, unit, sent)

        wanted = ([i for i in usable if i in self.images] for usable, _ in self.shards)
        units = [unit for unit in wanted if unit]
        for unit, (result, lost) in zip(units, self.workers.share_out(units, ask), strict=True):
            if lost:
                raise AnomalyError(f"{self.sources[unit[lost[0]]]}: {CRASHED}; train without it")
            yield result


def _of_patches(
    function: Callable[[PatchSet], Result], setup: TrainingSetup, features: CachedFeatures
) -> Result:
    return function(features)


def _scores(
    scorer: Scorer, setup: TrainingSetup, features: CachedFeatures
) -> dict[int, HeldOutScores]:
    """Scores of images by a scorer that hasn't seen them."""
    return features.scores(setup.model(scorer.to(setup.device)))


class ShardWorker:
    """The actor. Nothing is made before the first call, so that errors come back as they are.

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
        self._begun = False

    def learn(self, images: Sequence[int]) -> CachedFeatures:
        """Compute and keep features of images, and what a bank is selected from.

        Args:
            images: image numbers.

        Raises:
            DataError: this machine sees none of several image files, or not the run's folder.
        """
        self._begin()
        self._check_there(images)
        # The first shard stands for all of them where it is asked whether the disk has room.
        among = len(self._images) if 0 in images else len(images)
        mine = {i: self._images[i] for i in images}
        features = cached_features(self._setup, mine, self._scratch, among=among)
        with features as built:
            return built

    def _check_there(self, images: Sequence[int]) -> None:
        """Check that this machine has the images' disk; one file alone may be missing."""
        files = [file for i in images if isinstance(file := self._images[i], Path)]
        if len(files) > 1 and not any(file.exists() for file in files):
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {files[0]}, nor any of "
                f"{len(files)} images; with --ray, all machines need the same paths"
            )

    def apply(
        self, features: CachedFeatures, images: Sequence[int], function: Callable[..., Result]
    ) -> Result:
        """Result of a function of the setup and of some images' features."""
        self._begin()
        return function(self._setup, features.only(images))

    def _begin(self) -> None:
        if self._begun:
            return
        if not self._scratch.is_dir():
            raise DataError(
                f"the worker on {socket.gethostname()} sees no {self._scratch.parent}; with --ray, "
                "the run's folder has to be on a disk that all machines share (--output)"
            )
        with suppress(OSError):  # absolute paths work without it
            os.chdir(self._folder)
        # Ray gives each actor one processor.
        use_threads(1)
        cv2.setNumThreads(1)
        self._setup = replace(self._setup, device=device_of(self._setup.device.type))
        self._begun = True
