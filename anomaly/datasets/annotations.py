"""Text files that name images: annotations and lists, which aren't read and may tell defects."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import unquote

from anomaly.datasets.labels import split_of
from anomaly.datasets.masks import entries_of, folded, plain
from anomaly.errors import DataError, some
from anomaly.files.outputs import left_by_system, own_outputs
from anomaly.files.tables import CODE_PAGES, marked_encoding
from anomaly.imaging.listing import IMAGE_SUFFIXES, is_folder, is_image, list_files

_SUFFIXES = {".json", ".jsonl", ".ndjson", ".manifest", ".xml", ".txt", ".csv", ".tsv"}
_MOST_READ = 2**24  # bytes of a file: half from its beginning, half from its end
_SMALL = 2**20  # bytes of a file that is tried in all code pages
# What is said of a data set as a whole may name an image as an example.
_ABOUT = re.compile(r"read.?me|licen[cs]e|copying|notice|change.?log|citation", re.IGNORECASE)
# Folders of images and of annotations, as labelling tools and data sets name them.
_IMAGES = re.compile(r"(jpeg)?(image|img|picture|photo)s?", re.IGNORECASE)
_ANNOTATIONS = re.compile(
    r"anno?s?|annotations?|box(es)?|bbox(es)?|labels?|labeltxt|jsons?|xmls?|voc|yolo|coco|gt",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"""["',;:<>=\[\](){}|\t\r\n]+""")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_UPLOADED = re.compile(r"[0-9a-f]{8}-")  # what Label Studio puts before a name


def check_annotations(good: Collection[Path], files: Iterable[Path]) -> None:
    """Refuse images to be taken as good that text files name.

    A file names images by its own name (`1.json`, empty or not) or in its text, whatever its
    format. Names without a suffix count if they have letters and digits; mere numbers if half of
    the images are named so.

    Args:
        good: the images.
        files: these and other images, and the files in and beside their folder.

    Raises:
        DataError: the message says which files name how many images.
    """
    known: dict[str, list[Path]] = {}
    texts: list[Path] = []
    for file in map(plain, files):
        if is_image(file):
            known.setdefault(folded(file.stem), []).append(file)
        elif file.suffix.lower() in _SUFFIXES and not _ABOUT.match(file.name):
            texts.append(file)
    wanted = {plain(path) for path in good}
    found = {file: _named_by(file, known, wanted) for file in texts}
    naming = sorted((file for file in texts if found[file]), key=lambda file: -len(found[file]))
    if naming:
        images = sorted(path.name for path in set[Path]().union(*found.values()))
        one = len(naming) == 1
        who = str(naming[0]) if one else f"{len(naming)} files ({some([*map(str, naming)])})"
        raise DataError(
            f"{who} {'names' if one else 'name'} {len(images)} of {len(wanted)} images that would "
            f"be taken as good ({some(images)}). Annotations aren't read, and may call some "
            "defective: write a CSV list with the columns path and label and use that "
            f"(data.format=csv), or move {'this file' if one else 'these files'} away"
        )


def files_around(folder: Path) -> list[Path]:
    """Files in a folder of images, beside it and in folders of annotations there.

    Around `images/train` these are beside `train` and beside `images`.
    """
    files, place = list_files(folder, tell=False), plain(folder)
    while place != place.parent:
        place = place.parent
        for path in files_in(place) if os.access(place, os.R_OK) else ():
            if not is_folder(path):
                files.append(path)
            elif _ANNOTATIONS.fullmatch(path.name):
                files += list_files(path, tell=False)
        if not (_IMAGES.fullmatch(place.name) or split_of(place.name)):
            break
    return files


def files_in(folder: Path) -> list[Path]:
    """Entries of a folder, without those of a system or of this program."""
    entries = entries_of(folder)
    own = own_outputs(folder, [entry.name for entry in entries])
    return [e for e in entries if e.name not in own and not left_by_system(e.name)]


def _named_by(file: Path, known: dict[str, list[Path]], wanted: set[Path]) -> set[Path]:
    """The wanted images that a text file names."""
    if named := _meant(file.stem, file.parent, known) & wanted:
        return named
    numbers: set[Path] = set()
    for mention in _mentions(file):
        if images := _meant(mention, file.parent, known) & wanted:
            name = mention.rpartition("/")[2]
            if is_image(Path(name)) or re.search(r"[^\W\d_].*\d|\d.*[^\W\d_]", name):
                named |= images
            elif any(map(str.isdecimal, name)):
                numbers |= images
    return named | numbers if 2 * len(numbers) >= len(wanted) else named


def _meant(mention: str, folder: Path, known: dict[str, list[Path]]) -> set[Path]:
    """The images that a path can mean: those there, else those in folders named so, else all.

    Args:
        mention: the path, maybe on another machine; with or without an image's suffix.
        folder: that it leads from.
        known: images by their names without suffix, folded.
    """
    place, _, name = mention.rpartition("/")
    bare, _, suffix = name.rpartition(".")
    stem = folded(bare if f".{suffix.lower()}" in IMAGE_SUFFIXES else name)
    if not (images := known.get(stem) or known.get(_UPLOADED.sub("", stem, count=1))):
        return set()
    parent = plain(folder / place)
    here = {image for image in images if image.parent == parent}
    if here or os.path.lexists(parent / name):  # another file
        return here
    return {image for image in images if image.parent.name == parent.name} or set(images)


def _mentions(file: Path) -> set[str]:
    """Words of a text file that may be names, with forward slashes."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_READ // 2)
            rest = os.fstat(stream.fileno()).st_size - len(data)
            stream.seek(max(0, rest - _MOST_READ // 2), os.SEEK_CUR)
            data += stream.read(_MOST_READ // 2)
    except OSError:  # a folder, or not ours to read
        return set()
    encoding, data = marked_encoding(data) or ("utf-8", data)
    text = data.decode(encoding, "replace")
    if "\ufffd" in text and len(data) <= _SMALL:
        text = "\n".join(data.decode(page, "replace") for page in CODE_PAGES)
    text = unquote(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)).replace("\\", "/")
    parts = {part.strip() for part in _BETWEEN.split(text)}
    return parts.union(*(part.split() for part in parts if " " in part))
