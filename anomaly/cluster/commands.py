"""`anomaly manifest` lists the images of a large job; `merge-results` joins its shards' rows."""

from __future__ import annotations

import argparse
import io
import itertools
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from glob import has_magic, iglob
from pathlib import Path, PurePosixPath

from anomaly.cli.logging_setup import NOTE, ProgressLine
from anomaly.cluster.parts import merge
from anomaly.datasets.image_manifest import check_parquet, checked, read_manifest, write_manifest
from anomaly.datasets.inputs import is_table, say_passed_over
from anomaly.errors import DataError, OutputError, counted
from anomaly.files import storage
from anomaly.files.outputs import matched
from anomaly.files.tables import header_of, marked_encoding, rows_of
from anomaly.files.writing import looked_in
from anomaly.imaging.listing import each_file, is_folder, is_image
from anomaly.inference.rows import say_counts

log = logging.getLogger(__name__)

# What somebody who names a file so would take it for.
_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")


def _manifest(options: argparse.Namespace) -> int:
    """List images."""
    if not (options.input or options.list):
        raise DataError("give --input, --list, or both")
    if PurePosixPath(options.output).suffix.lower() in _TABLES:
        raise OutputError(
            f"--output {options.output}: a manifest is a Parquet file; give a name that ends in "
            ".parquet"
        )
    if storage.exists(options.output) and not options.overwrite:
        raise OutputError(f"{options.output} exists already; add --overwrite")
    listing = Listing(options.input, options.list)
    images, doubles = write_manifest(listing, options.output, options.chunk)
    if listing.passed_over:
        log.log(NOTE, say_passed_over(listing.passed_over))
    again = f", {doubles} named more than once" if doubles else ""
    chunks = len(read_manifest(options.output).sizes)
    listed = counted(images, "image") + again
    print(f"{listed} in {counted(chunks, 'chunk')}: {options.output}")
    return 0


def _merge_results(options: argparse.Namespace) -> int:
    """Join parts; 3 where some images couldn't be used, 2 where none could."""
    if not options.output.lower().endswith((".csv", ".parquet")):
        raise OutputError(f"--output {options.output} must end with .csv or .parquet")
    if storage.is_same(options.output, options.manifest):
        raise OutputError(f"--output {options.output} is the manifest; give the table another name")
    if storage.exists(options.output) and not options.overwrite:
        raise OutputError(f"{options.output} exists already; add --overwrite")
    manifest = read_manifest(options.manifest)
    with ProgressLine() as progress:
        counts = merge(
            manifest, options.results, options.output, progress=partial(progress, "joining")
        )
    print(f"{say_counts(counts)}; one row for each image: {options.output}")
    return 0 if counts["ok"] == manifest.images else 3 if counts["ok"] else 2


COMMANDS = {
    "manifest": _manifest,
    "merge-results": _merge_results,
}

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
        self.passed_over: list[str] = []

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
                    self.passed_over.append(name)
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
            yield from (
                str(f) for f in found if matched(f.as_posix(), path.as_posix()) and f.is_file()
            )
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
        # Names that aren't UTF-8 are told by their lines.
        with io.TextIOWrapper(stream, encoding, "surrogateescape", newline="") as text:
            try:
                yield from _of_text(text, name, place)
            except UnicodeDecodeError:
                raise DataError(f"{name} isn't text in {encoding}; save it as CSV UTF-8") from None


def _checked(entry: str, name: str, line: int) -> str:
    """The image that an entry of a list means."""
    try:
        checked(entry)
    except DataError as error:
        raise DataError(f"{name} line {line}: {error}") from None
    return storage.named(entry)


def _of_text(text: io.TextIOWrapper, name: str, place: str) -> Iterator[str]:
    first = text.readline().removeprefix("\ufeff")
    header, _ = header_of(first, _COLUMN)
    if is_table(header, place):
        rows = rows_of(first, text, name, _COLUMN, _COLUMN)
        yield from (_checked(row["path"], name, line) for line, row in rows if row["path"])
        return
    for number, line in enumerate(itertools.chain([first], text), 1):
        if line.strip():
            yield _checked(line.rstrip("\r\n"), name, number)


def _of_parquet(stream: object, name: str) -> Iterator[str]:
    check_parquet(name)
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(stream)
        if "path" not in file.schema_arrow.names:
            raise DataError(f"{name} lacks the column 'path'")
        values = (v for b in file.iter_batches(columns=["path"]) for v in b.column(0).to_pylist())
        for number, value in enumerate(values, 1):
            if not isinstance(value, str):
                raise DataError(f"{name}: {value!r} in the column 'path' isn't text")
            yield _checked(value, name, number)
    except (pyarrow.ArrowException, OSError, ValueError):
        raise DataError(f"{name} is a damaged Parquet file") from None
