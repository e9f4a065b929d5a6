"""Folders × model -> rows as files arrive: `infer --watch`, for as long as a shift lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from anomaly.datasets.inputs import picture_names
from anomaly.errors import DataError
from anomaly.files.outputs import WATCHED
from anomaly.files.writing import GrowingFile
from anomaly.imaging.listing import is_image, list_files
from anomaly.imaging.pool import Decoders
from anomaly.inference.journal import Finished, Journal
from anomaly.inference.outputs import DEFAULTS, OutputOptions, picture_exists
from anomaly.inference.rows import RegionRow, Row, as_jsonl, csv_header, csv_lines, region_rows
from anomaly.inference.run import Inputs, infer
from anomaly.maps.encoding import Thumbnails
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import MANIFEST, model_id

_POLL_SECONDS = 0.5
# Largest share of the time for listing the folders.
_POLL_SHARE = 0.2
_RESULTS, _LINES, _REGIONS = "results.csv", "results.jsonl", "regions.csv"


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written to.

    Attributes:
        size: in bytes.
        time: of the last change, in nanoseconds.
    """

    size: int
    time: int


def stamp_of(path: Path) -> Stamp | None:
    """A file's stamp; None if it is missing or not accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns)


class Arrivals:
    """Follows folders. It remembers only the files that are in them now.

    For an empty folder it remembers its last files.

    Args:
        folders: searched with their subfolders.
        done: files returned by an earlier run, with their stamps then.
        settle: seconds without a change after which a file counts as complete.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        done: Mapping[Path, Stamp],
        settle: float = 0.0,
    ) -> None:
        self._folders = folders
        self._returned = dict(done)
        self._settle = settle
        # The stamps of files that may still be written to, and since when they have them.
        self._written: dict[Path, tuple[Stamp, float]] = {}

    def poll(self, now: float = 0.0) -> dict[Path, Stamp]:
        """New files that are unchanged since an earlier poll.

        A file that has changed since it was returned counts as new.

        Args:
            now: seconds of a monotonic clock.

        Returns:
            Stamps by file, the oldest file first.

        Raises:
            DataError: a folder can't be listed; its new files are returned later.
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
        return dict(sorted(ready.items(), key=lambda one: (one[1].time, one[0])))


class WatchJournal(Journal):
    """The journal of watched folders, and the tables that grow with it.

    A line holds finished files and the lengths of the tables: later rows are of a killed process
    and are dropped.

    Args:
        output: the folder.
        about: what the rows depend on; tables of another run can't be continued.
        regions: whether there is a table of regions.
        mm_per_pixel: for the table of regions; None if unknown.
        seen: called with each image, once its row is in the tables.

    Attributes:
        earlier: files in the tables that were unchanged or missing at the start.
        arrived: files being scored, in order, with their stamps.
        done: empty, since none of them has a row yet.

    Raises:
        OutputError: the tables are of another run, or damaged.
    """

    done: tuple[int, ...] = ()

    def __init__(
        self,
        output: Path,
        about: Mapping[str, object],
        *,
        regions: bool,
        mm_per_pixel: float | None,
        seen: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._mm_per_pixel, self._seen = mm_per_pixel, seen
        self._headers = {_RESULTS: csv_header(Row), _LINES: ""}
        if regions:
            self._headers[_REGIONS] = csv_header(RegionRow)
        self._ends = dict.fromkeys(self._headers, 0)
        self._tables: dict[str, GrowingFile] = {}
        self.earlier: dict[Path, Stamp] = {}
        self.arrived: list[tuple[Path, Stamp]] = []
        super().__init__(output / WATCHED, about)

    def __enter__(self) -> Self:
        for name, end in self._ends.items():
            self._tables[name] = GrowingFile(self.file.with_name(name), end)
            if not end:
                self._tables[name].append(self._headers[name].encode())
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for table in self._tables.values():
            table.close()

    def add(self, batch: Sequence[Finished]) -> None:
        """Write rows and regions of a batch of `arrived`; they are in the tables on return.

        Raises:
            OutputError: the disk is full.
        """
        rows = [image.row for image in batch]
        texts = {_RESULTS: csv_lines(rows), _LINES: as_jsonl(rows)}
        if _REGIONS in self._tables:
            mm = self._mm_per_pixel
            regions = [r for image in batch for r in region_rows(image.row.path, image.regions, mm)]
            texts[_REGIONS] = csv_lines(regions)
        for name, text in texts.items():
            self._tables[name].append(text.encode("utf-8", "surrogateescape"))
        files = (self.arrived[image.index] for image in batch)
        stamps = {str(path): asdict(stamp) for path, stamp in files}
        self.commit({"files": stamps, "ends": {n: t.end for n, t in self._tables.items()}})
        for image in batch:
            self._seen(image)

    def take(self, line: dict[str, Any]) -> None:
        """Read the files and table lengths of a line."""
        for name, values in line["files"].items():
            path, stamp = Path(name), Stamp(**values)
            if stamp_of(path) in (stamp, None):  # a missing file may come back
                self.earlier[path] = stamp
        self._ends.update(line["ends"])


def watch(
    model: Model,
    folders: list[Path],
    output: Path,
    journal: WatchJournal,
    decoders: Decoders,
    *,
    settle: float = 0.5,
    stopped: Callable[[], bool],
    options: OutputOptions = DEFAULTS,
    thumbnails: Thumbnails | None = None,
    trouble: Callable[[str], None] = lambda message: None,
) -> None:
    """Score the files in the folders and new ones until stopped.

    Memory depends on the files now in the folders, not on all earlier ones. A folder that can't be
    listed, such as an interrupted network drive, is tried again.

    Args:
        model: scores the images.
        folders: the folders to follow.
        output: the folder of pictures, so that none is overwritten.
        journal: open; gets each row once its pictures are on disk.
        decoders: at this model's loading, and the pictures.
        settle: seconds without a change after which a file counts as complete.
        stopped: whether to stop.
        options: what to write for each image.
        thumbnails: as for `infer`.
        trouble: called with the folders' error, once until it ends; and when the model's folder
            holds another model.

    Raises:
        OutputError: results can't be written.
    """
    arrivals, look = Arrivals(folders, journal.earlier, settle), _warner_of_changes(model, trouble)
    complaint = reported = ""
    numbers: dict[str, int] = {}  # for repeated names
    while not stopped():
        look()
        begun = time.monotonic()
        try:
            ready = arrivals.poll(begun)
            before, complaint = complaint, ""
        except DataError as error:
            ready = {}
            before, complaint = complaint, str(error)
        # A folder that vanishes while it is listed isn't an error yet.
        if complaint == before != reported:
            trouble(complaint or "the folders can be listed again")
            reported = complaint
        polled = time.monotonic()
        if ready:
            paths = list(ready)
            names = picture_names(paths, folders, partial(picture_exists, output), numbers)
            inputs = Inputs(paths, names, options)
            journal.arrived = list(ready.items())
            infer(model, inputs, journal, decoders, stopped=stopped, thumbnails=thumbnails)
        _pause(polled + max(_POLL_SECONDS, (polled - begun) / _POLL_SHARE), stopped)


def _pause(until: float, stopped: Callable[[], bool]) -> None:
    """Sleep in short steps, since a signal doesn't end a sleep."""
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


def _warner_of_changes(model: Model, trouble: Callable[[str], None]) -> Callable[[], None]:
    """A function that warns when a folder holds another model than was loaded from it."""
    folder, current = model.folder, model.model_id
    assert folder is not None  # it was loaded
    known = stamp_of(folder / MANIFEST)

    def look() -> None:
        nonlocal current, known
        stamp = stamp_of(folder / MANIFEST)
        if stamp in (None, known):
            return
        known, before = stamp, current
        with suppress(OSError):  # replaced once more
            current = model_id(folder)
        if current != before:
            trouble(
                f"the model in {folder} has changed to {current}. Images are still scored with "
                f"model {model.model_id}; to use the new one, stop this and start again with "
                "another --output"
            )

    return look
