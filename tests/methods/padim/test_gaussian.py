import errno
import os

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis

from anomaly.errors import ConfigError, DataError, OutputError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim.fitter import GaussianFitter
from anomaly.methods.padim.gaussian import scorer

GRID = (3, 4)
CHANNELS = 24


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


def reference(train, test, regularisation):
    """Mahalanobis distances (B, h, w) of projected embeddings by scipy, float64."""
    train, test = train.double().numpy(), test.double().numpy()
    distances = np.empty(test.shape[:3])
    for row, column in np.ndindex(*test.shape[1:3]):
        x = train[:, row, column]
        covariance = np.cov(x, rowvar=False) + regularisation * np.eye(x.shape[1])
        inverse = np.linalg.inv(covariance)
        for image, v in enumerate(test[:, row, column]):
            distances[image, row, column] = mahalanobis(v, x.mean(axis=0), inverse)
    return distances


@pytest.mark.parametrize("kind", ["random", "orthogonal"])
@pytest.mark.parametrize(("spread", "rtol"), [(0.01, 1e-4), (1.0, 2e-4), (10.0, 2e-3)])
def test_scores_agree_with_scipy(kind, spread, rtol):
    projection = GaussianFitter(16, kind, seed=5).draw(CHANNELS)
    # Fewer images than dimensions; as many; one more (folded once); many (folded often).
    for count in (2, 7, 16, 17, 120):
        train = embeddings(count, spread=spread)
        test = torch.cat([train[:3], embeddings(6, seed=1, spread=spread)])
        model = GaussianFitter(16, kind, 0.01, seed=5).fit(batched(train))
        expected = reference(projection(train), projection(test), 0.01)
        scores = model.score(test)
        assert scores.nearest is None
        assert scores.scores.dtype == torch.float32
        np.testing.assert_allclose(scores.scores, expected, rtol=rtol)
        mean = train.double().mean(dim=0, keepdim=True).float()
        assert model.score(mean).scores.max() < 1e-4 * max(1, spread)


@pytest.mark.parametrize("count", [12, 120])
def test_a_large_offset_costs_no_digits(count):
    train, test = embeddings(count, offset=1e4), embeddings(6, seed=1, offset=1e4)
    model = GaussianFitter(CHANNELS).fit(batched(train))
    np.testing.assert_allclose(model.score(test).scores, reference(train, test, 0.01), rtol=2e-4)


def test_images_without_any_variance_leave_the_euclidean_distance():
    model = GaussianFitter(9, regularisation=0.25).fit([PatchBatch(torch.ones(5, 1, 2, 9), (0,))])
    test = torch.randn(3, 1, 2, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.score(test).scores, (test - 1).norm(dim=3) / 0.5)


@pytest.mark.parametrize("count", [12, 60])
def test_company_in_a_batch_changes_no_score(count):
    model = GaussianFitter(CHANNELS).fit(batched(embeddings(count)))
    test = embeddings(9, seed=1)
    together = model.score(test).scores
    for size in (1, 2, 4):
        apart = torch.cat([model.score(part).scores for part in test.split(size)])
        torch.testing.assert_close(apart, together, rtol=1e-5, atol=0)


@pytest.mark.parametrize("count", [12, 60])
def test_wherever_samples_wait_and_which_share_a_batch_changes_no_bit(count):
    """The workers of a cluster read larger batches than one machine."""
    train = embeddings(count)
    expected = GaussianFitter(CHANNELS).fit(batched(train)).tensors()
    for limit, size in ((512 * 1024**2, 1), (20_000, 3), (0, 16), (0, 60)):
        fitter = GaussianFitter(CHANNELS, memory_limit=limit)
        again = fitter.fit(iter(batched(train, size))).tensors()
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[k], expected[k]) for k in expected)


@pytest.mark.parametrize("kind", ["random", "orthogonal"])
@pytest.mark.parametrize("count", [12, 60])
def test_tensors_are_the_whole_model(kind, count):
    model, test = GaussianFitter(16, kind).fit(batched(embeddings(count))), embeddings(4, seed=1)
    again = scorer(model.tensors(), {}, device=test.device)
    assert torch.equal(again.score(test).scores, model.score(test).scores)
    assert torch.equal(model.to("cpu").score(test).scores, model.score(test).scores)


def test_few_images_make_a_small_model():
    train = embeddings(9, grid=(2, 2), channels=400)
    tensors = GaussianFitter(400).fit(batched(train)).tensors()
    # 8 directions of 400 numbers of 16 bits, means of two floats, and a little.
    assert sum(v.nbytes for v in tensors.values()) < 4 * (8 * 400 * 2 + 400 * 8) * 1.2 + 400 * 8


@pytest.mark.parametrize("count", [12, 80])
def test_number_of_threads_changes_nothing(count):
    """Of 289 positions, which are more than one block."""
    wide = {"grid": (17, 17), "channels": 64}
    before = torch.get_num_threads()
    scores = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            model = GaussianFitter(64, memory_limit=0).fit(batched(embeddings(count, **wide)))
            scores.append(model.score(embeddings(3, seed=1, **wide)).scores)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*scores)


def test_progress_ends_at_its_total_and_training_data_is_left_as_it_was():
    calls = []
    train = embeddings(5)
    before = train.clone()
    GaussianFitter(8).fit(batched(train), lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == len(calls)
    assert torch.equal(train, before)


def test_what_cannot_be_learned_or_scored_is_refused():
    for batches in ([], batched(embeddings(1))):
        with pytest.raises(DataError, match=r"at least 2.*patchcore"):
            GaussianFitter(8).fit(batches)
    with pytest.raises(DataError, match=r"4×3 patches.*3×4.*patchcore"):
        GaussianFitter(8).fit([*batched(embeddings(4)), *batched(embeddings(4, grid=(4, 3)))])
    broken = embeddings(40)
    broken[3, 1, 2] = float("nan")
    with pytest.raises(DataError, match="NaN"):
        GaussianFitter(8).fit(batched(broken))
    model = GaussianFitter(8).fit(batched(embeddings(4)))
    with pytest.raises(DataError, match=r"4×3 patches.*3×4.*patchcore"):
        model.score(embeddings(1, grid=(4, 3)))
    with pytest.raises(DataError, match=r"10 channels.*24"):
        model.score(embeddings(1, channels=10))
    for fitter, message in (
        (GaussianFitter(CHANNELS + 1), r"model.dimensions is 25.* 24 channels"),
        (GaussianFitter(0), r"model.dimensions is 0.* 24 channels"),
        (GaussianFitter(8, "pca"), "'pca' is unknown"),
        (GaussianFitter(8, regularisation=0.0), "model.regularisation is 0; it must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            fitter.fit(batched(embeddings(4)))


@pytest.mark.parametrize("channels", [2, 4, 100])
def test_regularisation_that_vanishes_beside_the_variances_is_refused(channels):
    """Where every channel is a multiple of one; which processor computes it makes no difference."""
    one = 1e4 * torch.randn(600, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    train = batched(one * torch.linspace(0.5, 1.5, channels), 60)
    with pytest.raises(ConfigError, match=r"model.regularisation 1e-12 is too small") as refused:
        GaussianFitter(channels, regularisation=1e-12).fit(train)
    named = float(str(refused.value).split("raise it to ")[1].split()[0])
    with pytest.raises(ConfigError, match="raise it to"):
        GaussianFitter(channels, regularisation=named / 2).fit(train)
    tensors = GaussianFitter(channels, regularisation=named).fit(train).tensors().values()
    assert all(bool(t.isfinite().all()) for t in tensors)


def test_a_full_disk_says_where_and_what_to_do(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"TMPDIR sets: No space left on device"):
        GaussianFitter(8, memory_limit=0).fit(batched(embeddings(30)))
