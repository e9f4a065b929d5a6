"""What a file says about its picture before a pixel is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

from anomaly.errors import ImageError

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
