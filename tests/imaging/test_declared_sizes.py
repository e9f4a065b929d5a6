"""Images from memory are refused by the size that they say they have, before anything is copied."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch
from kit import most_bytes
from picture_files import png
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.arrays import ArrayImage, AxisOrder, is_one, source_of, sources
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, by_shape, load
from anomaly.imaging.read import DEFAULT, Image

_SIDE = 30_000  # squared, 900 million pixels


def _strided(dtype: Any, *shape: int) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def test_huge_arrays_are_refused_by_their_shape() -> None:
    images: list[tuple[Any, AxisOrder | None]] = [
        (_strided(np.uint8, _SIDE, _SIDE, 3), None),
        (_strided(np.uint8, _SIDE, _SIDE), None),
        (_strided(np.uint16, _SIDE, _SIDE, 1), None),
        (_strided(np.float64, _SIDE, _SIDE, 3), None),
        (_strided(">u2", _SIDE, _SIDE, 3), None),
        (_strided(np.float32, 3, _SIDE, _SIDE), "CHW"),
        (_strided(np.uint8, 2 * _SIDE, _SIDE, 3)[::2], None),
        (torch.zeros(()).expand(3, _SIDE, _SIDE), "CHW"),
        (torch.zeros((), dtype=torch.bfloat16).expand(_SIDE, _SIDE), "HW"),
        (torch.empty(3, _SIDE, _SIDE, device="meta"), "CHW"),
        (Image(_strided(np.uint8, _SIDE, _SIDE, 3), 255.0, "rgb8", ""), None),
    ]
    for image, layout in images:
        _refused(ArrayImage(image, full_scale=1.0, layout=layout), "pixels")


def test_pil_images_are_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pil, "MAX_IMAGE_PIXELS", None)
    opened = Pil.open(io.BytesIO(png(_SIDE, _SIDE, 8, 2, [zlib.compress(bytes(1000))])))
    _refused(opened, "900.0 million pixels, more than")
    for mode in ("CMYK", "YCbCr", "LAB", "HSV", "I"):
        _refused(Pil.new(mode, (2000, 1000)), f"mode {mode}; convert it")


def test_pil_readers_that_fail_in_ways_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = struct.error("unpack requires a buffer of 8 bytes")
    monkeypatch.setattr(Pil.Image, "tobytes", Mock(side_effect=error))
    with pytest.raises(ImageError, match=r"PIL can't read it .unpack requires"):
        source_of(Pil.new("L", (8, 8)), DEFAULT)


def test_memory_that_opencv_does_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    error = cv2.error("Insufficient memory")
    error.code = cv2.Error.StsNoMem
    monkeypatch.setattr(cv2, "cvtColor", Mock(side_effect=error))
    with pytest.raises(ImageError, match="isn't enough memory"):
        source_of(np.zeros((8, 8), np.uint8), DEFAULT)


def _refused(image: Any, why: str) -> None:
    with most_bytes(1e6), pytest.raises(ImageError, match=why) as raised:
        source_of(image, DEFAULT)
    assert raised.value.status == "unsupported"


def test_what_is_no_image_is_refused_unconverted() -> None:
    for image in (
        *(_strided(kind, 20_000, 10_000) for kind in (np.complex128, object, np.float64)),
        _strided(np.int64, 20_000, 10_000, 3),
        _strided(np.uint8, 20_000, 10_000, 4),
        _strided(np.uint8, 100, 100, 100, 100),
        memoryview(bytes(1000)),
        b"bytes",
        [[1, 2], [3, 4]],
        np.zeros((0, 4, 3), np.uint8),
        Pil.new("RGB", (0, 4)),
        ArrayImage(torch.empty(8, 8, device="meta"), full_scale=1.0, layout="HW"),
        ArrayImage(torch.zeros(8, 8).to_sparse(), full_scale=1.0, layout="HW"),
        ArrayImage(torch.zeros(8, 8, dtype=torch.cfloat).conj(), full_scale=1.0, layout="HW"),
    ):
        _refused(image, "image|floats, so the value of white|tensor|no pixels")


def test_float8_tensors_are_taken() -> None:
    tensor = torch.full((8, 8), 0.5).to(torch.float8_e4m3fn)
    taken = source_of(ArrayImage(tensor, full_scale=1.0, layout="HW"), DEFAULT)
    assert isinstance(taken, Image)
    assert (taken.pixels == 0.5).all()


def test_other_libraries_arrays_are_one_image() -> None:
    class Foreign:
        def __array__(self, *_: object) -> np.ndarray:
            raise AssertionError("copied")

        def __iter__(self) -> Iterator[int]:
            return iter(range(10**9))

    assert is_one(Foreign())
    assert is_one(memoryview(b"abc"))
    ((_, refused),) = sources([Foreign()], DEFAULT)  # type: ignore[list-item]
    assert isinstance(refused, UnusableImage)
    assert "Foreign can't be used as an image" in refused.reason


def test_batches_of_large_arrays_are_small() -> None:
    """A camera's pictures of 60 MB wait for one another only up to a bound."""
    loading = Preprocessing(Sizing(None, None, 32, 8), DEFAULT)
    pixels = _strided(np.uint8, 4000, 5000, 3)

    def arrivals() -> Iterator[NetworkInput | UnusableImage]:
        small = Image(np.zeros((40, 50, 3), np.uint8), 255.0, "rgb8", "")
        item = load(0, small, loading)
        assert isinstance(item, NetworkInput)
        for index in itertools.count():
            image = Image(pixels, 255.0, "rgb8", "")
            yield NetworkInput(index, "", item.view, item.pixels, image=image)

    first = next(by_shape(arrivals(), 32))
    assert isinstance(first, list)
    assert len(first) == 5  # 300 MB; the fifth goes beyond 256
