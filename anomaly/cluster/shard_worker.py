"""What a worker of a cluster does for a training: features and scores of a few images."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anomaly.errors import DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.read import Image
from anomaly.methods.base import PatchSet, Result, Scorer
from anomaly.runtime.devices import device_of
from anomaly.runtime.threads import use_threads
from anomaly.scoring.build import loading_of
from anomaly.training.cross_fitting import Suspect, Suspects, scores_of
from anomaly.training.feature_cache import CachedFeatures, FeatureCache
from anomaly.training.fit import TrainingSetup


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
        import cv2

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
        loading = loading_of(model.config, stride, model.region, model.aspect, patch)
        self._decoders = Decoders(job.threads, Task(loading)).__enter__()
