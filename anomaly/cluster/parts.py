"""The parts of a job: where shards write them, who takes which, and joining them. Imports no torch.

    DEST/
      results.job.json             what all rows depend on; another job's shard is refused
      results.parts/000000012.parquet  the rows of a chunk, and what job they are of
      heatmaps/000000012/000345.png    of its image 345, counted from 0

The parts are the journal of every shard, on whatever storage: a process that goes on scores the
chunks that have none.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anomaly.datasets.image_manifest import ImageManifest
from anomaly.errors import DataError, OutputError, some
from anomaly.files import storage
from anomaly.files.outputs import INFER, JOB, PARTS
from anomaly.files.tables import csv_text
from anomaly.files.writing import as_json, from_json
from anomaly.inference.journal import check_same
from anomaly.inference.rows import Row, parquet_schema


@dataclass(frozen=True)
class Shard:
    """Which chunks a process takes: every `count`-th one, from `index` on."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Read `i/n`.

        Raises:
            DataError: i isn't from 0 to n - 1.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        index, count = map(int, found.groups()) if found else (0, 0)
        if index >= count:
            n = count or 4
            legal = "0/1, for all" if n == 1 else f"0/{n} to {n - 1}/{n}"
            raise DataError(
                f"--shard is {text[:40]!r}; it must be i/n with i from 0 to n - 1: {legal}"
            )
        return cls(index, count)

    def chunks(self, manifest: ImageManifest) -> range:
        """The numbers of its chunks."""
        return range(self.index, len(manifest.sizes), self.count)


def part_of(dest: str, chunk: int) -> str:
    """The place of a chunk's part."""
    return storage.inside(dest, f"{PARTS}/{chunk:09}.parquet")


def begin_job(dest: str, about: Mapping[str, object]) -> None:
    """See that a destination holds this job or nothing, and write down which it is.

    Raises:
        OutputError: it holds something else, or can't be written to.
    """
    wanted = json.loads(json.dumps(about))
    place = storage.inside(dest, JOB)
    try:
        found = read_job(dest)
    except FileNotFoundError:
        if others := sorted(storage.names(dest) & set(INFER)):
            raise OutputError(
                f"{dest} holds other results ({', '.join(others)}); give another --output"
            ) from None
        storage.put(place, as_json(wanted).encode())
        found = read_job(dest)  # another shard may have written at the same time
    check_same(dest, found, wanted, "give another --output")


def read_job(dest: str) -> dict[str, Any]:
    """What the rows at a destination depend on.

    Raises:
        FileNotFoundError: nothing says so.
        OutputError: that is damaged, or can't be read.
    """
    place = storage.inside(dest, JOB)
    try:
        return dict(from_json(storage.read(place)))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError):
        raise OutputError(f"{place} can't be read, or is damaged; give another --output") from None


def chunks_done(dest: str) -> set[int]:
    """The numbers of the chunks that have a part."""
    names = storage.names(storage.inside(dest, PARTS))
    found = (name.removesuffix(".parquet") for name in names if name.endswith(".parquet"))
    return {int(name) for name in found if name.isdecimal()}


# What differs from run to run stays in the parts.
_COLUMNS = [field.name for field in fields(Row) if field.name not in ("time", "milliseconds")]
_NAMED = 5  # of what is wrong, the others are counted


def merge(
    manifest: ImageManifest,
    dest: str,
    output: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Counter[str]:
    """Join the parts of a job; in memory is one of them.

    Args:
        manifest: names the images.
        dest: where the shards have written.
        output: the table, `.csv` or `.parquet`; it appears complete or not at all.
        progress: called with chunks done, and how many there are.

    Returns:
        Counts of statuses and verdicts; each image of the manifest has one row.

    Raises:
        DataError: an image has no row or several, a part is damaged or of another job, or nothing
            can be read; says which.
        OutputError: the table can't be written.
    """
    job = _job_of(manifest, dest)
    _check_chunks(manifest, dest)
    counts: Counter[str] = Counter()
    growing = _csv if output.lower().endswith(".csv") else _parquet
    with storage.appearing(output) as draft, growing(draft) as add:
        for chunk in range(len(manifest.sizes)):
            part = _part(dest, chunk, job)
            _check_rows(manifest.chunk(chunk), part.column("path").to_pylist(), dest, chunk)
            counts.update(part.column("status").to_pylist())
            counts.update(part.column("verdict").to_pylist())
            add(part.select(_COLUMNS).replace_schema_metadata(None))
            progress(chunk + 1, len(manifest.sizes))
    return counts


def _job_of(manifest: ImageManifest, dest: str) -> dict[str, Any]:
    try:
        job = read_job(dest)
    except FileNotFoundError:
        raise DataError(f"{dest} holds no results of: anomaly infer --manifest") from None
    if job.get("list of images") != manifest.id:
        raise DataError(f"{dest} holds results of another manifest than {manifest.place}")
    return job


def _check_chunks(manifest: ImageManifest, dest: str) -> None:
    done, wanted = chunks_done(dest), len(manifest.sizes)
    if strangers := sorted(chunk for chunk in done if chunk >= wanted):
        raise DataError(f"{part_of(dest, strangers[0])} belongs to no chunk of {manifest.place}")
    missing = [chunk for chunk in range(wanted) if chunk not in done]
    if missing:
        images = sum(manifest.sizes[chunk] for chunk in missing)
        listed = ", ".join(
            f"chunk {chunk} ({manifest.sizes[chunk]} images, the first is "
            f"{manifest.chunk(chunk)[0]})"
            for chunk in missing[:_NAMED]
        )
        more = f" and {len(missing) - _NAMED} more chunks" if len(missing) > _NAMED else ""
        raise DataError(
            f"{images} of {manifest.images} images have no row in {dest}: {listed}{more}; chunk c "
            "belongs to shard i of n where c mod n = i: run these shards (again) with --resume"
        )


def _part(dest: str, chunk: int, job: Mapping[str, Any]) -> Any:
    """The rows of a chunk, as a table."""
    import pyarrow
    import pyarrow.parquet

    place = part_of(dest, chunk)
    try:
        part = pyarrow.parquet.read_table(io.BytesIO(storage.read(place)))
        part.validate(full=True)
        about = from_json((part.schema.metadata or {})[b"anomaly"])
        found, number, _ = dict(about["job"]), about["chunk"], part.select(_COLUMNS)
    except (OSError, pyarrow.ArrowException, KeyError, ValueError, TypeError):
        raise DataError(
            f"{place} can't be read, or is damaged; delete it, and run its shard again with "
            "--resume"
        ) from None
    if found != job or number != chunk:
        other = ", ".join(k for k in job if found.get(k) != job[k]) or "chunk"
        raise DataError(
            f"{place} is of another {other} than the job in {dest}; delete it, and run its shard "
            "again with --resume"
        )
    return part


def _check_rows(wanted: list[str], found: list[str], dest: str, chunk: int) -> None:
    if wanted == found:
        return
    more, less = Counter(found) - Counter(wanted), Counter(wanted) - Counter(found)
    faults = [
        *_named("no row for", less),
        *_named("more than one row for", (path for path in more if path in wanted)),
        *_named("a row that the manifest doesn't know:", more.keys() - set(wanted)),
    ]
    raise DataError(
        f"{part_of(dest, chunk)}: {'; '.join(faults) or 'its rows are in another order'}; delete "
        "it, and run its shard again with --resume"
    )


def _named(what: str, paths: Iterable[str]) -> Iterator[str]:
    if listed := sorted(paths):
        yield f"{what} {some(listed, most=_NAMED)}"


@contextmanager
def _csv(file: Path) -> Iterator[Callable[[Any], None]]:
    """Add tables to a CSV file."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        stream.write(csv_text([_COLUMNS]))
        yield lambda table: _write(stream, table)


def _write(stream: io.TextIOWrapper, table: Any) -> None:
    stream.write(csv_text(row.values() for row in table.to_pylist()))


@contextmanager
def _parquet(file: Path) -> Iterator[Callable[[Any], None]]:
    """Add tables to a Parquet file."""
    import pyarrow.parquet

    columns = pyarrow.schema([parquet_schema().field(name) for name in _COLUMNS])
    with pyarrow.parquet.ParquetWriter(file, columns) as writer:
        yield writer.write_table
