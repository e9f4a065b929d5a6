"""Folders × model -> rows as files arrive: `infer --watch`, for as long as a shift lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from anomaly.datasets.inputs import picture_names
from anomaly.errors import DataError
from anomaly.files.outputs import WATCHED
from anomaly.files.writing import GrowingFile
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.listing import is_image, list_files
from anomaly.inference.journal import Finished, Journal
from anomaly.inference.outputs import DEFAULTS, OutputOptions, picture_exists
from anomaly.inference.rows import RegionRow, Row, as_jsonl, csv_header, csv_lines, region_rows
from anomaly.inference.run import Inputs, infer
from anomaly.maps.encoding import Thumbnails
from anomaly.scoring.predictor import AnyModel
from anomaly.scoring.scene import SceneWatch

_POLL_SECONDS = 0.5
# Looking into the folders takes at most this share of the time.
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
    """A file's stamp; None where there is none, or it may not be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns)


class Arrivals:
    """Follows folders. What it remembers are the files that are in them now.

    Of a folder that is empty it remembers those that were in it last.

    Args:
        folders: searched with their subfolders.
        done: files that were given earlier, with the stamps that they had then.
        settle: for how many seconds a file mustn't have changed to be taken as fully written.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        done: Mapping[Path, Stamp],
        settle: float = 0.0,
    ) -> None:
        self._folders = folders
        self._given = dict(done)
        self._settle = settle
        # The stamps of files that may still be written to, and since when they have them.
        self._written: dict[Path, tuple[Stamp, float]] = {}

    def poll(self, now: float = 0.0) -> dict[Path, Stamp]:
        """The files that are there, unchanged since an earlier poll, and not given yet.

        A file that has changed since it was given is another one under the same name.

        Args:
            now: seconds on any clock that only goes forward.

        Returns:
            Stamps by file, the oldest file first.

        Raises:
            DataError: a folder can't be listed; what arrives is given later.
        """
        files = {file for folder in self._folders for file in list_files(folder, tell=False)}
        listed = filter(is_image, files)
        stamps = {path: stamp for path in listed if (stamp := stamp_of(path)) is not None}
        new = {path: stamp for path, stamp in stamps.items() if self._given.get(path) != stamp}
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
        # A folder that is empty all at once may be a drive that comes back.
        if gone := self._given.keys() - stamps.keys():
            there = [f for f in self._folders if any(path.is_relative_to(f) for path in stamps)]
            for path in gone:
                if any(path.is_relative_to(folder) for folder in there):
                    del self._given[path]
        self._given.update(ready)
        return dict(sorted(ready.items(), key=lambda one: (one[1].time, one[0])))


class WatchJournal(Journal):
    """The record of watched folders, and the tables that grow with it.

    A line names files that are done and says how long the tables were then: whatever lies behind
    are rows that a killed process didn't finish, and is dropped.

    Args:
        output: the folder.
        about: what the rows depend on; tables about something else can't be continued.
        regions: whether there is a table of regions.
        mm_per_pixel: for that one; None where it isn't known.
        seen: called with each image, once its row is in the tables.

    Attributes:
        earlier: files in the tables that were unchanged, or not there, when this was made.
        arrived: files that are being scored, in order, with their stamps.
        done: none of them has a row yet.

    Raises:
        OutputError: the tables are about something else, or damaged.
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
            OutputError: no room.
        """
        rows = [one.row for one in batch]
        texts = {_RESULTS: csv_lines(rows), _LINES: as_jsonl(rows)}
        if _REGIONS in self._tables:
            mm = self._mm_per_pixel
            found = [r for one in batch for r in region_rows(one.row.path, one.regions, mm)]
            texts[_REGIONS] = csv_lines(found)
        for name, text in texts.items():
            self._tables[name].append(text.encode("utf-8", "surrogateescape"))
        files = (self.arrived[one.index] for one in batch)
        stamps = {str(path): asdict(stamp) for path, stamp in files}
        self.commit({"files": stamps, "ends": {n: t.end for n, t in self._tables.items()}})
        for one in batch:
            self._seen(one)

    def take(self, line: dict[str, Any]) -> None:
        """Remember the files of a line, and how long the tables were."""
        for name, said in line["files"].items():
            path, stamp = Path(name), Stamp(**said)
            if stamp_of(path) in (stamp, None):  # one that isn't there may come back
                self.earlier[path] = stamp
        self._ends.update(line["ends"])


def watch(
    model: AnyModel,
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
    looking: Callable[[], None] = lambda: None,
) -> None:
    """Score what is in the folders, and what arrives there, until stopped.

    What this holds in memory hangs on the files that are in the folders, not on how many have been
    there. A folder that can't be listed for a while, as network drives have it, is tried again.

    Args:
        model: says what is good.
        folders: what is followed.
        output: where the pictures are, so that none is written over.
        journal: open; gets each row once its pictures are on disk.
        decoders: begun, with this model's loading.
        settle: seconds after which a file that nobody has written to is fully written.
        stopped: asked all the time.
        options: what is written of each image.
        thumbnails: as for `infer`.
        trouble: called with what is wrong with the folders, once for each spell of it.
        looking: called before each look into them.

    Raises:
        OutputError: results can't be written.
    """
    arrivals = Arrivals(folders, journal.earlier, settle)
    complaint = reported = ""
    numbers: dict[str, int] = {}  # of names that come again
    scene = SceneWatch(model.models)
    while not stopped():
        looking()
        begun = time.monotonic()
        try:
            ready = arrivals.poll(begun)
            before, complaint = complaint, ""
        except DataError as error:
            ready = {}
            before, complaint = complaint, str(error)
        # A folder that goes while it is being listed is no trouble yet.
        if complaint == before != reported:
            trouble(complaint or "the folders can be listed again")
            reported = complaint
        polled = time.monotonic()
        if ready:
            paths = list(ready)
            names = picture_names(paths, folders, partial(picture_exists, output), numbers)
            inputs = Inputs(paths, names, options)
            journal.arrived = list(ready.items())
            infer(
                model,
                inputs,
                journal,
                decoders,
                stopped=stopped,
                thumbnails=thumbnails,
                scene=scene,
            )
        _pause(polled + max(_POLL_SECONDS, (polled - begun) / _POLL_SHARE), stopped)


def _pause(until: float, stopped: Callable[[], bool]) -> None:
    """A signal doesn't end a sleep, so that sleeps are short."""
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))
