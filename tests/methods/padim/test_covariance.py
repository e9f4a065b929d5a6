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
    pack_triangle,
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


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("count", "dimensions"), [(2, 3), (30, 7), (50, 65), (200, 130)])
def test_statistics_agree_with_numpy(count, dimensions, offset):
    samples = correlated(4, count, dimensions, offset=offset)
    statistics = GaussianStatistics.of(samples)
    for i, x in enumerate(samples.double().numpy()):
        np.testing.assert_allclose(statistics.mean[i], x.mean(axis=0), rtol=1e-7, atol=1e-6)
        expected = np.cov(x, rowvar=False)
        error = np.abs(covariance(statistics)[i].numpy() - expected).max()
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
        error = (covariance(merged) - covariance(whole)).abs().max()
        assert error <= 3e-6 * covariance(whole).abs().max()


@pytest.mark.parametrize("dimensions", [1, 63, 64, 65, 129])
def test_packed_triangle_comes_back(dimensions):
    lower = torch.randn(2, dimensions, dimensions).tril()
    assert torch.equal(unpack_triangle(pack_triangle(lower)), lower)


def test_packed_triangle_is_little_more_than_half():
    assert sum(panel.numel() for panel in pack_triangle(torch.ones(1, 550, 550))) < 0.56 * 550**2


def reference(samples, queries, regularisation):
    """Mahalanobis distances (P, B) by scipy, float64."""
    distances = []
    for x, q in zip(samples.double().numpy(), queries.double().numpy(), strict=True):
        covariance = np.cov(x, rowvar=False).reshape(x.shape[1], x.shape[1])
        inverse = np.linalg.inv(covariance + regularisation * np.eye(x.shape[1]))
        distances.append([mahalanobis(v, x.mean(axis=0), inverse) for v in q])
    return np.array(distances)


@pytest.mark.parametrize(("count", "dimensions"), [(20, 1), (40, 30), (300, 130)])
def test_cholesky_whitening_agrees_with_scipy(count, dimensions):
    samples = correlated(3, count, dimensions)
    queries = correlated(3, 6, dimensions, seed=1)
    statistics = GaussianStatistics.of(samples)
    residuals = (queries - statistics.mean[:, None]).float()
    whitening = cholesky_whitening(statistics, 0.01)
    found = whitening.squared_distances(residuals, slice(0, 3)).sqrt()
    np.testing.assert_allclose(found, reference(samples, queries, 0.01), rtol=2e-4)


@pytest.mark.parametrize(("count", "dimensions"), [(2, 9), (30, 31), (40, 130)])
@pytest.mark.parametrize(("spread", "rtol"), [(0.01, 1e-5), (3.0, 1e-4), (30.0, 1e-3)])
def test_low_rank_whitening_agrees_with_scipy(count, dimensions, spread, rtol):
    samples = correlated(3, count, dimensions, spread=spread)
    # The samples themselves lie in the span, where the textbook form cancels.
    queries = torch.cat([samples[:, :5], correlated(3, 5, dimensions, seed=1, spread=spread)], 1)
    mean, centred = centre(samples)
    whitening = low_rank_whitening(centred, 0.01)
    residuals = (queries - mean[:, None]).float()
    found = whitening.squared_distances(residuals, slice(0, 3)).sqrt()
    np.testing.assert_allclose(found, reference(samples, queries, 0.01), rtol=rtol)


def test_low_rank_whitening_keeps_the_digits_the_textbook_form_loses():
    samples = correlated(1, 40, 130, spread=300.0)
    expected = reference(samples, samples, 0.01)
    mean, centred = centre(samples)
    whitening = low_rank_whitening(centred, 0.01)
    residuals = (samples - mean[:, None]).float()
    found = whitening.squared_distances(residuals, slice(0, 1)).sqrt().numpy()

    inverse = torch.linalg.inv(centred @ centred.mT + 39 * 0.01 * torch.eye(40))
    h = residuals @ centred.mT
    textbook = (residuals.square().sum(2) - ((h @ inverse) * h).sum(2)).clamp_min(0) / 0.01

    def worst(distances):
        return np.abs(distances / expected - 1).max()

    assert worst(found) < 0.01
    assert worst(textbook.sqrt().numpy()) > 10 * worst(found)


def test_samples_without_any_variance_leave_the_euclidean_distance():
    samples = torch.ones(2, 5, 9)
    whitening = low_rank_whitening(centre(samples)[1], 0.25)
    residuals = torch.randn(2, 3, 9)
    found = whitening.squared_distances(residuals, slice(0, 2)).sqrt()
    torch.testing.assert_close(found, residuals.norm(dim=2) / 0.5)


def equal_channels(dimensions=4):
    """Statistics whose covariance is singular: every channel is a multiple of one."""
    one = 1e4 * correlated(1, 600, 1)
    return GaussianStatistics.of(one * torch.linspace(0.5, 1.5, dimensions))


@pytest.mark.parametrize("dimensions", [2, 4, 100])
def test_regularisation_that_vanishes_beside_the_variances_is_refused(dimensions):
    statistics = equal_channels(dimensions)
    with pytest.raises(ConfigError, match=r"model.regularisation 1e-12 is too small"):
        cholesky_whitening(statistics, 1e-12)
    least = 2**-21 * float(covariance(statistics)[0].trace())
    with pytest.raises(ConfigError, match="raise it to"):
        cholesky_whitening(statistics, least * 0.99)
    factor = cholesky_whitening(statistics, least * 1.01)
    assert all(bool(t.isfinite().all()) for t in factor.tensors().values())


def test_a_remedy_that_is_named_is_taken():
    with pytest.raises(ConfigError) as refused:
        cholesky_whitening(equal_channels(), 1e-12)
    named = float(str(refused.value).split("raise it to ")[1].split()[0])
    cholesky_whitening(equal_channels(), named)


def test_singularity_is_computed_not_met(monkeypatch):
    """A factorisation that happens to succeed, as another processor's may, changes nothing."""
    monkeypatch.setattr(torch.linalg, "cholesky", lambda a: torch.eye(4).expand_as(a))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (torch.eye(4).expand_as(a), a[:0]))
    with pytest.raises(ConfigError, match="too small"):
        cholesky_whitening(equal_channels(), 1e-12)


def test_samples_that_are_not_numbers_are_refused():
    samples = correlated(1, 50, 4)
    samples[0, 3, 2] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        cholesky_whitening(GaussianStatistics.of(samples), 0.01)
