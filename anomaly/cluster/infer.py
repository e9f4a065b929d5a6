"""Scores of images by Ray's actors, each of which holds the model.

The command's own process decodes, gathers batches, draws and writes, as without a cluster; workers
compute. So batches, and with them rows, are those of one process, and only it needs the images.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import cv2

from anomaly.cluster.actors import CRASHED, Cluster, Workers
from anomaly.errors import DataError, ModelError
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.inference.outputs import about_model
from anomaly.inference.pipeline import Predict
from anomaly.runtime import use_threads
from anomaly.scoring.model import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.load import load_model


@dataclass(frozen=True)
class ScoringJob:
    """Settings of every worker.

    Attributes:
        model: model or run folder, as it is on all machines.
        device: `cpu` or `cuda`.
        about: what scores depend on, see `about_model`.
    """

    model: Path
    device: str
    about: Mapping[str, object]


def predicted_by(cluster: Cluster, job: ScoringJob, stopped: Callable[[], bool]) -> Predict:
    """Have a cluster's workers score batches, instead of `Model.predict_batches`."""

    def predict(
        batches: Iterable[list[NetworkInput] | UnusableImage],
    ) -> Iterator[Prediction | UnusableImage]:
        begun: deque[list[NetworkInput] | UnusableImage] = deque()

        def usable() -> Iterator[list[NetworkInput]]:
            for batch in batches:
                begun.append(batch)
                if not isinstance(batch, UnusableImage):
                    yield batch

        with closing(Workers(cluster, ScoringWorker, job)) as workers:
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

    return predict


class ScoringWorker:
    """The actor. Its model is loaded by the first call, so that errors come back as they are."""

    def __init__(self, job: ScoringJob) -> None:
        self._job = job
        self._model: Model | None = None

    def predict(self, batch: list[NetworkInput]) -> list[Prediction | UnusableImage]:
        """Score a batch, which may be empty.

        Raises:
            DataError: the model, program or device isn't that of the job.
        """
        self._model = model = self._model or self._load()
        results = model.predict_batches([batch] if batch else [])
        return [r if isinstance(r, UnusableImage) else replace(r, image=None) for r in results]

    def _load(self) -> Model:
        job, host = self._job, socket.gethostname()
        use_threads(1)
        cv2.setNumThreads(1)
        try:
            model = load_model(job.model, job.device)
        except ModelError as error:
            raise ModelError(
                f"the worker on {host}: {error} (all machines need the model folder)"
            ) from None
        about = about_model(model)
        if other := [key for key in about if about[key] != job.about[key]]:
            raise DataError(
                f"the worker on {host} has another {', '.join(other)} than this command "
                f"({about[other[0]]!r}, not {job.about[other[0]]!r}); all machines need the same "
                "model folder, program and device"
            )
        return model
