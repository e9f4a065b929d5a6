"""One model of the service: its checked version, loaded or not, and the parts that wait for it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anomaly.calibration import Threshold
from anomaly.evaluation.splits import caught_defects
from anomaly.line.drift import RecordedDrift, levels_of
from anomaly.line.engine import BusyError, Engine, PictureRequest, Scored
from anomaly.scoring.build import to_dict
from anomaly.scoring.pipeline import Model
from anomaly.storage.thresholds import thresholds_alone_differ

_AGAIN_SECONDS = 5  # after which a client should ask again for an unusable model


@dataclass(frozen=True)
class Limits:
    """Limits of requests and models.

    Attributes:
        body_bytes: of one image file.
        short_bytes: of any other body.
        held_bytes: of all images being received or waiting to be scored.
        receive_seconds: until a body is complete.
        begin_seconds: after which a body has to come at `bytes_a_second` at least.
        answer_seconds: until a part is answered.
        waiting_parts: parts in progress of each model.
        memory: bytes that the models in memory may take together; None for no limit.
    """

    body_bytes: int = 64_000_000
    short_bytes: int = 64_000
    held_bytes: int = 512_000_000
    receive_seconds: float = 30.0
    begin_seconds: float = 5.0
    bytes_a_second: int = 1000
    answer_seconds: float = 60.0
    waiting_parts: int = 64
    memory: int | None = None

    @classmethod
    def of(cls, body_bytes: int) -> Limits:
        """Limits that let one image file of `body_bytes` be scored while another waits."""
        return cls(body_bytes, held_bytes=max(cls.held_bytes, 2 * body_bytes))


@dataclass(frozen=True)
class Version:
    """A version that has passed its checks, and its facts while it isn't loaded.

    Attributes:
        model_id: of its folder.
        checked: what was checked.
        marks: whether it has thresholds, so that masks and regions can be asked for.
        short: its entry in the list of models.
        long: its further facts.
        drift: watches its scores; None without thresholds.
        review: the review threshold; None without thresholds.
        promise: what the thresholds promise, as JSON for the record; empty without thresholds.
    """

    model_id: str
    checked: str
    marks: bool
    short: dict[str, Any]
    long: dict[str, Any]
    drift: RecordedDrift | None
    review: Threshold | None
    promise: str = ""

    @classmethod
    def of(cls, model: Model, folder: Path, checked: str) -> Version:
        """The facts of a loaded model."""
        limits = model.thresholds
        short = {"model_id": model.model_id, "model_name": model.config.name}
        short |= {"method": model.method, "unit": model.unit}
        long = {
            "config": to_dict(model.config),
            "thresholds": None if limits is None else limits.to_json(),
            "calibration": [] if limits is None else limits.lines(),
            "training_images": len(model.manifest.get("training_images", ())),
        }
        if limits is None:
            return cls(model.model_id, checked, False, short, long, None, None)
        ids, levels = {model.model_id, *thresholds_alone_differ(folder)}, levels_of(limits)
        drift, review = RecordedDrift(levels, ids), limits.calibration.review
        rates = {"review": review.false_rejects, "reject": limits.calibration.reject.false_rejects}
        rates |= {f"zone {name}": own.false_rejects for name, own in limits.zones.items()}
        promise = {
            "rates": {name: asdict(rate) for name, rate in rates.items()},
            "levels": [asdict(level) for level in levels],
            "same_scores": sorted(ids),
            "caught": caught_defects(model),
        }
        return cls(model.model_id, checked, True, short, long, drift, review, json.dumps(promise))


@dataclass(frozen=True)
class _Waiting:
    """A part that waits until its model is loaded."""

    since: float
    done: Future[Scored]
    arguments: tuple[bytes, str, PictureRequest]


@dataclass
class ModelSlot:
    """One model of the service.

    Attributes:
        name: in the service.
        folder: the model folder.
        record: of its results.
        now: the version in use; None until one has passed its checks.
        engine: scores its parts; None while the model isn't loaded.
        trouble: why the folder's version can't be used; empty if it can.
        seen: state of the folder's files at the last check.
        tried: their state when they were last loaded, with or without success.
        passed: their state when they passed the checks.
        grown: bytes that loading it has added to this process; of its files while it is new.
        beside: least memory of its decoding processes in bytes.
        asked: when it was last asked for or loaded.
        most_waiting: most parts that may wait until it is loaded.
        wake: called when a part needs the model while it isn't loaded.
    """

    name: str
    folder: Path
    record: Path = Path()
    now: Version | None = None
    engine: Engine | None = None
    trouble: str = ""
    seen: object = None
    tried: object = None
    passed: object = None
    grown: int = 0
    beside: int = 0
    asked: float = 0.0
    most_waiting: int = 64
    wake: Callable[[], object] = lambda: None
    _waiting: list[_Waiting] = field(default_factory=list, repr=False)
    _stopping: bool = False
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def state(self) -> str:
        """`loading`, `ready`, `unloaded` or `failed`; also `ready` if a new version was refused."""
        if self.engine is not None:
            return "ready"
        return "failed" if self.trouble else "unloaded" if self.now else "loading"

    @property
    def unusable(self) -> str:
        """Why parts aren't accepted; empty if they are."""
        reason = {"failed": self.trouble, "loading": "it is still being loaded"}.get(self.state)
        return f"{self.name} can't be used: {reason}" if reason else ""

    @property
    def refused(self) -> bool:
        """Whether an older version is in use because the folder's version has failed."""
        return bool(self.engine and self.trouble)

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        engine = self.engine
        return len(self._waiting) + (engine.waiting if engine else 0)

    @property
    def waits_since(self) -> float | None:
        """Since when parts wait until the model is loaded; None if none wait."""
        with self._changing:
            return self._waiting[0].since if self._waiting else None

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory; while it isn't loaded, the last or expected value."""
        engine = self.engine
        return self.grown + max(self.beside, engine.resident if engine else 0)

    def submit(self, data: bytes, name: str, wanted: PictureRequest) -> Future[Scored]:
        """Submit one part to the version in use, once it is loaded; see `Engine.submit`.

        Raises:
            BusyError: too many parts are waiting, or the model can't be used.
        """
        done: Future[Scored] = Future()
        with self._changing:
            self.asked = time.monotonic()
            if self.engine is not None:
                return self.engine.submit(data, name, wanted, done)
            if unusable := "the service is stopping" if self._stopping else self.unusable:
                raise BusyError(unusable, _AGAIN_SECONDS)
            if len(self._waiting) >= self.most_waiting:
                raise BusyError(
                    f"{self.most_waiting} parts wait until {self.name} is loaded; try again in "
                    f"{_AGAIN_SECONDS} s",
                    _AGAIN_SECONDS,
                )
            self._waiting.append(_Waiting(self.asked, done, (data, name, wanted)))
        self.wake()
        return done

    def use(self, version: Version, engine: Engine) -> None:
        """Switch to an engine for waiting and further parts; the last engine finishes its own."""
        with self._changing:
            last, self.engine = self.engine, engine
            self.now, self.trouble, self.asked = version, "", time.monotonic()
            for part in self._waiting:
                engine.submit(*part.arguments, part.done)
            self._waiting = []
        if last is not None:
            last.__exit__()

    def let_go(self) -> None:
        """Unload the model; accepted parts are finished, further parts wait."""
        with self._changing:
            last, self.engine = self.engine, None
        if last is not None:
            last.__exit__()

    def refuse(self, reason: str, *, stays: bool) -> None:
        """Refuse the waiting parts, since the model can't be loaded.

        Args:
            reason: why.
            stays: whether to refuse until its files change; otherwise the next part tries again.
        """
        with self._changing:
            self.trouble = reason if stays else self.trouble
            waiting, self._waiting = self._waiting, []
        for part in waiting:
            part.done.set_exception(
                BusyError(f"{self.name} can't be used: {reason}", _AGAIN_SECONDS)
            )

    def stop(self) -> None:
        """Refuse all waiting parts."""
        self._stopping = True
        self.refuse("the service is stopping", stays=False)

    def short(self) -> dict[str, Any]:
        """Its entry in the list of models."""
        with self._changing:
            short: dict[str, Any] = {"name": self.name, "state": self.state}
            short |= {"refused": self.refused, "reason": self.trouble}
            return short | (self.now.short if self.now else {})

    def long(self) -> dict[str, Any]:
        """All its facts: settings, thresholds, and how these were found."""
        now = self.now
        state = {"checked": now.checked if now else "", "drift": self.drifted()}
        return {**self.short(), **state, **(now.long if now else {})}

    def drifted(self) -> dict[str, Any]:
        """The drift of its newest parts, as in `anomaly drift`.

        Returns:
            `alarm`; `lines`, a readable line for each level; `compared`, whether `more` or `fewer`
            parts are flagged than promised; `flagged`, a readable line if so.
        """
        if not (self.now and self.now.drift and self.now.review):
            return {"alarm": False, "lines": [], "compared": "as promised", "flagged": ""}
        drift = self.now.drift.look(self.record)
        compared, flagged = drift.flagged(self.now.review, str(self.folder))
        levels = {"alarm": drift.alarm is not None, "lines": drift.lines()}
        return levels | {"compared": compared, "flagged": flagged}
