"""Images -> rows and pictures, for `infer`, `infer --watch` and the service."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from anomaly.errors import OutputError
from anomaly.files.outputs import HEATMAPS
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.imaging.pool import Decoders
from anomaly.inference.journal import Finished, RunJournal, WatchJournal
from anomaly.inference.outputs import Outputs, Pictures, Wanted
from anomaly.inference.rows import RegionRow, region_rows, row_of
from anomaly.maps.heatmap import Thumbnails
from anomaly.methods.base import Progress
from anomaly.runtime.parallel import StoppedError
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction

# Scores batches, as `Model.predict_batches` does.
Predict: TypeAlias = Callable[
    [Iterable[list[NetworkInput] | UnusableImage]], Iterator[Prediction | UnusableImage]
]

_BEHIND = 16  # scored images whose pictures may still be on their way
_LAST_SECONDS = 5.0  # for their pictures after a stop


@dataclass(frozen=True, eq=False)
class Drawn:
    """A scored image whose pictures are on their way.

    Attributes:
        result: its prediction, or why it is unusable.
        pictures: its pictures; `UnusableImage` where it can't be scored or drawn. Raises
            OutputError when they can't be written.
        ends_batch: whether it is the last one of its batch.
    """

    result: Prediction | UnusableImage
    pictures: Future[Pictures | UnusableImage]
    ends_batch: bool


@dataclass(frozen=True)
class Pipeline:
    """Scores decoded images in batches, and has them drawn where they were decoded.

    Attributes:
        model: scores the images.
        decoders: that the images come from.
        draw: gives the file of a prediction's image, and the pictures that it is to have.
        predict: scores batches; None for the model, in this process.
    """

    model: Model
    decoders: Decoders
    draw: Callable[[Prediction], tuple[Path | bytes, Wanted]]
    predict: Predict | None = None

    def run(
        self, loaded: Iterable[NetworkInput | UnusableImage], batch_size: int | None = None
    ) -> Iterator[Drawn]:
        """Score and draw images, batch by batch.

        Args:
            loaded: what the decoders made of each, in order.
            batch_size: images at once; by default the model's.
        """
        batches = by_shape(self.model.fitting(loaded), batch_size or self.model.batch_size)
        left: deque[int] = deque()  # images of each batch without a result

        def counted() -> Iterator[list[NetworkInput] | UnusableImage]:
            for batch in batches:
                left.append(1 if isinstance(batch, UnusableImage) else len(batch))
                yield batch

        for result in (self.predict or self.model.predict_batches)(counted()):
            left[0] -= 1
            yield Drawn(result, self._drawn(result), ends_batch=not left[0])
            if not left[0]:
                left.popleft()

    def _drawn(self, result: Prediction | UnusableImage) -> Future[Pictures | UnusableImage]:
        if isinstance(result, Prediction):
            source, wanted = self.draw(result)
            return self.decoders.finish(result.index, source, result.source_map, wanted)
        self.decoders.forget(result.index)
        unusable: Future[Pictures | UnusableImage] = Future()
        unusable.set_result(result)
        return unusable


@dataclass(frozen=True)
class Inputs:
    """The images to score.

    Attributes:
        paths: image files, sorted.
        pictures: a name for each one's heatmap, and for its other pictures.
        groups: the part of each image, by its path.
        begun: when the reading of each file began, by `time.perf_counter`.
    """

    paths: Sequence[Path]
    pictures: Sequence[str]
    groups: Mapping[str, str] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)

    def begin(self, done: Container[int]) -> Iterator[tuple[int, Path]]:
        """Index and file of each image that isn't done."""
        for index, path in enumerate(self.paths):
            if index not in done:
                self.begun[index] = time.perf_counter()
                yield index, path


@dataclass(frozen=True)
class Run:
    """A run of `infer`, which scores images until it is stopped.

    The record gets whole batches: a score's last digits may depend on its batch, and a resumed
    run, which has the same batches, must write the same bytes as an uninterrupted one.

    Attributes:
        model: scores the images.
        outputs: what to write for each image.
        record: open; gets each batch once its pictures are on disk.
        decoders: at this model's loading, and the outputs' pictures.
        stopped: whether to stop; scored images are then still drawn and kept for a few seconds.
        thumbnails: gets small heatmaps of the images that matter most.
        predict: scores batches; None for the model, in this process.
    """

    model: Model
    outputs: Outputs
    record: RunJournal | WatchJournal
    decoders: Decoders
    stopped: Callable[[], bool] = lambda: False
    thumbnails: Thumbnails = field(default_factory=Thumbnails)
    predict: Predict | None = None

    def score(self, inputs: Inputs, progress: Progress = lambda done, total: None) -> None:
        """Score the images that aren't in the record yet.

        Args:
            inputs: the images to score.
            progress: called with images done in this call, and the number to do.

        Raises:
            OutputError: results can't be written.
        """

        def draw(prediction: Prediction) -> tuple[Path, Wanted]:
            i = prediction.index
            return inputs.paths[i], self.outputs.wanted(prediction, inputs.pictures[i])

        done = self.record.done
        total = sum(index not in done for index in range(len(inputs.paths)))
        loaded = self.decoders.load_all(inputs.begin(done), self.stopped)
        pipeline = Pipeline(self.model, self.decoders, draw, self.predict)
        behind: deque[list[Drawn]] = deque([[]])  # batches; the last one is incomplete
        try:
            for count, drawn in enumerate(pipeline.run(loaded), 1):
                behind[-1].append(drawn)
                progress(count, total)
                if drawn.ends_batch:
                    behind.append([])
                    while len(behind) > 2 and sum(map(len, behind)) > _BEHIND:
                        self._record(behind.popleft(), inputs)
                    if self.stopped():
                        break
        except StoppedError:
            pass
        finally:
            self._record_all(behind, inputs)

    def _record_all(self, batches: Iterable[list[Drawn]], inputs: Inputs) -> None:
        """Record scored batches even if another one's picture couldn't be written."""
        failure: OutputError | None = None
        end = time.monotonic() + _LAST_SECONDS
        for batch in batches:
            drawing = wait(_pictures(batch), end - time.monotonic() if self.stopped() else None)
            if drawing.not_done:
                break  # a resumed run will score it again
            try:
                if batch and batch[-1].ends_batch:
                    self._record(batch, inputs)
            except OutputError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _record(self, batch: Sequence[Drawn], inputs: Inputs) -> None:
        """Record a batch once all its pictures are written, or can't be."""
        wait(_pictures(batch))
        self.record.add([self._finished(drawn, inputs) for drawn in batch])

    def _finished(self, drawn: Drawn, inputs: Inputs) -> Finished:
        result, pictures, i = drawn.result, drawn.pictures.result(), drawn.result.index
        path, heatmap = str(inputs.paths[i]), ""
        regions: tuple[RegionRow, ...] = ()
        if isinstance(pictures, UnusableImage):
            result = pictures
        elif isinstance(result, Prediction):
            mm = self.model.config.image.mm_per_pixel
            regions = tuple(region_rows(path, pictures.regions, mm))
            if self.outputs.has_heatmap(result.verdict):
                heatmap = f"{HEATMAPS}/{inputs.pictures[i]}"
            if pictures.small:
                self.thumbnails.keep(heatmap, bool(result.reason), result.score, pictures.small)
        group, begun = inputs.groups.get(path, ""), inputs.begun.pop(i)
        return Finished(i, row_of(result, self.model, path, begun, heatmap, group), regions)


def _pictures(batch: Iterable[Drawn]) -> list[Future[Pictures | UnusableImage]]:
    return [drawn.pictures for drawn in batch]


@contextmanager
def resumable(done: Callable[[], str]) -> Iterator[None]:
    """Add to a write error what is done, and how to continue.

    Args:
        done: returns what is done, in words.

    Raises:
        OutputError: results can't be written; a `WriteError` where it was one.
    """
    try:
        yield
    except OutputError as error:
        raise type(error)(f"{error}; {done()} done and kept; continue with --resume") from None
