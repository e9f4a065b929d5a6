"""Writing results so that nothing is lost: whole files, one run at a time, nobody else's work.

A name holds a whole file or nothing. This program's own files are recognised, and never an input.

A command that writes into a run holds the lock of the run's folder (of the model folder, if that
lies in no run). `serve` only reads models; its record has a lock of its own. The lock is the
operating system's, on a file in the folder, so a killed process leaves none behind. Network file
systems pass it on to their server; where there are no locks, a warning says so.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anomaly.errors import AnomalyError, OutputError, closest, unwritable

log = logging.getLogger(__name__)

HEATMAPS, MASKS, MAPS = "heatmaps", "masks", "maps"
PAGE = "results.html"
JOURNAL = "results.partial.jsonl"
WATCHED = "results.watched.jsonl"
DONE = "results.done.json"
GOLDEN = "golden.json"
# Folders of a run of `infer`, and the suffix of what it writes into them.
_SUFFIXES = {HEATMAPS: ".png", MASKS: ".png", MAPS: ".tiff"}
FOLDERS = tuple(_SUFFIXES)
_TABLES = ("results.csv", "results.jsonl", "regions.csv", "parts.csv")
INFER = (*_TABLES, PAGE, JOURNAL, WATCHED, DONE, *FOLDERS)
TRAIN = ("model", "train.json", "suspects")
# And what belongs to the model of a run: its golden parts.
RUN = (*TRAIN, "golden")
_EXPLANATION, _EXPLANATION_PAGE = "explanation.json", "explanation.html"
_MANIFEST = "manifest.json"
LOCK = ".anomaly-lock"
_ATTEMPTS = 100  # at locking a file that other runs delete as they end
_NOTE_SECONDS = 0.05  # time that a run needs to write into its lock file who it is
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
# What systems keep beside a user's files. No name that a user may have given: a folder `recycled`.
_SYSTEM = re.compile(
    r"[$#@~]recycled?([ ._-]?bin)?|recycle[ ._-]?bin|recycler"
    r"|[#@~]_*(snapshots?|recently-snapshots?|thumbs?|eadir|te?mp|syno\w*|share\w*|trash|recover\w*)"
    r"|\$(sysreset|winreagent|extend|windows\.~\w+)|~\$.*|found\.\d{3}|system volume information"
    r"|network recycle bin.*|_gsdata_|@(appstore|database|docker)|__macosx|__pycache__"
    r"|ipynb_checkpoints|lost\+found|network trash folder|temporary items"
    r"|thevolumesettingsfolder|files_trashbin|(eh)?thumbs(_vista)?\.db|desktop\.ini|desktop d[bf]",
    re.IGNORECASE,
)
# Locked folders and files, as real paths, and the threads that have locked them.
_held: set[tuple[str, int]] = set()


def left_by_system(name: str) -> bool:
    """True if a file or folder of this name is the system's, never data.

    These are hidden ones, recycle bins, snapshots, thumbnails of network storage, and the extra
    files in archives of macOS.
    """
    return name.startswith(".") or _SYSTEM.fullmatch(name) is not None


def own_outputs(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Names in a folder that this program's commands have written there.

    A name that others may use is no proof: such a file must hold what a command writes.

    Args:
        folder: a folder of results, or of anything else.
        names: the names of all its files and subfolders.
    """
    own: set[str] = set()
    if "model" in names and is_model(folder / "model"):
        own.update((*TRAIN, "images.csv"))
    if "golden" in names and (folder / "golden" / GOLDEN).is_file():
        own.add("golden")
    if not {JOURNAL, WATCHED, DONE}.isdisjoint(names) or (
        "results.csv" in names and _head(folder / "results.csv").startswith(b"path,image_sha256,")
    ):
        own.update(INFER)
    if "scores.csv" in names and b",defect_type,is_defect," in _head(folder / "scores.csv"):
        own.update(("scores.csv", "metrics.json"))
    if _EXPLANATION in names:
        with suppress(OSError, ValueError, LookupError, TypeError):
            written = from_json((folder / _EXPLANATION).read_bytes())["pictures"]
            own.update((_EXPLANATION, _EXPLANATION_PAGE, *map(str, written)))
    return frozenset(own.intersection(names))


def _foreign_path(folder: Path, *, is_own: bool) -> Path | None:
    """A path in a folder to delete that this program hasn't written; None if there is none.

    Files of an own folder are recognised by their suffix, if the run was asked to write it; else
    all of them are foreign. Own folders other than `FOLDERS` (model, golden) aren't searched, and
    files of the system (`left_by_system`) don't count.

    Args:
        folder: the folder to delete, in a run's folder.
        is_own: True if it is one of `own_outputs`; of another folder any content counts.
    """
    if not is_own:
        return folder if any(folder.iterdir()) else None
    if folder.name not in FOLDERS:
        return None
    suffix = _SUFFIXES[folder.name] if folder.name in _asked_for(folder.parent) else None
    for file in folder.rglob("*"):
        is_folder = file.is_dir() and not file.is_symlink()
        ours = is_folder or file.suffix == suffix
        if not (ours or any(map(left_by_system, file.relative_to(folder).parts))):
            return file
    return None


def _asked_for(folder: Path) -> Collection[str]:
    """Outputs that a run was asked for, by its journal, and heatmaps; `FOLDERS` without one."""
    for name in (DONE, JOURNAL, WATCHED):
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            first, _ = json.JSONDecoder().raw_decode((folder / name).read_text("utf-8"))
            return {HEATMAPS, *first["about"]["set of outputs"]}
    return FOLDERS


def is_model(folder: Path) -> bool:
    """True if a folder is a model folder, by its manifest."""
    return b'"anomaly-model/' in _head(folder / _MANIFEST)


def _head(file: Path) -> bytes:
    """The first 1,000 bytes of a file; none if it can't be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(1000)
    except OSError:  # not there, or not ours to read
        return b""


def locked(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder, so that other runs and threads are refused while the block runs.

    A thread may lock it again within the block, as a command that runs others does. Folders made
    for the lock and empty at the end are removed.

    Args:
        folder: made if it is missing.

    Raises:
        OutputError: another run is at work there, or the folder can't be made or written to.
    """
    return _locked(folder, folder / LOCK)


def locked_file(file: Path) -> AbstractContextManager[None]:
    """Lock a file, like `locked`; other files in its folder stay free.

    Args:
        file: may be missing, and so may its folder, which is made.

    Raises:
        OutputError: another run writes to it, or its folder can't be made or written to.
    """
    return _locked(file, file.resolve().with_name(f".{file.resolve().name}{LOCK}"))


@contextmanager
def _locked(what: Path, lock: Path) -> Iterator[None]:
    """Hold a lock file, which stands for the folder or file `what`, while the block runs.

    Folders made for it are removed if they are empty at the end.
    """
    holder = os.path.realpath(what), threading.get_ident()
    if holder in _held:
        yield
        return
    made: list[Path] = []
    try:
        try:
            made += [path for path in lock.parents if not path.exists()]
            handle = _take(what, lock)
        except OSError as error:
            where = what if error.filename in (None, str(lock)) else error.filename
            raise unwritable(where, error, "{} can't be written to") from None
        _held.add(holder)
        try:
            yield
        finally:
            _held.discard(holder)
            # Deleted while the lock holds: afterwards the file may be another run's.
            if _is_at(handle, lock):
                with suppress(OSError):
                    lock.unlink()
            os.close(handle)
    finally:
        for path in made:
            with suppress(OSError):  # holds something: it stays
                path.rmdir()


def _take(what: Path, lock: Path) -> int:
    """Take a lock, as in `_locked`; returns the descriptor of its file.

    Raises:
        OutputError: another run holds it.
        OSError: the file can't be made.
    """
    for _ in range(_ATTEMPTS):
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # a run that failed has just removed its new folder
            continue
        with ExitStack() as opened:
            opened.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(what, handle) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s: no locks here (%s): other runs go unnoticed", what, error.strerror)
            if _is_at(handle, lock):
                _note(handle)
                opened.pop_all()  # the file stays open
                return handle
            # Another run has just ended and deleted the file that was opened here: try again.
    raise OutputError(f"{what} is in use by runs that come and go; try again")


def _is_at(handle: int, file: Path) -> bool:
    """True if a file's name still leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except OSError:
        return False


def _note(handle: int) -> None:
    """Write into an open lock file who holds it; a full disk is no reason to stop."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())


def _in_use(what: Path, handle: int) -> OutputError:
    """The error where another run holds a lock; `handle` is its file, which names that run."""
    time.sleep(_NOTE_SECONDS)
    who = ""
    with suppress(OSError):
        who = os.read(handle, 500).decode(errors="replace")
    return OutputError(
        f"{what} is in use by another run ({who or 'which one is not known'}); wait until that "
        "has ended, or write elsewhere"
    )


# File systems take 255 bytes a name; this leaves room for a suffix and a number.
_LONGEST_NAME = 230
_MOST_DIGITS = 40  # of a number in JSON: none that this program writes has more
_DRAFT, _DRAFT_SUFFIX = ".anomaly-", ".part"


def claim(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Make an output folder and see that results can be written there; nothing is deleted.

    Args:
        folder: made if it is missing.
        names: the files and folders that the caller is going to write.
        overwrite: accept existing ones instead of refusing them; `clear` deletes them later.

    Raises:
        OutputError: one of them exists; or it is to be overwritten and holds files that no earlier
            run has written; or the folder is a model's, or can't be made or written to.
    """
    try:
        if folder.is_file():
            raise OutputError(
                f"{folder} is a file, but results need a folder; give another --output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if is_model(folder):
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
        own = own_outputs(folder, [path.name for path in folder.iterdir()])
        for path in filter(Path.is_dir, present):
            if (kept := _foreign_path(path, is_own=path.name in own)) is not None:
                raise OutputError(
                    f"{kept} isn't from an earlier run, so it isn't deleted; move it away or give "
                    "another --output"
                )
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{folder} can't be written to; give another --output")
    except OSError as error:
        raise unwritable(error.filename or folder, error, "{} can't be used") from None


def clear(folder: Path, names: Iterable[str]) -> None:
    """Delete an earlier run's outputs; to be called once nothing can refuse the new run any more.

    Args:
        folder: the output folder; other files in it stay.
        names: files and folders to delete, missing ones among them.

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
        AnomalyError: there is no user of that name, or no home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise AnomalyError(
            f"{path}: no home folder is known for {path.parts[0]}; write the path in full"
        ) from None


def like(path: Path) -> str:
    """A hint at files beside a missing one: `"; in /folder did you mean 'a'?"`, or nothing."""
    try:
        present = next(folder for folder in path.absolute().parents if folder.is_dir())
        names = [f.name for f in present.iterdir() if not f.name.startswith(".")]
    except OSError:
        return ""
    close = closest(path.absolute().relative_to(present).parts[0], names)
    return close and f"; in {present} " + close


def looked_in(path: Path) -> str:
    """A hint at a missing file: the folder in which a relative path was looked up, similar names.

    Returns:
        `" (looked in /folder); in /folder did you mean 'a'?"`, or parts of it, or nothing.
    """
    looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    return looked + like(path)


def short_name(name: str) -> str:
    """A name of a file or folder, short enough for every file system and a suffix.

    A name of more than 230 bytes is cut between two characters; a hash keeps it unique.
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
    """The values in a text of JSON.

    Raises:
        ValueError: the text isn't JSON, is nested too deep, or holds a number that isn't finite or
            has more than 40 digits.
    """
    try:
        return json.loads(
            text, parse_constant=_read_number, parse_float=_read_number, parse_int=_read_number
        )
    except RecursionError:
        raise DamagedError("it is nested too deep") from None


class DamagedError(AnomalyError, ValueError):
    """A file holds impossible values."""


def _read_number(text: str) -> float:
    """A number of JSON, `int` if it is all digits; `NaN`, `Infinity` and long ones are refused."""
    if len(text) > _MOST_DIGITS or not math.isfinite(number := float(text)):
        raise DamagedError(f"it holds the impossible number {text[:_MOST_DIGITS]}")
    return int(text) if text.lstrip("-").isdigit() else number


def draft_of(path: Path) -> Path:
    """A random path beside `path`, for a file or folder that is being written."""
    return path.with_name(f"{_DRAFT}{secrets.token_hex(8)}{_DRAFT_SUFFIX}")


def share(file: Path) -> None:
    """Give a file the permissions of any new file; some libraries make it its owner's alone."""
    twin = draft_of(file)
    twin.touch(exist_ok=False)
    shutil.copymode(twin, file)
    twin.unlink()


def remove_drafts(folder: Path, inside: Iterable[str] = ()) -> None:
    """Delete drafts of files and folders that a killed process couldn't finish.

    Args:
        folder: the folder; drafts in its subfolders stay, since other runs may be at work there.
        inside: names of subfolders that this run alone writes: drafts at any depth are deleted.
    """
    pattern = f"{_DRAFT}*{_DRAFT_SUFFIX}"
    deep = (draft for name in inside for draft in (folder / name).rglob(pattern))
    for draft in (*folder.glob(pattern), *deep):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            with suppress(OSError):
                draft.unlink()


@contextmanager
def draft(file: Path) -> Iterator[Path]:
    """A path to write to, which is renamed to `file` if the block ends without an error.

    Args:
        file: the finished file; its folder is made if it is missing.

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
        file: its folder is made if it is missing.
        content: text is written as UTF-8, and undecoded bytes of file names in it as bytes.

    Raises:
        OutputError: no room, no permission.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with draft(file) as unfinished:
        unfinished.write_bytes(data)


class GrowingFile:
    """A file that grows by whole pieces: a piece that doesn't fit on the disk leaves no trace.

    Args:
        file: the file; made anew if `end` is 0.
        end: number of bytes to keep; bytes beyond it are dropped.

    Attributes:
        end: length of the file in bytes.

    Raises:
        OutputError: it can't be written, or is missing or shorter than `end`.
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
        """Write one more piece; it is in the file when this returns.

        Raises:
            OutputError: it can't be written; the file is as before.
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
        """Close the file."""
        self._stream.close()

    def _drop_torn(self) -> None:
        """Drop the beginning of a piece that couldn't be written whole."""
        self._stream.seek(self.end)
        self._stream.truncate()
