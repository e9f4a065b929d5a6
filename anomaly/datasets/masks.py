"""Which file, or folder of files, is the mask of which image, by its name."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from anomaly.errors import DataError, some
from anomaly.files.outputs import left_by_system
from anomaly.imaging.listing import is_folder, is_image, list_images
from anomaly.imaging.read import FORMATS


class Masks:
    """Finds the masks of images in folders: each folder is read once."""

    def __init__(self) -> None:
        self._listed: dict[Path, dict[str, list[_Entry]]] = {}
        self._owners: dict[Path, Path] = {}  # each mask is one image's

    def of(self, image: Path, folders: Iterable[Path] = ()) -> Path | None:
        """`1_mask.png`, `1.png`, another of the usual names or a folder `1`, for `1.jpg`.

        Suffixes are any that can be read; capitals and forms of Unicode don't matter where nothing
        has the same ones.

        Args:
            image: its file.
            folders: where its mask may be, the likeliest first; then the image's own, for masks
                that aren't called as the image.
        """
        return next(filter(None, (self._in(image, f) for f in (*folders, image.parent))), None)

    def _in(self, image: Path, folder: Path) -> Path | None:
        beside = self._names_in(image.parent)
        found = [
            entry
            for entry in self._names_in(folder).get(folded(image.stem), ())
            # `1_mask.png` is the mask of an image `1_mask.jpg` where there is one.
            if (
                entry.rank != _SAME and _lossless(entry.path)
                if folder == image.parent
                else entry.rank == _SAME
                or not any(e.rank == _SAME for e in beside.get(entry.stem, ()))
            )
        ]
        if not found:
            return None
        stem = unicodedata.normalize("NFC", image.stem)

        def fits(entry: _Entry) -> tuple[bool, int, bool, str]:
            name = entry.path.name
            exact = stem in unicodedata.normalize("NFC", name)
            return not exact, entry.rank, name != image.name, name

        mask = min(found, key=fits).path
        if (owner := self._owners.setdefault(mask, image)) != image:
            raise DataError(
                f"{mask} would be the mask of both {owner} and {image}; give each image its own "
                "mask, with one subfolder of masks for each folder of images"
            )
        return mask

    def left_in(self, folder: Path) -> tuple[Path, ...]:
        """The files in a folder of masks, and below it, that are no image's."""
        files = list_images(folder) if is_folder(folder) else []
        return tuple(f for f in files if not {f, *f.parents} & self._owners.keys())

    def _names_in(self, folder: Path) -> dict[str, list[_Entry]]:
        """Pictures and folders, by what the image may be called whose masks they are."""
        if folder not in self._listed:
            names: dict[str, list[_Entry]] = {}
            place = _found(folder)
            for entry in entries_of(place) if is_folder(place) else ():
                if left_by_system(entry.name) or not (is_image(entry) or entry.is_dir()):
                    continue
                stem = folded(entry.stem if is_image(entry) else entry.name)
                names.setdefault(stem, []).append(_Entry(entry, stem, _SAME))
                if of := _MASK_NAME.fullmatch(stem):
                    rank = _USUAL if stem.endswith("_mask") else _OTHER
                    image = of["behind"] or of["before"]
                    names.setdefault(image, []).append(_Entry(entry, stem, rank))
            self._listed[folder] = names
        return self._listed[folder]


class _Entry(NamedTuple):
    """A picture or folder of masks, its name without suffix, folded, and how that fits."""

    path: Path
    stem: str
    rank: int


# How a mask's name fits its image's, the likeliest first.
_USUAL, _SAME, _OTHER = range(3)
_MASK_WORDS = "masks?|labels?|gt|ground_?truth|truth|seg|segm|segmentation|annotations?|anno"
_MASK_NAME = re.compile(
    rf"(?:{_MASK_WORDS})[-_. ](?P<behind>.+)|(?P<before>.+?)[-_. ](?:{_MASK_WORDS})"
)


def without_masks(images: Sequence[Path]) -> list[Path]:
    """Those that aren't masks of one beside them by their names: not `1_mask.png` beside `1.jpg`.

    A JPEG is never taken for a mask.
    """
    beside = {(image.parent, folded(image.stem)) for image in images}

    def is_mask(image: Path) -> bool:
        of = _MASK_NAME.fullmatch(folded(image.stem)) if _lossless(image) else None
        return of is not None and (image.parent, of["behind"] or of["before"]) in beside

    return [image for image in images if not is_mask(image)]


def _lossless(file: Path) -> bool:
    return is_image(file) and file.suffix.lower() not in FORMATS["jpeg"].SUFFIXES


def plain(path: Path) -> Path:
    """Absolute, and without `..`."""
    return Path(os.path.abspath(path))  # noqa: PTH100, `..` goes and links stay


def folded(name: str) -> str:
    """A name in small letters and one form of Unicode."""
    return unicodedata.normalize("NFC", name).casefold()


def _found(folder: Path) -> Path:
    """A folder, or the one whose name differs in capitals or in the form of Unicode only."""
    if is_folder(folder) or folder == folder.parent:
        return folder
    around = _found(folder.parent)
    beside = entries_of(around) if is_folder(around) else []
    same = (place for place in beside if folded(place.name) == folded(folder.name))
    return next(same, folder)


def strays(masks: Sequence[Path]) -> str:
    """That masks belong to no image; empty without any."""
    if not masks:
        return ""
    these = "this mask" if len(masks) == 1 else f"these {len(masks)} masks"
    return (
        f"no image has the name of {these}: {some([str(mask) for mask in masks])}; name masks like "
        "their images, 1_mask.png or 1.png for 1.jpg, or remove them"
    )


def entries_of(folder: Path) -> list[Path]:
    """The files and folders in a folder.

    Raises:
        DataError: it can't be listed.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: can't list this folder ({error.strerror})") from None
