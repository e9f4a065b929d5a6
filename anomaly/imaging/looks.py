"""What tells one picture from another, and what shows that two are all but one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.read import Image

_SIDE = 16
_DENSE = 256  # pixels of the shorter side that are looked at: more change nothing


@dataclass(frozen=True, eq=False)
class Look:
    """What a picture looks like.

    Attributes:
        picture: sha256 of its pixels in hex, equal for equal pictures in any lossless files.
        thumbnail: (256,) grey levels, of 255, of 16×16 areas, less their mean. Compression and
            noise hardly change them.
        brightest: the highest value of a file of 16 bits, of full scale; None for others.
    """

    picture: str
    thumbnail: NDArray[np.float16]
    brightest: float | None = None


def look_of(image: Image) -> Look:
    """What an image looks like."""
    step = max(1, min(image.size) // _DENSE)
    some = np.asarray(image.pixels[::step, ::step], np.float32)
    grey = cv2.resize(some, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA).mean(axis=2)
    grey = (grey - grey.mean()) * np.float32(255 / image.full_scale)
    deep = image.mode.endswith("16")
    brightest = float(image.pixels.max()) / image.full_scale if deep else None
    return Look(picture_of(image), grey.ravel().astype(np.float16), brightest)


def picture_of(image: Image) -> str:
    """sha256 of an image's pixels in hex; of 8 bits where a file of 16 holds no more."""
    pixels, full_scale = image.pixels, image.full_scale
    if pixels.dtype == np.uint16 and full_scale == 65535:
        narrow = (pixels >> 8).astype(np.uint8)
        if (narrow * np.uint16(257) == pixels).all():
            pixels, full_scale = narrow, 255.0
    digest = hashlib.sha256(f"{pixels.shape}{pixels.dtype}{full_scale}".encode())
    digest.update(pixels.data)
    return digest.hexdigest()
