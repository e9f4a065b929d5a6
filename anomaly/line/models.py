"""The models of the service, their checked versions, and the parts that they score.

A part takes four steps: a decoding process reads it; the model's thread scores it in a batch of
one network size; the decoding process draws its pictures; the record's thread writes it. A
request is answered once its row is in the record.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.desk import golden as golden_parts
from anomaly.errors import AnomalyError, ModelError, OutputError, some, visible, why
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.inference.pipeline import Pipeline
from anomaly.inference.results import Pictures, PictureWriter, region_rows, row_of
from anomaly.line.drift import Promise, RecordedDrift
from anomaly.line.record import Answer, Record
from anomaly.runtime import get_threads, program_threads
from anomaly.scoring.model import Model, Prediction
from anomaly.storage.models import load_model
from anomaly.storage.thresholds import caught_share, models_scoring_alike

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_SMALL_PIXELS = 480_000  # of a heatmap on the page
_MOST_WAITING = 64  # parts of one model that are in progress at once
_LOOK_SECONDS = 1.0  # between checks of the models' folders
_LAST_SECONDS = 3.0  # for parts without an answer, once the service has ended

_loading = threading.Lock()  # models are loaded one after the other


@dataclass(frozen=True, eq=False)
class Version:
    """A model that has passed its checks, with what the service keeps beside it.

    Attributes:
        checked: a sentence about the checks.
        decoders: processes that decode and draw.
        drift: drift of the scores, with the promise; None without thresholds.
    """

    model: Model
    checked: str
    decoders: Decoders
    drift: RecordedDrift | None = None

    @classmethod
    def of(cls, model: Model, folder: Path, checked: str) -> Version:
        """The version of a model that was loaded from a folder."""
        decoders = Decoders(model.loading, PictureWriter.of(model, _SMALL_PIXELS))
        if model.thresholds is None:
            return cls(model, checked, decoders)
        ids = {model.model_id, *models_scoring_alike(folder)}
        promise = Promise.given(model.thresholds, ids, caught_share(model))
        drift = RecordedDrift(promise, model.thresholds.to_review)
        return cls(model, checked, decoders, drift)


@dataclass(eq=False)
class _Part:
    """A part in progress; `decoding` is None until the part is handed to a decoding process."""

    index: int
    data: bytes
    name: str
    wanted: Collection[str]
    version: Version
    done: Future[dict[str, Any]] = field(default_factory=Future)
    decoding: Future[NetworkInput | UnusableImage] | None = None
    begun: float = field(default_factory=time.perf_counter)


class ModelSlot:
    """One model of the service. Use it in a `with` statement, which finishes accepted parts.

    A thread loads the folder's model, and loads it anew once its files have changed. Until the
    first version has passed its checks, parts are refused.

    Args:
        name: the model's name in the service.
        publish: called with number and result of each part once it is recorded.

    Attributes:
        version: the version in use; None until one has passed its checks.
        trouble: the reason that the folder's version can't be used; empty if it can.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        record: Record,
        *,
        device: str | torch.device,
        publish: Callable[[int, Answer], object] = lambda number, answer: None,
    ) -> None:
        self.name, self.folder = name, folder
        self.version: Version | None = None
        self.trouble = ""
        self._record, self._device, self._publish = record, device, publish
        self._numbers = count()
        self._parts: dict[int, _Part] = {}  # without an answer, in order
        self._decoded: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"{work.__name__} {name}", daemon=True)
            for work in (self._score_parts, self._follow_folder)
        ]

    def __enter__(self) -> ModelSlot:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        wait([part.done for part in list(self._parts.values())], _LAST_SECONDS)
        self._decoded.put(None)
        for thread in self._threads:
            thread.join(_LAST_SECONDS)

    @property
    def state(self) -> str:
        """`loading`, `ready` or `failed`; `ready` even if a new version was refused."""
        if self.version is not None:
            return "ready"
        return "failed" if self.trouble else "loading"

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return len(self._parts)

    @property
    def refused(self) -> bool:
        """True while an older version is in use because the folder's version has failed."""
        return bool(self.version and self.trouble)

    def _follow_folder(self) -> None:
        """Load each version that comes into the folder; a thread's work."""
        seen = tried = None
        while not self._closing.is_set():
            stamp = stamp_of(self.folder)
            if stamp != tried and (tried is None or stamp == seen):  # not while files are written
                tried = stamp
                with _loading:
                    self._load()
            seen = stamp
            self._closing.wait(_LOOK_SECONDS)

    def _load(self) -> None:
        """Load and check the folder's version; a failed one leaves the version in use."""
        try:
            model = load_model(self.folder, self._device)
            version = Version.of(model, self.folder, check(model, self.folder))
        except AnomalyError as error:
            self.trouble = visible(str(error))
        except Exception as error:  # one model's error mustn't stop the others
            log.exception("%s can't be loaded", self.name)
            self.trouble = f"loading failed: {type(error).__name__}"
        else:
            if self.version and self.version.model.model_id != model.model_id:
                log.info("%s now serves model %s", self.name, model.model_id)
            self.use(version)
            return
        effect = "the new version is refused" if self.version else "it can't be served"
        log.error("%s: %s: %s", self.name, effect, self.trouble)

    def use(self, version: Version) -> None:
        """Score further parts with a version; the one before finishes its own."""
        if version.drift:
            promise = json.dumps(asdict(version.drift.promise))
            self._record.promises[version.model.model_id] = promise
        self.version, self.trouble = version, ""

    def submit(
        self, data: bytes, name: str = "", wanted: Collection[str] = ()
    ) -> Future[dict[str, Any]]:
        """Accept one part.

        Args:
            data: the image file's bytes.
            name: the image's name in its row; never used as a path.
            wanted: `heatmap`, `mask` or `regions`, to be answered beside the row.

        Returns:
            The answer: the row, its number in the record (`id`), and what is wanted; or an
            `AnomalyError`: the service has ended, or the part can't be recorded.

        Raises:
            AnomalyError: too many parts are waiting, or the model can't be used.
        """
        with self._lock:
            if self.version is None:
                reason = self.trouble or "it is still being loaded"
                raise AnomalyError(f"{self.name} can't be used: {reason}")
            if len(self._parts) >= _MOST_WAITING:
                raise AnomalyError(f"{_MOST_WAITING} parts are waiting for {self.name}; try again")
            part = _Part(next(self._numbers), data, name, wanted, self.version)
            self._parts[part.index] = part
        self._begin_decoding()
        return part.done

    def _begin_decoding(self) -> None:
        with self._lock:
            # Images in tiles stay in memory whole until they are scored, so only a few at a time.
            for place, part in enumerate(self._parts.values()):
                if part.version.model.config.image.tile and place >= program_threads():
                    break
                if part.decoding is None:
                    part.decoding = part.version.decoders.submit(part.index, part.data)
                    part.decoding.add_done_callback(partial(self._on_decoded, part))

    def _on_decoded(self, part: _Part, future: Future[NetworkInput | UnusableImage]) -> None:
        if not future.cancelled():  # by `refuse_waiting`
            self._decoded.put(part)

    def refuse_waiting(self, reason: str) -> int:
        """Refuse the parts that no process has begun to decode; returns their number."""
        with self._lock:
            waiting = list(self._parts.values())
            refused = [part for part in waiting if part.decoding is None or part.decoding.cancel()]
            for part in refused:
                del self._parts[part.index]
        for part in refused:
            part.version.decoders.forget(part.index)
            part.done.set_exception(AnomalyError(reason))
        return len(refused)

    def _score_parts(self) -> None:
        """Score decoded parts in batches, each with its own version; a thread's work."""
        while (first := self._decoded.get()) is not None:
            gathered = [first]
            with suppress(queue.Empty):  # what was decoded during the last batch
                while part := self._decoded.get_nowait():
                    gathered.append(part)
                self._decoded.put(None)  # the end has come: for the loop around
            for version in dict.fromkeys(part.version for part in gathered):
                self._score(version, [part for part in gathered if part.version is version])

    def _score(self, version: Version, parts: Sequence[_Part]) -> None:
        """Score parts, and have them drawn and recorded."""
        unscored = {part.index: part for part in parts}

        def to_draw(prediction: Prediction) -> tuple[bytes, Set[str], str]:  # see `Pipeline`
            part = unscored[prediction.index]
            return part.data, {"small", *part.wanted}, ""

        # Every thread gets a batch, even a small one.
        share = min(version.model.batch_size, -(-len(parts) // get_threads()))
        pipeline = Pipeline(version.model, version.decoders, to_draw)
        try:
            loaded = (part.decoding.result() for part in parts if part.decoding)
            for result, pictures in chain.from_iterable(pipeline.run(loaded, share)):
                part = unscored.pop(result.index)
                pictures.add_done_callback(partial(self._on_drawn, part, result))
        except Exception as error:  # an error in this program mustn't end the service
            log.exception("scoring parts with %s failed", self.name)
            reason = f"scoring failed: {type(error).__name__}"
            for part in unscored.values():
                self._put(part, UnusableImage(part.index, "failed", reason), Pictures())

    def _on_drawn(
        self,
        part: _Part,
        result: Prediction | UnusableImage,
        drawing: Future[Pictures | UnusableImage],
    ) -> None:
        """Record a part whose pictures were drawn, or couldn't be."""
        if (error := drawing.exception()) is not None:
            reason = f"drawing failed: {why(error)}"
            self._put(part, UnusableImage(part.index, "failed", reason), Pictures())
        elif isinstance(pictures := drawing.result(), UnusableImage):
            reason = pictures.reason.removeprefix(f"image {part.index}: ")
            self._put(part, replace(pictures, reason=reason), Pictures())
        else:
            self._put(part, result, pictures)

    def _put(self, part: _Part, result: Prediction | UnusableImage, pictures: Pictures) -> None:
        row = row_of(result, part.version.model, part.name, part.begun)
        small = pictures.small.photo if pictures.small else b""
        answer = Answer(self.name, row, part.data, small)
        self._record.put(answer).add_done_callback(partial(self._on_put, part, answer, pictures))

    def _on_put(self, part: _Part, answer: Answer, pictures: Pictures, number: Future[int]) -> None:
        """Answer a part that was recorded, or couldn't be; called in the record's thread."""
        with self._lock:
            del self._parts[part.index]
        self._begin_decoding()
        if (error := number.exception()) is not None:
            reason = f"the part isn't recorded, so it has no verdict ({why(error)}); send it again"
            part.done.set_exception(OutputError(reason))
            return
        row = answer.row
        answered: dict[str, Any] = {**asdict(row), "id": number.result()}
        if row.status == "ok":
            for kind in [kind for kind in ("heatmap", "mask") if kind in part.wanted]:
                answered[f"{kind}_png"] = base64.b64encode(getattr(pictures, kind)).decode()
            if "regions" in part.wanted:
                mm = part.version.model.config.image.mm_per_pixel
                answered["regions"] = [
                    asdict(r) for r in region_rows(row.path, pictures.regions, mm)
                ]
        try:
            self._publish(number.result(), answer)
        finally:
            part.done.set_result(answered)

    def facts(self) -> dict[str, Any]:
        """State, model, checks, promises and drift, as plain values."""
        facts = {"name": self.name, "state": self.state, "refused": self.refused}
        facts |= {"reason": self.trouble, "checked": "", "drift": self.drift_facts()}
        if (version := self.version) is not None:
            model, limits = version.model, version.model.thresholds
            facts |= {"model_id": model.model_id, "model_name": model.name, "method": model.method}
            facts |= {"unit": model.unit, "checked": version.checked}
            facts["calibration"] = [] if limits is None else limits.lines()
        return facts

    def drift_facts(self) -> dict[str, Any]:
        """The drift of the newest parts, as in a report.

        Returns:
            `alarm`: whether scores have drifted; `lines`: a sentence for each level; `compared`:
            `as promised`, also without thresholds, or `more` or `fewer` parts are flagged.
        """
        watched = self.version.drift if self.version else None
        if watched is None:
            return {"alarm": False, "lines": [], "compared": "as promised"}
        drift = watched.look(self._record.file)
        compared = drift.flagged(watched.review)
        return {"alarm": bool(drift.alarm), "lines": drift.lines(), "compared": compared}


def check(model: Model, folder: Path) -> str:
    """Check a model's golden parts, if there are any; loading it has checked its files.

    Returns:
        What was checked, for people.

    Raises:
        ModelError: a score or a verdict differs from the record.
        DataError: the record of golden parts is damaged.
    """
    golden = golden_parts.golden_of(folder)
    if golden is None:
        # The first pass of a network takes longer than the others.
        grey = Image(np.full((256, 256, 3), 128, np.uint8), 255.0, "rgb8", "")
        list(model.results([grey]))
        return "every file's hash; no golden parts are recorded beside the model"
    comparison = golden_parts.check(model, golden)
    if comparison.moved:
        changes = some([f"{name}: {change}" for name, change in comparison.moved.items()], "; ")
        raise ModelError(f"its golden parts' scores or verdicts differ from {golden}: {changes}")
    checked = (
        f"every file's hash, and {len(comparison.parts)} golden parts, which score as recorded"
    )
    return f"{checked}; {comparison.missed}" if comparison.missed else checked


def stamp_of(folder: Path) -> tuple[object, ...]:
    """Paths, times, sizes and inodes of a model's files and golden parts, which any write changes.

    Empty while the folder is missing or changing.
    """
    golden = folder.parent / "golden" if folder.name == "model" else folder / "golden"
    with suppress(OSError):
        files = [file for place in (folder, golden) for file in sorted(place.rglob("*"))]
        entries = [(file, file.stat()) for file in files]
        return tuple((str(file), e.st_mtime_ns, e.st_size, e.st_ino) for file, e in entries)
    return ()
