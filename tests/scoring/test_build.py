"""What a config makes of the stages."""

import pytest

from anomaly.config.load import parse_config
from anomaly.imaging.geometry import View
from anomaly.scoring.build import loading_of


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
