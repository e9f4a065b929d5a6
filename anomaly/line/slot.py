"""One model of the service: the version that was let in, in memory or not, and who asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anomaly.calibration import Threshold
from anomaly.line.drift import RecordedDrift, levels_of
from anomaly.line.engine import BusyError, Engine, PictureRequest, Scored
from anomaly.scoring.build import to_dict
from anomaly.scoring.pipeline import Model
from anomaly.storage.thresholds import thresholds_alone_differ

_AGAIN_SECONDS = 5  # after which to ask for a model that can't be used


@dataclass(frozen=True)
class Limits:
    """What requests and models may take.

    Attributes:
        body_bytes: of one image file.
        short_bytes: of any other body.
        held_bytes: of all that are received, or wait to be scored.
        receive_seconds: until a body is there.
        begin_seconds: after which a body has to come at `bytes_a_second` at least.
        answer_seconds: until a part is answered.
        waiting_parts: of each model, that may be on their way at once.
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
        """Limits with which an image file of so many bytes is taken, and another may wait."""
        return cls(body_bytes, held_bytes=max(cls.held_bytes, 2 * body_bytes))


@dataclass(frozen=True)
class Version:
    """What was let in, and is known of it even while it isn't in memory.

    Attributes:
        model_id: of its folder.
        checked: what was looked at before it was let in.
        marks: whether it has thresholds, so that masks and regions can be asked for.
        short: what a list of models says of it.
        long: what else can be asked of it.
        drift: watches its scores; None without thresholds.
        review: the review threshold; None without thresholds.
    """

    model_id: str
    checked: str
    marks: bool
    short: dict[str, Any]
    long: dict[str, Any]
    drift: RecordedDrift | None
    review: Threshold | None

    @classmethod
    def of(cls, model: Model, folder: Path, checked: str) -> Version:
        """The version that a folder's model is."""
        limits = model.thresholds
        short = {"model_id": model.model_id, "model_name": model.config.name}
        short |= {"method": model.method, "unit": model.unit}
        long = {
            "config": to_dict(model.config),
            "thresholds": None if limits is None else limits.to_json(),
            "calibration": [] if limits is None else limits.lines(),
            "training_images": len(model.manifest.get("training_images", ())),
        }
        drift = review = None
        if limits is not None:
            ids = {model.model_id, *thresholds_alone_differ(folder)}
            drift, review = RecordedDrift(levels_of(limits), ids), limits.calibration.review
        return cls(model.model_id, checked, limits is not None, short, long, drift, review)


@dataclass(frozen=True)
class _Waiting:
    """A part that waits until its model is in memory."""

    since: float
    done: Future[Scored]
    arguments: tuple[bytes, str, PictureRequest]


@dataclass
class ModelSlot:
    """One model of the service.

    Attributes:
        name: in the service.
        folder: the model folder.
        record: where its answers are.
        now: the version in use; None until one was let in.
        engine: scores its parts; None while it isn't in memory.
        trouble: why what is in the folder can't be used; empty while that isn't so.
        seen: what the folder's files were like at the last look.
        tried: what they were like when they were loaded last, with or without success.
        passed: what they were like when they were let in.
        grown: bytes by which loading it has made this process grow, or its files' when it is new.
        beside: bytes that its decoding processes hold at least.
        asked: when somebody has asked for it last, or when it was loaded.
        most_waiting: parts that may wait until it is in memory.
        wake: called when it isn't, and is asked for.
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
        """`loading`, `ready`, `unloaded` or `failed`; ready, too, where a new one was refused."""
        if self.engine is not None:
            return "ready"
        return "failed" if self.trouble else "unloaded" if self.now else "loading"

    @property
    def unusable(self) -> str:
        """Why no parts are taken; empty where they are, at once or once it is in memory."""
        reason = {"failed": self.trouble, "loading": "it is still being loaded"}.get(self.state)
        return f"{self.name} can't be used: {reason}" if reason else ""

    @property
    def refused(self) -> bool:
        """Whether another version is in use than the one in the folder, which has failed."""
        return bool(self.engine and self.trouble)

    @property
    def waiting(self) -> int:
        """Parts that were taken and aren't answered yet."""
        engine = self.engine
        return len(self._waiting) + (engine.waiting if engine else 0)

    @property
    def waits_since(self) -> float | None:
        """Since when parts wait until it is in memory; None while there are none."""
        with self._changing:
            return self._waiting[0].since if self._waiting else None

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory, or, while it isn't there, that it has taken or will."""
        engine = self.engine
        return self.grown + max(self.beside, engine.resident if engine else 0)

    @property
    def scene(self) -> str:
        """What has changed of the scene, not the parts; empty where nothing has."""
        engine = self.engine
        return "; ".join(engine.scene.changed.values()) if engine else ""

    def submit(self, data: bytes, name: str, wanted: PictureRequest) -> Future[Scored]:
        """Have the version in use take one part, once it is in memory; see `Engine.submit`.

        Raises:
            BusyError: too many wait already, or the model can't be used.
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
        """Let an engine take all further parts, and those that wait; what the last one took is
        answered.
        """
        with self._changing:
            last, self.engine = self.engine, engine
            self.now, self.trouble, self.asked = version, "", time.monotonic()
            for part in self._waiting:
                engine.submit(*part.arguments, part.done)
            self._waiting = []
        if last is not None:
            last.__exit__()

    def let_go(self) -> None:
        """Have it leave the memory; what it took is answered, further parts wait."""
        with self._changing:
            last, self.engine = self.engine, None
        if last is not None:
            last.__exit__()

    def refuse(self, reason: str, *, stays: bool) -> None:
        """It can't be loaded: answer the parts that wait for it.

        Args:
            reason: why.
            stays: until its files change; else the next one who asks has it tried again.
        """
        with self._changing:
            self.trouble = reason if stays else self.trouble
            waiting, self._waiting = self._waiting, []
        for part in waiting:
            part.done.set_exception(
                BusyError(f"{self.name} can't be used: {reason}", _AGAIN_SECONDS)
            )

    def stop(self) -> None:
        """Let no part wait any more."""
        self._stopping = True
        self.refuse("the service is stopping", stays=False)

    def short(self) -> dict[str, Any]:
        """What a list of models says of it."""
        with self._changing:
            short: dict[str, Any] = {"name": self.name, "state": self.state}
            short |= {"refused": self.refused, "reason": self.trouble}
            return short | (self.now.short if self.now else {})

    def long(self) -> dict[str, Any]:
        """All that can be asked of it: settings, thresholds, and what they were found with."""
        now = self.now
        state = {"checked": now.checked if now else "", "drift": self.drifted()}
        return {**self.short(), **state, **(now.long if now else {})}

    def drifted(self) -> dict[str, Any]:
        """Whether its newest parts have drifted, as `anomaly drift` says, and what was seen.

        Returns:
            `alarm`; `lines`, what was seen of each level; `compared`, whether `more` or `fewer`
            parts are flagged than promised, and `flagged`, where that is so, a line for people.
        """
        if not (self.now and self.now.drift and self.now.review):
            return {"alarm": False, "lines": [], "compared": "as promised", "flagged": ""}
        drift = self.now.drift.look(self.record)
        compared, flagged = drift.flagged(self.now.review, str(self.folder))
        said = {"alarm": drift.alarm is not None, "lines": drift.lines()}
        return said | {"compared": compared, "flagged": flagged}
