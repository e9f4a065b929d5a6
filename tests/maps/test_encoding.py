"""Anomaly maps in files, and small pictures: other programs read what was written."""

import io
import random

import cv2
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

from anomaly.maps.heatmap import (
    SHOWN,
    Thumbnail,
    Thumbnails,
    encode_float32,
    encode_uint16,
    thumbnail,
)


def _scores(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = cv2.GaussianBlur(rng.random(size).astype(np.float32) * 9, (0, 0), 2).reshape(size)
    scores[rng.random(size) < 0.05] = np.nan
    return scores


def _by_opencv(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


@settings(max_examples=30)
@given(st.tuples(st.integers(1, 60), st.integers(1, 60)))
def test_floats_come_back_bit_by_bit(size: tuple[int, int]) -> None:
    scores = _scores(size)
    data = encode_float32(scores)
    np.testing.assert_array_equal(_by_opencv(data).view(np.uint32), scores.view(np.uint32))
    with Pil.open(io.BytesIO(data)) as picture:
        np.testing.assert_array_equal(np.asarray(picture), scores)
    # tifffile reads for scikit-image, too; here without its annex imagecodecs.
    np.testing.assert_array_equal(tifffile.imread(io.BytesIO(data)), scores)


def test_16_bits_of_a_threshold_of_0() -> None:
    scores = np.array([[0, 1e-3, np.nan]], np.float32)
    with np.errstate(all="raise"):
        data = encode_uint16(lambda rows: scores[rows], (1, 3), threshold=0.0)
    assert _by_opencv(data).tolist() == [[1, 65535, 0]]
    with Pil.open(io.BytesIO(data)) as picture:
        assert float(picture.text["scale"]) > 0


def test_16_bits_with_a_scale() -> None:
    scores = _scores((40, 50))
    scores[0, :3] = 0, 8, 9
    data = encode_uint16(lambda rows: scores[rows], (40, 50), threshold=1.0)
    levels = _by_opencv(data)
    assert levels.dtype == np.uint16
    with Pil.open(io.BytesIO(data)) as picture:
        scale = float(picture.text["scale"])
    assert scale == 1.0 / 8192
    hidden = np.isnan(scores)
    assert (levels[hidden] == 0).all()
    assert list(levels[0, :3]) == [1, 65535, 65535] or hidden[0, :3].any()
    fits = ~hidden & (scores > scale) & (scores < 65535 * scale)
    np.testing.assert_allclose(levels[fits] * scale, scores[fits], atol=scale / 2 * 1.01)
    assert ((levels > 8192) == (scores > 1.0 + scale / 2))[fits].all()


@pytest.mark.parametrize("size", [(900, 900), (7, 3000), (1, 1), (1601, 1599)])
def test_a_thumbnail_looks_like_its_picture(size: tuple[int, int]) -> None:
    picture = np.zeros((*size, 3), np.uint8)
    picture[:, : size[1] // 2] = (200, 40, 90)
    small = thumbnail(picture, 120_000)
    assert small.source == size[::-1]
    assert small.size[0] * small.size[1] <= 120_000
    seen = cv2.imdecode(np.frombuffer(small.photo, np.uint8), cv2.IMREAD_COLOR)
    assert seen is not None
    assert seen.shape[1::-1] == small.size
    wanted = cv2.resize(picture, small.size, interpolation=cv2.INTER_AREA)
    assert np.abs(seen[..., ::-1].astype(int) - wanted).mean() < 6


def test_those_that_matter_most_are_kept() -> None:
    rng = random.Random(0)
    ranks = [(rng.random() < 0.01, rng.random()) for _ in range(20 * SHOWN)]
    kept = Thumbnails()
    for number, rank in enumerate(ranks):
        kept.keep(str(number), *rank, Thumbnail(b"", (1, 1), (1, 1)))
    most = sorted(range(len(ranks)), key=lambda i: ranks[i])[-SHOWN:]
    assert {n for n in range(len(ranks)) if kept.get(str(n))} == set(most)
