import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.methods.padim.fitter import GaussianFitter


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(kind, channels, dimensions, seed=0):
    return GaussianFitter(dimensions, kind, seed=seed).draw(channels)


sizes = st.integers(2, 60).flatmap(lambda dim: st.tuples(st.just(dim), st.integers(1, dim - 1)))


@settings(max_examples=25)
@given(sizes, st.integers(0, 2**31))
def test_random_subset_keeps_distinct_ascending_channels(size, seed):
    dim, target = size
    projection = drawn("random", dim, target, seed)
    channels = projection.weights.tolist()
    assert channels == sorted(set(channels))
    assert len(channels) == target
    assert set(channels) <= set(range(dim))
    x = torch.randn(2, 3, dim, generator=seeded(1))
    np.testing.assert_array_equal(projection(x), np.take(x.numpy(), channels, axis=-1))


@settings(max_examples=25)
@given(sizes, st.integers(0, 2**31))
def test_orthogonal_projection_is_orthonormal(size, seed):
    dim, target = size
    projection = drawn("orthogonal", dim, target, seed)
    w = projection.weights.double().numpy()
    assert w.shape == (dim, target)
    np.testing.assert_allclose(w.T @ w, np.eye(target), atol=1e-6)
    x = torch.randn(2, 3, dim, generator=seeded(1))
    np.testing.assert_allclose(projection(x), x.double().numpy() @ w, atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "orthogonal"])
def test_the_seed_decides_and_all_channels_are_kept_as_they_are(kind):
    a, b, c = (drawn(kind, 40, 9, s).weights for s in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    x = torch.randn(2, 3, 7)
    assert torch.equal(drawn(kind, 7, 7)(x), x)


@pytest.mark.parametrize("target", [1, 9, 30])
@pytest.mark.parametrize("kind", ["random", "orthogonal"])
@pytest.mark.parametrize("grids", [[(8, 6), (4, 3), (2, 2)], [(4, 3), (9, 7)]])
def test_maps_are_projected_like_their_full_embeddings(grids, kind, target):
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
    projection = drawn(kind, dim, min(target, dim))
    expected = projection(torch.from_numpy(full).permute(0, 2, 3, 1))
    torch.testing.assert_close(projection.of_maps(maps), expected, rtol=0, atol=1e-5)
