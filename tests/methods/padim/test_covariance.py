"""Statistics of samples and distances by their covariances, against numpy and scipy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis

from anomaly.errors import ConfigError, DataError
from anomaly.methods.padim.accumulator import (
    GaussianStatistics,
    centre,
    cholesky_whitening,
    low_rank_whitening,
    unpack_triangle,
)


def covariance(statistics):
    """(P, d, d) float32, unbiased: divided by N − 1."""
    lower = unpack_triangle(statistics.scatter)
    return (lower + lower.tril(-1).mT) / (statistics.count - 1)


def correlated(positions, count, dimensions, *, seed=0, spread=3.0, offset=0.0):
    """Samples (P, N, d) whose variances span several orders of magnitude."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(positions, dimensions, dimensions)) / dimensions**0.5
    scales = spread * np.logspace(0, -3, dimensions)
    latent = rng.normal(size=(positions, count, dimensions)) * scales
    return torch.from_numpy((latent @ mixing + offset).astype(np.float32))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.sampled_from([3, 65]),
    st.sampled_from([0.0, 1e4, -1e6]),
    st.integers(0, 99),
)
def test_merged_parts_agree_with_numpy(lengths, dimensions, offset, seed):
    samples = correlated(3, sum(lengths), dimensions, seed=seed, offset=offset)
    whole = GaussianStatistics.of(samples)
    first, *rest = samples.split(lengths, dim=1)
    one_by_one = GaussianStatistics.of(first)
    for part in rest:
        one_by_one = one_by_one.merge(GaussianStatistics.of(part))
    tail = GaussianStatistics.of(rest[-1])
    for part in reversed(rest[:-1]):
        tail = GaussianStatistics.of(part).merge(tail)
    for statistics in (whole, one_by_one, GaussianStatistics.of(first).merge(tail)):
        assert statistics.count == sum(lengths)
        for i, x in enumerate(samples.double().numpy()):
            # A part's mean is known to float32's rounding of the spread, whatever the offset.
            np.testing.assert_allclose(statistics.mean[i], x.mean(axis=0), rtol=1e-12, atol=4e-6)
            expected = np.cov(x, rowvar=False)
            error = np.abs(covariance(statistics)[i].numpy() - expected).max()
            assert error < 4e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("count", "dimensions"), [(2, 9), (30, 31), (40, 130)])
@pytest.mark.parametrize(("spread", "rtol"), [(0.01, 1e-5), (3.0, 1e-4), (30.0, 1e-3)])
def test_fewer_samples_than_dimensions_agree_with_scipy(count, dimensions, spread, rtol):
    samples = correlated(3, count, dimensions, spread=spread)
    # The samples themselves lie in the span, where the textbook form cancels.
    queries = torch.cat([samples[:, :5], correlated(3, 5, dimensions, seed=1, spread=spread)], 1)
    expected = []
    for x, q in zip(samples.double().numpy(), queries.double().numpy(), strict=True):
        inverse = np.linalg.inv(np.cov(x, rowvar=False) + 0.01 * np.eye(dimensions))
        expected.append([mahalanobis(v, x.mean(axis=0), inverse) for v in q])
    mean, centred = centre(samples)
    whitening = low_rank_whitening(centred, 0.01)
    residuals = (queries - mean[:, None]).float()
    found = whitening.squared_distances(residuals, slice(0, 3)).sqrt()
    np.testing.assert_allclose(found, expected, rtol=rtol)


@pytest.mark.parametrize("dimensions", [2, 4, 100])
def test_regularisation_that_vanishes_beside_the_variances_is_refused(dimensions):
    """Where every channel is a multiple of one; which processor computes it makes no difference."""
    one = 1e4 * correlated(1, 600, 1)
    statistics = GaussianStatistics.of(one * torch.linspace(0.5, 1.5, dimensions))
    with pytest.raises(ConfigError, match=r"model.regularisation 1e-12 is too small") as refused:
        cholesky_whitening(statistics, 1e-12)
    least = 2**-21 * float(covariance(statistics)[0].trace())
    with pytest.raises(ConfigError, match="raise it to"):
        cholesky_whitening(statistics, least * 0.99)
    named = float(str(refused.value).split("raise it to ")[1].split()[0])
    for enough in (least * 1.01, named):
        tensors = cholesky_whitening(statistics, enough).tensors().values()
        assert all(bool(t.isfinite().all()) for t in tensors)


def test_samples_that_are_not_numbers_are_refused():
    samples = correlated(1, 50, 4)
    samples[0, 3, 2] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        cholesky_whitening(GaussianStatistics.of(samples), 0.01)
