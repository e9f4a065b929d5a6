"""The models of a service: found in a folder, loaded one after the other, each checked first.

A folder whose files change is loaded anew beside the model in use, which goes on answering until
the new version has passed the same checks; a version that doesn't pass is refused.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anomaly.calibration.drift import Drift, levels_of
from anomaly.errors import AnomalyError, ModelError
from anomaly.inference.rows import Row
from anomaly.model.checkpoint import load
from anomaly.model.folder import find_model
from anomaly.model.settings import portable
from anomaly.service.engine import Engine, Scored
from anomaly.service.pictures import Wanted
from anomaly.service.recorder import Recorder
from anomaly.service.versions import check, stamp_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at the models' folders


def find_models(folder: Path) -> dict[str, Path]:
    """The models in a folder: each subfolder that is one or is a run, else the folder itself.

    Returns:
        Their folders by name, which is the subfolder's.

    Raises:
        ModelError: there is none.
    """
    found = {}
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and entry.name != "model" and not entry.name.startswith("."):
                try:
                    found[entry.name] = find_model(entry)
                except ModelError:
                    continue
    return found or {folder.absolute().name: find_model(folder)}


@dataclass(frozen=True)
class Version:
    """What takes a model's requests.

    Attributes:
        engine: scores them.
        checked: what was looked at before it was let in.
        drift: watches its scores since then; None without thresholds.
    """

    engine: Engine
    checked: str
    drift: Drift | None


@dataclass
class Served:
    """One model of the service.

    Attributes:
        name: in the service.
        folder: the model folder.
        now: the version in use; None until one is loaded.
        trouble: why what is in the folder can't be used; empty while that isn't so.
        seen: what the folder's files were like at the last look.
        tried: what they were like when it was loaded last, with or without success.
    """

    name: str
    folder: Path
    now: Version | None = None
    trouble: str = ""
    seen: object = None
    tried: object = None
    _changing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def engine(self) -> Engine | None:
        """The engine in use."""
        return self.now.engine if self.now else None

    @property
    def state(self) -> str:
        """`loading`, `ready` or `failed`; ready, too, where a newer version was refused."""
        return "ready" if self.now else "failed" if self.trouble else "loading"

    @property
    def refused(self) -> bool:
        """Whether another version is in use than the one in the folder, which has failed."""
        return bool(self.now and self.trouble)

    def submit(self, data: bytes, name: str, wanted: Wanted) -> tuple[Engine, Future[Scored]]:
        """Have the version in use take one part; see `Engine.submit`.

        Returns:
            Its engine, which answers even when another version follows meanwhile; the answer.
        """
        with self._changing:
            assert self.now is not None
            return self.now.engine, self.now.engine.submit(data, name, wanted)

    def use(self, version: Version) -> None:
        """Let another version take all further parts; what the last one took is answered."""
        with self._changing:
            last, self.now, self.trouble = self.now, version, ""
        if last is not None:
            last.engine.__exit__()

    def short(self) -> dict[str, Any]:
        """What a list of models says of it."""
        with self._changing:
            said: dict[str, Any] = {"name": self.name, "state": self.state}
            said |= {"refused": self.refused, "reason": self.trouble}
            engine = self.engine
        if engine is not None:
            model = engine.model
            said |= {"model_id": model.model_id, "model_name": model.config.name}
            said |= {"method": model.method, "unit": model.unit}
        return said

    def note(self, row: Row) -> None:
        """A part was answered: see whether parts drift."""
        now = self.now
        if now is None or now.drift is None or row.image_score is None or row.reason:
            return
        if row.model_id == now.engine.model.model_id:  # not by the version before
            now.drift.add(row.image_score)

    def drifted(self) -> dict[str, Any]:
        """Whether its parts have drifted since this version is in use, and what was seen."""
        drift = self.now and self.now.drift
        if not drift:
            return {"alarm": False, "lines": []}
        return {"alarm": drift.alarm is not None, "lines": drift.lines()}

    def long(self) -> dict[str, Any]:
        """All that can be asked of it: settings, thresholds, and what they were found with."""
        checked = self.now.checked if self.now else ""
        said = {**self.short(), "checked": checked, "drift": self.drifted()}
        if self.engine is not None:
            model, limits = self.engine.model, self.engine.model.thresholds
            said["config"] = portable(model.config)
            said["thresholds"] = None if limits is None else limits.to_json()
            said["calibration"] = [] if limits is None else limits.lines()
            said["training_images"] = len(model.manifest.get("training_images", ()))
        return said


class Lineup:
    """All models of the service. Used in a `with` statement, which answers what was taken.

    Loading goes on in a thread of its own: the service is alive meanwhile, but not ready. Then the
    thread looks whether a folder's files have changed, and loads those that have.

    Args:
        folders: the models' folders by name.
        recorder: writes answers down.
        device: where the networks are.
        workers: decoding processes of each model.
        most_waiting: parts of each model that may be on their way at once.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        recorder: Recorder,
        *,
        device: torch.device,
        workers: int,
        most_waiting: int = 64,
    ) -> None:
        self.models = {name: Served(name, folder) for name, folder in folders.items()}
        self._recorder = recorder
        self._device = device
        self._workers, self._most_waiting = workers, most_waiting
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="load models", daemon=True)

    def __enter__(self) -> Lineup:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for served in self.models.values():
            if served.engine is not None:
                served.engine.__exit__()

    @property
    def ready(self) -> bool:
        """Whether every model can be used."""
        return all(served.state == "ready" for served in self.models.values())

    def _keep_up(self) -> None:
        for served in self.models.values():
            if not self._closing.is_set():
                served.seen = served.tried = stamp_of(served.folder)
                self._load(served)
        while not self._closing.wait(_LOOK_SECONDS):
            for served in self.models.values():
                self._look(served)

    def _look(self, served: Served) -> None:
        stamp = stamp_of(served.folder)
        still, served.seen = stamp == served.seen, stamp  # not while files are being written
        if still and stamp != served.tried and not self._closing.is_set():
            served.tried = stamp
            self._load(served)

    def _load(self, served: Served) -> None:
        try:
            version = self._version(served)
        except AnomalyError as error:
            served.trouble = str(error)
        except Exception as error:  # one model mustn't take the others with it
            log.exception("%s can't be loaded", served.name)
            served.trouble = f"loading it failed: {type(error).__name__}"
        else:
            served.use(version)
            return
        goes_on = "; the version before goes on" if served.now else ""
        log.error("%s isn't served: %s%s", served.name, served.trouble, goes_on)

    def _version(self, served: Served) -> Version:
        model = load(served.folder, self._device)
        checked = check(model, served.folder, self._workers)
        drift = None if model.thresholds is None else Drift(levels_of(model.thresholds))
        engine = Engine(
            served.name,
            model,
            self._recorder,
            workers=self._workers,
            most_waiting=self._most_waiting,
        )
        return Version(engine.__enter__(), checked, drift)
