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

from anomaly.maps.heatmap import SHOWN, Thumbnail, Thumbnails, encode_float32, thumbnail


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
