"""What `infer` is to score: files, folders of them, lists."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from anomaly.errors import DataError
from anomaly.images import list_images


def find_inputs(
    inputs: Sequence[Path], list_file: str | None = None, option: str = "--input"
) -> list[Path]:
    """The image files that are meant, each once, in order of their names.

    Args:
        inputs: files, and folders that are searched.
        list_file: a text file with a path on each line, `-` for standard input; a file that it
            names needn't exist, and will be reported as unreadable.
        option: where the inputs were given, for messages.

    Raises:
        DataError: an input or the list doesn't exist, or there is no image at all.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        if given.is_dir():
            found.update(dict.fromkeys(list_images(given)))
        elif given.exists():
            found[given] = None
        else:
            raise DataError(f"{option} {given} doesn't exist (looked in {Path.cwd()})")
    if list_file is not None:
        found.update(dict.fromkeys(_listed(list_file)))
    if not found:
        wanted = [*map(str, inputs), *([f"--list {list_file}"] if list_file else [])]
        raise DataError(
            f"no images in {', '.join(wanted)}" if wanted else "give --input, --list, or both"
        )
    return sorted(found)


def _listed(list_file: str) -> list[Path]:
    try:
        data = sys.stdin.buffer.read() if list_file == "-" else Path(list_file).read_bytes()
    except OSError as error:
        raise DataError(f"--list {list_file} can't be read: {error.strerror}") from None
    # File names are bytes; whatever isn't UTF-8 in them survives.
    return [Path(os.fsdecode(line)) for line in data.splitlines() if line.strip()]


def picture_names(paths: Sequence[Path], inputs: Sequence[Path]) -> list[str]:
    """A heatmap's path for each image, mirroring the inputs' folders; no two are equal.

    Args:
        paths: the image files.
        inputs: the files and folders that they were found through; none stands for the files
            themselves.
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
        while name.casefold() in taken:
            name = f"{name.removesuffix('.png')}~.png"
        taken.add(name.casefold())
        names.append(name)
    return names
