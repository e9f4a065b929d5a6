"""One model that many requests share: decoded side by side, scored in batches, written down.

A part goes through four hands: a decoding process; this model's thread, which gathers parts of one
network size and scores them; the decoding process again, which draws; and the record's thread. A
request is answered once its row is in the record.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from anomaly.errors import AnomalyError, OutputError, why
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.imaging.read import Image, read_image
from anomaly.inference.rows import row_of
from anomaly.line.record import Answer, Recorder
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.encoding import thumbnail
from anomaly.maps.heatmap import display, encode_png, heatmap
from anomaly.maps.regions import MARKED, MarkedRegion, marked_regions, outlined_areas
from anomaly.runtime.parallel import get_threads
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.scoring.scene import SceneWatch

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.005  # that a decoded part waits for others at most


class BusyError(AnomalyError):
    """As many parts wait already as may.

    Args:
        seconds: after which there should be room.
    """

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class Scored:
    """What became of one part.

    Attributes:
        number: in the record.
        answer: as it was written down.
        drawn: its pictures; None for a part that couldn't be scored.
        mm_per_pixel: the model's; None where it has none.
    """

    number: int
    answer: Answer
    drawn: PartPictures | None = None
    mm_per_pixel: float | None = None


@dataclass(eq=False)
class _Part:
    """A part on its way."""

    index: int
    data: bytes
    name: str
    wanted: PictureRequest
    done: Future[Scored]
    begun: float = field(default_factory=time.perf_counter)


class Engine:
    """Scores the parts of one model. Used in a `with` statement, which answers what was taken.

    Args:
        name: of the model in the service.
        model: the model.
        recorder: writes answers down.
        workers: decoding processes.
        most_waiting: parts that may be on their way at once.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        recorder: Recorder,
        *,
        workers: int,
        most_waiting: int = 64,
    ) -> None:
        self.name, self.model = name, model
        self.scene = SceneWatch(model.models)
        self._recorder = recorder
        self._most, self._workers = most_waiting, workers
        # An image in tiles lies here whole until it is scored: few of them at once.
        self._most_begun = workers if model.config.image.tile else most_waiting
        self._held_back: deque[_Part] = deque()
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}
        self._ready: queue.SimpleQueue[NetworkInput | UnusableImage | None] = queue.SimpleQueue()
        self._decoding = 0
        self._lock = threading.Lock()
        self._seconds = 0.1  # that a part has taken of late, from one answer to the next
        self._last = time.perf_counter()
        limits = model.thresholds
        pixel, review = (None, None) if limits is None else (limits.pixel, limits.review_pixel)
        self._decoders = Decoders(workers, Task(model.loading, PartPictureWriter(pixel, review)))
        self._thread = threading.Thread(target=self._work, name=f"score {name}", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for part in list(self._parts.values()):
            part.done.exception()  # waits until it is answered, whichever way
        self._ready.put(None)
        self._thread.join()
        self._decoders.__exit__()

    @property
    def waiting(self) -> int:
        """Parts that were taken and aren't answered yet."""
        return len(self._parts)

    @property
    def resident(self) -> int:
        """Bytes that the decoding processes hold; 0 where the system doesn't say."""
        return self._decoders.resident

    def begun(self) -> int:
        """`resident`, once all of them are there."""
        list(self._decoders.map(len, [()] * self._workers))
        return self.resident

    def submit(
        self,
        data: bytes,
        name: str = "",
        wanted: PictureRequest | None = None,
        done: Future[Scored] | None = None,
    ) -> Future[Scored]:
        """Take one part.

        Args:
            data: the image file's bytes.
            name: what its row calls it; nothing is read or written under it.
            wanted: what to draw.
            done: takes the answer, if somebody waits for it already.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            if len(self._parts) >= self._most:
                seconds = max(1, round(self._most * self._seconds))
                raise BusyError(
                    f"{self._most} parts wait for {self.name} already; try again in {seconds} s",
                    seconds,
                )
            part = _Part(
                next(self._numbers), data, name, wanted or PictureRequest(), done or Future()
            )
            self._parts[part.index] = part
            self._held_back.append(part)
        self._begin()
        return part.done

    def _begin(self) -> None:
        """Have parts decoded, as many as may be underway, in their order."""
        with self._lock:
            underway = len(self._parts) - len(self._held_back)
            room = self._most_begun - underway
            begun = [self._held_back.popleft() for _ in range(min(room, len(self._held_back)))]
            self._decoding += len(begun)
            for part in begun:
                decoded = self._decoders.submit(part.index, part.data)
                decoded.add_done_callback(partial(self._decoded, part))

    def _decoded(self, part: _Part, future: Future[NetworkInput | UnusableImage]) -> None:
        error = future.exception()
        if error is not None:  # nothing of the image's own
            self._ready.put(
                UnusableImage(part.index, "failed", f"it couldn't be decoded: {why(error)}")
            )
        else:
            self._ready.put(future.result())

    def _work(self) -> None:
        while (gathered := self._gather()) is not None:
            left = {item.index for item in gathered}
            try:
                for result in self._score(gathered):
                    if isinstance(result, Prediction):
                        result, _ = self.scene.judged(result)
                    self._draw(result)
                    left.discard(result.index)
            except Exception as error:  # a mistake of ours mustn't end the service
                log.exception("scoring parts by %s failed", self.name)
                for index in left:  # others are being drawn or written down already
                    self._refuse(index, f"scoring it failed: {type(error).__name__}")

    def _gather(self) -> list[NetworkInput | UnusableImage] | None:
        """What is ready: waits for the first one, and a moment for others that are underway."""
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
        # Every thread gets a batch of its own, if a small one.
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
        found = self._decoders.finish(part.index, part.data, *shown)
        found.add_done_callback(partial(self._drawn, part, result))

    def _drawn(
        self, part: _Part, result: Prediction, future: Future[PartPictures | UnusableImage]
    ) -> None:
        if (error := future.exception()) is not None:
            reason = f"drawing it failed: {why(error)}"
        elif isinstance(drawn := future.result(), PartPictures):
            if drawn.regions is not None:
                drawn = replace(drawn, regions=result.placed(drawn.regions))
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
            now = time.perf_counter()
            since = now - max(self._last, part.begun)
            self._seconds, self._last = 0.9 * self._seconds + 0.1 * since, now
        self._begin()
        if isinstance(number, OutputError):
            part.done.set_exception(number)
        else:
            mm = self.model.config.image.mm_per_pixel
            part.done.set_result(Scored(number, answer, drawn, mm))


SMALL_PIXELS = 480_000


PHOTOGRAPH_PIXELS = 4_000_000


def photograph(file: bytes, max_pixels: int, bit_depth: int | None) -> bytes:
    """An image file of any kind as a JPEG that a browser shows, at a whole fraction of its size."""
    image = read_image(file, max_pixels=max_pixels, bit_depth=bit_depth)
    return thumbnail(display(image), PHOTOGRAPH_PIXELS).photo


@dataclass(frozen=True)
class PictureRequest:
    """What a request wants beside its row."""

    heatmap: bool = False
    mask: bool = False
    regions: bool = False


@dataclass(frozen=True)
class PartPictures:
    """What was drawn.

    Attributes:
        small: heatmap for the page, JPEG.
        heatmap: of the image's size, PNG; empty where it isn't wanted.
        mask: of the image's size, PNG; empty where it isn't wanted.
        regions: what is marked; None where that isn't wanted.
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
        self, image: Image, found: SourceMap, wanted: PictureRequest, rejected: bool
    ) -> PartPictures:
        """Draw one part.

        Args:
            image: the decoded file.
            found: its anomaly map.
            wanted: what to draw beside the small heatmap.
            rejected: whether its verdict is that.
        """
        limit = float(np.nanmax(found.scores)) if self.limit is None else self.limit
        found = found.held()
        areas = outlined_areas(found, limit, self.review, rejected=rejected)
        picture = heatmap(image, found, limit, areas)
        small = thumbnail(picture, SMALL_PIXELS).photo
        whole = encode_png(picture) if wanted.heatmap else b""
        if self.limit is None or not (wanted.mask or wanted.regions):
            return PartPictures(small, whole)
        mask = np.where(areas == MARKED, areas, np.uint8(0))
        regions = marked_regions(mask, found) if wanted.regions else None
        return PartPictures(small, whole, encode_png(mask) if wanted.mask else b"", regions)
