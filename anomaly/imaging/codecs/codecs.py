"""The compiled decoders behind the formats, kept quiet: callers raise what they find wrong."""

from __future__ import annotations

from threading import Lock

import cv2
import numpy as np
from isal import isal_zlib

from anomaly.imaging.codecs.header import Pixels, damaged


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
