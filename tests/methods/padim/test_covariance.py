import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anomaly.methods.padim.covariance import (
    GaussianStatistics,
    flat_width,
    pack_triangle,
    unpack_triangle,
)


def correlated(positions, count, dimensions, *, seed=0, spread=3.0, offset=0.0):
    """Samples (P, N, d) whose variances span several orders of magnitude."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(positions, dimensions, dimensions)) / dimensions**0.5
    scales = spread * np.logspace(0, -3, dimensions)
    latent = rng.normal(size=(positions, count, dimensions)) * scales
    return torch.from_numpy((latent @ mixing + offset).astype(np.float32))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("count", "dimensions"), [(2, 3), (30, 7), (50, 65), (200, 130)])
def test_statistics_agree_with_numpy(count, dimensions, offset):
    samples = correlated(4, count, dimensions, offset=offset)
    statistics = GaussianStatistics.of(samples)
    for i, x in enumerate(samples.double().numpy()):
        np.testing.assert_allclose(statistics.mean[i], x.mean(axis=0), rtol=1e-7, atol=1e-6)
        expected = np.cov(x, rowvar=False)
        error = np.abs(statistics.covariance()[i].numpy() - expected).max()
        assert error < 1e-6 * np.abs(expected).max()


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.sampled_from([0.0, 1e4, -1e6]),
    st.integers(0, 99),
)
def test_merging_parts_equals_one_pass(lengths, offset, seed):
    samples = correlated(3, sum(lengths), 5, seed=seed, offset=offset)
    whole = GaussianStatistics.of(samples)
    first, *rest = samples.split(lengths, dim=1)
    one_by_one = GaussianStatistics.of(first)
    for part in rest:
        one_by_one = one_by_one.merge(GaussianStatistics.of(part))
    tail = GaussianStatistics.of(rest[-1])
    for part in reversed(rest[:-1]):
        tail = GaussianStatistics.of(part).merge(tail)
    for merged in (one_by_one, GaussianStatistics.of(first).merge(tail)):
        assert merged.count == whole.count
        # A part's mean is known to float32's rounding of the spread, whatever the offset.
        torch.testing.assert_close(merged.mean, whole.mean, rtol=0, atol=2e-6)
        error = (merged.covariance() - whole.covariance()).abs().max()
        assert error <= 3e-6 * whole.covariance().abs().max()


@pytest.mark.parametrize("dimensions", [1, 63, 64, 65, 129])
def test_packed_triangle_comes_back(dimensions):
    lower = torch.randn(2, dimensions, dimensions).tril()
    assert torch.equal(unpack_triangle(pack_triangle(lower)), lower)


def test_flat_statistics_come_back():
    statistics = GaussianStatistics.of(correlated(3, 9, 70))
    flat = statistics.flat()
    assert flat.shape == (3, flat_width(70))
    again = GaussianStatistics.from_flat(9, flat, 70)
    assert torch.equal(again.mean, statistics.mean)
    assert torch.equal(again.covariance(), statistics.covariance())


def test_packed_triangle_is_little_more_than_half():
    assert sum(panel.numel() for panel in pack_triangle(torch.ones(1, 550, 550))) < 0.56 * 550**2
