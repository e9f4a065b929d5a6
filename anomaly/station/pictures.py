"""What a camera gives, and how."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError

PICTURE_SECONDS = 2.0  # that a picture may take


class CameraError(AnomalyError):
    """A camera gives no picture."""


Picture = tuple[bytes, str]  # an image file, and its name, which is empty for a camera's


class Camera:
    """Takes pictures; used by one thread."""

    def grab(self) -> Picture:
        """The next picture, begun after this was called; a CameraError where none comes."""
        raise NotImplementedError

    def check(self) -> None:
        """A CameraError where it is gone."""

    def close(self) -> None:
        """Let others use it."""


def as_file(pixels: NDArray[Any]) -> bytes:
    """Pixels (H, W) or (H, W, 3) BGR as an image file, uncompressed: that takes a millisecond."""
    plain = [] if pixels.dtype == np.uint8 else [cv2.IMWRITE_TIFF_COMPRESSION, 1]
    return cv2.imencode(".tiff" if plain else ".bmp", pixels, plain)[1].tobytes()
