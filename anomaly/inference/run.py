"""Model x files -> rows and pictures: one run of `infer`, which survives what happens on a line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anomaly.errors import OutputError
from anomaly.files.own_outputs import HEATMAPS
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import Tiling
from anomaly.imaging.preprocessing import Loaded, Refused, by_shape
from anomaly.inference.artifacts import Drawn, Shown
from anomaly.inference.journal import Known, Record
from anomaly.inference.rows import Row, row_of
from anomaly.maps.thumbnails import Thumbnails
from anomaly.model.detector import AnomalyDetector
from anomaly.model.prediction import Prediction
from anomaly.prefetch import StoppedError
from anomaly.scorers.base import Progress

_BEHIND = 16  # scored images whose pictures may still be on their way
_LAST_SECONDS = 5.0  # that their pictures may take once the run is to stop


@dataclass(frozen=True)
class Inputs:
    """What is to be scored.

    Attributes:
        paths: image files, sorted.
        pictures: a name for each one's heatmap, and for its other pictures.
        heatmaps: which images have a heatmap: none, those that aren't called good, or all.
    """

    paths: Sequence[Path]
    pictures: Sequence[str]
    heatmaps: Literal["none", "reject", "all"] = "all"


def infer(
    model: AnomalyDetector,
    inputs: Inputs,
    record: Record,
    decoders: Decoders,
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = lambda done, total: None,
    thumbnails: Thumbnails | None = None,
) -> None:
    """Score the images that the record doesn't know yet.

    Batches are cut from the whole list, known images included, and one that isn't complete is
    scored whole again: a number's last digits may hang on what it shares a batch with, and a run
    that was broken off has to end with the same bytes as one that wasn't.

    Args:
        model: says what is good.
        inputs: what is to be scored.
        record: gets each row once its pictures are on disk.
        decoders: begun, with this model's loading.
        stopped: asked all the time; what is scored is then drawn and kept, as far as that takes
            no more than a few seconds.
        progress: called with images done in this run, and how many there are to do.
        thumbnails: gets small heatmaps of the images that matter most.

    Raises:
        OutputError: results can't be written.
    """
    _Run(model, inputs, record, decoders, stopped, thumbnails).score(progress)


class _Run:
    def __init__(
        self,
        model: AnomalyDetector,
        inputs: Inputs,
        record: Record,
        decoders: Decoders,
        stopped: Callable[[], bool],
        thumbnails: Thumbnails | None,
    ) -> None:
        self._stopped = stopped
        self._thumbnails = thumbnails
        self._model = model
        self._inputs = inputs
        self._record = record
        self._decoders = decoders
        self._behind: deque[tuple[Prediction, Shown, Future[Drawn | Refused]]] = deque()
        self._begun: dict[int, float] = {}

    def score(self, progress: Progress) -> None:
        total = len(self._inputs.paths) - len(self._record.known)
        done = 0
        detector = self._model
        items = detector.fitting(self._items())
        batches = self._unfinished(by_shape(items, detector.config.batch_size))
        try:
            for result in detector.predict_batches(batches):
                if result.index in self._record.known:
                    self._decoders.forget(result.index)
                    continue
                self._take(result)
                done += 1
                progress(done, total)
                if self._stopped():
                    break
        except StoppedError:
            pass
        finally:
            self._settle_all()

    def _items(self) -> Iterator[Loaded | Known | Refused]:
        """Every file in order: known, or loaded ahead."""
        known, paths = self._record.known, self._inputs.paths
        new = (i for i in range(len(paths)) if i not in known)
        loaded = self._decoders.load_all(((i, self._begin(i)) for i in new), self._stopped)
        for index in range(len(paths)):
            if index not in known:
                yield next(loaded)
            elif known[index].shape is not None:  # others were alone
                yield known[index]

    def _begin(self, index: int) -> Path:
        self._begun[index] = time.perf_counter()
        return self._inputs.paths[index]

    def _unfinished(
        self, batches: Iterable[list[Loaded | Known] | Refused]
    ) -> Iterator[list[Loaded] | Refused]:
        """Batches that hold anything new, whole."""
        for batch in batches:
            if isinstance(batch, Refused):
                yield batch
                continue
            again = [item.index for item in batch if isinstance(item, Known)]
            if len(again) == len(batch):
                continue
            wanted = ((i, self._inputs.paths[i]) for i in again)
            found = self._decoders.load_all(wanted, self._stopped)
            whole = []
            for item in batch:
                one = next(found) if isinstance(item, Known) else item
                if isinstance(one, Loaded):  # a known one may have vanished since
                    whole.append(one)
            yield whole

    def _take(self, result: Prediction | Refused) -> None:
        if isinstance(result, Refused):
            self._decoders.forget(result.index)
            self._record.add(Known(result.index, None, self._row(result)))
            return
        i = result.index
        picture, shown = self._inputs.pictures[i], self._shown(result)
        future = self._decoders.finish(i, self._inputs.paths[i], result.source_map, picture, shown)
        self._behind.append((result, shown, future))
        if len(self._behind) > _BEHIND:
            self._settle()

    def _settle_all(self) -> None:
        """What is computed isn't thrown away because another one's picture had no room."""
        failure: OutputError | None = None
        end = time.monotonic() + _LAST_SECONDS
        while self._behind:
            if self._stopped() and not wait([self._behind[0][2]], end - time.monotonic()).done:
                break  # the run will score it again when it goes on
            try:
                self._settle()
            except OutputError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _settle(self) -> None:
        """A row counts once its picture is on disk."""
        result, shown, future = self._behind.popleft()
        drawn = future.result()
        shape = None if isinstance(result.view, Tiling) else result.view.size
        if isinstance(drawn, Refused):
            self._record.add(Known(result.index, shape, self._row(drawn)))
        else:
            picture = f"{HEATMAPS}/{self._inputs.pictures[result.index]}"
            row = self._row(result, picture if shown.heatmap else "")
            self._record.add(Known(result.index, shape, row, drawn.regions))
            if self._thumbnails and drawn.small:
                odd = bool(result.reason)
                self._thumbnails.keep(row.heatmap, odd, result.score, drawn.small)

    def _shown(self, result: Prediction) -> Shown:
        thresholds = self._model.thresholds
        verdict, wanted = result.verdict, self._inputs.heatmaps
        drawn = wanted == "all" or (wanted == "reject" and verdict != "good")
        times = result.score / thresholds.image if thresholds and thresholds.image else None
        small = 0
        if self._thumbnails and self._thumbnails.wants(bool(result.reason), result.score):
            small = self._thumbnails.pixels
        return Shown(drawn, verdict, result.score, times, small)

    def _row(self, result: Prediction | Refused, heatmap: str = "") -> Row:
        begun = self._begun.pop(result.index)
        return row_of(result, self._model, str(self._inputs.paths[result.index]), begun, heatmap)
