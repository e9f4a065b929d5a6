"""What a config makes of the stages."""

from pathlib import Path

import numpy as np
import pytest

from anomaly.config.load import parse_config
from anomaly.config.schema import ImageConfig
from anomaly.imaging.geometry import View
from anomaly.imaging.region import Region
from anomaly.scoring.build import loading_of, region_of


@pytest.mark.parametrize(
    ("stride", "source", "size"),
    [
        (16, (500, 500), (256, 256)),
        (16, (600, 300), (352, 192)),  # 362 × 181, to the next multiples of 32
        (16, (100, 1000), (96, 800)),  # 81 × 810
        (64, (600, 300), (384, 192)),
    ],
)
def test_kept_aspects_fill_whole_patches_of_every_layer(
    stride: int, source: tuple[int, int], size: tuple[int, int]
) -> None:
    loading = loading_of(parse_config({}, "a test"), stride, None, None)
    view = loading.sizing.view(source)
    assert isinstance(view, View)
    assert view.size == size


def test_a_region_in_shares_and_one_in_pixels() -> None:
    square = [[[0.25, 0.5], [0.75, 0.5], [0.75, 1.0], [0.25, 1.0]]]
    pixels = [[[2, 4], [6, 4], [6, 8], [2, 8]]]
    assert region_of(ImageConfig(), Path()) is None
    expected = np.zeros((8, 8), bool)
    expected[4:, 2:6] = True
    for polygons, unit in ((square, "relative"), (pixels, "pixels")):
        image = parse_config({"image": {"region": {"polygons": polygons, "unit": unit}}}, "a test")
        region = region_of(image.image, Path())
        assert isinstance(region, Region)
        np.testing.assert_array_equal(region.inside((8, 8), slice(None)), expected)
