import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.methods.padim import GaussianFitter, projected


def drawn(channels, dimensions, seed=0):
    return GaussianFitter(dimensions, seed=seed).prepared(channels, torch.device("cpu")).projection


sizes = st.integers(2, 60).flatmap(lambda dim: st.tuples(st.just(dim), st.integers(1, dim - 1)))


@settings(max_examples=25)
@given(sizes, st.integers(0, 2**31))
def test_projection_is_orthonormal(size, seed):
    dim, target = size
    w = drawn(dim, target, seed).double().numpy()
    assert w.shape == (dim, target)
    np.testing.assert_allclose(w.T @ w, np.eye(target), atol=1e-6)


def test_the_seed_decides_and_all_channels_are_kept_as_they_are():
    a, b, c = (drawn(40, 9, s) for s in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    x = torch.randn(2, 3, 7)
    assert torch.equal(x @ drawn(7, 7), x)


@pytest.mark.parametrize("target", [1, 9, 30])
@pytest.mark.parametrize("grids", [[(8, 6), (4, 3), (2, 2)], [(4, 3), (9, 7)]])
def test_maps_are_projected_like_their_full_embeddings(grids, target):
    channels = [7, 11, 13][: len(grids)]
    dim = sum(channels)
    maps = [torch.randn(2, c, *g) for c, g in zip(channels, grids, strict=True)]
    finest = max(grids)
    rows, columns = np.meshgrid(*map(np.arange, finest), indexing="ij")
    full = np.concatenate(
        [
            m.numpy()[:, :, rows * h // finest[0], columns * w // finest[1]]
            for m, (h, w) in zip(maps, grids, strict=True)
        ],
        axis=1,
    )
    projection = drawn(dim, min(target, dim))
    expected = torch.from_numpy(full).permute(0, 2, 3, 1) @ projection
    torch.testing.assert_close(projected(projection, maps), expected, rtol=0, atol=1e-5)
