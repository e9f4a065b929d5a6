"""Which file, or folder of files, is the mask of which image, by its name."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from anomaly.errors import DataError, some
from anomaly.files.outputs import left_by_system
from anomaly.imaging.formats import JPEG
from anomaly.imaging.listing import is_folder, is_image, list_images


class Masks:
    """Finds the masks of images in folders: each folder is read once."""

    def __init__(self) -> None:
        self._listed: dict[Path, tuple[_Named, _Named]] = {}
        self._owners: dict[Path, Path] = {}  # each mask is one image's

    def of(self, image: Path, folders: Iterable[Path] = ()) -> Path | None:
        """`1_mask.png`, another of the usual names, `1.png` or a folder `1`, for `1.jpg`.

        Suffixes are any that can be read; capitals and forms of Unicode don't matter.

        Args:
            image: its file.
            folders: where its mask may be, the likeliest first; then the image's own, for masks
                that aren't called as the image.

        Raises:
            DataError: another image has this mask.
        """
        mask = next(filter(None, (self._in(image, f) for f in (*folders, image.parent))), None)
        if mask and (owner := self._owners.setdefault(mask, image)) != image:
            raise DataError(
                f"{mask} would be the mask of both {owner} and {image}; give each image its own "
                "mask, with one subfolder of masks for each folder of images"
            )
        return mask

    def _in(self, image: Path, folder: Path) -> Path | None:
        same, named = self._names_in(folder)
        stem = folded(image.stem)
        if folder == image.parent:
            return next(filter(_lossless, named.get(stem, ())), None)
        # `1_mask.png` is the mask of an image `1_mask.jpg` where there is one.
        beside, _ = self._names_in(image.parent)
        found = [mask for mask in named.get(stem, ()) if folded(mask.stem) not in beside]
        return next(iter((*found, *same.get(stem, ()))), None)

    def left_in(self, folder: Path) -> tuple[Path, ...]:
        """The files in a folder of masks, and below it, that are no image's."""
        files = list_images(folder) if is_folder(folder) else []
        return tuple(f for f in files if not {f, *f.parents} & self._owners.keys())

    def _names_in(self, folder: Path) -> tuple[_Named, _Named]:
        """Pictures and folders by their own names, and by those of the images they are masks of."""
        if folder not in self._listed:
            same, named = self._listed[folder] = {}, {}
            place = _found(folder)
            for entry in sorted(entries_of(place)) if is_folder(place) else ():
                if left_by_system(entry.name) or not (is_image(entry) or entry.is_dir()):
                    continue
                stem = folded(entry.stem if is_image(entry) else entry.name)
                same.setdefault(stem, []).append(entry)
                if of := _MASK_NAME.fullmatch(stem):
                    named.setdefault(of["behind"] or of["before"], []).append(entry)
        return self._listed[folder]


_Named = dict[str, list[Path]]  # by a name without suffix, folded
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
    return is_image(file) and file.suffix.lower() not in JPEG.suffixes


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
