"""The compiled decoders behind the formats, kept quiet: callers raise what they find wrong."""

from __future__ import annotations

import cv2
import numpy as np
from zlib_ng import zlib_ng

from anomaly.formats.header import Pixels, damaged


def decode_by_opencv(file: bytes) -> Pixels | None:
    """Decode a file by OpenCV, at its own depth, BGR; None where OpenCV finds it damaged."""
    level = cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None
    finally:
        cv2.utils.logging.setLogLevel(level)


def inflate(stream: bytes | memoryview, expected: int) -> tuple[bytes, bool]:
    """Inflate a zlib stream, but not beyond `expected` + 1 bytes.

    Returns:
        What came out, and whether the stream came to its end (with its checksum) there.

    Raises:
        ImageError: `unreadable` where the stream breaks its rules.
    """
    inflater = zlib_ng.decompressobj()
    try:
        content = inflater.decompress(stream, expected + 1)
    except zlib_ng.error as error:  # type: ignore[misc]  # the stub has an instance, not a class
        raise damaged(f"its pixel data is damaged ({error})") from None
    return content, inflater.eof
