"""Refusals of images whose folders, files or annotations contradict what they are given as."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from anomaly.datasets.masks import entries_of, folded, plain
from anomaly.datasets.names import CLEAR, Label, by_file_names, label_of, split_of
from anomaly.errors import DataError, some
from anomaly.files.outputs import left_by_system, own_outputs
from anomaly.files.tables import CODE_PAGES, marked_encoding
from anomaly.imaging.listing import IMAGE_SUFFIXES, is_folder

# What a folder inside one of good, or of defective, images mustn't say.
_CONTRARY = {
    Label.GOOD: {*Label} - {Label.GOOD, Label.PLACE},
    Label.DEFECTIVE: {Label.GOOD, Label.ASIDE},
}
_TEXTS = {".json", ".jsonl", ".ndjson", ".manifest", ".xml", ".txt", ".csv", ".tsv"}
_MOST_READ = 2**24  # bytes of a text
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


def check_good(images: Sequence[Path], folder: Path) -> None:
    """Refuse images to be taken as good where names or text files beside them say otherwise.

    Args:
        images: files in `folder`.
        folder: as given; its own name counts, those of the folders around it don't.

    Raises:
        DataError: the message names the first such folder, or the files.
    """
    check_names(images, folder, Label.GOOD)
    check_annotations(images, folder)


def check_inputs(inputs: Iterable[Path], images: Iterable[Path], *, defects: bool = False) -> None:
    """Refuse files and folders that were given as good, or as defects, where names say otherwise.

    Args:
        inputs: as given.
        images: what was found in them.
        defects: whether they were given as defects; a file that is named as one may lie anywhere.

    Raises:
        DataError: as `check_good`.
    """
    files = list(images)
    # A folder may be given beside files of it.
    given = sorted((is_folder(place), place) for place in inputs)
    for folder, whole in {p if whole else p.parent: whole for whole, p in given}.items():
        inside = [file for file in files if file.is_relative_to(folder)]
        if not defects:
            check_good(inside, folder)
        elif whole:
            check_names(inside, folder, Label.DEFECTIVE)


def check_names(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    """Refuse images to be taken as good, or as defective, where names don't say so.

    Good images may lie in folders of good names, or of numbers, lots and cameras; where some lie in
    a folder that is named as good, all have to.
    """
    top, holding = plain(folder), {plain(image.parent) for image in images}
    known = {f for inner in holding for f in (inner, *inner.parents) if f.is_relative_to(top)}
    labels = {f: label_of(f.name, alone=f == top) for f in known}
    if labels.get(top) not in {Label.GOOD, Label.DEFECTIVE, Label.ASIDE}:
        labels[top] = Label.PLACE  # a product's name says nothing of its parts
    good = {f for f in known if Label.GOOD in {labels.get(g) for g in (f, *f.parents)}}
    bad = {f for f in known if labels[f] in _CONTRARY[wanted]}
    if wanted is Label.GOOD and good:
        bad |= holding - good
    if bad:
        first = min(bad)
        all_in = "" if first == top else f", like all in {top}"
        raise DataError(
            f"the images in {first} would be taken as {wanted}{all_in}, but that folder's name "
            f"doesn't say so. Move them elsewhere, rename that folder (`{wanted} …`), take folders "
            "by their names (data.format=good_defect), or write a list with labels "
            "(data.format=csv)"
        )
    check_files(images, folder, wanted)


def check_files(images: Sequence[Path], folder: Path, wanted: Label) -> None:
    """Refuse images to be taken as good, or as defective, where names of files say otherwise."""
    named = by_file_names([path.stem for path in images])
    (contrary,) = CLEAR - {wanted}
    if others := [path.name for path in images if named[path.stem] is contrary]:
        raise DataError(
            f"the images in {folder} would all be taken as {wanted}, but the names of "
            f"{len(others)} of {len(images)} files say {contrary} ({some(others)}): move those "
            "elsewhere, or rename them"
        )


def undecided(folder: Path, names: Sequence[str], what: str = "folders") -> DataError:
    """The error of folders, or files, whose names don't tell."""
    return DataError(
        f"{folder}: the names of these {what} don't say whether images are good or defective: "
        f"{some(names)}. Rename them (`good …`, `defect …`), move them elsewhere, or list the "
        "images in a CSV file with the columns path and label (data.format=csv)"
    )


def check_annotations(good: Sequence[Path], folder: Path) -> None:
    """Refuse images to be taken as good that text files beside them name.

    A file names images by its own name (`1.json`, empty or not) or in its text, whatever its
    format. Names without a suffix count if they have letters; mere numbers if half of the images
    are named so.

    Args:
        good: the images.
        folder: they are all in it.

    Raises:
        DataError: the message says which files name how many images.
    """
    inside: dict[Path, list[tuple[str, Path]]] = {}
    for image in map(plain, good):
        inside.setdefault(image.parent, []).append((folded(image.stem), image))
    listed = cache(files_in)
    texts: dict[Path, dict[str, set[Path]]] = {}
    for place, images in inside.items():
        for text in _texts_around(place, plain(folder), listed):
            for stem, image in images:
                texts.setdefault(text, {}).setdefault(stem, set()).add(image)
    found = {text: named for text, images in texts.items() if (named := _named_by(text, images))}
    if found:
        naming = sorted(found, key=lambda file: (-len(found[file]), file))
        names = sorted({path.name for paths in found.values() for path in paths})
        one = len(naming) == 1
        who = str(naming[0]) if one else f"{len(naming)} files ({some([*map(str, naming)])})"
        raise DataError(
            f"{who} {'names' if one else 'name'} {len(names)} of {len(good)} images that would "
            f"be taken as good ({some(names)}). Annotations aren't read, and may call some "
            "defective: write a CSV list with the columns path and label and use that "
            f"(data.format=csv), or move {'this file' if one else 'these files'} away"
        )


def _texts_around(
    place: Path, folder: Path, listed: Callable[[Path], list[Path]]
) -> Iterator[Path]:
    """Text files in a folder of images, beside it and in folders of annotations there.

    Around `images/train` these are beside `train` and beside `images`.

    Args:
        place: of the images.
        folder: around it, in which all text files count on the way to `place`.
        listed: lists a folder.
    """
    around, name = [place], place.name
    while place != place.parent:
        place = place.parent
        if os.access(place, os.R_OK):
            beside = [p for p in listed(place) if _ANNOTATIONS.fullmatch(p.name)]
            inner = [annotations / name for annotations in beside]
            around += [place, *(p for p in (*beside, *inner) if is_folder(p))]
        if not (
            _IMAGES.fullmatch(place.name) or split_of(place.name) or place.is_relative_to(folder)
        ):
            break
    for text in (file for place in dict.fromkeys(around) for file in listed(place)):
        if text.suffix.lower() in _TEXTS and not _ABOUT.match(text.name):
            yield text


def files_in(folder: Path) -> list[Path]:
    """Entries of a folder, without those of a system or of this program."""
    entries = entries_of(folder)
    own = own_outputs(folder, [entry.name for entry in entries])
    return [e for e in entries if e.name not in own and not left_by_system(e.name)]


def _named_by(text: Path, images: dict[str, set[Path]]) -> set[Path]:
    """The images that a text file names.

    Args:
        text: the file.
        images: by their names without suffix, folded.
    """
    if named := images.get(_stem(text.stem)):
        return named
    named, numbers = set[Path](), set[Path]()
    for mention in _mentions(text):
        meant = images.get(stem := _stem(mention), set())
        place = plain(text.parent / mention)
        if meant and os.path.lexists(place):  # it or another file
            meant = meant & {place}
        is_number = stem.isdecimal() and not mention.lower().endswith(tuple(IMAGE_SUFFIXES))
        (numbers if is_number else named).update(meant)
    return named | numbers if 2 * len(numbers) >= sum(map(len, images.values())) else named


def _stem(mention: str) -> str:
    """The name, without an image's suffix, of the file that a path on any machine may mean."""
    name = _UPLOADED.sub("", mention.rpartition("/")[2], count=1)
    bare, _, suffix = name.rpartition(".")
    return folded(bare if f".{suffix.lower()}" in IMAGE_SUFFIXES else name)


def _mentions(file: Path) -> set[str]:
    """Words of a text file that may be names, with forward slashes."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_READ)
    except OSError:  # a folder, or not ours to read
        return set()
    encoding, data = marked_encoding(data) or ("utf-8", data)
    text = data.decode(encoding, "replace")
    if "\ufffd" in text:
        text = "\n".join(data.decode(page, "replace") for page in CODE_PAGES)
    text = unquote(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)).replace("\\", "/")
    parts = {part.strip() for part in _BETWEEN.split(text)}
    return parts.union(*(part.split() for part in parts if " " in part))
