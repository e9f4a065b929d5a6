"""A manifest: the images of a job as a Parquet file, in chunks that no batch of images crosses.

Its lines stand in the order of a hash of their names, so that the order doesn't depend on how the
images were listed, a name that was listed twice stands beside itself, and each chunk is a random
sample of the whole: chunks take equally long, and neighbours don't all lie in one folder. A chunk
is a row group. Which chunks there are depends on the list alone; shards share them out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from anomaly.errors import AnomalyError, DataError
from anomaly.files import storage
from anomaly.files.writing import from_json

CHUNK = 1000  # images, where nothing else is said
_FORMAT = "anomaly-images/1"
_KEY = b"anomaly"
_BUCKETS = 1024
_HELD = 100_000  # names in memory until they go to the disk


def check_parquet(what: str) -> None:
    """See that Parquet files can be read and written.

    Raises:
        AnomalyError: pyarrow is missing.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise AnomalyError(f"{what} needs pyarrow: pip install 'anomaly[parquet]'")


@dataclass(frozen=True)
class ImageManifest:
    """A manifest that is read a chunk at a time.

    Attributes:
        place: where it is.
        id: tells one list of images, cut into chunks, from another.
        sizes: images in each chunk.
    """

    place: str
    id: str
    sizes: tuple[int, ...]

    @property
    def images(self) -> int:
        """How many there are."""
        return sum(self.sizes)

    def chunk(self, number: int) -> list[str]:
        """The images of a chunk, in order.

        Raises:
            DataError: the file can't be read any more.
        """
        import pyarrow

        try:
            return storage.again(self.place, partial(self._read, number))
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"{self.place} can't be read any more") from None
            raise DataError(
                f"{self.place} is damaged; make it again with: anomaly manifest"
            ) from None

    @cached_property
    def _file(self) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(storage.opened(self.place))

    def _read(self, number: int) -> list[str]:
        try:
            names: list[str] = self._file.read_row_group(number).column("path").to_pylist()
        except Exception:
            self.__dict__.pop("_file", None)  # opened anew the next time
            raise
        return names


def read_manifest(place: str) -> ImageManifest:
    """Open a manifest; its lines aren't read yet.

    Raises:
        DataError: it doesn't exist, or is something else.
        AnomalyError: pyarrow is missing.
    """
    check_parquet("a manifest")
    try:
        return storage.again(place, partial(_opened, place))
    except OSError as error:
        if storage.local(place) is not None and error.errno is None:  # pyarrow's, of its bytes
            raise DataError(f"{place} is damaged; make it again with: anomaly manifest") from None
        raise DataError(f"{place} can't be read: {storage.answer(error)}") from None


def _opened(place: str) -> ImageManifest:
    import pyarrow
    import pyarrow.parquet

    try:
        with storage.opened(place) as stream:
            about = pyarrow.parquet.read_metadata(stream)
        header = from_json((about.metadata or {})[_KEY])
        if header["format"] != _FORMAT:
            raise KeyError
        sizes = (about.row_group(i).num_rows for i in range(about.num_row_groups))
        return ImageManifest(place, str(header["id"]), tuple(sizes))
    except (pyarrow.ArrowException, KeyError, ValueError, TypeError):
        raise DataError(
            f"{place} isn't a manifest of images; make one with: anomaly manifest"
        ) from None


def write_manifest(names: Iterable[str], place: str, chunk: int = CHUNK) -> tuple[int, int]:
    """Write a manifest; it appears complete or not at all.

    In memory are a hundred thousand names, or a thousandth of all where that is more; the others
    wait in files beside the manifest (or in the folder for temporary files, if it isn't local).

    Args:
        names: paths and URLs, in any order.
        place: where to.
        chunk: images that are scored, and whose rows are written, together.

    Returns:
        How many images there are, and how many names were given more than once.

    Raises:
        DataError: a name can't be in a manifest, or there is none.
        OutputError: it can't be written.
        AnomalyError: pyarrow is missing.
    """
    check_parquet("a manifest")
    import pyarrow
    import pyarrow.parquet

    if not 1 <= chunk <= 1_000_000:
        raise DataError(f"--chunk is {chunk}; it must be from 1 to 1,000,000 images")
    schema = pyarrow.schema([("path", pyarrow.string())])
    digest = hashlib.sha256(f"{_FORMAT} {chunk}\0".encode())
    count = 0
    with (
        storage.appearing(place) as draft,
        tempfile.TemporaryDirectory(prefix=".anomaly-list-", dir=draft.parent) as folder,
        pyarrow.parquet.ParquetWriter(draft, schema, write_statistics=False) as writer,
    ):
        sorter = _ByHash(Path(folder))
        for lines in _cut(sorter.sorted(names), chunk):
            writer.write_table(pyarrow.table({"path": lines}, schema), row_group_size=chunk)
            digest.update("".join(f"{line}\0" for line in lines).encode())
            count += len(lines)
        if not count:
            raise DataError("there are no images to list")
        header = {"format": _FORMAT, "id": digest.hexdigest()[:32]}
        writer.add_key_value_metadata({_KEY: json.dumps(header)})
    return count, sorter.taken - count


def _cut(names: Iterator[str], chunk: int) -> Iterator[list[str]]:
    while lines := list(itertools.islice(names, chunk)):
        yield lines


class _ByHash:
    """Sorts names by their hash, with most of them on disk.

    Attributes:
        taken: how many names were given.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[list[bytes]] = [[] for _ in range(_BUCKETS)]
        self.taken = 0

    def sorted(self, names: Iterable[str]) -> Iterator[str]:
        """Each name once."""
        for name in names:
            data = checked(name)
            self._waiting[_bucket(data)].append(data)
            self.taken += 1
            if self.taken % _HELD == 0:
                self._spill()
        for bucket, waiting in enumerate(self._waiting):
            file = self._folder / str(bucket)
            spilt = file.read_bytes().split(b"\0")[:-1] if file.exists() else []
            for data in sorted({*waiting, *spilt}, key=lambda each: (_hash(each), each)):
                yield data.decode()

    def _spill(self) -> None:
        for bucket, waiting in enumerate(self._waiting):
            if waiting:
                with (self._folder / str(bucket)).open("ab") as file:
                    file.write(b"".join(data + b"\0" for data in waiting))
                waiting.clear()


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _bucket(data: bytes) -> int:
    """The first bits of the hash, so that the buckets one after the other are in its order."""
    return int.from_bytes(_hash(data)[:2], "big") * _BUCKETS >> 16


def checked(name: str) -> bytes:
    """A name as a manifest holds it.

    Raises:
        DataError: it can't be in one.
    """
    try:
        data = name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{_shown(name)}: its name isn't UTF-8, which a manifest needs; rename it, or, where a "
            "list names it, save that as CSV UTF-8"
        ) from None
    if not data or b"\0" in data:
        raise DataError(f"'{_shown(name)}' is empty or holds a null character; correct it")
    return data


def _shown(name: str) -> str:
    return repr(name[:200])[1:-1]
