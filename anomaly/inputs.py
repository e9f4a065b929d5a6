"""What `infer` is to score: files, folders of them, lists."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anomaly.errors import DataError
from anomaly.images import list_images


@dataclass(frozen=True)
class Found:
    """What is to be scored.

    Attributes:
        paths: the image files, each once, in order of their names.
        groups: the part that an image shows, by its path; those that a list says nothing of are
            missing.
    """

    paths: list[Path]
    groups: dict[str, str]


def find_inputs(
    inputs: Sequence[Path],
    list_file: str | None = None,
    without: Sequence[Path] = (),
    option: str = "--input",
) -> Found:
    """The image files that are meant.

    Args:
        inputs: files, and folders that are searched.
        list_file: a text file with a path on each line, or a CSV file with a header and the
            columns `path` and `group`; `-` for standard input. A file that it names needn't exist,
            and will be reported as unreadable.
        without: folders and files that aren't inputs: our own pictures.
        option: where the inputs were given, for messages.

    Raises:
        DataError: an input or the list doesn't exist, there is no image at all, or the list gives
            an image no part or two.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        if given.is_dir():
            found.update(dict.fromkeys(list_others(given, without)))
        elif given.exists():
            found[given] = None
        else:
            raise DataError(f"{option} {given} doesn't exist (looked in {Path.cwd()})")
    groups: dict[str, str] = {}
    if list_file is not None:
        data = _read(list_file)
        groups = _grouped(data, list_file)
        # File names are bytes; whatever isn't UTF-8 in them survives.
        lines = [os.fsdecode(line) for line in data.splitlines() if line.strip()]
        found.update(dict.fromkeys(map(Path, groups or lines)))
    if not found:
        wanted = [*map(str, inputs), *([f"--list {list_file}"] if list_file else [])]
        raise DataError(
            f"no images in {', '.join(wanted)}" if wanted else "give --input, --list, or both"
        )
    return Found(sorted(found), groups)


def list_others(folder: Path, without: Sequence[Path]) -> list[Path]:
    """The pictures in a folder, but for those in some folders inside it.

    Raises:
        DataError: the folder, or one inside it, can't be listed.
    """
    ours = [one.absolute() for one in without if one.absolute().is_relative_to(folder.absolute())]
    found = list_images(folder)
    if not ours:
        return found
    return [p for p in found if not any(p.absolute().is_relative_to(one) for one in ours)]


def _read(list_file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if list_file == "-" else Path(list_file).read_bytes()
    except OSError as error:
        raise DataError(f"--list {list_file} can't be read: {error.strerror}") from None


def _grouped(data: bytes, list_file: str) -> dict[str, str]:
    """The part of each image, by its path; empty where the list is no CSV with that."""
    text = os.fsdecode(data.removeprefix(b"\xef\xbb\xbf"))
    lines = csv.DictReader(io.StringIO(text, newline=""))
    if not {"path", "group"} <= set(lines.fieldnames or ()):
        return {}
    groups: dict[str, str] = {}
    for line in lines:
        path, group = str(Path(line["path"] or "")), line["group"]
        if not line["path"] or not group:
            raise DataError(
                f"--list {list_file}, line {lines.line_num}: path and group mustn't be empty"
            )
        if groups.setdefault(path, group) != group:
            raise DataError(
                f"--list {list_file}, line {lines.line_num}: {path} is in group {group!r}, and was "
                f"in {groups[path]!r} above; an image shows one part"
            )
    if not groups:
        raise DataError(f"--list {list_file} names no image")
    return groups


def picture_names(
    paths: Sequence[Path],
    inputs: Sequence[Path],
    exists: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """A heatmap's path for each image, mirroring the inputs' folders; no two are equal.

    Args:
        paths: the image files.
        inputs: the files and folders that they were found through; none stands for the files
            themselves.
        exists: whether a name is taken by a picture already.
    """
    roots = [(p if p.is_dir() else p.parent).absolute() for p in inputs or paths]
    common = Path(os.path.commonpath(roots))
    taken: set[str] = set()
    names = []
    for path in paths:
        mirrored = path.absolute().relative_to(common)
        plain = mirrored.with_suffix(".png") if mirrored.suffix.lower() == ".png" else mirrored
        name = plain.as_posix() if plain.suffix == ".png" else f"{plain.as_posix()}.png"
        # Names that differ in case alone are one name on Windows and macOS.
        while name.casefold() in taken or exists(name):
            name = f"{name.removesuffix('.png')}~.png"
        taken.add(name.casefold())
        names.append(name)
    return names
