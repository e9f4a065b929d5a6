"""Views: sizes, crops, and pixels that end up where they belong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anomaly.errors import DataError
from anomaly.imaging.geometry import Sizing, render


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_kept_aspect_has_the_area_and_the_multiple(height: int, width: int) -> None:
    sizing = Sizing(None, None, 256, 16)
    if max(height, width) > 64 * min(height, width):
        with pytest.raises(DataError, match=f"{width}×{height} pixels are too thin"):
            sizing.view((height, width))
        return
    rows, columns = sizing.view((height, width)).size
    assert rows * columns <= 1.3 * 256**2
    assert rows % 16 == columns % 16 == 0
    if 1 / 8 < height / width < 8:
        assert 0.75 < rows * columns / 256**2 < 1.3
        assert abs(np.log(rows / columns) - np.log(height / width)) < 0.25


def test_a_strip_of_any_length_is_seen_in_tiles() -> None:
    for size in ((8000, 100), (60, 12_000), (1, 100_000)):
        with pytest.raises(DataError, match=r"too thin: .*set image\.tile"):
            Sizing(None, None, 256, 16).view(size)
        view = Sizing(None, None, 256, 16, tile=128, overlap=16).view(size)
        assert (view.source, max(view.size)) == (size, 256)


@pytest.mark.parametrize("size", [(100, 100), (517, 301), (64, 900), (900, 64), (30, 31)])
def test_render_keeps_a_mark_at_its_place(size: tuple[int, int]) -> None:
    view = Sizing(256, 224, 256, 8).view(size)
    pixels = np.zeros((*size, 3), dtype=np.uint8)
    top, left = size[0] // 3, size[1] // 2
    pixels[top : top + 3, left : left + 3] = 255
    seen = render(pixels, 255.0, view)[..., 0]
    assert seen.shape == (224, 224)
    weight = seen / seen.sum()
    row = (weight.sum(1) * (np.arange(224) + 0.5)).sum()
    column = (weight.sum(0) * (np.arange(224) + 0.5)).sum()
    assert view.rows[0].to_source(np.array([row]))[0] == pytest.approx(top + 1.5, abs=0.2)
    assert view.columns[0].to_source(np.array([column]))[0] == pytest.approx(left + 1.5, abs=0.3)


def test_depth_does_not_change_the_picture() -> None:
    eight = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    eight.reshape(-1)[:256] = np.arange(256)
    sixteen = eight.astype(np.uint16) * 257
    for area in (50, 64, 128):
        view = Sizing(area, None, 256, 8).view((50, 70))
        assert np.array_equal(render(eight, 255.0, view), render(sixteen, 65535.0, view))


def test_sixteen_bits_survive() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    view = Sizing(256, None, 256, 8).view((256, 256))
    seen = render(np.repeat(ramp[..., None], 3, 2), 65535.0, view)
    assert len(np.unique(seen[..., 0])) == 65536


def test_shrinking_averages_every_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    seen = render(pixels, 255.0, Sizing(128, None, 256, 8).view((512, 512)))
    expected = pixels.reshape(128, 4, 128, 4, 3).mean((1, 3)) / 255
    np.testing.assert_allclose(seen, expected, atol=1e-6)


def test_one_axis_may_shrink_while_the_other_grows() -> None:
    pixels = np.zeros((1000, 20, 3), dtype=np.uint8)
    pixels[::2] = 255
    seen = render(pixels, 255.0, Sizing(100, None, 256, 8).view((1000, 20)))
    np.testing.assert_allclose(seen, 0.5, atol=1e-5)


def test_one_size_for_all_images_or_none() -> None:
    for sizing, size in (
        (Sizing(256, 224, 0, 32), (224, 224)),
        (Sizing(256, None, 0, 32), (256, 256)),
        (Sizing(None, None, 256, 32, aspect=1.5), (320, 224)),
    ):
        assert sizing.fixed_size == size
        assert sizing.view((150, 100)).size == sizing.view((301, 200)).size == size
    assert Sizing(None, None, 256, 32).fixed_size is None
    assert Sizing(None, None, 256, 32, tile=64, overlap=8).fixed_size is None


def test_a_tenth_off_the_aspect_is_near_enough_where_all_need_one() -> None:
    sizing = Sizing(None, None, 256, 32, aspect=1.5)
    usual = sizing.view((1500, 1000)).size
    for near in ((1575, 1000), (1500, 1050), (1640, 1000)):
        assert sizing.view(near).size == usual
    for far, off in (((1725, 1000), 15), ((1500, 1150), 15), ((1665, 1000), 11)):
        with pytest.raises(DataError, match=f"off the training images' shape by {off}%: PaDiM"):
            sizing.view(far)
