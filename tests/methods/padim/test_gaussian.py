import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis

from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim import GaussianFitter, scorer

GRID = (3, 4)
CHANNELS = 24
CPU = torch.device("cpu")


def embeddings(count, *, seed=0, offset=0.0, spread=1.0, grid=GRID, channels=CHANNELS):
    """(N, h, w, D) with correlated channels, different at each position."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(*grid, channels, channels))
    latent = rng.normal(size=(count, *grid, 1, channels)) * np.logspace(0, -2, channels)
    return torch.from_numpy((spread * (latent @ mixing)[..., 0, :] + offset).astype(np.float32))


def batched(values, size=5):
    return [
        PatchBatch(part, tuple(range(i * size, i * size + len(part))))
        for i, part in enumerate(values.split(size))
    ]


def whole(channels=CHANNELS, **settings):
    """A fitter that keeps all channels as they are."""
    return GaussianFitter(channels, **settings).prepared(channels, CPU)


def reference(train, test, regularisation):
    """Mahalanobis distances (B, h, w) of embeddings by scipy, float64."""
    train, test = train.double().numpy(), test.double().numpy()
    distances = np.empty(test.shape[:3])
    for row, column in np.ndindex(*test.shape[1:3]):
        x = train[:, row, column]
        covariance = np.cov(x, rowvar=False) + regularisation * np.eye(x.shape[1])
        inverse = np.linalg.inv(covariance)
        for image, v in enumerate(test[:, row, column]):
            distances[image, row, column] = mahalanobis(v, x.mean(axis=0), inverse)
    return distances


@pytest.mark.parametrize(("spread", "rtol"), [(0.01, 1e-4), (1.0, 2e-4), (10.0, 2e-3)])
def test_scores_agree_with_scipy(spread, rtol):
    # Fewer images than dimensions; as many; one more; more than are added at once.
    for count in (2, 7, 24, 25, 120):
        train = embeddings(count, spread=spread)
        test = torch.cat([train[:3], embeddings(6, seed=1, spread=spread)])
        model = whole().fit(batched(train))
        expected = reference(train, test, 0.01)
        scores = model.score(test)
        assert scores.nearest is None
        assert scores.scores.dtype == torch.float32
        np.testing.assert_allclose(scores.scores, expected, rtol=rtol)
        mean = train.double().mean(dim=0, keepdim=True).float()
        assert model.score(mean).scores.max() < 1e-4 * max(1, spread)


@pytest.mark.parametrize("count", [12, 120])
def test_a_large_offset_costs_no_digits(count):
    train, test = embeddings(count, offset=1e4), embeddings(6, seed=1, offset=1e4)
    model = whole().fit(batched(train))
    np.testing.assert_allclose(model.score(test).scores, reference(train, test, 0.01), rtol=2e-4)


def test_images_without_any_variance_leave_the_euclidean_distance():
    model = whole(9, regularisation=0.25).fit([PatchBatch(torch.ones(5, 1, 2, 9), (0,))])
    test = torch.randn(3, 1, 2, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.score(test).scores, (test - 1).norm(dim=3) / 0.5)


@pytest.mark.parametrize("count", [12, 60])
def test_company_in_a_batch_changes_no_score(count):
    model = whole().fit(batched(embeddings(count)))
    test = embeddings(9, seed=1)
    together = model.score(test).scores
    for size in (1, 2, 4):
        apart = torch.cat([model.score(part).scores for part in test.split(size)])
        torch.testing.assert_close(apart, together, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [12, 150])
def test_which_samples_share_a_batch_changes_no_bit(count):
    """The workers of a cluster read larger batches than one machine."""
    train = embeddings(count)
    expected = whole().fit(batched(train)).tensors()
    for size in (1, 3, 16, 60):
        again = whole().fit(iter(batched(train, size))).tensors()
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[k], expected[k]) for k in expected)


@pytest.mark.parametrize("count", [12, 60])
def test_tensors_are_the_whole_model(count):
    model, test = whole().fit(batched(embeddings(count))), embeddings(4, seed=1)
    tensors = model.tensors()
    again = scorer(tensors, {})
    assert torch.equal(again.score(test).scores, model.score(test).scores)
    assert torch.equal(model.to("cpu").score(test).scores, model.score(test).scores)
    assert all(torch.equal(again.tensors()[k], tensors[k]) for k in tensors)
    # Triangles of 16 bits, scales of their rows, means, and a projection.
    numbers = 2 * CHANNELS * (CHANNELS + 1) // 2 + 12 * CHANNELS
    assert sum(v.nbytes for v in tensors.values()) <= 12 * numbers + 4 * CHANNELS**2 + 16


@pytest.mark.parametrize("count", [12, 80])
def test_number_of_threads_changes_nothing(count):
    """Of 289 positions, which are more than one block."""
    wide = {"grid": (17, 17), "channels": 64}
    before = torch.get_num_threads()
    scores = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            model = whole(64).fit(batched(embeddings(count, **wide)))
            scores.append(model.score(embeddings(3, seed=1, **wide)).scores)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*scores)


def test_training_data_is_left_as_it_was():
    train = embeddings(5)
    before = train.clone()
    whole().fit(batched(train))
    assert torch.equal(train, before)


def test_what_cannot_be_learned_or_scored_is_refused():
    for batches in ([], batched(embeddings(1))):
        with pytest.raises(DataError, match=r"at least 2.*patchcore"):
            whole().fit(batches)
    with pytest.raises(DataError, match=r"4×3 patches.*3×4.*patchcore"):
        whole().fit([*batched(embeddings(4)), *batched(embeddings(4, grid=(4, 3)))])
    broken = embeddings(40)
    broken[3, 1, 2] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        whole().fit(batched(broken))
    with pytest.raises(DataError, match=r"4×3 patches.*3×4.*patchcore"):
        whole().fit(batched(embeddings(4))).score(embeddings(1, grid=(4, 3)))
    with pytest.raises(DataError, match=r"10 channels.*24"):
        whole().fit(batched(embeddings(4))).score(embeddings(1, channels=10))
    for dimensions in (CHANNELS + 1, 0):
        with pytest.raises(ConfigError, match=rf"model.dimensions is {dimensions}.* 24 channels"):
            GaussianFitter(dimensions).prepared(CHANNELS, CPU)
    with pytest.raises(ValueError, match="prepared"):
        GaussianFitter(CHANNELS).fit(batched(embeddings(4)))


@pytest.mark.parametrize("channels", [2, 4, 100])
def test_regularisation_that_vanishes_beside_the_variances_is_refused(channels):
    """Where every channel is a multiple of one; which processor computes it makes no difference."""
    one = 1e4 * torch.randn(600, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    train = batched(one * torch.linspace(0.5, 1.5, channels), 60)
    with pytest.raises(ConfigError, match=r"model.regularisation 1e-12 is too small") as refused:
        whole(channels, regularisation=1e-12).fit(train)
    named = float(str(refused.value).split("raise it to ")[1].split()[0])
    with pytest.raises(ConfigError, match="raise it to"):
        whole(channels, regularisation=named / 2).fit(train)
    tensors = whole(channels, regularisation=named).fit(train).tensors().values()
    assert all(bool(t.isfinite().all()) for t in tensors)
