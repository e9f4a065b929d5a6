"""Progress of a run of `infer` on disk, so that an interrupted run can be resumed; its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from anomaly.errors import OutputError, why
from anomaly.files.outputs import DONE, JOURNAL, WATCHED
from anomaly.files.writing import GrowingFile, as_json, from_json, write
from anomaly.inference.outputs import Outputs
from anomaly.inference.rows import (
    Part,
    RegionRow,
    Row,
    as_csv,
    as_jsonl,
    csv_header,
    csv_lines,
    judge_parts,
)

RESULTS, LINES, REGIONS = "results.csv", "results.jsonl", "regions.csv"


# A file's size in bytes and the time of its last change in nanoseconds.
Stamp: TypeAlias = tuple[int, int]


def stamp_of(path: Path) -> Stamp | None:
    """What changes when a file is written to; None if it is missing or not accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Finished:
    """A finished image: its row is final and its pictures are on disk.

    Attributes:
        index: its place in the list of files.
        row: its row of results.
        regions: its marked regions, if wanted.
    """

    index: int
    row: Row
    regions: tuple[RegionRow, ...] = ()


class Journal:
    """A file whose first line describes the run, and each further line what is finished.

    Each line is a JSON object; an incomplete last line is dropped. Use it in a `with` statement.

    Args:
        file: created if missing.
        about: what the results depend on; a journal of another run can't be continued.

    Raises:
        OutputError: the file is of another run, or isn't a journal.
    """

    def __init__(self, file: Path, about: Mapping[str, object]) -> None:
        self.file = file
        self.about: dict[str, object] = json.loads(json.dumps(about))
        self._end = 0
        if file.exists():
            try:
                with file.open("rb") as stream:
                    self._read(stream)
            except OSError as error:
                raise OutputError(f"{file} can't be read: {error.strerror}") from None
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{file} is damaged ({why(error)}); start again with --overwrite"
                ) from None
        self._lines = GrowingFile(file, self._end)
        if not self._end:
            self.commit({"about": self.about})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def commit(self, line: Mapping[str, object]) -> None:
        """Write one more line; it is in the file when this returns.

        Raises:
            OutputError: the disk is full.
        """
        # Plain ASCII, so that any file name survives.
        text = json.dumps(line, ensure_ascii=True, allow_nan=False)
        self._lines.append(text.encode() + b"\n")

    def take(self, line: dict[str, Any]) -> None:
        """Read a line of an earlier run."""

    def _read(self, lines: Iterator[bytes]) -> None:
        for text in lines:
            if not text.endswith(b"\n"):
                return
            line = from_json(text)
            if self._end:
                self.take(line)
            else:
                _check_same(self.file.parent, line["about"], self.about)
            self._end += len(text)


class RunJournal(Journal):
    """The journal of a run over a list of files: a line for each batch.

    The tables are written from it at the end of the `with` block, whatever has ended that.

    Args:
        outputs: what is written, and where.
        about: what the rows depend on.
        groups: the part of each image, by its path.

    Attributes:
        done: finished images by index.
    """

    def __init__(
        self,
        outputs: Outputs,
        about: Mapping[str, object],
        groups: Mapping[str, str] | None = None,
    ) -> None:
        self._regions, self._groups = outputs.regions, groups or {}
        self.done: dict[int, Finished] = {}
        super().__init__(outputs.folder / JOURNAL, about)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        try:
            self._write_tables()
        except OutputError:
            if error == (None, None, None):  # else the first error is that of the block
                raise

    def add(self, batch: Sequence[Finished]) -> None:
        """Write a batch; it is in the file when this returns.

        Raises:
            OutputError: the disk is full.
        """
        self.commit({"images": [asdict(image) for image in batch]})
        self.done |= {image.index: image for image in batch}

    def take(self, line: dict[str, Any]) -> None:
        """Read a batch of an earlier run."""
        for image in line["images"]:
            regions = tuple(RegionRow(**region) for region in image["regions"])
            self.done[image["index"]] = Finished(image["index"], Row(**image["row"]), regions)

    def _write_tables(self) -> None:
        """Write the tables, in order of the files; none if no image is finished."""
        images, folder = [self.done[index] for index in sorted(self.done)], self.file.parent
        if not images:
            return
        rows = [image.row for image in images]
        write(folder / RESULTS, as_csv(rows, Row))
        write(folder / LINES, as_jsonl(rows))
        if self._regions:
            regions = [region for image in images for region in image.regions]
            write(folder / REGIONS, as_csv(regions, RegionRow))
        if self._groups:
            write(folder / "parts.csv", as_csv(judge_parts(rows, self._groups), Part))

    def finish(self, exit_code: int) -> None:
        """Mark the run as complete in a file of its own, and delete this one.

        Args:
            exit_code: of the run.

        Raises:
            OutputError: the disk is full.
        """
        about = {"about": self.about, "exit_code": exit_code}
        write(self.file.with_name(DONE), as_json(about))
        self.file.unlink(missing_ok=True)

    @staticmethod
    def finished(folder: Path, about: Mapping[str, object]) -> int:
        """The exit code of a run that is complete.

        Args:
            folder: of the run.
            about: what the rows of the wanted run depend on.

        Raises:
            OutputError: it was another run, or the file that `finish` writes is missing or damaged.
        """
        try:
            record = from_json((folder / DONE).read_bytes())
            found, code = dict(record["about"]), int(record["exit_code"])
        except (OSError, ValueError, KeyError, TypeError):
            raise OutputError(
                f"{folder} holds results, but {DONE}, which describes the run, is missing or "
                "damaged; give another --output, or add --overwrite to start again"
            ) from None
        _check_same(folder, found, json.loads(json.dumps(about)))
        return code


class WatchJournal(Journal):
    """The journal of watched folders, and the tables that grow with it.

    A line holds finished files and the lengths of the tables: later rows are of a killed process
    and are dropped.

    Args:
        outputs: what is written, and where.
        about: what the rows depend on; tables of another run can't be continued.
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
        outputs: Outputs,
        about: Mapping[str, object],
        seen: Callable[[Finished], None] = lambda finished: None,
    ) -> None:
        self._seen = seen
        headers = {RESULTS: csv_header(Row), LINES: ""}
        if outputs.regions:
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
        """Write rows and regions of a batch of `arrived`; they are in the tables on return.

        Raises:
            OutputError: the disk is full.
        """
        rows = [image.row for image in batch]
        texts = {RESULTS: csv_lines(rows), LINES: as_jsonl(rows)}
        if REGIONS in self._tables:
            texts[REGIONS] = csv_lines(region for image in batch for region in image.regions)
        for name, text in texts.items():
            self._tables[name].append(text.encode("utf-8", "surrogateescape"))
        files = (self.arrived[image.index] for image in batch)
        stamps = {str(path): stamp for path, stamp in files}
        self.commit({"files": stamps, "ends": {n: t.end for n, t in self._tables.items()}})
        for image in batch:
            self._seen(image)

    def take(self, line: dict[str, Any]) -> None:
        """Read the files and table lengths of a line."""
        for name, values in line["files"].items():
            path, stamp = Path(name), (values[0], values[1])
            if stamp_of(path) in (stamp, None):  # a missing file may come back
                self.earlier[path] = stamp
        self._ends.update(line["ends"])


def _check_same(output: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Check that the run in an output folder is the one to resume.

    Args:
        output: the folder, for the message.
        found: what its rows depend on.
        wanted: what the rows of this run depend on.

    Raises:
        OutputError: it is another run.
    """
    if found != wanted:
        other = ", ".join(k for k in wanted if found.get(k) != wanted[k])
        raise OutputError(
            f"{output} holds a run with another {other or 'program'}, which can't be "
            "continued with this one; give another --output, or --overwrite to start again"
        )
