"""What the picture formats share: headers, errors, colours, EXIF, and the compiled decoders.

Alpha is composited over black. Dropping it would show the colours hidden under transparent
pixels, which encoders are free to change, so one picture saved twice would give two results.
Embedded ICC profiles and gamma are not applied: a camera's values are taken as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import cv2
import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from anomaly.errors import ImageError

_ROWS = 256  # rows multiplied at a time, which bounds the wide temporaries

Pixels: TypeAlias = NDArray[Any]
"""uint8, uint16 or float32; which one depends on the file."""


@dataclass(frozen=True)
class ImageHeader:
    """What a file says about its picture.

    Attributes:
        format: "png", "jpeg", "bmp", "tiff" or "webp".
        mode: colour kind and bits a sample as stored: "grey8", "rgb16", "palette4", "cmyk8",
            "rgba8", "greyfloat32".
        size: (H0, W0) of the picture once its orientation is applied.
        full_scale: the pixel value that means 1.0.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
    """

    format: str
    mode: str
    size: tuple[int, int]
    full_scale: float
    orientation: int = 1


def upright(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Turn a stored size (H, W) into the size after orientation: 5 to 8 swap the sides."""
    return (size[1], size[0]) if orientation >= 5 else size


def damaged(what: str) -> ImageError:
    """Error for a file whose content breaks its format's own rules."""
    return ImageError(what, "unreadable")


def unsupported(what: str) -> ImageError:
    """Error for a healthy file of a kind that isn't accepted."""
    return ImageError(what, "unsupported")


def decode_by_opencv(file: bytes, size: tuple[int, int]) -> Pixels:
    """Decode a file by OpenCV: (H, W) or (H, W, C) at its own depth, blue first.

    Raises:
        ImageError: `unreadable` where OpenCV finds it damaged, or of another size (H, W).
    """
    # OpenCV would write to standard error what the caller says in its own words.
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from None
        pixels = None
    finally:
        cv2.utils.logging.setLogLevel(level)
    if pixels is None or pixels.shape[:2] != size:
        raise damaged("its pixels can't be decoded")
    return pixels


def inflate(stream: bytes | memoryview, most: int) -> bytes:
    """Inflate a zlib stream, which has to end, with its checksum, within `most` bytes.

    Raises:
        ImageError: `unreadable` where the stream breaks its rules, is cut short, or holds more.
    """
    inflater = isal_zlib.decompressobj()
    try:
        content = inflater.decompress(stream, most + 1)
    except isal_zlib.error:  # type: ignore[misc]  # the stub has an instance, not a class
        raise damaged("its pixel data is damaged") from None
    if len(content) > most:
        raise damaged(f"its pixel data is longer than the {most} bytes that it should have")
    if not inflater.eof:
        raise damaged(f"its pixel data ends after {len(content)} of {most} bytes")
    return content


def grey_to_rgb(grey: Pixels) -> Pixels:
    """Repeat grey (H, W) or (H, W, 1) into (H, W, 3)."""
    return np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB))


def to_rgb(pixels: Pixels) -> Pixels:
    """Turn what OpenCV decodes into RGB (H, W, 3), colours in place and alpha over black.

    Args:
        pixels: (H, W), or (H, W, C) with blue first and straight alpha last.
    """
    if pixels.ndim == 2:
        return grey_to_rgb(pixels)
    if pixels.shape[2] == 3:
        return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels))
    rgba = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA, dst=pixels))
    return over_black(rgba[..., :3], rgba[..., 3])


def over_black(colours: Pixels, alpha: Pixels) -> Pixels:
    """Composite integer colours (H, W, C) over black by straight alpha (H, W), rounded to nearest.

    Full opacity is the highest value of their type.
    """
    full = int(np.iinfo(alpha.dtype).max)
    if alpha.min() == full:
        return np.ascontiguousarray(colours)
    product = np.empty(colours.shape, colours.dtype)
    for start in range(0, len(colours), _ROWS):
        rows = slice(start, start + _ROWS)
        wide = colours[rows].astype(np.uint32) * alpha[rows, ..., None]
        product[rows] = (wide + full // 2) // full
    return product


# TIFF field type -> numpy code: BYTE, SHORT, LONG, IFD
_INTEGERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4"}
_ORIENTATION = 274


@dataclass(frozen=True)
class Directory:
    """The tags of one picture of a TIFF, or of EXIF data, which is laid out as TIFF.

    Values are read where they lie, when they are asked for.

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
        """The common value of a tag with one value for each sample; all must be equal."""
        values = self.values(tag)
        if (values != values[:1]).any():
            raise unsupported("its samples aren't all of one kind and depth")
        return self.first(tag, default)

    @property
    def orientation(self) -> int:
        """EXIF orientation, 1 to 8; 1 where none is given, or no legal one."""
        value = self.first(_ORIENTATION, 1)
        return value if 1 <= value <= 8 else 1


def read_directories(data: bytes) -> Iterator[Directory]:
    """Read the directories of a TIFF in file order, each when it is asked for; they may be a loop.

    Raises:
        ImageError: `unreadable` when there is none, the chain is cut, or this isn't TIFF.
    """
    order = ">" if data[:2] == b"MM" else "<"
    try:
        magic, at = struct.unpack_from(order + "HI", data, 2)
        if data[:2] not in (b"II", b"MM") or magic != 42:
            raise damaged("it isn't TIFF data")
        while at:
            directory, at = _read_directory(data, at, order)
            yield directory
    except struct.error:
        raise damaged("it is cut short: a TIFF directory lies beyond its end") from None


def _read_directory(data: bytes, at: int, order: str) -> tuple[Directory, int]:
    """Read one directory, and where the next one is (0 after the last)."""
    (count,) = struct.unpack_from(order + "H", data, at)
    entries: dict[int, tuple[str, int, int]] = {}
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, length, start = struct.unpack_from(order + "HHII", data, entry)
        if kind in _INTEGERS and tag not in entries:
            dtype = order + _INTEGERS[kind]
            if length * np.dtype(dtype).itemsize <= 4:  # short enough to lie in the entry itself
                start = entry + 8
            entries[tag] = (dtype, length, start)
    (following,) = struct.unpack_from(order + "I", data, at + 2 + 12 * count)
    return Directory(data, entries), int(following)


def exif_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8; 1 where none is given or the EXIF data is damaged."""
    try:
        return next(read_directories(exif.removeprefix(b"Exif\0\0"))).orientation if exif else 1
    except (ImageError, StopIteration):
        return 1  # metadata only: the picture itself may well be whole
