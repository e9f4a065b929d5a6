"""Model x files -> rows and pictures: one run of `infer`, which survives what happens on a line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from anomaly.datasets.inputs import Found, picture_names
from anomaly.errors import OutputError
from anomaly.files.outputs import HEATMAPS
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.inference.journal import Finished, Record, RunJournal
from anomaly.inference.outputs import DEFAULTS, OutputOptions, Outputs, RenderOptions, RenderResult
from anomaly.inference.rows import Row, row_of
from anomaly.maps.encoding import Thumbnails
from anomaly.methods.base import Progress
from anomaly.runtime.parallel import StoppedError
from anomaly.scoring.prediction import Prediction
from anomaly.scoring.predictor import AnyModel
from anomaly.scoring.scene import SceneWatch

_BEHIND = 16  # scored images whose pictures may still be on their way
_LAST_SECONDS = 5.0  # that their pictures may take once the run is to stop


@dataclass(frozen=True)
class Inputs:
    """What is to be scored.

    Attributes:
        paths: image files, sorted.
        pictures: a name for each one's heatmap, and for its other pictures.
        options: what is written of them.
        brought: gives each index and path, in order, once the file is there; for files that come
            from elsewhere.
    """

    paths: Sequence[Path]
    pictures: Sequence[str]
    options: OutputOptions = DEFAULTS
    brought: Callable[[Iterator[tuple[int, Path]]], Iterator[tuple[int, Path]]] = iter


def infer(
    model: AnyModel,
    inputs: Inputs,
    record: Record,
    decoders: Decoders,
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = lambda done, total: None,
    thumbnails: Thumbnails | None = None,
    scored: Callable[[Prediction], None] = lambda prediction: None,
    scene: SceneWatch | None = None,
) -> None:
    """Score the images that the record doesn't know yet.

    The record gets whole batches: a number's last digits may hang on what it shares a batch with,
    and a run that was broken off, whose batches are cut as if it hadn't been, has to end with the
    same bytes as one that wasn't.

    Args:
        model: says what is good.
        inputs: what is to be scored.
        record: gets each batch once its pictures are on disk.
        decoders: begun, with this model's loading.
        stopped: asked all the time; what is scored is then drawn and kept, as far as that takes
            no more than a few seconds.
        progress: called with images done in this run, and how many there are to do.
        thumbnails: gets small heatmaps of the images that matter most.
        scored: called with each prediction, which knows nothing of the scene.
        scene: watches the images, whose order is that of the parts; None where it isn't.

    Raises:
        OutputError: results can't be written.
    """
    _Run(model, inputs, record, decoders, stopped, thumbnails, scored, scene).score(progress)


def infer_files(
    model: AnyModel,
    found: Found,
    folders: Sequence[Path],
    outputs: Outputs,
    journal: RunJournal,
    decoders: Decoders,
    *,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
    scored: Callable[[Prediction], None] = lambda prediction: None,
) -> Thumbnails | None:
    """Score the files of a list that its journal doesn't know yet, and write the tables.

    Args:
        model: says what is good.
        found: the files.
        folders: those that were named; pictures are named by the way from there.
        outputs: what to write, its folder begun.
        journal: of the run.
        decoders: started.
        stopped: asked all the time; the journal then lacks some of the files.
        progress: called with images done in this run, and how many there are to do.
        scored: called with each prediction, which knows nothing of the scene.

    Returns:
        Small heatmaps for the page, if there is to be one.

    Raises:
        OutputError: results can't be written; those that could are kept, and the run can go on.
    """
    paths = found.paths
    inputs = Inputs(paths, picture_names(paths, folders), outputs.options)
    thumbnails = Thumbnails(len(paths)) if outputs.options.page else None
    # Files of one folder, by name, are taken for parts in a row; subfolders hold kinds or lots.
    scene = SceneWatch(model.models) if len({path.parent for path in paths}) == 1 else None
    if scene is not None:
        for image in journal.done.values():
            scene.add(image.row.product, image.scene)
    decoders.begin(Task(model.reference_model.loading, outputs.pictures(model)))
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
                scored=scored,
                scene=scene,
            )
    except OutputError as error:
        failure = error
    finally:
        # Whatever stopped the run, the rows that exist are kept.
        try:
            mm_per_pixel = model.reference_model.config.image.mm_per_pixel
            outputs.write_tables(journal, found.groups, mm_per_pixel)
        except OutputError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return thumbnails


@contextmanager
def resumable(done: Callable[[], str]) -> Iterator[None]:
    """Say of a run that couldn't write what is done, and how it goes on.

    Args:
        done: says it.

    Raises:
        OutputError: results can't be written; a `WriteError` where it was one.
    """
    try:
        yield
    except OutputError as error:
        raise type(error)(f"{error}; {done()} done and kept: go on with --resume") from None


# A score, what its pictures show, and the pictures on their way.
_Scored: TypeAlias = tuple[Prediction, RenderOptions, Future[RenderResult | UnusableImage]]


@dataclass
class _Run:
    """A run under way: its parts as for `infer`, and what is on its way through them."""

    model: AnyModel
    inputs: Inputs
    record: Record
    decoders: Decoders
    stopped: Callable[[], bool]
    thumbnails: Thumbnails | None
    scored: Callable[[Prediction], None]
    scene: SceneWatch | None
    # The index of each batch's last image, and how many images it has.
    batches: dict[int, int] = field(default_factory=dict)
    # In the batches' order: results whose pictures may still be on their way, if they have any,
    # and what is finished of the batch that the first of them belongs to.
    behind: deque[_Scored | UnusableImage] = field(default_factory=deque)
    finished: list[Finished] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    figures: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def score(self, progress: Progress) -> None:
        paths, detector = self.inputs.paths, self.model
        new = [index for index in range(len(paths)) if index not in self.record.done]
        items = self.inputs.brought((i, self._begin(i)) for i in new)
        loaded = self.decoders.load_all(items, self.stopped)
        batches = by_shape(detector.fitting(loaded), detector.batch_size)
        try:
            results = detector.predict_batches(self._noted(batches))
            for done, result in enumerate(results, 1):
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
            self.scored(result)
            if self.scene is not None:
                result, self.figures[result.index] = self.scene.judged(result)
            i, options = result.index, self._render_options(result)
            path, name = self.inputs.paths[i], self.inputs.pictures[i]
            drawn = self.decoders.finish(i, path, result.source_map, name, options)
            self.behind.append((result, options, drawn))
        if len(self.behind) > _BEHIND:
            self._record_first()

    def _record_all(self) -> None:
        """What is computed isn't thrown away because another one's picture had no room."""
        failure: OutputError | None = None
        end = time.monotonic() + _LAST_SECONDS
        while self.behind:
            first = self.behind[0]
            drawing = [] if isinstance(first, UnusableImage) else [first[2]]
            if self.stopped() and wait(drawing, end - time.monotonic()).not_done:
                break  # the run will score its batch again when it goes on
            try:
                self._record_first()
            except OutputError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _record_first(self) -> None:
        """A row counts once its picture is on disk, and those of its batch are."""
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
        figures = self.figures.pop(prediction.index, ())
        return Finished(prediction.index, row, prediction.placed(drawn.regions), figures)

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
        begun = self.begun.pop(result.index)
        return row_of(result, self.model, str(self.inputs.paths[result.index]), begun, heatmap)
