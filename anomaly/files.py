"""Writing results so that a name holds a whole file or nothing, and never an earlier run's work."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from anomaly.errors import OutputError


def claim(folder: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Make an output folder and see that none of our outputs is in it.

    Args:
        folder: made if need be; other files in it are left alone.
        names: the files and folders that the caller is going to write.
        overwrite: delete those that exist already instead of refusing.

    Raises:
        OutputError: one of them exists, or the folder can't be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = [folder / name for name in names if (folder / name).exists()]
        if present and not overwrite:
            listed = ", ".join(str(p) for p in present)
            raise OutputError(f"{listed} exists already; give another --output or add --overwrite")
        for path in present:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not os.access(folder, os.W_OK):
            raise OutputError(f"{folder} can't be written to; give another --output")
    except OSError as error:
        raise OutputError(f"{error.filename or folder} can't be used: {error.strerror}") from None


def cache_folder() -> Path:
    """Where what can be made again is kept: `$XDG_CACHE_HOME/anomaly`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anomaly"


def remove_drafts(folder: Path) -> None:
    """Delete what `write` has left of files that it couldn't finish, because it was killed."""
    for draft in folder.rglob(".*.part"):
        with suppress(OSError):
            draft.unlink()


def write(file: Path, content: bytes | str) -> None:
    """Write a file that appears under its name complete or not at all.

    Args:
        file: its folder is made if need be.
        content: text is written as UTF-8.

    Raises:
        OutputError: no room, no permission.
    """
    data = content.encode() if isinstance(content, str) else content
    draft: str | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(prefix=".", suffix=".part", dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(draft).chmod(0o644)
        Path(draft).replace(file)
        draft = None
    except OSError as error:
        raise OutputError(f"{file} can't be written: {error.strerror}") from None
    finally:
        if draft is not None:
            Path(draft).unlink(missing_ok=True)
