"""The errors a user can cause. Every message says what is wrong, where, and what to do about it.

The command line prints the message and exits with `exit_code`, and so it does with an `OSError`
that nobody has foreseen; anything else is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path


class AnomalyError(Exception):
    """Base of every error that a user's input, files or machine can cause."""

    exit_code = 2


class ConfigError(AnomalyError):
    """A config file or a `--set` override can't be used."""


class DataError(AnomalyError):
    """A data set is missing, empty or laid out in a way that can't be used."""


class ImageError(AnomalyError):
    """One image can't be turned into pixels.

    Args:
        message: the file and its fault.
        status: `unreadable` (damaged, cut short, vanished, no permission), `unsupported` (a healthy
            file of a kind that isn't accepted: too many pixels, several pages), or `failed` (it
            took too long, or crashed decoding processes).
    """

    def __init__(self, message: str, status: str = "unreadable") -> None:
        super().__init__(message)
        self.status = status


class WeightsError(AnomalyError):
    """Backbone weights are missing, damaged, or belong to another network."""


class LayerError(AnomalyError):
    """A layer path doesn't exist in the network or can't be used as asked."""


class ModelError(AnomalyError):
    """A model folder is missing, incomplete, changed, or was made by something else."""


class OutputError(AnomalyError):
    """A result can't be written, or would overwrite an earlier one."""


class WriteError(OutputError):
    """Results can't be written: the disk is full, broken or read-only."""

    exit_code = 4


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def unwritable(file: Path | str, error: OSError, lead: str = "{} can't be written") -> OutputError:
    """`WriteError` to raise if a disk is full, broken or read-only; else a plain `OutputError`.

    `lead` is the message's beginning, with `{}` for the file or folder.
    """
    if error.errno not in DISK:
        return OutputError(f"{lead.format(file)}: {why(error)}")
    reason, remedy = os.strerror(error.errno), "make room there"  # libraries add their own words
    if error.errno == errno.EROFS:
        reason, remedy = "the folder is read-only", "choose another --output"
    elif error.errno == errno.EIO:
        remedy = "choose a folder on another disk"
    elif error.errno == errno.ENOSPC:
        with suppress(OSError, StopIteration):
            there = next(p for p in (Path(file), *Path(file).absolute().parents) if p.exists())
            reason += f" ({shutil.disk_usage(there).free / 1e6:.1f} MB are free in {there})"
    return WriteError(f"{lead.format(file)}: {reason}; {remedy}")


def closest(name: str, known: Iterable[str]) -> str:
    """`"did you mean 'a', 'b'?"`: the known names most like `name`, up to 3; empty if none is."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return "did you mean " + ", ".join(repr(c) for c in close) + "?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`closest` names, or `"known: 'a', 'b'"`, the first 12 by name, if none is like `name`."""
    names = sorted(set(known))
    if close := closest(name, names):
        return close
    shown = ", ".join(repr(k) for k in names[:12])
    return f"known: {shown}" + (", …" if len(names) > 12 else "")


def some(names: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """The first few names and the number of the others, for a message: `a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def counted(count: int, noun: str) -> str:
    """A number with its noun, for a message: `1 image`, `2 images`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories
_JOINERS = "\u200c\u200d"  # spelling needs them


def visible(text: str) -> str:
    """A text whose control characters are escaped as in JSON: `\\u001b`.

    They control a terminal, break a line or turn the writing direction, or stand for bytes of file
    names that aren't text.
    """
    if text.isprintable():
        return text
    return "".join(
        json.dumps(c)[1:-1] if unicodedata.category(c) in _CONTROLS and c not in _JOINERS else c
        for c in text
    )


def first_of(lines: Sequence[str], rest: str = "", most: int | None = 5) -> list[str]:
    """The first few lines, and a last one with the number of the others: `… and 7 more`.

    Args:
        lines: all lines.
        rest: text behind "more" in the last line, with its space: ` of the good images`.
        most: number of lines shown; None for all.
    """
    shown = list(lines[:most])
    left = len(lines) - len(shown)
    return [*shown, f"… and {left} more{rest}"] if left else shown


# Packages of the extra `train`; exported models run without them.
_TRAINING = ("torch", "torchvision", "timm", "faiss")


def needs_training(name: str, error: ModuleNotFoundError) -> AnomalyError:
    """The error to raise if a package of the extra `train` isn't installed; says how to install it.

    Args:
        name: command, public name or model that needs the package, for the message.
        error: the failed import.

    Raises:
        ModuleNotFoundError: `error` itself, if the package isn't one of that extra.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _TRAINING:
        raise error
    return AnomalyError(
        f"{name} needs {package}, which isn't installed: pip install 'anomaly[train]' (exported "
        "models are scored without it)"
    )


# Patterns of paths that this system doesn't have, and a remedy for each.
_FOREIGN = {
    r"[a-z][a-z0-9+.-]+:/": "; it is a URL: download the images first",
    r"~": "; ~ stands for no folder here, write the path in full",
    r"[A-Za-z]:|.*\\": "; it is a Windows path, write it as this system has it",
}


def _foreign(error: OSError) -> str:
    """A remedy for a missing file named by a URL, `~` or a Windows path; empty for other errors."""
    if not isinstance(error, FileNotFoundError) or os.name == "nt":
        return ""
    name = os.fsdecode(error.filename or "")
    return next((hint for start, hint in _FOREIGN.items() if re.match(start, name)), "")


def why(error: BaseException) -> str:
    """The reason of an error in plain words: libraries' own messages seldom help a user."""
    if isinstance(error, AnomalyError):
        return str(error)
    if isinstance(error, OSError):
        return (error.strerror or "it can't be reached") + _foreign(error)
    if isinstance(error, UnicodeError):
        return "it isn't text in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno} isn't JSON"
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "its path holds a null character"
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]!r}" if error.args else "it lacks something"
    return "something in it is missing or wrong"
