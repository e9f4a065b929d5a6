"""TIFF directories: the tables of tags that describe each picture of a TIFF (or EXIF) file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

from anomaly.formats.header import damaged

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
PICTURES_LISTED = 0xB001  # of a multi-picture JPEG

_WANTED = frozenset(
    value for name, value in globals().items() if name.isupper() and isinstance(value, int)
)
# TIFF field type -> numpy code: BYTE, SHORT, LONG, IFD, LONG8, IFD8
_INTEGERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}

Directory: TypeAlias = dict[int, tuple[int, ...]]
"""Tag -> its values; only tags of integers that are of use here."""


def byte_order(data: bytes) -> Literal["<", ">"]:
    """Tell the byte order, "<" or ">", of a TIFF."""
    return ">" if data[:2] == b"MM" else "<"


def read_directories(data: bytes) -> Iterator[Directory]:
    """Read the directories of a TIFF in file order, each when it is asked for.

    Raises:
        ImageError: `unreadable` when there is none, the chain is cut or loops, or this isn't TIFF.
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
    directory: Directory = {}
    for _ in range(count):
        tag, kind, length = struct.unpack_from(order + entry, data, at)
        if tag in _WANTED and kind in _INTEGERS:
            dtype = np.dtype(order + _INTEGERS[kind])
            start = at + size - room
            if length * dtype.itemsize > room:  # too long to lie in the entry itself
                (start,) = struct.unpack_from(order + pointer, data, start)
            if start + length * dtype.itemsize > len(data):
                raise damaged(f"it is cut short: the values of its TIFF tag {tag} are missing")
            directory[tag] = tuple(np.frombuffer(data, dtype, length, start).tolist())
        at += size
    (following,) = struct.unpack_from(order + pointer, data, at)
    return directory, int(following)
