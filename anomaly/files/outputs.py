"""The folder that a command writes into: what lies there, and one run at a time.

What this program has written is recognised by its file names, and is never an input.

Who writes a model, or anything else of a run, holds the lock of the run's folder: `train`, `start`,
`update`, `calibrate`, `deploy` and `export`. (For a model folder that lies in no run it is
the lock of that folder.) Who only reads models, as `serve` does, holds none; its record, a file
that it writes to as long as it runs, has a lock of its own.

The lock is the operating system's, on a file in the folder, so that a killed process leaves none
behind. Network file systems pass it on to their server (NFS from Linux 2.6.12 on, SMB); where the
file system has no locks, a file in the local temporary folder stands in, and only runs of the
same machine notice each other.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anomaly.errors import OutputError, unwritable

log = logging.getLogger(__name__)

HEATMAPS, MASKS, MAPS = "heatmaps", "masks", "maps"
SCALE, PAGE = "heatmap_scale.png", "results.html"
JOURNAL = "results.partial.jsonl"
WATCHED = "results.watched.jsonl"
DONE = "results.done.json"
GOLDEN = "golden.json"
# Folders of a run of `infer`, and the suffixes of what it writes into them.
_SUFFIXES = {
    HEATMAPS: (".png",),
    MASKS: (".png",),
    MAPS: (".png", ".tiff"),
}
FOLDERS = tuple(_SUFFIXES)
# Settings of a run, one of which it has if it was asked to write the folder.
_SETTINGS = {MASKS: {"masks"}, MAPS: {"float32", "uint16"}}
_TABLES = ("results.csv", "results.jsonl", "regions.csv", "parts.csv")
INFER = (*_TABLES, PAGE, SCALE, JOURNAL, WATCHED, DONE, *FOLDERS)
TRAIN = ("model", "train.json", "suspects")
# And what belongs to the model of a run: its golden parts.
RUN = (*TRAIN, "golden")
_EXPLANATION, _EXPLANATION_PAGE = "explanation.json", "explanation.html"
_MANIFEST = "manifest.json"
LOCK = ".anomaly-lock"
_ATTEMPTS = 100
_NOTE_SECONDS = 0.05  # after which a run that has just got the lock has said who it is
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
# Real paths of what is locked, and the thread that has locked it.
_held: set[tuple[str, int]] = set()


def left_by_system(name: str) -> bool:
    """Whether a file or folder of this name is a system's own, never data.

    Hidden ones, recycle bins, snapshots, thumbnails of network storage, what an archive of macOS
    holds beside the files.
    """
    return name.startswith(".") or _SYSTEM.fullmatch(name) is not None


def own_outputs(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Which entries of a folder this program's commands have written there.

    Nothing is taken for theirs by its name alone, and nothing else in such a folder is.

    Args:
        folder: the folder.
        names: all that is in it.
    """
    own: set[str] = set()
    if "model" in names and is_model(folder / "model", (_MANIFEST,)):
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
        own.update(_explained(folder / _EXPLANATION))
    return frozenset(own.intersection(names))


def foreign(folder: Path, name: str) -> Path | None:
    """A file in one of a run's folders that the run hasn't written; None where there is none.

    Files are recognised by their suffixes; a folder that its run wasn't to write holds foreign
    ones only. What file managers leave (`left_by_system`) isn't counted.

    Args:
        folder: a run's.
        name: of a folder in it that is one of `own_outputs`.

    Raises:
        OSError: a folder can't be listed.
    """
    if name not in _SUFFIXES or not (folder / name).is_dir():
        return None
    suffixes = _SUFFIXES[name] if _may_have_written(folder, name) else ()
    return next((file for file in _files(folder / name) if file.suffix not in suffixes), None)


def _files(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if left_by_system(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield Path(entry.path)


def _may_have_written(folder: Path, name: str) -> bool:
    """Whether a run may have written a folder, as far as its settings are known."""
    try:
        settings = _SETTINGS.get(name)
        return settings is None or not settings.isdisjoint(_about(folder)["set of outputs"])
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        return True


def _about(folder: Path) -> dict[str, Any]:
    """What the rows of a run depend on, as its file or its journal says."""
    for name in (DONE, JOURNAL, WATCHED):
        if (folder / name).exists():
            with (folder / name).open("rb") as stream:
                text = stream.read() if name == DONE else stream.readline()
            return dict(json.loads(text)["about"])
    raise FileNotFoundError(folder / DONE)


def is_model(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder that holds entries of these names is a model folder."""
    return _MANIFEST in names and b'"anomaly-model/' in _head(folder / _MANIFEST)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(1000)
    except OSError:  # not there, or not ours to read
        return b""


def _explained(file: Path) -> list[str]:
    try:
        return [
            _EXPLANATION,
            _EXPLANATION_PAGE,
            *map(str, json.loads(file.read_bytes())["pictures"]),
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; what this made and nothing was written into goes again.

    Args:
        folder: made if need be. One that this thread has locked already stays so: a command may
            run others within its lock. Another thread of this process is kept out, too.

    Raises:
        OutputError: another run is at work there, or the folder can't be made or written to.
    """
    with _locked(folder, folder / LOCK):
        yield


@contextmanager
def locked_file(file: Path) -> Iterator[None]:
    """Keep other runs from a file; all others in its folder may be written to meanwhile.

    Args:
        file: needn't be there; its folder is made if need be, and goes again as with `locked`.

    Raises:
        OutputError: another run writes to it, or its folder can't be made or written to.
    """
    with _locked(file, file.resolve().with_name(f".{file.resolve().name}{LOCK}")):
        yield


@contextmanager
def _locked(what: Path, lock: Path) -> Iterator[None]:
    """Hold a lock file.

    Args:
        what: it stands for.
        lock: the file, whose folder is made if need be.
    """
    holder = os.path.realpath(what), threading.get_ident()
    if holder in _held:
        yield
        return
    made: list[Path] = []
    try:
        try:
            made += [path for path in lock.parents if not path.exists()]
            file, handle = _take(what, lock)
        except OSError as error:
            where = what if error.filename in (None, str(lock)) else error.filename
            raise unwritable(where, error, "{} can't be written to") from None
        _held.add(holder)
        try:
            yield
        finally:
            _held.discard(holder)
            _release(file, handle)
    finally:
        for path in made:
            with suppress(OSError):  # holds something: it stays
                path.rmdir()


def _take(what: Path, lock: Path) -> tuple[Path, int]:
    """The lock file, or what stands in for it, and its descriptor."""
    try:
        return _hold(what, lock)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        lock.unlink(missing_ok=True)
        log.warning(
            "%s: its file system has no locks (%s); a run of another machine there goes unnoticed",
            what,
            error.strerror,
        )
    place = hashlib.blake2b(os.fsencode(os.path.realpath(what)), digest_size=12).hexdigest()
    return _hold(what, Path(tempfile.gettempdir()) / f"anomaly-{place}.lock")


def _hold(what: Path, file: Path) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = _open(file)
        except FileNotFoundError:  # a run that failed has just removed its new folder
            continue
        try:
            if not _lock(handle):
                raise _in_use(what, handle)
            if _is_at(handle, file):
                _note(handle)
                return file, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the run that held it has just ended, and taken the file away
    raise OutputError(f"{what} is in use by runs that come and go; try again")


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # left there by another account's run that was killed
        if not file.exists():
            raise
        return os.open(file, os.O_RDONLY)


def _lock(handle: int) -> bool:
    """Whether the lock is ours now; OSError where the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except OSError:
        return False


def _note(handle: int) -> None:
    """Say in the file who holds it; a full disk is no reason to stop."""
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, text.encode())


def _in_use(what: Path, handle: int) -> OutputError:
    time.sleep(_NOTE_SECONDS)
    who = ""
    with suppress(OSError):
        who = os.read(handle, 500).decode(errors="replace")
    return OutputError(
        f"{what} is in use by another run ({who or 'which one is not known'}); wait until that "
        "has ended, or write elsewhere"
    )


def _release(file: Path, handle: int) -> None:
    if _is_at(handle, file):  # before the lock ends: afterwards the file may be another run's
        with suppress(OSError):
            file.unlink()
    os.close(handle)
