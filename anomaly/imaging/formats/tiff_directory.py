"""TIFF directories: the tables of tags that describe each picture of a TIFF (or EXIF) file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ImageError
from anomaly.imaging.formats.base import damaged, unsupported

# TIFF field type -> numpy code: BYTE, SHORT, LONG, IFD, LONG8, IFD8
_INTEGERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}
_MOST_TAGS = 4096  # of one directory; a few dozen are usual
_MOST_DIRECTORIES = 100
_MOST_ALIKE = 64  # values looked at where all have to be equal: there is one for each sample


class Tag(IntEnum):
    """Tags of the TIFF 6.0 specification, by what they tell."""

    NEW_SUBFILE_TYPE = 254
    WIDTH = 256
    HEIGHT = 257
    BITS = 258
    COMPRESSION = 259
    PHOTOMETRIC = 262
    FILL_ORDER = 266
    STRIP_OFFSETS = 273
    ORIENTATION = 274
    SAMPLES = 277
    ROWS_PER_STRIP = 278
    STRIP_BYTES = 279
    PLANAR = 284
    PREDICTOR = 317
    COLOUR_MAP = 320
    TILE_WIDTH = 322
    TILE_HEIGHT = 323
    TILE_OFFSETS = 324
    TILE_BYTES = 325
    EXTRA_SAMPLES = 338
    SAMPLE_FORMAT = 339


@dataclass(frozen=True)
class Directory:
    """The tags of one picture. Values are read where they lie, when they are asked for.

    Attributes:
        data: the whole file.
        entries: tag -> numpy type, how many values, and where in the file they start.
    """

    data: bytes
    entries: dict[int, tuple[str, int, int]]

    def values(self, tag: int) -> NDArray[Any]:
        """All values of a tag of integers, as a view of the file; empty without the tag.

        Raises:
            ImageError: `unreadable` where they lie beyond the end of the file.
        """
        dtype, count, start = self.entries.get(tag, ("u1", 0, 0))
        if not count:
            return np.empty(0, dtype)
        if start + count * np.dtype(dtype).itemsize > len(self.data):
            raise damaged(f"it is cut short: the values of its TIFF tag {tag} are missing")
        return np.frombuffer(self.data, dtype, count, start)

    def first(self, tag: int, default: int | None = None) -> int:
        """First value of a tag; without a default, raises where the tag is missing."""
        values = self.values(tag)
        if len(values):
            return int(values[0])
        if default is None:
            raise damaged(f"its TIFF tag {tag} is missing")
        return default

    def same(self, tag: int, default: int) -> int:
        """The value of a tag that has one for each sample, all of which have to be equal."""
        values = set(self.values(tag)[:_MOST_ALIKE].tolist()) or {default}
        if len(values) > 1:
            raise unsupported("its samples aren't all of one kind and depth")
        return int(values.pop())


def byte_order(data: bytes) -> Literal["<", ">"]:
    """Tell the byte order, "<" or ">", of a TIFF."""
    return ">" if data[:2] == b"MM" else "<"


def read_directories(data: bytes) -> Iterator[Directory]:
    """Read the directories of a TIFF in file order, each when it is asked for.

    Raises:
        ImageError: `unreadable` when there is none, the chain is cut or loops, or this isn't TIFF;
            `unsupported` when there are more than anybody's picture has.
    """
    order = byte_order(data)
    try:
        (magic,) = struct.unpack_from(order + "H", data, 2)
        if data[:2] not in (b"II", b"MM") or magic not in (42, 43):
            raise damaged("it isn't TIFF data")
        big = magic == 43
        (at,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
        if not at:
            raise damaged("it holds no picture")
        seen: set[int] = set()
        while at:
            if at in seen:
                raise damaged("its directories form a loop")
            if len(seen) == _MOST_DIRECTORIES:
                raise unsupported(f"it is a TIFF of over {_MOST_DIRECTORIES} pages")
            seen.add(at)
            directory, at = _read_directory(data, at, order, big)
            yield directory
    except (struct.error, OverflowError):  # beyond what a position can be at all
        raise damaged("it is cut short: a TIFF directory lies beyond its end") from None


def _read_directory(data: bytes, at: int, order: str, big: bool) -> tuple[Directory, int]:
    """Read one directory, and where the next one is (0 after the last)."""
    number, entry, pointer = ("Q", "HHQ", "Q") if big else ("H", "HHI", "I")
    room = struct.calcsize(order + pointer)
    (count,) = struct.unpack_from(order + number, data, at)
    at += struct.calcsize(order + number)
    size = struct.calcsize(order + entry) + room
    if at + count * size > len(data):
        raise damaged("it is cut short inside a TIFF directory")
    if count > _MOST_TAGS:
        raise damaged(f"a TIFF directory of {count} tags isn't a picture's")
    entries: dict[int, tuple[str, int, int]] = {}
    for _ in range(count):
        tag, kind, length = struct.unpack_from(order + entry, data, at)
        if kind in _INTEGERS and tag not in entries:
            dtype = order + _INTEGERS[kind]
            start = at + size - room
            if length * np.dtype(dtype).itemsize > room:  # too long to lie in the entry itself
                (start,) = struct.unpack_from(order + pointer, data, start)
            entries[tag] = (dtype, length, start)
        at += size
    (following,) = struct.unpack_from(order + pointer, data, at)
    return Directory(data, entries), int(following)


def exif_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8; 1 where none is given or the EXIF data is damaged."""
    exif = exif.removeprefix(b"Exif\0\0")
    if not exif:
        return 1
    try:
        return valid_orientation(next(read_directories(exif)))
    except ImageError:
        return 1  # metadata only: the picture itself may well be whole


def valid_orientation(directory: Directory) -> int:
    """Take a directory's orientation where it is a legal one, else 1."""
    value = directory.first(Tag.ORIENTATION, 1)
    return value if 1 <= value <= 8 else 1
