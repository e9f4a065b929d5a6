"""What a camera does: takes pictures, or raises CameraError."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError

PICTURE_SECONDS = 2.0  # longest wait for a picture


class CameraError(AnomalyError):
    """A camera gives no picture."""


Picture = tuple[bytes, str]  # an image file, and its name, which is empty for a camera's


class Camera:
    """Takes pictures; used by one thread."""

    def grab(self) -> Picture:
        """Take a picture that begins after this call. Raises CameraError if none comes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises CameraError if the camera is gone."""

    def close(self) -> None:
        """Close the camera for other programs."""


def as_file(pixels: NDArray[Any]) -> bytes:
    """Pixels (H, W) or (H, W, 3) BGR as an image file, uncompressed: that takes a millisecond."""
    plain = [] if pixels.dtype == np.uint8 else [cv2.IMWRITE_TIFF_COMPRESSION, 1]
    return cv2.imencode(".tiff" if plain else ".bmp", pixels, plain)[1].tobytes()
