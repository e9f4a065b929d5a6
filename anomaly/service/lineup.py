"""The models of a service: found in a folder, loaded one after the other, each checked first.

A folder whose files change is loaded anew beside the model in use, which goes on answering until
the new version has passed the same checks; a version that doesn't pass is refused. Where memory is
limited, models that nobody asks for leave it, and come back when somebody does.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.errors import AnomalyError, ModelError
from anomaly.imaging.process_limits import resident_bytes
from anomaly.model.checkpoint import load
from anomaly.runtime.memory import release_memory
from anomaly.service.engine import Engine
from anomaly.service.recorder import Recorder
from anomaly.service.served import Served, Version
from anomaly.service.versions import check, stamp_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at the models' folders


class Lineup:
    """All models of the service. Used in a `with` statement, which answers what was taken.

    Loading goes on in a thread of its own: the service is alive meanwhile, but not ready. Then the
    thread looks whether a folder's files have changed, and loads those that have.

    With a limit of memory every model is loaded once, too. When the next one needs the room, the
    one that was asked for longest ago leaves, one without parts on their way first; what it took
    is answered. Parts for a model that isn't in memory wait for it, and all that wait are taken
    once it is: two models that take turns both get on.

    Args:
        folders: the models' folders by name.
        recorder: writes answers down.
        device: where the networks are.
        workers: decoding processes of each model.
        most_waiting: parts of each model that may be on their way at once.
        memory: bytes that the models in memory may take together; None for no limit.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        recorder: Recorder,
        *,
        device: torch.device,
        workers: int,
        most_waiting: int = 64,
        memory: int | None = None,
    ) -> None:
        self._awake = threading.Event()
        self.models = {
            name: Served(name, folder, most_waiting=most_waiting, wake=self._awake.set)
            for name, folder in folders.items()
        }
        self._recorder = recorder
        self._device = device
        self._workers, self._most_waiting = workers, most_waiting
        self._memory = memory
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, name="load models", daemon=True)

    def __enter__(self) -> Lineup:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._closing.set()
        self._awake.set()
        self._thread.join()
        for served in self.models.values():
            served.let_go()

    @property
    def ready(self) -> bool:
        """Whether every model can be used."""
        return all(served.state in ("ready", "unloaded") for served in self.models.values())

    def stop(self) -> None:
        """Let no part wait for its model any more."""
        for served in self.models.values():
            served.stop()

    def _keep_up(self) -> None:
        if self._memory is not None:
            self._warm_up()
        for served in self.models.values():
            self._load_asked()
            if not self._closing.is_set():
                served.seen = served.tried = stamp_of(served.folder)
                self._load(served)
        looked = time.monotonic()
        while not self._closing.is_set():
            self._awake.wait(_LOOK_SECONDS)
            self._awake.clear()
            self._load_asked()
            if time.monotonic() >= looked + _LOOK_SECONDS:
                for served in self.models.values():
                    self._look(served)
                looked = time.monotonic()

    def _look(self, served: Served) -> None:
        stamp = stamp_of(served.folder)
        still, served.seen = stamp == served.seen, stamp  # not while files are being written
        if still and stamp != served.tried and not self._closing.is_set():
            served.tried = stamp
            self._load(served)

    def _load_asked(self) -> None:
        """Load the models that parts wait for; one whose files have changed is for `_look`."""
        since = {name: one.waits_since for name, one in self.models.items()}
        for name in sorted((n for n, s in since.items() if s), key=lambda n: since[n] or 0.0):
            served = self.models[name]
            if not self._closing.is_set() and stamp_of(served.folder) == served.tried:
                self._load(served)

    def _load(self, served: Served) -> None:
        again = served.tried == served.passed
        try:
            version, engine = self._version(served, served.now if again else None)
        except AnomalyError as error:
            reason = str(error)
        except Exception as error:  # one model mustn't take the others with it
            log.exception("%s can't be loaded", served.name)
            reason = f"loading it failed: {type(error).__name__}"
        else:
            served.passed = served.tried
            if served.now and served.now.model_id != version.model_id:
                log.info("%s is model %s from now on", served.name, version.model_id)
            served.use(version, engine)
            return
        served.refuse(reason, stays=not again)
        if served.engine:
            log.error(
                "the new version of %s is refused, the one before goes on: %s", served.name, reason
            )
        else:
            log.error("%s isn't served: %s", served.name, reason)

    def _version(self, served: Served, passed: Version | None) -> tuple[Version, Engine]:
        """What is in a model's folder, checked and measured unless it has passed before."""
        if not served.folder.is_dir():
            raise ModelError(f"its folder {served.folder} isn't there any more")
        if not passed:
            size = sum(file.stat().st_size for file in served.folder.iterdir() if file.is_file())
            self._refuse_above_limit(size, "its files have")
            served.grown = max(size, served.grown)
        self._make_room(served, served.memory)
        before = _resident()
        model = load(served.folder, self._device)
        with ExitStack() as undone:
            engine = undone.enter_context(
                Engine(
                    served.name,
                    model,
                    self._recorder,
                    workers=self._workers,
                    most_waiting=self._most_waiting,
                )
            )
            if not passed:
                passed = Version.of(model, check(model, served.folder, self._workers))
                beside, grown = engine.begun(), max(size, _resident() - before)
                self._refuse_above_limit(grown + beside, "in memory it takes")
                self._make_room(served, grown + beside)
                served.grown, served.beside = grown, beside
            undone.pop_all()
        return passed, engine

    def _make_room(self, served: Served, needed: int) -> None:
        """Have others leave until a model fits beside the rest, or nothing more can leave."""
        while self._memory is not None:
            inside = [one for one in self.models.values() if one.engine]
            # Of a version that was refused since, nothing is left but what is in memory.
            others = [one for one in inside if one is not served and not one.refused]
            if not others or sum(one.memory for one in inside) + needed <= self._memory:
                return
            last = min(others, key=lambda one: (one.waiting > 0, one.asked))
            log.info("%s leaves the memory, for %s", last.name, served.name)
            last.let_go()

    def _refuse_above_limit(self, size: int, what: str) -> None:
        if self._memory is not None and size > self._memory:
            raise ModelError(
                f"{what} {size / 1e6:.0f} MB, more than all models together may take "
                f"({self._memory / 1e6:.0f} MB); give a larger --memory"
            )

    def _warm_up(self) -> None:
        """Have what comes with the first model in memory, libraries above all: it's no model's."""
        with suppress(Exception):  # said when it is loaded to be used
            folder = next(iter(self.models.values())).folder
            check(load(folder, self._device), folder, self._workers)


def _resident() -> int:
    """Bytes that this process holds, less what is free; 0 where the system doesn't say."""
    gc.collect()
    release_memory()
    return resident_bytes(os.getpid())
