"""What the picture formats share: headers, errors, colours, and the compiled decoders.

Alpha is composited over black. Dropping it would show the colours hidden under transparent
pixels, which encoders are free to change, so one picture saved twice would give two results.
Embedded ICC profiles and gamma are not applied: a camera's values are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
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


class _Silence:
    """OpenCV's log, silent for as long as any thread decodes: its level is the whole process's."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads = 0
        self._level = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                silent = cv2.utils.logging.LOG_LEVEL_SILENT
                self._level = cv2.utils.logging.setLogLevel(silent)
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                cv2.utils.logging.setLogLevel(self._level)


_silence = _Silence()


def decode_by_opencv(file: bytes) -> Pixels | None:
    """Decode a file by OpenCV: (H, W) or (H, W, C) at its own depth, blue first.

    None where OpenCV finds it damaged.
    """
    try:
        with _silence:
            return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from None
        return None


def longest_stored(expected: int) -> int:
    """Most bytes that any sane encoder makes of `expected` bytes; what follows isn't read.

    LZW at its worst takes 3/2, and deflate adds 5 bytes a block and PackBits 1 byte in 128.
    """
    return 2 * expected + 4096


def inflate(stream: bytes | memoryview, expected: int) -> bytes:
    """Inflate a zlib stream, which has to end, with its checksum, within `expected` bytes.

    Raises:
        ImageError: `unreadable` where the stream breaks its rules, is cut short, or holds more.
    """
    inflater = isal_zlib.decompressobj()
    try:
        content = inflater.decompress(stream[: longest_stored(expected)], expected + 1)
    except isal_zlib.error:  # type: ignore[misc]  # the stub has an instance, not a class
        raise damaged("its pixel data is damaged") from None
    if len(content) > expected:
        raise damaged(f"its pixel data is longer than the {expected} bytes that it should have")
    if not inflater.eof:
        raise damaged(f"its pixel data ends after {len(content)} of {expected} bytes")
    return content


def look_up(indices: Pixels, colours: Pixels) -> Pixels:
    """Replace palette indices (H, W) by colours (N, 3), both uint8; N is at most 256."""
    if indices.max() >= len(colours):
        raise damaged(f"it uses colour {indices.max()} of a palette of {len(colours)}")
    table = np.zeros((256, 1, 3), np.uint8)
    table[: len(colours), 0] = colours
    return np.asarray(cv2.LUT(grey_to_rgb(indices), table))


def bgr_to_rgb(bgr: Pixels) -> Pixels:
    """Swap red and blue in place, which for (H, W, 3) needs no second picture."""
    return np.asarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB, dst=bgr))


def grey_to_rgb(grey: Pixels) -> Pixels:
    """Repeat grey (H, W) or (H, W, 1) into (H, W, 3)."""
    return np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB))


def over_black(colours: Pixels, alpha: Pixels, full_scale: float) -> Pixels:
    """Composite colours (H, W, C) over black by straight alpha (H, W)."""
    if alpha.min() == full_scale:
        return np.ascontiguousarray(colours)
    return _scaled(colours, alpha[..., None], full_scale)


def cmyk_to_rgb(ink: Pixels, full_scale: float) -> Pixels:
    """Turn ink (H, W, 4), where 0 is no ink, into light: R = (1 - C)(1 - K), and so on."""
    top = ink.dtype.type(full_scale)
    return _scaled(top - ink[..., :3], top - ink[..., 3:], full_scale)


def _scaled(values: Pixels, weights: Pixels, full_scale: float) -> Pixels:
    """Multiply values by weights / full_scale, rounded to nearest for integers."""
    product = np.empty(values.shape, values.dtype)
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        if values.dtype.kind == "f":
            product[rows] = values[rows] * weights[rows]
        else:
            full = int(full_scale)
            wide = values[rows].astype(np.uint32) * weights[rows]
            product[rows] = (wide + full // 2) // full
    return product
