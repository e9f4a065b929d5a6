"""Images that are listed one by one, however many there are: for a manifest."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from glob import has_magic, iglob
from pathlib import Path, PurePosixPath

from anomaly.datasets.image_manifest import check_parquet
from anomaly.datasets.inputs import is_table
from anomaly.errors import DataError
from anomaly.files import storage
from anomaly.files.tables import header_of, marked_encoding, rows_of
from anomaly.files.writing import looked_in
from anomaly.imaging.listing import each_file, is_folder, is_image

_COLUMN = ("path",)


class Listing:
    """Images in folders, of patterns, and in lists; each is asked for when its turn comes.

    Args:
        inputs: files, folders that are searched, and patterns (`*`, `?`, `[…]`, `**` for any
            folders), local or as URLs.
        lists: Parquet or CSV files with the column `path`, or text files with a path or URL on
            each line, local or as URLs. What they name needn't exist.

    Attributes:
        passed_over: files in folders, or of patterns, whose names aren't pictures', so far.
    """

    def __init__(self, inputs: Sequence[str], lists: Sequence[str] = ()) -> None:
        self._inputs = inputs
        self._lists = lists
        self.passed_over = 0

    def __iter__(self) -> Iterator[str]:
        """The names as they are come across; one may come more than once.

        Raises:
            DataError: an input doesn't exist, holds no image or can't be listed; a list can't be
                read.
        """
        for given in self._inputs:
            found = False
            itself = str(storage.local(given) or given)
            for name in self._files(given):
                if name != itself and not is_image(Path(PurePosixPath(name).name)):
                    self.passed_over += 1
                    continue
                found = True
                yield name
            if not found:
                raise DataError(f"no images in --input {given}")
        for each in self._lists:
            yield from _listed(each)

    def _files(self, given: str) -> Iterator[str]:
        path = storage.local(given)
        if path is None:
            yield from storage.each_file(given)
        elif is_folder(path):
            yield from map(str, each_file(path))
        elif path.exists():
            yield str(path)  # as its folder would give it
        elif has_magic(str(path)):
            found = map(Path, iglob(str(path), recursive=True))  # noqa: PTH207, takes absolute ones
            yield from (str(file) for file in found if file.is_file())
        else:
            raise DataError(f"--input {given} doesn't exist{looked_in(path)}")


def _listed(place: str) -> Iterator[str]:
    name = f"--list {place}"
    with storage.opened(place) as stream:
        head = stream.read(4)
        stream.seek(0)
        if head == b"PAR1":
            yield from _of_parquet(stream, name)
            return
        encoding, _ = marked_encoding(head) or ("utf-8", b"")
        with io.TextIOWrapper(stream, encoding, newline="") as text:
            try:
                yield from _of_text(text, name, place)
            except UnicodeDecodeError:
                raise DataError(f"{name} isn't text in UTF-8; save it as CSV UTF-8") from None


def _of_text(text: io.TextIOWrapper, name: str, place: str) -> Iterator[str]:
    first = text.readline().removeprefix("\ufeff")
    header, _ = header_of(first, _COLUMN)
    if is_table(header, place):
        rows = rows_of(first, text, name, _COLUMN, _COLUMN)
        yield from (row["path"] for _, row in rows if row["path"])
        return
    lines = itertools.chain([first], text)
    yield from (line.rstrip("\r\n") for line in lines if line.strip())


def _of_parquet(stream: object, name: str) -> Iterator[str]:
    check_parquet(name)
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(stream)
        if "path" not in file.schema_arrow.names:
            raise DataError(f"{name} lacks the column 'path'")
        for batch in file.iter_batches(columns=["path"]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise DataError(f"{name}: {value!r} in the column 'path' isn't text")
                yield value
    except pyarrow.ArrowException:
        raise DataError(f"{name} is a damaged Parquet file") from None
