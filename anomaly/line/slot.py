"""One model of the service, and its checked version."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anomaly.evaluation.splits import caught_defects
from anomaly.line.drift import Promise, RecordedDrift
from anomaly.line.engine import BusyError, Engine, Scored
from anomaly.scoring.build import to_dict
from anomaly.scoring.pipeline import Model
from anomaly.storage.thresholds import thresholds_alone_differ


@dataclass(frozen=True)
class Version:
    """A version that has passed its checks.

    Attributes:
        model: loaded from its folder.
        checked: what was checked.
        drift: watches its scores; None without thresholds.
        promise: what the thresholds promise, as JSON for the record; empty without thresholds.
    """

    model: Model
    checked: str
    drift: RecordedDrift | None
    promise: str

    @classmethod
    def of(cls, model: Model, folder: Path, checked: str) -> Version:
        """A loaded model's version."""
        limits = model.thresholds
        if limits is None:
            return cls(model, checked, None, "")
        ids = {model.model_id, *thresholds_alone_differ(folder)}
        promise = Promise.given(limits, ids, caught_defects(model))
        drift = RecordedDrift(promise.levels, ids)
        return cls(model, checked, drift, json.dumps(asdict(promise)))

    def short(self) -> dict[str, Any]:
        """Its entry in the list of models."""
        model = self.model
        names = {"model_id": model.model_id, "model_name": model.config.name}
        return names | {"method": model.method, "unit": model.unit}

    def long(self) -> dict[str, Any]:
        """Its further facts: settings, thresholds, and how these were found."""
        model, limits = self.model, self.model.thresholds
        return {
            "checked": self.checked,
            "config": to_dict(model.config),
            "thresholds": None if limits is None else limits.to_json(),
            "calibration": [] if limits is None else limits.lines(),
            "training_images": len(model.manifest.get("training_images", ())),
        }


@dataclass
class ModelSlot:
    """One model of the service.

    Attributes:
        name: in the service.
        folder: the model folder.
        record: of its results.
        now: the version in use; None until one has passed its checks.
        engine: scores the parts of the version in use; None without one.
        trouble: why the folder's version can't be used; empty if it can.
        seen: state of the folder's files at the last check.
        tried: their state when they were last loaded, with or without success.
    """

    name: str
    folder: Path
    record: Path = Path()
    now: Version | None = None
    engine: Engine | None = None
    trouble: str = ""
    seen: object = None
    tried: object = None
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def state(self) -> str:
        """`loading`, `ready` or `failed`; also `ready` if a new version was refused."""
        if self.engine is not None:
            return "ready"
        return "failed" if self.trouble else "loading"

    @property
    def unusable(self) -> str:
        """Why parts aren't accepted; empty if they are."""
        reason = {"failed": self.trouble, "loading": "it is still being loaded"}.get(self.state)
        return f"{self.name} can't be used: {reason}" if reason else ""

    @property
    def waiting(self) -> int:
        """Number of accepted parts without an answer."""
        return self.engine.waiting if self.engine else 0

    @property
    def refused(self) -> bool:
        """Whether an older version is in use because the folder's version has failed."""
        return bool(self.engine and self.trouble)

    def submit(self, data: bytes, name: str, wanted: Collection[str]) -> Future[Scored]:
        """Submit one part to the version in use; see `Engine.submit`.

        Raises:
            BusyError: too many parts are waiting, or the model can't be used.
        """
        with self._changing:
            if self.engine is None:
                raise BusyError(self.unusable)
            return self.engine.submit(data, name, wanted)

    def use(self, version: Version, engine: Engine) -> None:
        """Switch to an engine for further parts; the last engine finishes its own."""
        with self._changing:
            last, self.engine = self.engine, engine
            self.now, self.trouble = version, ""
        if last is not None:
            last.__exit__()

    def close(self) -> None:
        """Finish accepted parts."""
        with self._changing:
            last, self.engine = self.engine, None
        if last is not None:
            last.__exit__()

    def short(self) -> dict[str, Any]:
        """Its entry in the list of models."""
        with self._changing:
            short: dict[str, Any] = {"name": self.name, "state": self.state}
            short |= {"refused": self.refused, "reason": self.trouble}
            return short | (self.now.short() if self.now else {})

    def long(self) -> dict[str, Any]:
        """All its facts."""
        now = self.now
        facts = {"checked": ""} if now is None else now.long()
        return {**self.short(), "drift": self.drifted(), **facts}

    def drifted(self) -> dict[str, Any]:
        """The drift of its newest parts, as in a report.

        Returns:
            `alarm`; `lines`, a readable line for each level; `compared`, whether `more` or `fewer`
            parts are flagged than promised; `flagged`, a readable line if so.
        """
        now = self.now
        if now is None or now.drift is None or now.model.thresholds is None:
            return {"alarm": False, "lines": [], "compared": "as promised", "flagged": ""}
        drift = now.drift.look(self.record)
        review = now.model.thresholds.calibration.review
        compared, flagged = drift.flagged(review, str(self.folder))
        levels = {"alarm": drift.alarm is not None, "lines": drift.lines()}
        return levels | {"compared": compared, "flagged": flagged}
