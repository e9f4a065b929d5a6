"""Progress of a run of `infer` on disk, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from anomaly.errors import OutputError, why
from anomaly.files.writing import GrowingFile, as_json, from_json, write
from anomaly.inference.rows import Row
from anomaly.maps.regions import MarkedRegion


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
    regions: tuple[MarkedRegion, ...] = ()


class Record(Protocol):
    """A receiver of a run's rows."""

    @property
    def done(self) -> Container[int]:
        """Indices of the images that needn't be scored."""

    def add(self, batch: Sequence[Finished]) -> None:
        """Add a whole batch; it is saved when this returns."""


class Journal:
    """A file whose first line describes the run, and each further line what is finished.

    Each line is a JSON object; an incomplete last line is dropped. Use it in a `with` statement.

    Args:
        file: created at the start of the `with` block.
        about: what the results depend on; a journal of another run can't be continued.

    Raises:
        OutputError: the file is of another run, or isn't a journal.
    """

    def __init__(self, file: Path, about: Mapping[str, object]) -> None:
        self.file = file
        self.about: dict[str, object] = json.loads(json.dumps(about))
        self._lines: GrowingFile | None = None
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

    def __enter__(self) -> Self:
        self._lines = GrowingFile(self.file, self._end)
        if not self._end:
            self.commit({"about": self.about})
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lines is not None
        self._lines.close()

    def commit(self, line: Mapping[str, object]) -> None:
        """Write one more line; it is in the file when this returns.

        Raises:
            OutputError: the disk is full.
        """
        assert self._lines is not None
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

    Attributes:
        done: finished images by index.
    """

    def __init__(self, file: Path, about: Mapping[str, object]) -> None:
        self.done: dict[int, Finished] = {}
        super().__init__(file, about)

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
            regions = tuple(MarkedRegion(**region) for region in image["regions"])
            self.done[image["index"]] = Finished(image["index"], Row(**image["row"]), regions)

    def in_order(self) -> list[Finished]:
        """All finished images, in order of the files."""
        return [self.done[index] for index in sorted(self.done)]

    def rows(self) -> list[Row]:
        """All rows, in order of the files."""
        return [image.row for image in self.in_order()]

    def finish(self, done: Path, exit_code: int, more: Mapping[str, object] | None = None) -> None:
        """Mark the run as complete in another file, and delete this one.

        Args:
            done: the other file.
            exit_code: of the run.
            more: further values for it; `finished` ignores them.

        Raises:
            OutputError: the disk is full.
        """
        write(done, as_json({"about": self.about, "exit_code": exit_code, **(more or {})}))
        self.file.unlink(missing_ok=True)

    @staticmethod
    def finished(done: Path, about: Mapping[str, object]) -> int:
        """The exit code of a run that is complete.

        Args:
            done: the file that `finish` has written.
            about: what the rows of the wanted run depend on.

        Raises:
            OutputError: it was another run, or the file is missing or damaged.
        """
        try:
            record = from_json(done.read_bytes())
            found, code = dict(record["about"]), int(record["exit_code"])
        except (OSError, ValueError, KeyError, TypeError):
            raise OutputError(
                f"{done.parent} holds results, but {done.name}, which describes the run, is "
                "missing or damaged; give another --output, or add --overwrite to start again"
            ) from None
        _check_same(done.parent, found, json.loads(json.dumps(about)))
        return code


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
