"""The models of the service by name, and the versions of each that are deployed."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anomaly.errors import AnomalyError, ModelError, OutputError, some, visible, why
from anomaly.files.outputs import locked
from anomaly.files.writing import draft_of
from anomaly.imaging.read import Image, list_images
from anomaly.line.record import Recorder
from anomaly.line.slot import ModelSlot, Version
from anomaly.scoring.model import Model
from anomaly.storage.folder import EXPORT, MANIFEST, check_run_folder, model_id
from anomaly.storage.golden import (
    carry_missed,
    golden_of,
    is_missed,
    moved_since,
    read_record,
    say_caught,
    score_golden,
)
from anomaly.storage.load import load_model

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between checks of the models' folders


class ModelRegistry:
    """All models of the service. Use it in a `with` statement, which finishes accepted parts.

    A thread loads the models; until then the service is alive, but not ready. Afterwards the
    thread checks for folders whose files have changed, and loads these.

    Args:
        folders: the models' folders by name.
        recorder: records the results.
        device: that the networks run on.
        waiting_parts: most parts of each model that may wait.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        recorder: Recorder,
        *,
        device: torch.device,
        waiting_parts: int = 64,
    ) -> None:
        self.models = {
            name: ModelSlot(name, folder, recorder, most_waiting=waiting_parts)
            for name, folder in folders.items()
        }
        self._promises = recorder.record.promises
        self._device = device
        self._open = ExitStack()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="load models", daemon=True)

    def __enter__(self) -> ModelRegistry:
        for slot in self.models.values():
            self._open.enter_context(slot)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._open.close()

    def _keep_up(self) -> None:
        for slot in self.models.values():
            if not self._closing.is_set():
                slot.seen = slot.tried = stamp_of(slot.folder)
                self._load(slot)
        while not self._closing.wait(_LOOK_SECONDS):
            for slot in self.models.values():
                self._look(slot)

    def _look(self, slot: ModelSlot) -> None:
        stamp = stamp_of(slot.folder)
        still, slot.seen = stamp == slot.seen, stamp  # not while files are being written
        if still and stamp != slot.tried and not self._closing.is_set():
            slot.tried = stamp
            self._load(slot)

    def _load(self, slot: ModelSlot) -> None:
        try:
            version = self._version(slot)
        except AnomalyError as error:
            slot.trouble = visible(str(error))
        except Exception as error:  # one model's error mustn't stop the others
            log.exception("%s can't be loaded", slot.name)
            slot.trouble = f"loading failed: {type(error).__name__}"
        else:
            model_id = version.model.model_id
            if slot.now and slot.now.model.model_id != model_id:
                log.info("%s now serves model %s", slot.name, model_id)
            if version.promise:
                self._promises[model_id] = version.promise
            slot.use(version)
            return
        what = "the new version is refused" if slot.now else "it can't be served"
        log.error("%s: %s: %s", slot.name, what, slot.trouble)

    def _version(self, slot: ModelSlot) -> Version:
        """Load and check a model's folder."""
        model = load_model(slot.folder, self._device)
        return Version.of(model, slot.folder, check(model, slot.folder))


_TOLERANCE = 0.01  # largest change of a golden part's score, as in `selfcheck`
_EARLIER, _WITHDRAWN = "earlier", "withdrawn"
# In the order in which they move: nobody finds a new model without its golden parts.
_BESIDE = ("train.json", "suspects", "golden")
_PARTS = (*_BESIDE, "model")


def check(model: Model, folder: Path) -> str:
    """Check a model's golden parts, if there are any; `load` has checked its files.

    Args:
        model: the model.
        folder: its folder.

    Returns:
        What was checked, for people.

    Raises:
        ModelError: a score or a verdict differs from the record.
        DataError: the record of golden parts is damaged.
    """
    golden = golden_of(folder)
    if golden is None:
        # The first pass of a network takes longer than the others.
        grey = Image(np.full((256, 256, 3), 128, np.uint8), 255.0, "rgb8", "array", "")
        list(model.results([grey]))
        return "every file's hash; no golden parts are recorded beside the model"
    recorded = read_record(golden)["images"]
    scores = score_golden(model, list_images(golden), golden)
    moved = moved_since(recorded, scores, _TOLERANCE)
    if moved:
        changes = some([f"{name}: {change}" for name, change in moved.items()], "; ")
        raise ModelError(f"its golden parts' scores or verdicts differ from {golden}: {changes}")
    known = say_caught(scores)
    parts = sum(not is_missed(name) for name in scores)
    checked = f"every file's hash, and {parts} golden parts, which score as recorded"
    return f"{checked}; {known}" if known else checked


def stamp_of(folder: Path) -> tuple[object, ...]:
    """Places, times and sizes of a model's files and golden parts, to notice changes.

    Two results differ if a file was written in between.
    """
    golden = folder.parent / "golden" if folder.name == "model" else folder / "golden"
    stamp: list[object] = []
    for place in (folder, golden):
        try:
            for file in sorted(place.rglob("*")):
                stat = file.stat()
                stamp.append((str(file), stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:  # being replaced right now
            stamp.append(place)
    return tuple(stamp)


def deploy(new: Path, run: Path) -> None:
    """Copy a model into a run, which keeps its previous version.

    Its golden parts, the previous version's missed defects and the facts of its training, above
    all the data set, are copied, too.

    Args:
        new: the model folder.
        run: created if missing.

    Raises:
        OutputError: the run holds this model already, can't be written, or is a folder of runs.
    """
    if (run / MANIFEST).is_file():
        raise OutputError(
            f"{run} is a model folder, which holds one version; give the run's folder"
        )
    check_run_folder(run)
    draft = draft_of(run / "model")
    beside = [new.parent / part for part in _BESIDE if new.name == "model"]
    _check_links([new, *beside, run / "golden"])
    with _changing(run):
        if holds(run / "model", new):
            raise OutputError(f"{run} holds this model already; nothing was changed")
        try:
            shutil.copytree(new, draft / "model")
            for part in beside:
                _copy(part, draft / part.name)
            carry_missed(run / "golden", draft / "golden", _id(draft))
            _move(run, _numbered(run, _EARLIER))
            _move(draft, run)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def earlier(run: Path) -> Path:
    """The previous version's folder, which `back` restores.

    Raises:
        OutputError: there is none.
    """
    versions = [v for v in _kept(run, _EARLIER) if (v / "model" / MANIFEST).is_file()]
    if not versions:
        raise OutputError(f"{run} has no earlier version (none in {run / _EARLIER})")
    return versions[-1]


def back(run: Path) -> None:
    """Bring the previous version back; the current one is kept as withdrawn.

    Args:
        run: that a model was deployed to.

    Raises:
        OutputError: there is no previous version, or the folder can't be written.
    """
    with _changing(run):
        before = earlier(run)
        carry_missed(run / "golden", before / "golden", _id(before))
        _move(run, _numbered(run, _WITHDRAWN))
        _move(before, run)
        shutil.rmtree(before)


def _id(run: Path) -> str:
    model = run / "model"
    return model_id(model) if (model / MANIFEST).is_file() else ""


def holds(old: Path, new: Path) -> bool:
    """Whether two model folders are of one model in one engine; an export keeps its model's id."""
    places = [(old / name, new / name) for name in (MANIFEST, EXPORT)]
    return all(_content(before) == _content(after) for before, after in places)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _kept(run: Path, kind: str) -> list[Path]:
    return sorted(version for version in (run / kind).glob("*") if version.is_dir())


def _numbered(run: Path, kind: str) -> Path:
    """A new folder for the version in use, numbered after all others of its kind."""
    kept = _kept(run, kind)
    last = int(kept[-1].name.partition("-")[0]) if kept else 0
    return run / kind / f"{last + 1:03}-{_id(run)}"


def _check_links(places: Iterable[Path]) -> None:
    """Refuse links, which may lead to files that are no part of a run."""
    for place in places:
        for path in (place, *place.rglob("*")):
            if path.is_symlink():
                raise OutputError(f"{path} is a link, which isn't copied; put the file there")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copy2(source, target)


def _move(source: Path, target: Path) -> None:
    for part in _PARTS:
        if (source / part).exists():
            target.mkdir(parents=True, exist_ok=True)
            (source / part).rename(target / part)


@contextmanager
def _changing(run: Path) -> Iterator[None]:
    with locked(run):
        try:
            yield
        except (OSError, ValueError) as error:
            raise OutputError(f"the versions in {run} can't be changed: {why(error)}") from None
