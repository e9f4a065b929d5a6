from __future__ import annotations

import numpy as np

from anomaly.explain.overlays import glowing, signed


def test_what_is_high_glows_and_what_is_low_stays_grey() -> None:
    picture = np.full((40, 60, 3), (200, 100, 0), np.uint8)
    values = np.zeros((4, 6))
    values[2, 3] = 1
    shown = glowing(picture, values)
    assert shown.shape == picture.shape
    spread = np.ptp(shown.astype(int), axis=2)
    assert spread[5, 5] == 0  # grey
    assert spread[25, 35] > 50
    assert shown[25, 35].sum() > shown[5, 5].sum()


def test_signed_values_lie_around_mid_grey() -> None:
    values = np.array([[[-1.0, 0.0, 1.0], [-0.5, 0.5, 2.0]]])
    shown = signed(values)
    assert shown[0, 0, 1] == 128
    assert shown[0, 0, 0] < 128 < shown[0, 0, 2]
    assert (signed(np.zeros((2, 2, 3))) == 128).all()
