"""Where the shards of a job write, and who takes which chunk. Imports no torch.

    DEST/
      results.job.json             what all rows depend on; another job's shard is refused
      results.parts/000000012.parquet  the rows of a chunk, and what job they are of
      heatmaps/000000012/000345.png    of its image 345, counted from 0

The parts are the journal of every shard, on whatever storage: a process that goes on scores the
chunks that have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anomaly.datasets.image_manifest import ImageManifest
from anomaly.errors import DataError, OutputError
from anomaly.files import storage
from anomaly.files.own_outputs import INFER, JOB, PARTS
from anomaly.files.writing import as_json
from anomaly.inference.journal import check_same


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
        return dict(json.loads(storage.read(place)))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError):
        raise OutputError(f"{place} can't be read, or is damaged; give another --output") from None


def chunks_done(dest: str) -> set[int]:
    """The numbers of the chunks that have a part."""
    names = storage.names(storage.inside(dest, PARTS))
    found = (name.removesuffix(".parquet") for name in names if name.endswith(".parquet"))
    return {int(name) for name in found if name.isdecimal()}
