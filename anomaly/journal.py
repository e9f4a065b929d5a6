"""What a run of `infer` has done so far, kept line by line, so that a broken-off one can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from anomaly.errors import OutputError
from anomaly.results import Row


@dataclass(frozen=True)
class Known:
    """An image that an earlier run has scored.

    Attributes:
        index: its place in the list of files.
        shape: (H, W) of its network input, which decides what it shared a batch with; None where
            it was alone.
        row: what was said of it.
    """

    index: int
    shape: tuple[int, int] | None
    row: Row


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
        self._stream: IO[bytes] | None = None
        self.known: dict[int, Known] = {}
        self._end = 0
        if file.exists():
            self._read()

    def __enter__(self) -> Journal:
        try:
            self._stream = self._file.open("r+b" if self._end else "wb")
            self._stream.seek(self._end)
            self._stream.truncate()
        except OSError as error:
            raise OutputError(f"{self._file} can't be written: {error.strerror}") from None
        if not self._end:
            self._write({"about": self._about})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._stream is not None
        self._stream.close()

    def add(self, known: Known) -> None:
        """Write one more row; it is in the file when this returns.

        Raises:
            OutputError: no room.
        """
        self._write({"index": known.index, "shape": known.shape, "row": asdict(known.row)})
        self.known[known.index] = known

    def rows(self) -> list[Row]:
        """All rows, in order of the files."""
        return [self.known[index].row for index in sorted(self.known)]

    def remove(self) -> None:
        """Delete the file: the run is complete."""
        self._file.unlink(missing_ok=True)

    def _write(self, line: object) -> None:
        assert self._stream is not None
        try:
            self._stream.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise OutputError(f"{self._file} can't be written: {error.strerror}") from None

    def _read(self) -> None:
        try:
            whole, _, _torn = self._file.read_bytes().rpartition(b"\n")
            lines = [json.loads(line) for line in whole.splitlines()]
            about = lines[0]["about"] if lines else self._about
            found = [_known(line) for line in lines[1:]]
        except OSError as error:
            raise OutputError(f"{self._file} can't be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{self._file} is damaged ({error}); start again with --overwrite"
            ) from None
        if about != self._about:
            other = ", ".join(k for k in self._about if about.get(k) != self._about[k])
            raise OutputError(
                f"{self._file.parent} holds a run with another {other or 'program'}, which can't "
                "be continued with this one; give another --output, or --overwrite to start again"
            )
        self.known = {one.index: one for one in found}
        self._end = len(whole) + 1 if lines else 0


def _known(line: dict[str, Any]) -> Known:
    shape = line["shape"]
    return Known(line["index"], None if shape is None else tuple(shape), Row(**line["row"]))
