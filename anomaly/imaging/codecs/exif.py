"""EXIF, of which only the orientation matters here. EXIF is a small TIFF without a picture."""

from __future__ import annotations

import cv2
import numpy as np

from anomaly.errors import ImageError
from anomaly.imaging.codecs.header import Pixels
from anomaly.imaging.codecs.tiff_directory import ORIENTATION, Directory, read_directories


def orientation(exif: bytes) -> int:
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
    value = directory.first(ORIENTATION, 1)
    return value if 1 <= value <= 8 else 1


def turned_upright(pixels: Pixels, orientation: int) -> Pixels:
    """Turn stored pixels (H, W, 3) so that the picture's top row is the first row."""
    if orientation in (5, 6, 7, 8):
        pixels = np.asarray(cv2.transpose(pixels))
    # After the transposition above, what is left is a mirroring of rows, columns or both.
    flip = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}.get(orientation)
    return pixels if flip is None else np.asarray(cv2.flip(pixels, flip))
