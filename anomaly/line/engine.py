"""One model for many requests: parts are decoded in parallel, scored in batches and recorded.

A part takes four steps: a decoding process reads it; this model's thread scores it in a batch of
one network size; the decoding process draws its pictures; the record's thread writes it. A
request is answered once its row is in the record.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from anomaly.errors import AnomalyError, OutputError, why
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.imaging.pool import Decoders, Task
from anomaly.imaging.read import Decoding, Image, read_image
from anomaly.inference.rows import row_of
from anomaly.line.record import Answer, Recorder
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.encoding import thumbnail
from anomaly.maps.heatmap import display, encode_png, heatmap
from anomaly.maps.regions import MARKED, MarkedRegion, marked_regions, outlined_areas
from anomaly.runtime.parallel import get_threads, program_threads
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.005  # longest wait of a decoded part for others


class BusyError(AnomalyError):
    """Too many parts or clients are waiting; the same request can succeed later."""


@dataclass(frozen=True)
class Scored:
    """The result for one part.

    Attributes:
        number: the part's number in the record.
        answer: what was recorded.
        drawn: its pictures; None for a part that couldn't be scored.
        mm_per_pixel: the model's; None where it has none.
    """

    number: int
    answer: Answer
    drawn: PartPictures | None = None
    mm_per_pixel: float | None = None


@dataclass(eq=False)
class _Part:
    """A part in progress."""

    index: int
    data: bytes
    name: str
    wanted: Collection[str]
    done: Future[Scored] = field(default_factory=Future)
    decoding: Future[NetworkInput | UnusableImage] = field(default_factory=Future)
    begun: float = field(default_factory=time.perf_counter)


class Engine:
    """Scores the parts of one model. Use it in a `with` statement, which finishes accepted parts.

    Args:
        name: the model's name in the service.
        model: the model.
        recorder: records the results.
        most_waiting: most parts in progress at once.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        recorder: Recorder,
        *,
        most_waiting: int = 64,
    ) -> None:
        self.name, self.model = name, model
        self._recorder = recorder
        self._most = most_waiting
        # Images in tiles stay in memory whole until they are scored: few of them at once.
        self._most_begun = program_threads() if model.config.image.tile else most_waiting
        self._held_back: deque[_Part] = deque()
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}
        self._ready: queue.SimpleQueue[NetworkInput | UnusableImage | None] = queue.SimpleQueue()
        self._decoding = 0
        self._lock = threading.Lock()
        limits = model.thresholds
        pixel, review = (None, None) if limits is None else (limits.pixel, limits.review_pixel)
        self._decoders = Decoders(Task(model.loading, PartPictureWriter(pixel, review)))
        self._thread = threading.Thread(target=self._work, name=f"score {name}", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for part in list(self._parts.values()):
            part.done.exception()  # waits for an answer or an error
        self._ready.put(None)
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return len(self._parts)

    def submit(
        self,
        data: bytes,
        name: str = "",
        wanted: Collection[str] = (),
    ) -> Future[Scored]:
        """Accept one part.

        Args:
            data: the image file's bytes.
            name: the image's name in its row; never used as a path.
            wanted: what to draw: `heatmap`, `mask`, `regions`.

        Raises:
            BusyError: too many parts are waiting.
        """
        with self._lock:
            if len(self._parts) >= self._most:
                raise BusyError(
                    f"{self._most} parts are waiting for {self.name}, which is the limit; try again"
                )
            part = _Part(next(self._numbers), data, name, wanted)
            self._parts[part.index] = part
            self._held_back.append(part)
        self._begin()
        return part.done

    def _begin(self) -> None:
        """Send waiting parts to the decoders in order, up to the limit."""
        with self._lock:
            underway = len(self._parts) - len(self._held_back)
            room = self._most_begun - underway
            begun = [self._held_back.popleft() for _ in range(min(room, len(self._held_back)))]
            self._decoding += len(begun)
            for part in begun:
                part.decoding = self._decoders.submit(part.index, part.data)
                part.decoding.add_done_callback(partial(self._decoded, part))

    def refuse_waiting(self, reason: str) -> int:
        """Refuse the parts that no process has begun to decode; returns their number."""
        with self._lock:
            self._held_back.clear()
            parts = list(self._parts.values())
        refused = [part for part in parts if part.decoding.cancel()]
        for part in refused:
            self._parts.pop(part.index)
            part.done.set_exception(BusyError(reason))
        return len(refused)

    def _decoded(self, part: _Part, future: Future[NetworkInput | UnusableImage]) -> None:
        if future.cancelled():
            self._decoders.forget(part.index)
            with self._lock:
                self._decoding -= 1
            return
        error = future.exception()
        if error is not None:  # not the image's fault
            self._ready.put(UnusableImage(part.index, "failed", f"decoding failed: {why(error)}"))
        else:
            self._ready.put(future.result())

    def _work(self) -> None:
        while (gathered := self._gather()) is not None:
            unfinished = {item.index for item in gathered}
            try:
                for result in self._score(gathered):
                    self._draw(result)
                    unfinished.discard(result.index)
            except Exception as error:  # an error in this program mustn't end the service
                log.exception("scoring parts with %s failed", self.name)
                for index in unfinished:  # others are being drawn or written down already
                    self._refuse(index, f"scoring failed: {type(error).__name__}")

    def _gather(self) -> list[NetworkInput | UnusableImage] | None:
        """Decoded parts: waits for the first one, then briefly for others."""
        first = self._take()
        if first is None:
            return None
        gathered, end = [first], time.perf_counter() + BATCH_SECONDS
        most = self.model.batch_size * get_threads()
        while len(gathered) < most:
            left = end - time.perf_counter() if self._decoding else 0.0
            try:
                item = self._take(max(left, 0.0))
            except queue.Empty:
                break
            if item is None:
                self._ready.put(None)
                break
            gathered.append(item)
        return gathered

    def _take(self, seconds: float | None = None) -> NetworkInput | UnusableImage | None:
        item = self._ready.get(timeout=seconds) if seconds != 0 else self._ready.get_nowait()
        if item is not None:
            with self._lock:
                self._decoding -= 1
        return item

    def _score(
        self, gathered: Sequence[NetworkInput | UnusableImage]
    ) -> Iterator[Prediction | UnusableImage]:
        # Every thread gets a batch, even a small one.
        share = -(-len(gathered) // get_threads())
        items = self.model.fitting(iter(gathered))
        batches: Iterator[Any] = by_shape(items, max(1, min(self.model.batch_size, share)))
        return self.model.predict_batches(batches)

    def _draw(self, result: Prediction | UnusableImage) -> None:
        part = self._parts.get(result.index)
        if part is None or part.done.done():
            return
        if isinstance(result, UnusableImage):
            self._decoders.forget(result.index)
            self._record(part, result, None)
            return
        shown = result.source_map, part.wanted, result.verdict == "reject"
        pictures = self._decoders.finish(part.index, part.data, *shown)
        pictures.add_done_callback(partial(self._drawn, part, result))

    def _drawn(
        self, part: _Part, result: Prediction, future: Future[PartPictures | UnusableImage]
    ) -> None:
        if (error := future.exception()) is not None:
            reason = f"drawing failed: {why(error)}"
        elif isinstance(drawn := future.result(), PartPictures):
            self._record(part, result, drawn)
            return
        else:
            reason = drawn.reason
        self._record(part, UnusableImage(part.index, "failed", reason), None)

    def _refuse(self, index: int, reason: str) -> None:
        part = self._parts.get(index)
        if part is not None and not part.done.done():
            self._record(part, UnusableImage(index, "failed", reason), None)

    def _record(
        self, part: _Part, result: Prediction | UnusableImage, drawn: PartPictures | None
    ) -> None:
        if isinstance(result, UnusableImage):
            reason = result.reason.removeprefix(f"image {part.index}: ")
            result = UnusableImage(result.index, result.status, reason)
        row = row_of(result, self.model, part.name, part.begun)
        answer = Answer(self.name, row, part.data, drawn.small if drawn else b"")
        self._recorder.put(answer, partial(self._recorded, part, answer, drawn))

    def _recorded(
        self, part: _Part, answer: Answer, drawn: PartPictures | None, number: int | OutputError
    ) -> None:
        with self._lock:
            self._parts.pop(part.index, None)
        self._begin()
        if isinstance(number, OutputError):
            part.done.set_exception(number)
        else:
            mm = self.model.config.image.mm_per_pixel
            part.done.set_result(Scored(number, answer, drawn, mm))


SMALL_PIXELS = 480_000


PHOTOGRAPH_PIXELS = 4_000_000


def photograph(file: bytes, decoding: Decoding) -> bytes:
    """An image file as a JPEG for browsers, reduced by a whole factor."""
    image = read_image(file, decoding)
    return thumbnail(display(image), PHOTOGRAPH_PIXELS).photo


@dataclass(frozen=True)
class PartPictures:
    """The pictures of one part.

    Attributes:
        small: heatmap for the page, JPEG.
        heatmap: of the image's size, PNG; empty if not wanted.
        mask: of the image's size, PNG; empty if not wanted.
        regions: the marked regions; None if not wanted.
    """

    small: bytes
    heatmap: bytes = b""
    mask: bytes = b""
    regions: tuple[MarkedRegion, ...] | None = None


@dataclass(frozen=True)
class PartPictureWriter:
    """How a model's parts are drawn.

    Attributes:
        limit: the anomaly map's value where marking starts; None takes each image's own highest
            patch score, for models without thresholds: they have no masks and no regions.
        review: a lower value, which a heatmap outlines fainter; None for none.
    """

    limit: float | None
    review: float | None

    def write(
        self, image: Image, anomaly_map: SourceMap, wanted: Collection[str], rejected: bool
    ) -> PartPictures:
        """Draw one part.

        Args:
            image: the decoded file.
            anomaly_map: its anomaly map.
            wanted: what to draw beside the small heatmap, see `Engine.submit`.
            rejected: whether its verdict is `reject`.
        """
        limit = float(np.nanmax(anomaly_map.scores)) if self.limit is None else self.limit
        anomaly_map = anomaly_map.held()
        areas = outlined_areas(anomaly_map, limit, self.review, rejected=rejected)
        picture = heatmap(image, anomaly_map, limit, areas)
        small = thumbnail(picture, SMALL_PIXELS).photo
        whole = encode_png(picture) if "heatmap" in wanted else b""
        if self.limit is None or not {"mask", "regions"} & {*wanted}:
            return PartPictures(small, whole)
        mask = np.where(areas == MARKED, areas, np.uint8(0))
        regions = marked_regions(mask, anomaly_map) if "regions" in wanted else None
        return PartPictures(small, whole, encode_png(mask) if "mask" in wanted else b"", regions)
