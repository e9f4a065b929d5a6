"""Folders × model -> rows as files arrive: `infer --watch`, for as long as a shift lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from anomaly.datasets.inputs import picture_names
from anomaly.errors import DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.inference.arrivals import Arrivals, Stamp
from anomaly.inference.artifacts import picture_exists
from anomaly.inference.journal import Known
from anomaly.inference.run import Inputs, infer
from anomaly.inference.watch_log import WatchLog
from anomaly.maps.thumbnails import Thumbnails
from anomaly.model.detector import AnomalyDetector

_POLL_SECONDS = 0.5
# Looking into the folders takes at most this share of the time.
_POLL_SHARE = 0.2


def watch(
    model: AnomalyDetector,
    folders: list[Path],
    output: Path,
    log: WatchLog,
    decoders: Decoders,
    *,
    settle: float = 0.5,
    stopped: Callable[[], bool],
    heatmaps: Literal["none", "reject", "all"] = "all",
    thumbnails: Thumbnails | None = None,
    seen: Callable[[Known], None] = lambda known: None,
    trouble: Callable[[str], None] = lambda message: None,
) -> None:
    """Score what is in the folders, and what arrives there, until stopped.

    What this holds in memory hangs on the files that are in the folders, not on how many have been
    there. A folder that can't be listed for a while, as network drives have it, is tried again.

    Args:
        model: says what is good.
        folders: what is followed.
        output: where the pictures are, so that none is written over.
        log: open; gets each row once its pictures are on disk.
        decoders: begun, with this model's loading.
        settle: seconds after which a file that nobody has written to is fully written.
        stopped: asked all the time.
        heatmaps: which images have one, as for `Inputs`.
        thumbnails: as for `infer`.
        seen: called with each row.
        trouble: called with what is wrong with the folders, once for each spell of it.

    Raises:
        OutputError: results can't be written.
    """
    arrivals = Arrivals(folders, log.done, settle)
    complaint = told = ""
    while not stopped():
        begun = time.monotonic()
        try:
            ready = arrivals.poll(begun)
            before, complaint = complaint, ""
        except DataError as error:
            ready = {}
            before, complaint = complaint, str(error)
        # A folder that goes while it is being listed is no trouble yet.
        if complaint == before != told:
            trouble(complaint or "the folders can be listed again")
            told = complaint
        polled = time.monotonic()
        if ready:
            paths = list(ready)
            names = picture_names(paths, folders, partial(picture_exists, output))
            inputs = Inputs(paths, names, heatmaps)
            record = _Arrived(ready, log, seen)
            infer(model, inputs, record, decoders, stopped=stopped, thumbnails=thumbnails)
        _pause(polled + max(_POLL_SECONDS, (polled - begun) / _POLL_SHARE), stopped)


def _pause(until: float, stopped: Callable[[], bool]) -> None:
    """A signal doesn't end a sleep, so that sleeps are short."""
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


class _Arrived:
    """Takes the rows of what one poll has found."""

    def __init__(
        self, ready: Mapping[Path, Stamp], log: WatchLog, seen: Callable[[Known], None]
    ) -> None:
        self._files = list(ready.items())
        self._log = log
        self._seen = seen
        self.known: dict[int, Known] = {}

    def add(self, known: Known) -> None:
        path, stamp = self._files[known.index]
        self._log.add(path, stamp, known)
        self._seen(known)
