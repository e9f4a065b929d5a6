"""Anomaly maps in files: what other programs read is what was written."""

import io

import cv2
import numpy as np
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

from anomaly.maps.encoding import encode_float32, encode_uint16


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
