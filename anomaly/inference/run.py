"""Model x files -> rows and pictures: one run of `infer`, which can be interrupted and resumed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from anomaly.datasets.inputs import Found, picture_names
from anomaly.errors import OutputError
from anomaly.files.outputs import HEATMAPS
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.imaging.pool import Decoders, Task
from anomaly.inference.journal import Finished, Record, RunJournal
from anomaly.inference.outputs import DEFAULTS, OutputOptions, Outputs, RenderOptions, RenderResult
from anomaly.inference.rows import Row, row_of
from anomaly.maps.encoding import Thumbnails
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


@dataclass(frozen=True)
class Inputs:
    """The images to score.

    Attributes:
        paths: image files, sorted.
        pictures: a name for each one's heatmap, and for its other pictures.
        options: what to write.
        groups: the part of each image, by its path.
    """

    paths: Sequence[Path]
    pictures: Sequence[str]
    options: OutputOptions = DEFAULTS
    groups: Mapping[str, str] = field(default_factory=dict)


def infer(
    model: Model,
    inputs: Inputs,
    record: Record,
    decoders: Decoders,
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = lambda done, total: None,
    thumbnails: Thumbnails | None = None,
    predict: Predict | None = None,
) -> None:
    """Score the images that aren't in the record yet.

    The record gets whole batches: a score's last digits may depend on its batch, and a resumed
    run, which has the same batches, must write the same bytes as an uninterrupted one.

    Args:
        model: scores the images.
        inputs: the images to score.
        record: gets each batch once its pictures are on disk.
        decoders: at this model's loading, and the pictures.
        stopped: whether to stop; scored images are then still drawn and kept for a few seconds.
        progress: called with images done in this run, and the number to do.
        thumbnails: gets small heatmaps of the images that matter most.
        predict: scores batches; None for the model, in this process.

    Raises:
        OutputError: results can't be written.
    """
    run = _Run(model, inputs, record, decoders, stopped, thumbnails)
    run.score(progress, predict or model.predict_batches)


def infer_files(
    model: Model,
    found: Found,
    folders: Sequence[Path],
    outputs: Outputs,
    journal: RunJournal,
    *,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
    predict: Predict | None = None,
) -> Thumbnails | None:
    """Score the files of a list that aren't in its journal yet, and write the tables.

    Args:
        model: scores the images.
        found: the files.
        folders: the given folders; names of pictures are relative to them.
        outputs: what to write; its folder is prepared.
        journal: of the run.
        stopped: whether to stop; the journal then lacks some files.
        progress: called with images done in this run, and the number to do.
        predict: scores batches; None for the model, in this process.

    Returns:
        Small heatmaps for the page, if wanted.

    Raises:
        OutputError: results can't be written; earlier ones are kept, and the run can be resumed.
    """
    paths = found.paths
    inputs = Inputs(paths, picture_names(paths, folders), outputs.options, found.groups)
    thumbnails = Thumbnails(len(paths)) if outputs.options.page else None
    decoders = Decoders(Task(model.loading, outputs.pictures(model)))
    failure: OutputError | None = None
    try:
        with journal:
            outputs.write_scale(model)
            infer(
                model,
                inputs,
                journal,
                decoders,
                stopped=stopped,
                progress=progress,
                thumbnails=thumbnails,
                predict=predict,
            )
    except OutputError as error:
        failure = error
    finally:
        # Keep the existing rows, whatever stopped the run.
        try:
            mm_per_pixel = model.config.image.mm_per_pixel
            outputs.write_tables(journal, found.groups, mm_per_pixel)
        except OutputError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return thumbnails


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


# A score, what its pictures show, and the pictures on their way.
_Scored: TypeAlias = tuple[Prediction, RenderOptions, Future[RenderResult | UnusableImage]]


@dataclass
class _Run:
    """A run in progress: the arguments of `infer`, and unfinished images."""

    model: Model
    inputs: Inputs
    record: Record
    decoders: Decoders
    stopped: Callable[[], bool]
    thumbnails: Thumbnails | None
    # The index of each batch's last image, and how many images it has.
    batches: dict[int, int] = field(default_factory=dict)
    # In the batches' order: results whose pictures may be unfinished, and the finished images of #
    # the first one's batch.
    behind: deque[_Scored | UnusableImage] = field(default_factory=deque)
    finished: list[Finished] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)

    def score(self, progress: Progress, predict: Predict) -> None:
        paths, detector = self.inputs.paths, self.model
        new = [index for index in range(len(paths)) if index not in self.record.done]
        items = ((i, self._begin(i)) for i in new)
        loaded = self.decoders.load_all(items, self.stopped)
        batches = by_shape(detector.fitting(loaded), detector.batch_size)
        try:
            for done, result in enumerate(predict(self._noted(batches)), 1):
                self._take(result)
                progress(done, len(new))
                if result.index in self.batches and self.stopped():
                    break
        except StoppedError:
            pass
        finally:
            self._record_all()

    def _begin(self, index: int) -> Path:
        self.begun[index] = time.perf_counter()
        return self.inputs.paths[index]

    def _noted(
        self, batches: Iterable[list[NetworkInput] | UnusableImage]
    ) -> Iterator[list[NetworkInput] | UnusableImage]:
        for batch in batches:
            members = [batch] if isinstance(batch, UnusableImage) else batch
            self.batches[members[-1].index] = len(members)
            yield batch

    def _take(self, result: Prediction | UnusableImage) -> None:
        if isinstance(result, UnusableImage):
            self.decoders.forget(result.index)
            self.behind.append(result)
        else:
            i, options = result.index, self._render_options(result)
            path, name = self.inputs.paths[i], self.inputs.pictures[i]
            drawn = self.decoders.finish(i, path, result.source_map, name, options)
            self.behind.append((result, options, drawn))
        if len(self.behind) > _BEHIND:
            self._record_first()

    def _record_all(self) -> None:
        """Finish computed images even if another one's picture couldn't be written."""
        failure: OutputError | None = None
        end = time.monotonic() + _LAST_SECONDS
        while self.behind:
            first = self.behind[0]
            drawing = [] if isinstance(first, UnusableImage) else [first[2]]
            if self.stopped() and wait(drawing, end - time.monotonic()).not_done:
                break  # a resumed run will score its batch again
            try:
                self._record_first()
            except OutputError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _record_first(self) -> None:
        """Add rows to the record once all pictures of their batch are on disk."""
        first = self.behind.popleft()
        index = first.index if isinstance(first, UnusableImage) else first[0].index
        try:
            self.finished.append(self._finish(first))
            if len(self.finished) == self.batches.get(index):
                self.record.add(self.finished)
        finally:
            if self.batches.pop(index, None):
                self.finished = []

    def _finish(self, result: _Scored | UnusableImage) -> Finished:
        if isinstance(result, UnusableImage):
            return Finished(result.index, self._row(result))
        prediction, options, future = result
        drawn = future.result()
        if isinstance(drawn, UnusableImage):
            return Finished(drawn.index, self._row(drawn))
        picture = f"{HEATMAPS}/{self.inputs.pictures[prediction.index]}"
        row = self._row(prediction, picture if options.heatmap else "")
        if self.thumbnails and drawn.small:
            odd = bool(prediction.reason)
            self.thumbnails.keep(row.heatmap, odd, prediction.score, drawn.small)
        return Finished(prediction.index, row, drawn.regions)

    def _render_options(self, result: Prediction) -> RenderOptions:
        thresholds = result.thresholds
        verdict, wanted = result.verdict, self.inputs.options.heatmaps
        drawn = wanted == "all" or (wanted == "reject" and verdict != "good")
        times = result.score / thresholds.image if thresholds and thresholds.image else None
        small = 0
        if self.thumbnails and self.thumbnails.wants(bool(result.reason), result.score):
            small = self.thumbnails.pixels
        return RenderOptions(
            drawn,
            verdict,
            result.score,
            times,
            small,
            limit=None if thresholds is None else thresholds.pixel,
            review=None if thresholds is None else thresholds.review_pixel,
        )

    def _row(self, result: Prediction | UnusableImage, heatmap: str = "") -> Row:
        begun, path = self.begun.pop(result.index), str(self.inputs.paths[result.index])
        group = self.inputs.groups.get(path, "")
        return row_of(result, self.model, path, begun, heatmap, group)
