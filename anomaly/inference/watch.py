"""Folders × model -> rows as files arrive: `infer --watch`, for as long as a shift lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from anomaly.datasets.inputs import picture_names
from anomaly.errors import DataError
from anomaly.files.writing import WATCHED, GrowingFile
from anomaly.imaging.read import is_image, list_files
from anomaly.inference.pipeline import LINES, REGIONS, RESULTS, Finished, Inputs, Journal, Run
from anomaly.inference.results import Outputs, RegionRow, Row, as_jsonl, csv_header, csv_lines
from anomaly.scoring.model import Model
from anomaly.storage.folder import MANIFEST, model_id

_POLL_SECONDS = 0.5
SETTLE = 0.5  # seconds without a change after which a file counts as complete
_POLL_SHARE = 0.2  # largest share of the time spent on listing the folders

# A file's size in bytes and the time of its last change in nanoseconds.
Stamp: TypeAlias = tuple[int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Size and time of a file, which change when it is written to; None if it isn't accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class Arrivals:
    """New files in folders.

    It remembers only the files that are in the folders now, so a long run needs no more memory;
    for an empty folder it remembers the last files.

    Args:
        folders: folders to list, with their subfolders.
        done: files that an earlier run has scored, with their stamps at that time.
        settle: seconds without a change after which a file counts as complete.
    """

    def __init__(
        self, folders: Sequence[Path], done: Mapping[Path, Stamp], settle: float = 0.0
    ) -> None:
        self._folders = folders
        self._returned = dict(done)
        self._settle = settle
        # Files that may still be written to: stamp, and the time at which it was first seen.
        self._written: dict[Path, tuple[Stamp, float]] = {}

    def poll(self, now: float = 0.0) -> dict[Path, Stamp]:
        """New files that are complete: unchanged for `settle` seconds between two polls.

        A file that changes after it was returned counts as new.

        Args:
            now: time in seconds, by a monotonic clock.

        Returns:
            Stamps by file, the oldest file first.

        Raises:
            DataError: a folder can't be listed; a later poll returns its new files.
        """
        files = {file for folder in self._folders for file in list_files(folder, tell=False)}
        listed = filter(is_image, files)
        stamps = {path: stamp for path in listed if (stamp := stamp_of(path)) is not None}
        new = {path: stamp for path, stamp in stamps.items() if self._returned.get(path) != stamp}
        before, self._written = self._written, {}
        ready = {}
        for path, stamp in new.items():
            known, since = before.get(path, (None, now))
            if known != stamp:
                self._written[path] = stamp, now
            elif now - since < self._settle:
                self._written[path] = stamp, since
            else:
                ready[path] = stamp
        # A folder that is suddenly empty may be a drive that comes back.
        if gone := self._returned.keys() - stamps.keys():
            there = [f for f in self._folders if any(path.is_relative_to(f) for path in stamps)]
            for path in gone:
                if any(path.is_relative_to(folder) for folder in there):
                    del self._returned[path]
        self._returned.update(ready)
        return dict(sorted(ready.items(), key=lambda one: (one[1][1], one[0])))


class WatchJournal(Journal):
    """The journal of watched folders, and the tables that grow with it.

    A line holds finished files and the lengths of the tables. Rows beyond these lengths come from
    a killed process; they are dropped, and their files are scored again.

    Args:
        outputs: output folder, and the kinds of files written there.
        about: facts that the rows depend on; tables of another run can't be continued.
        seen: called with each image, once its row is in the tables.

    Attributes:
        earlier: files of an earlier run that were unchanged or missing at the start, with stamps.
        arrived: files being scored, with their stamps; `Finished.index` is a place in this list.

    Raises:
        OutputError: the tables are of another run, or damaged.
    """

    def __init__(
        self,
        outputs: Outputs,
        about: Mapping[str, object],
        seen: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._seen = seen
        # Before `super().__init__`, which calls `take` for each line of an earlier run.
        headers = {RESULTS: csv_header(Row), LINES: ""}
        if "regions" in outputs.kinds:
            headers[REGIONS] = csv_header(RegionRow)
        self._ends = dict.fromkeys(headers, 0)
        self.earlier: dict[Path, Stamp] = {}
        self.arrived: list[tuple[Path, Stamp]] = []
        super().__init__(outputs.folder / WATCHED, about)
        self._tables = {
            name: GrowingFile(outputs.folder / name, end) for name, end in self._ends.items()
        }
        for name, header in headers.items():
            if not self._ends[name]:
                self._tables[name].append(header.encode())

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for table in self._tables.values():
            table.close()

    def add(self, batch: Sequence[Finished]) -> None:
        """Write rows and regions of a batch of `arrived` into the tables."""
        rows = [image.row for image in batch]
        texts = {RESULTS: csv_lines(rows), LINES: as_jsonl(rows)}
        if REGIONS in self._tables:
            texts[REGIONS] = csv_lines(region for image in batch for region in image.regions)
        # Rows first, then the line that makes them final: a crash in between loses no file.
        for name, text in texts.items():
            self._tables[name].append(text.encode("utf-8", "surrogateescape"))
        files = (self.arrived[image.index] for image in batch)
        stamps = {str(path): stamp for path, stamp in files}
        self.commit({"files": stamps, "ends": {n: t.end for n, t in self._tables.items()}})
        for image in batch:
            self._seen(image)

    def take(self, line: dict[str, Any]) -> None:
        """Take the files and table lengths from a line of an earlier run."""
        for name, values in line["files"].items():
            path, stamp = Path(name), (values[0], values[1])
            if stamp_of(path) in (stamp, None):  # a missing file may come back
                self.earlier[path] = stamp
        self._ends.update(line["ends"])


def watch(
    run: Run,
    journal: WatchJournal,
    folders: list[Path],
    *,
    trouble: Callable[[str], None] = lambda message: None,
) -> None:
    """Score the files in folders, and new files as they arrive, until the run is stopped.

    Memory grows with the files now in the folders, not with all earlier ones. A folder that can't
    be listed, such as an interrupted network drive, is tried again.

    Args:
        run: the run that scores the images.
        journal: the run's record.
        folders: folders to follow.
        trouble: called with a message when folders can't be listed, when they can again, and when
            the model's folder holds another model.

    Raises:
        OutputError: results can't be written.
    """
    arrivals, model = Arrivals(folders, journal.earlier, SETTLE), run.model
    assert model.folder is not None  # it was loaded
    manifest = model.folder / MANIFEST
    known = stamp_of(manifest)
    complaint = reported = ""
    numbers: dict[str, int] = {}  # the last number given to pictures of each repeated name
    while not run.stopped():
        if (stamp := stamp_of(manifest)) not in (None, known):
            known = stamp
            _warn_of_change(model, model.folder, trouble)
        begun, before = time.monotonic(), complaint
        try:
            ready, complaint = arrivals.poll(begun), ""
        except DataError as error:
            ready, complaint = {}, str(error)
        # Only an error of two polls in a row is reported: a folder may vanish while it is listed.
        if complaint == before != reported:
            trouble(complaint or "the folders can be listed again")
            reported = complaint
        polled = time.monotonic()
        if ready:
            paths = list(ready)
            journal.arrived = list(ready.items())
            names = picture_names(paths, folders, run.outputs.holds_picture, numbers)
            run.score(Inputs(paths, names))
        _pause(polled + max(_POLL_SECONDS, (polled - begun) / _POLL_SHARE), run.stopped)


def _pause(until: float, stopped: Callable[[], bool]) -> None:
    """Sleep in short steps, since a signal doesn't end a sleep."""
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


def _warn_of_change(model: Model, folder: Path, trouble: Callable[[str], None]) -> None:
    """Warn if a folder no longer holds the model that was loaded from it."""
    with suppress(OSError):  # the folder is being replaced; its next stamp is checked again
        if (current := model_id(folder)) != model.model_id:
            trouble(
                f"the model in {folder} has changed to {current}. Images are still scored with "
                f"model {model.model_id}; to use the new one, stop this and start again with "
                "another --output"
            )
