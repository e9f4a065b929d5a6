"""Places for images and results: local paths, and URLs of whatever storage fsspec opens.

Storage that doesn't answer is asked again for about a quarter of a minute, and then it is said so.
What it does answer, that there is no such object or that access is denied, is believed at once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from anomaly.errors import AnomalyError, DataError, OutputError
from anomaly.files.outputs import JOB, SHARDED, left_by_system, matched
from anomaly.files.writing import draft, write

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts
_BLOCK = 1 << 20
_ANSWERS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

Result = TypeVar("Result")


def local(place: str) -> Path | None:
    """The path that a place is on this machine; None for storage elsewhere."""
    name = place.removeprefix("file://")
    return None if "://" in name else Path(name)


def named(entry: str, folder: Path = Path()) -> str:
    """The place that an entry of a list means.

    Args:
        entry: a path, or a URL. A path with backslashes has slashes where only that file exists.
        folder: that paths lead from.
    """
    name = entry.removeprefix("file://")
    slashed = name if os.name == "nt" or "://" in name else name.replace("\\", "/")
    # Of `os.path`, which takes any name: too long, with null characters.
    if slashed == name or os.path.lexists(folder / name):
        return name
    return slashed if os.path.exists(folder / slashed) else name  # noqa: PTH110


def inside(place: str, name: str) -> str:
    """The place of a name in a folder."""
    return f"{place.rstrip('/')}/{name}"


def read(place: str) -> bytes:
    """The bytes of a small file.

    Raises:
        FileNotFoundError: there is none; OSError: it can't be read.
        DataError: storage elsewhere doesn't answer.
    """
    path = local(place)
    return _asked(place, lambda fs, name: fs.cat_file(name)) if path is None else path.read_bytes()


def fetch(place: str, target: Path, limit: int) -> None:
    """Copy an object of storage elsewhere into a file, no more than one byte beyond a limit.

    Raises:
        FileNotFoundError: there is none; PermissionError: access is denied.
        DataError: the storage doesn't answer.
    """

    def copy(fs: Any, name: str) -> None:
        left = limit + 1
        with fs.open(name, "rb") as source, target.open("wb") as file:
            while left and (data := source.read(min(left, _BLOCK))):
                file.write(data)
                left -= len(data)

    _asked(place, copy)


def put(place: str, content: bytes | Path) -> None:
    """Write a file that appears under its name complete or not at all.

    Object storage sees to that itself; on other remote storage an upload that is cut off may leave
    a part of the file.

    Args:
        place: the file; its folder is made if need be.
        content: its bytes, or a file that holds them.

    Raises:
        OutputError: it can't be written.
    """
    path = local(place)
    if path is None:

        def send(fs: Any, name: str) -> None:
            if isinstance(content, bytes):
                fs.pipe_file(name, content)
            else:
                fs.put_file(str(content), name)

        try:
            _asked(place, send, OutputError)
        except _ANSWERS as error:
            raise OutputError(f"{place} can't be written: {answer(error)}") from None
    else:
        write(path, content if isinstance(content, bytes) else content.read_bytes())


def names(place: str) -> set[str]:
    """The names of what lies in a folder; none where there is no such folder.

    Raises:
        OutputError: it can't be listed.
    """
    path = local(place)
    try:
        if path is not None:
            return {entry.name for entry in path.iterdir()}
        entries = _asked(place, lambda fs, name: fs.ls(name, detail=False), OutputError)
        return {str(entry).rstrip("/").rpartition("/")[2] for entry in entries}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise OutputError(f"{place} can't be listed: {answer(error)}") from None


@contextmanager
def appearing(place: str) -> Iterator[Path]:
    """A local file to write into; it gets its name, or is uploaded, once it is whole.

    Raises:
        OutputError: it can't be written.
    """
    path = local(place)
    if path is None:
        with tempfile.TemporaryDirectory(prefix="anomaly-") as folder:
            unfinished = Path(folder) / "draft"
            yield unfinished
            put(place, unfinished)
        return
    with draft(path) as unfinished:
        yield unfinished


def exists(place: str) -> bool:
    """Whether there is a file of this name.

    Raises:
        DataError: the storage doesn't answer, or refuses access.
    """
    path = local(place)
    if path is not None:
        return path.exists()
    return bool(_asked(place, lambda fs, name: fs.exists(name)))


def is_same(place: str, other: str) -> bool:
    """Whether two names are one file's, as far as names tell."""
    here, there = local(place), local(other)
    if here is None or there is None:
        return place == other
    return here.resolve() == there.resolve()


def opened(place: str) -> IO[bytes]:
    """A file to read from anywhere in it.

    Raises:
        DataError: it can't be read.
    """
    path = local(place)
    try:
        if path is not None:
            return path.open("rb")
        stream: IO[bytes] = _asked(place, lambda fs, name: fs.open(name, "rb"))
        return stream
    except OSError as error:
        raise DataError(f"{place} can't be read: {answer(error)}") from None


def again(place: str, act: Callable[[], Result], kind: type[AnomalyError] = DataError) -> Result:
    """Do something with a file; with one of storage elsewhere several times if it doesn't answer.

    Args:
        place: the file.
        act: what to do.
        kind: of the error.

    Raises:
        OSError: what it has answered.
        AnomalyError: it doesn't answer.
    """
    if local(place) is not None:
        return act()
    for pause in (*_PAUSES, None):
        try:
            return act()
        except (*_ANSWERS, AnomalyError):
            raise
        except Exception as error:  # each kind of storage has errors of its own
            if "Credentials" in type(error).__name__:
                raise kind(
                    f"{place}: no way to sign in is set up; see the documentation of fsspec's "
                    "package for this storage (environment variables, a profile, a role)"
                ) from None
            if pause is None:
                raise kind(
                    f"{place}: the storage doesn't answer, after {len(_PAUSES) + 1} attempts "
                    f"({answer(error)})"
                ) from None
            time.sleep(pause)
    raise AssertionError


def each_file(place: str) -> Iterator[str]:
    """The files of storage elsewhere that a place means: an object, a pattern, or a folder's.

    A system's own files and folders are skipped, and so is what `infer` has written in folders. A
    folder is listed when it is come to; a pattern is listed as a whole, and may have no matches.

    Raises:
        DataError: there is no such object or folder, or it can't be listed.
    """
    fs, name = _filesystem(place)
    try:
        if any(c in name for c in "*?[") and not again(place, partial(fs.exists, name)):
            matches = again(place, partial(fs.glob, name, detail=True)).items()
            files = (n for n, about in matches if about["type"] == "file" and matched(n, name))
            yield from map(fs.unstrip_protocol, files)
        elif again(place, partial(fs.isfile, name)):
            yield fs.unstrip_protocol(name)
        else:
            yield from map(fs.unstrip_protocol, _walk(place, fs, name))
    except OSError as error:
        raise DataError(f"{place} can't be listed: {answer(error)}") from None


def _walk(place: str, fs: Any, folder: str) -> Iterator[str]:
    listing = again(place, partial(fs.ls, folder, detail=True))
    paths = [(str(entry["name"]).rstrip("/"), entry["type"]) for entry in listing]
    entries = {path.rpartition("/")[2]: (path, kind) for path, kind in paths}
    own = SHARDED if JOB in entries else ()
    for name, (path, kind) in sorted(entries.items()):
        if left_by_system(name) or name in own or path == folder.rstrip("/"):
            continue
        if kind == "directory":
            yield from _walk(place, fs, path)
        else:
            yield path


def _asked(
    place: str, act: Callable[[Any, str], Result], kind: type[AnomalyError] = DataError
) -> Result:
    fs, name = _filesystem(place, kind)
    return again(place, partial(act, fs, name), kind)


def _filesystem(place: str, kind: type[AnomalyError] = DataError) -> tuple[Any, str]:
    """What fsspec has for a URL, and the name that it goes by there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise kind(f"{place} needs fsspec: pip install 'anomaly[remote]'") from None
    protocol = place.partition("://")[0]
    try:
        # Storage within storage is URLs with `::` between them; else that is a part of a name.
        first, *more = place.split("::")
        is_chain = all("://" in one for one in more)
        # Listings that are kept would fill the memory, and hide what others write.
        fs, name = url_to_fs(place if is_chain else first, use_listings_cache=False)
        name += "" if is_chain else place.removeprefix(first)
    except ImportError as error:  # fsspec names the package
        raise kind(f"{place} needs another package: {error}") from None
    except ValueError:
        raise kind(f"{place}: {protocol}:// isn't known; see fsspec's list of storage") from None
    except Exception as error:
        raise kind(f"{place} can't be reached ({answer(error)})") from None
    return fs, str(name)


def answer(error: BaseException) -> str:
    """What storage has answered, as the end of a message."""
    if isinstance(error, FileNotFoundError):
        return "it doesn't exist"
    if isinstance(error, PermissionError):
        return "access is denied"
    return (isinstance(error, OSError) and error.strerror) or type(error).__name__
