"""The models of a service: found in a folder, loaded one after the other, each checked first."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.calibration.drift import Drift, levels_of
from anomaly.errors import AnomalyError, ModelError
from anomaly.files.own_outputs import GOLDEN
from anomaly.imaging.image import Image
from anomaly.imaging.listing import list_images
from anomaly.inference.golden import moved_since, read_record, score_golden
from anomaly.model.checkpoint import load
from anomaly.model.detector import AnomalyDetector
from anomaly.model.folder import find_model
from anomaly.model.settings import portable
from anomaly.service.engine import Engine
from anomaly.service.recorder import Recorder

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_TOLERANCE = 0.01  # by which a golden part's score may have moved, as in `selfcheck`


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


@dataclass
class Served:
    """One model of the service.

    Attributes:
        name: in the service.
        folder: the model folder.
        engine: None until it is loaded, and where it can't be used.
        trouble: why it can't be used; empty while that isn't so.
        checked: what was looked at before it was let in.
        drift: watches its scores since the service was started; None without thresholds.
    """

    name: str
    folder: Path
    engine: Engine | None = None
    trouble: str = ""
    checked: str = ""
    drift: Drift | None = None

    @property
    def state(self) -> str:
        """`loading`, `ready` or `failed`."""
        return "failed" if self.trouble else "ready" if self.engine else "loading"

    def short(self) -> dict[str, Any]:
        """What a list of models says of it."""
        said: dict[str, Any] = {"name": self.name, "state": self.state, "reason": self.trouble}
        if self.engine is not None:
            model = self.engine.model
            said |= {"model_id": model.model_id, "model_name": model.config.name}
            said |= {"method": model.method, "unit": model.unit}
        return said

    def drifted(self) -> dict[str, Any]:
        """Whether its parts have drifted since the service was started, and what was seen."""
        if self.drift is None:
            return {"alarm": False, "lines": []}
        return {"alarm": self.drift.alarm is not None, "lines": self.drift.lines()}

    def long(self) -> dict[str, Any]:
        """All that can be asked of it: settings, thresholds, and what they were found with."""
        said = {**self.short(), "checked": self.checked, "drift": self.drifted()}
        if self.engine is not None:
            model, limits = self.engine.model, self.engine.model.thresholds
            said["config"] = portable(model.config)
            said["thresholds"] = None if limits is None else limits.to_json()
            said["calibration"] = [] if limits is None else limits.lines()
            said["training_images"] = len(model.manifest.get("training_images", ()))
        return said


class Lineup:
    """All models of the service. Used in a `with` statement, which answers what was taken.

    Loading goes on in a thread of its own: the service is alive meanwhile, but not ready.

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
        self._engines = ExitStack()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._load_all, name="load models", daemon=True)

    def __enter__(self) -> Lineup:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._engines.close()

    @property
    def ready(self) -> bool:
        """Whether every model can be used."""
        return all(served.state == "ready" for served in self.models.values())

    def _load_all(self) -> None:
        for served in self.models.values():
            if self._closing.is_set():
                return
            try:
                self._load(served)
            except AnomalyError as error:
                served.trouble = str(error)
            except Exception as error:  # one model mustn't take the others with it
                log.exception("%s can't be loaded", served.name)
                served.trouble = f"loading it failed: {type(error).__name__}"
            if served.trouble:
                log.error("%s isn't served: %s", served.name, served.trouble)

    def _load(self, served: Served) -> None:
        model = load(served.folder, self._device)
        served.checked = self._check(model, served.folder)
        if model.thresholds is not None:
            served.drift = Drift(levels_of(model.thresholds))
        engine = Engine(
            served.name,
            model,
            self._recorder,
            workers=self._workers,
            most_waiting=self._most_waiting,
        )
        served.engine = self._engines.enter_context(engine)

    def _check(self, model: AnomalyDetector, folder: Path) -> str:
        """Score the golden parts beside a model, if there are any.

        Returns:
            What was done.

        Raises:
            ModelError: a score or a verdict isn't as it was recorded.
        """
        golden = folder.parent / "golden"
        if folder.name != "model" or not (golden / GOLDEN).is_file():
            # The first pass of a network takes longer than the others.
            grey = Image(np.full((256, 256, 3), 128, np.uint8), 255.0, "rgb8", "array", "")
            list(model.score_all([grey], workers=1))
            return "every file's hash; no golden parts are recorded beside the model"
        recorded = read_record(golden)["images"]
        found = score_golden(model, list_images(golden), golden, self._workers)
        moved = moved_since(recorded, found, _TOLERANCE)
        if moved:
            more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
            raise ModelError(
                f"its golden parts aren't scored as recorded in {golden}: "
                f"{'; '.join(moved[:3])}{more}"
            )
        return f"every file's hash, and {len(found)} golden parts, which score as recorded"
