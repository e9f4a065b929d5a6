from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anomaly.export.features import channel_axis, from_backbone, pooled


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 64, 7, 7), 1), ((1, 7, 7, 64), 3), ((1, 197, 768), 2), ((1, 512), 1), ((1, 7, 7, 7), 1)],
)
def test_channels_are_told_by_the_shape_of_a_square_image(
    shape: tuple[int, ...], axis: int
) -> None:
    assert channel_axis(shape) == axis


@pytest.mark.parametrize("side", [96, 128])
def test_channels_are_told_where_there_are_as_many_as_rows(side: int) -> None:
    """At 384 Swin's first stage puts out (1, 96, 96, 96)."""
    source = from_backbone("swin_t", "random", 4 * side, square=True, layers=["features.1"])
    assert source.layers == {"features.1": 3}
    mapped = from_backbone("resnet18", "random", 8 * side, square=True, layers=["layer2"])
    assert mapped.layers == {"layer2": 1}


@given(
    st.sampled_from([((2, 3, 4, 5), 1), ((2, 4, 5, 3), 3), ((2, 6, 3), 2), ((2, 3), 1)]),
    st.sampled_from(["mean", "max", "none"]),
)
def test_pooling_equals_numpy(kind: tuple[tuple[int, ...], int], how: str) -> None:
    shape, axis = kind
    values = np.random.default_rng(0).normal(size=shape)
    got = pooled(torch.from_numpy(values), axis, how).numpy()
    if how == "none":
        np.testing.assert_array_equal(got, values)
        return
    flat = np.moveaxis(values, axis, 1).reshape(2, 3, -1)
    np.testing.assert_allclose(got, flat.mean(axis=2) if how == "mean" else flat.max(axis=2))
