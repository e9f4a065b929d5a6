"""Which files of a folder are pictures, by their names."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from anomaly.errors import DataError, some, why
from anomaly.files.outputs import is_model, left_by_system, own_outputs
from anomaly.imaging.formats import FORMATS

log = logging.getLogger(__name__)

# Pictures that can't be read are listed too, so that they get a row that says why.
_OTHERS = (".gif", ".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl", ".psd", ".exr", ".tga")
IMAGE_SUFFIXES = frozenset(_OTHERS).union(*(known.suffixes for known in FORMATS))


def list_images(folder: Path) -> list[Path]:
    """List the pictures in a folder and its subfolders, sorted by path.

    Raises:
        DataError: as `list_files`.
    """
    return [path for path in list_files(folder) if is_image(path)]


def other_files(folder: Path) -> str:
    """What a folder without pictures holds, in brackets, for a message; empty for no files.

    Raises:
        DataError: as `list_files`.
    """
    kinds = Counter(
        path.suffix.lower() or path.name
        for path in (list_files(folder, tell=False) if is_folder(folder) else ())
    )
    if not kinds:
        return ""
    found = some([f"{count} {kind}" for kind, count in kinds.most_common()])
    *names, last = (known.name for known in FORMATS)
    readable = f"{', '.join(names)} and {last}"
    return f" (but {found}, in a format that can't be read; convert them to one of {readable})"


def is_image(path: Path) -> bool:
    """Whether a file's name is a picture's, by its suffix."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name.

    Raises:
        DataError: it can't be looked at: no permission, or a name that is too long.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be looked at ({why(error)})") from None


def list_files(folder: Path, *, tell: bool = True) -> list[Path]:
    """List the files in a folder and its subfolders, sorted by path.

    A system's own files and folders are skipped (`left_by_system`), and so is what this program has
    written itself. Links are followed, except to a folder that the link lies in.

    Args:
        folder: where to look.
        tell: log a warning that names outputs of this program which are skipped.

    Raises:
        DataError: the folder, or one inside it, can't be listed.
    """
    own: list[Path] = []
    files = sorted(_walk(folder, (), own), key=lambda path: path.parts)
    if own and tell:
        names = some([path.relative_to(folder).as_posix() for path in own], most=6)
        log.warning("%s: skipped this program's own outputs: %s", folder, names)
    return files


def _walk(folder: Path, above: tuple[tuple[int, int], ...], own: list[Path]) -> Iterator[Path]:
    try:
        status = folder.stat()
        with os.scandir(folder) as scan:
            entries = list(scan)
    except OSError as error:
        raise DataError(f"{folder}: can't list this folder ({why(error)})") from None
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    names = [entry.name for entry in entries]
    if above and is_model(folder, names):
        own.append(folder)
        return
    outputs = own_outputs(folder, names)
    for entry in sorted(entries, key=lambda entry: entry.name):
        path = folder / entry.name
        if left_by_system(entry.name):
            continue
        if entry.name in outputs:
            if _is_folder(entry) or is_image(path):  # tables and notes aren't worth a word
                own.append(path)
        elif _is_folder(entry):
            yield from _walk(path, (*above, identity), own)
        else:
            yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself; reading it as an image will say so
        return False
