"""Predicted masks and their regions agree with SciPy's labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from anomaly.maps import regions as marked
from anomaly.maps.regions import MarkedRegion, marked_regions, predicted_mask

_EIGHT = np.ones((3, 3))


def _expected(scores: np.ndarray, threshold: float) -> set[MarkedRegion]:
    above = np.nan_to_num(scores, nan=-np.inf) > threshold
    labels, count = ndimage.label(above, _EIGHT)
    found = set()
    for number, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        inside = labels == number
        y, x = ndimage.maximum_position(scores, labels, number)
        found.add(
            MarkedRegion(
                columns.start,
                rows.start,
                columns.stop - columns.start,
                rows.stop - rows.start,
                int(inside.sum()),
                float(scores[inside].max()),
                int(x),
                int(y),
            )
        )
    assert len(found) == count
    return found


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.floats(0, 1),
    st.integers(1, 500),
)
def test_regions_are_scipys(seed: int, size: tuple[int, int], level: float, strip: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.random(size).astype(np.float32)
    scores[rng.random(size) < 0.1] = np.nan
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(marked, "_STRIP_PIXELS", strip)
        mask = predicted_mask(lambda rows: scores[rows], size, level)
        found = marked_regions(mask, lambda rows: scores[rows])
    np.testing.assert_array_equal(mask, np.where(scores > level, 255, 0))
    assert set(found) == _expected(scores, level)
    assert [r.peak_score for r in found] == sorted((r.peak_score for r in found), reverse=True)


def test_nothing_marked() -> None:
    assert marked_regions(np.zeros((5, 7), np.uint8), lambda rows: np.zeros((5, 7))[rows]) == ()
