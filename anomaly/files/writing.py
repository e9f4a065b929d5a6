"""Writing results so that a name holds a whole file or nothing, and never an earlier run's work."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anomaly.errors import AnomalyError, OutputError, closest, unwritable
from anomaly.files.outputs import foreign, is_model, own_outputs

# File systems take 255 bytes a name; this leaves room for a suffix and a number.
_LONGEST_NAME = 230
_MOST_DIGITS = 40
_DRAFT, _DRAFT_SUFFIX = ".anomaly-", ".part"


def claim(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Make an output folder and see that results can be written there; nothing is deleted.

    Args:
        folder: made if need be.
        names: the files and folders that the caller is going to write.
        overwrite: take those that exist already instead of refusing; `clear` deletes them later.

    Raises:
        OutputError: one of them exists, or is a folder that no earlier run has made or that holds
            something else, or the folder is a model's, or can't be made or written to.
    """
    try:
        if folder.is_file():
            raise OutputError(
                f"{folder} is a file, but results need a folder; give another --output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        entries = [file.name for file in folder.iterdir()]
        if is_model(folder, entries):
            raise OutputError(
                f"{folder} is a model folder, where nothing else can be written; give another "
                "--output"
            )
        present = [folder / name for name in names if (folder / name).exists()]
        if present and not overwrite:
            listed = ", ".join(str(p) for p in present)
            exist = "exists" if len(present) == 1 else "exist"
            raise OutputError(
                f"{listed} {exist} already; give another --output or add --overwrite "
                "(overwrite=True)"
            )
        own = own_outputs(folder, entries) if present else ()
        for path in present:
            if path.is_dir() and path.name not in own and any(path.iterdir()):
                raise OutputError(
                    f"{path} isn't from an earlier run, so it isn't written over; move it away or "
                    "give another --output"
                )
            other = foreign(folder, path.name) if path.name in own else None
            if other is not None:
                raise OutputError(
                    f"{other} isn't from an earlier run, and {path} would be deleted with it; move "
                    "it away or give another --output"
                )
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{folder} can't be written to; give another --output")
    except OSError as error:
        raise unwritable(error.filename or folder, error, "{} can't be used") from None


def clear(folder: Path, names: Iterable[str]) -> None:
    """Delete an earlier run's outputs, once nothing can keep new ones from taking their place.

    Args:
        folder: other files in it are left alone.
        names: files and folders; those that aren't there are passed over.

    Raises:
        OutputError: one of them can't be deleted.
    """
    try:
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error.filename or folder, error, "{} can't be used") from None


def at_home(path: Path) -> Path:
    """A path with the home folder in place of its `~`.

    Raises:
        AnomalyError: nobody of that name has one.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise AnomalyError(
            f"{path}: no home folder is known for {path.parts[0]}; write the path in full"
        ) from None


def like(path: Path) -> str:
    """`"; did you mean 'a', 'b'?"` of what lies beside a missing file; empty without such."""
    try:
        present = next(folder for folder in path.absolute().parents if folder.is_dir())
        names = [f.name for f in present.iterdir() if not f.name.startswith(".")]
    except OSError:
        return ""
    close = closest(path.absolute().relative_to(present).parts[0], names)
    return close and f"; in {present} " + close


def looked_in(path: Path) -> str:
    """Where a missing file was looked for, as far as its path leaves that open, and what is alike.

    Returns:
        `" (looked in /folder); in /folder did you mean 'a'?"`, or parts of it, or nothing.
    """
    looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    return looked + like(path)


def short_name(name: str) -> str:
    """A file's or folder's name that every file system takes, with room for a suffix.

    A long one is cut between two characters, and a hash of the whole keeps it apart from others.
    """
    data = os.fsencode(name)
    if len(data) <= _LONGEST_NAME:
        return name
    mark = "-" + hashlib.blake2b(data, digest_size=6).hexdigest()
    return data[: _LONGEST_NAME - len(mark)].decode("utf-8", "ignore") + mark


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's bytes, as 64 hexadecimal digits.

    Raises:
        OSError: it can't be read.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def as_json(values: Any) -> str:
    """Values as indented JSON with a newline, the same text each time.

    Bytes of file names that aren't UTF-8 become JSON's own escapes.

    Raises:
        ValueError: a number is NaN or infinite, which JSON doesn't have.
    """
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def from_json(text: str | bytes) -> Any:
    """The values in JSON that this program, or a person, has written.

    Raises:
        ValueError: it isn't JSON, is nested too deep, or holds a number that isn't finite or has
            more digits than any that is written.
    """
    try:
        return json.loads(
            text, parse_constant=_read_number, parse_float=_read_number, parse_int=_read_number
        )
    except RecursionError:
        raise DamagedError("it is nested too deep") from None


class DamagedError(AnomalyError, ValueError):
    """A file holds values that can't be meant."""


def _read_number(text: str) -> float:
    if len(text) > _MOST_DIGITS or not math.isfinite(number := float(text)):
        raise DamagedError(f"it holds the impossible number {text[:_MOST_DIGITS]}")
    return int(text) if text.lstrip("-").isdigit() else number


def draft_of(path: Path) -> Path:
    """A name beside `path` that nobody else uses, for what isn't finished."""
    return path.with_name(f"{_DRAFT}{secrets.token_hex(8)}{_DRAFT_SUFFIX}")


def share(file: Path) -> None:
    """Give a file that a library made for its owner alone the permissions that the umask leaves."""
    twin = draft_of(file)
    twin.touch(exist_ok=False)
    shutil.copymode(twin, file)
    twin.unlink()


def remove_drafts(folder: Path, inside: Iterable[str] = ()) -> None:
    """Delete drafts of files and folders that a killed process couldn't finish.

    Args:
        folder: drafts in it are deleted, not those in its folders, where others may be at work.
        inside: folders in it that are one's own: drafts at any depth are deleted.
    """
    pattern = f"{_DRAFT}*{_DRAFT_SUFFIX}"
    own = (draft for name in inside for draft in (folder / name).rglob(pattern))
    for draft in (*folder.glob(pattern), *own):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            with suppress(OSError):
                draft.unlink()


@contextmanager
def draft(file: Path) -> Iterator[Path]:
    """A path to write to, beside a file whose name it takes if the block ends without an error.

    Args:
        file: its folder is made if need be.

    Raises:
        OutputError: no room, no permission.
    """
    unfinished = draft_of(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(file)
    except OSError as error:
        raise unwritable(file, error) from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write(file: Path, content: bytes | str) -> None:
    """Write a file that appears under its name complete or not at all.

    Args:
        file: its folder is made if need be.
        content: text is written as UTF-8, and the bytes of file names as they are.

    Raises:
        OutputError: no room, no permission.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with draft(file) as unfinished:
        unfinished.write_bytes(data)


class GrowingFile:
    """A file that grows by whole pieces: one that there is no room for leaves it as it was.

    Args:
        file: made if need be.
        end: what lies behind this is dropped.

    Raises:
        OutputError: it can't be written.
    """

    def __init__(self, file: Path, end: int) -> None:
        self._file = file
        self.end = end
        try:
            # Unbuffered: what couldn't be written mustn't come up again when the file is closed.
            self._stream = file.open("r+b" if end else "wb", buffering=0)
            if self._stream.seek(0, os.SEEK_END) < end:
                self._stream.close()
                raise OutputError(
                    f"{file} was changed since: it is shorter than what was written; give "
                    "--overwrite or another --output"
                )
            self._drop_torn()
        except FileNotFoundError:
            raise OutputError(
                f"{file} is gone, or its folder is; give --overwrite or another --output"
            ) from None
        except OSError as error:
            raise unwritable(file, error) from None

    def append(self, data: bytes) -> None:
        """Write one more piece; the system has it when this returns.

        Raises:
            OutputError: no room.
        """
        left = memoryview(data)
        try:
            while left:  # a disk that fills up takes the beginning of a piece
                left = left[self._stream.write(left) :]
        except OSError as error:
            self._drop_torn()
            raise unwritable(self._file, error) from None
        self.end += len(data)

    def close(self) -> None:
        """Once it doesn't grow any more."""
        self._stream.close()

    def _drop_torn(self) -> None:
        self._stream.seek(self.end)
        self._stream.truncate()
