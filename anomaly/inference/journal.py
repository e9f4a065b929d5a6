"""What a run of `infer` has done so far, kept line by line, so that a broken-off one can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from anomaly.errors import OutputError, why
from anomaly.files.writing import GrowingFile, as_json, write
from anomaly.inference.rows import Row
from anomaly.maps.regions import MarkedRegion


@dataclass(frozen=True)
class Known:
    """An image that an earlier run has scored.

    Attributes:
        index: its place in the list of files.
        shape: (H, W) of its network input, which decides what it shared a batch with; None where
            it was alone.
        row: what was said of it.
        regions: what is marked in it, where that was asked for.
    """

    index: int
    shape: tuple[int, int] | None
    row: Row
    regions: tuple[MarkedRegion, ...] = ()


class Record(Protocol):
    """What takes the rows of a run."""

    @property
    def known(self) -> Mapping[int, Known]:
        """The images that needn't be scored, by index."""

    def add(self, known: Known) -> None:
        """Take one more row; it is kept when this returns."""


class Journal:
    """A file of finished rows. Each line is whole or isn't there: a torn last one is dropped.

    Args:
        file: made with the first line.
        about: what the rows depend on; a journal about something else can't be continued.

    Raises:
        OutputError: the file is about something else, or isn't a journal.
    """

    def __init__(self, file: Path, about: Mapping[str, object]) -> None:
        self._file = file
        self._about = json.loads(json.dumps(about))
        self._lines: GrowingFile | None = None
        self.known: dict[int, Known] = {}
        self._end = 0
        if file.exists():
            self._read()

    def __enter__(self) -> Journal:
        self._lines = GrowingFile(self._file, self._end)
        if not self._end:
            self._lines.append(as_line({"about": self._about}))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lines is not None
        self._lines.close()

    def add(self, known: Known) -> None:
        """Write one more row; it is in the file when this returns.

        Raises:
            OutputError: no room.
        """
        assert self._lines is not None
        self._lines.append(as_line(asdict(known)))
        self.known[known.index] = known

    def in_order(self) -> list[Known]:
        """All that is known, in order of the files."""
        return [self.known[index] for index in sorted(self.known)]

    def rows(self) -> list[Row]:
        """All rows, in order of the files."""
        return [known.row for known in self.in_order()]

    def finish(self, done: Path, exit_code: int, more: Mapping[str, object] | None = None) -> None:
        """The run is complete: another file says of what, and this one goes.

        Args:
            done: the other file.
            exit_code: of the run.
            more: what it shall say besides; `finished` doesn't look at it.

        Raises:
            OutputError: no room for it.
        """
        write(done, as_json({"about": self._about, "exit_code": exit_code, **(more or {})}))
        self._file.unlink(missing_ok=True)

    def _read(self) -> None:
        with reading(self._file):
            whole, _, _torn = self._file.read_bytes().rpartition(b"\n")
            lines = [json.loads(line) for line in whole.splitlines()]
            about = lines[0]["about"] if lines else self._about
            found = [_known(line) for line in lines[1:]]
        check_same(self._file, about, self._about)
        self.known = {one.index: one for one in found}
        self._end = len(whole) + 1 if lines else 0


def finished(done: Path, about: Mapping[str, object]) -> int:
    """The exit code of a run that is complete.

    Args:
        done: what `Journal.finish` has written.
        about: what the rows of the run that is asked for depend on.

    Raises:
        OutputError: it was another run, or nothing says which one it was.
    """
    try:
        said = json.loads(done.read_bytes())
        found, code = dict(said["about"]), int(said["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OutputError(
            f"{done.parent} holds results, but {done.name}, which says what of, is missing "
            "or damaged; give another --output, or --overwrite to start again"
        ) from None
    check_same(done, found, json.loads(json.dumps(about)))
    return code


def as_line(content: object) -> bytes:
    """One line of JSON; plain ASCII, so that any file name survives."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False).encode() + b"\n"


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Say what is wrong with a file of ours that is read inside.

    Raises:
        OutputError: it can't be read, or holds something else.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{file} is damaged ({why(error)}); start again with --overwrite"
        ) from None


def check_same(file: Path, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """See that the run in a file is the one that is to go on.

    Raises:
        OutputError: it is another one.
    """
    if found != wanted:
        other = ", ".join(k for k in wanted if found.get(k) != wanted[k])
        raise OutputError(
            f"{file.parent} holds a run with another {other or 'program'}, which can't be "
            "continued with this one; give another --output, or --overwrite to start again"
        )


def _known(line: dict[str, Any]) -> Known:
    shape = line["shape"]
    return Known(
        line["index"],
        None if shape is None else tuple(shape),
        Row(**line["row"]),
        tuple(MarkedRegion(**region) for region in line["regions"]),
    )
