"""Tables that grow while folders are watched, and what they hold already."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from anomaly.files.own_outputs import WATCHED
from anomaly.files.writing import GrowingFile
from anomaly.inference.arrivals import Stamp, stamp_of
from anomaly.inference.journal import Known, as_line, check_same, reading
from anomaly.inference.rows import RegionRow, Row, as_jsonl, csv_header, csv_lines, region_rows

_RESULTS, _LINES, _REGIONS = "results.csv", "results.jsonl", "regions.csv"


class WatchLog:
    """Rows that are written as they come. Used in a `with` statement.

    A line of `results.watched.jsonl` names a file that is done and says how long the tables were
    then: whatever lies behind is a row that a killed process didn't finish, and is dropped.

    Args:
        output: the folder.
        about: what the rows depend on; tables about something else can't be continued.
        regions: whether there is a table of regions.
        mm_per_pixel: for that one; None where it isn't known.

    Attributes:
        done: files in the tables that are still where they were, unchanged, when this was made.

    Raises:
        OutputError: the tables are about something else, or damaged.
    """

    def __init__(
        self,
        output: Path,
        about: Mapping[str, object],
        *,
        regions: bool,
        mm_per_pixel: float | None,
    ) -> None:
        self._output = output
        self._about = json.loads(json.dumps(about))
        self._mm_per_pixel = mm_per_pixel
        self._headers = {_RESULTS: csv_header(Row), _LINES: ""}
        if regions:
            self._headers[_REGIONS] = csv_header(RegionRow)
        self._ends = dict.fromkeys([WATCHED, *self._headers], 0)
        self._files: dict[str, GrowingFile] = {}
        self.done: dict[Path, Stamp] = {}
        if (output / WATCHED).exists():
            self._read(output / WATCHED)

    def __enter__(self) -> WatchLog:
        for name, end in self._ends.items():
            self._files[name] = GrowingFile(self._output / name, end)
        if not self._ends[WATCHED]:
            for name, header in self._headers.items():
                self._files[name].append(header.encode())
            ends = {name: self._files[name].end for name in self._headers}
            self._files[WATCHED].append(as_line({"about": self._about, "ends": ends}))
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, path: Path, stamp: Stamp, known: Known) -> None:
        """Write one more row, and its regions; they are in the files when this returns.

        Raises:
            OutputError: no room.
        """
        row = csv_lines([known.row]).encode("utf-8", "surrogateescape")
        self._files[_RESULTS].append(row)
        self._files[_LINES].append(as_jsonl([known.row]).encode())
        if _REGIONS in self._files:
            regions = region_rows(known.row.path, known.regions, self._mm_per_pixel)
            self._files[_REGIONS].append(csv_lines(regions).encode("utf-8", "surrogateescape"))
        ends = {name: self._files[name].end for name in self._headers}
        line = {"path": str(path), "stamp": asdict(stamp), "ends": ends}
        self._files[WATCHED].append(as_line(line))

    def _read(self, file: Path) -> None:
        with reading(file), file.open("rb") as stream:
            for number, text in enumerate(stream):
                if not text.endswith(b"\n"):
                    break
                line = json.loads(text)
                if number == 0:
                    check_same(file, line["about"], self._about)
                else:
                    self._remember(Path(line["path"]), Stamp(**line["stamp"]))
                self._ends.update(line["ends"])
                self._ends[WATCHED] += len(text)

    def _remember(self, path: Path, stamp: Stamp) -> None:
        if stamp_of(path) == stamp:
            self.done[path] = stamp
