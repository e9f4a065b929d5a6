"""PaDiM's Gaussians against scipy, its projections, and scores without an image against refits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patch_lists import PatchList
from scipy.spatial.distance import mahalanobis

from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim import GaussianFitter, projected

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


@pytest.mark.parametrize(
    ("spread", "offset", "rtol"),
    [(0.01, 0, 1e-4), (1.0, 0, 2e-4), (10.0, 0, 2e-3), (1.0, 1e4, 2e-4)],
)
def test_scores_agree_with_scipy(spread, offset, rtol):
    # Fewer images than dimensions; as many; one more; more than are added at once.
    for count in (2, 7, 24, 25, 120):
        train = embeddings(count, spread=spread, offset=offset)
        test = torch.cat([train[:3], embeddings(6, seed=1, spread=spread, offset=offset)])
        model = whole().fit(batched(train))
        scores = model.score(test)
        assert scores.nearest is None
        assert scores.scores.dtype == torch.float32
        np.testing.assert_allclose(scores.scores, reference(train, test, 0.01), rtol=rtol)
        mean = train.double().mean(dim=0, keepdim=True).float()
        assert model.score(mean).scores.max() < 1e-4 * max(1, spread, offset / 20)


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
    assert torch.equal(train, embeddings(count))
    for size in (1, 3, 16, 60):
        again = whole().fit(iter(batched(train, size))).tensors()
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[k], expected[k]) for k in expected)


@pytest.mark.parametrize("count", [12, 80])
def test_number_of_threads_changes_nothing(count):
    """Of 289 positions, which are more than one block."""
    wide = {"grid": (17, 17), "channels": 64}
    scores = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        model = whole(64).fit(batched(embeddings(count, **wide)))
        scores.append(model.score(embeddings(3, seed=1, **wide)).scores)
        assert torch.get_num_threads() == threads
    assert torch.equal(*scores)


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


def drawn(channels, dimensions, seed=0):
    return GaussianFitter(dimensions, seed=seed).prepared(channels, CPU).projection


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


def left_out(values, regularisation=0.01):
    """Scores (N, h, w) of training images (N, h, w, D), each without itself."""
    images = len(values)
    fitter = whole(values.shape[3], regularisation=regularisation)
    patches = PatchList([PatchBatch(values, tuple(range(images)))])
    folds = [(image,) for image in range(images)]
    ((_, without),) = fitter.held_out(fitter.fit(patches), patches, folds, grouped=False)
    return without.score(values).scores.numpy()


def refitted(values, regularisation=0.01):
    """The same by scipy with covariances of the others."""
    others = [torch.cat([values[:i], values[i + 1 :]]) for i in range(len(values))]
    pairs = zip(others, values[:, None], strict=True)
    return np.concatenate([reference(rest, image, regularisation) for rest, image in pairs])


@pytest.mark.parametrize("regularisation", [0.01, 1e-4])
@pytest.mark.parametrize(
    ("variances", "rtol"),
    [
        *((torch.full((6,), scale**2), 1e-6) for scale in (0.01, 0.3, 3.0)),
        # Leverages are 1 but for ε over the variance: no difference from 1 may be taken.
        (torch.logspace(1.5, -2, 100), 1e-5),
    ],
)
def test_scores_without_an_image_are_those_of_refits(variances, rtol, regularisation):
    for images in (3, 12, 30, 99, 101):
        g = torch.Generator().manual_seed(images)
        noise = torch.randn(images, 1, 2, len(variances), generator=g)
        values = 3 + noise * variances.sqrt()
        expected = refitted(values, regularisation)
        np.testing.assert_allclose(left_out(values, regularisation), expected, rtol=rtol)


def test_equal_images_are_scored():
    """Their difference has no variance; each still has its twin."""
    values = torch.randn(8, 1, 1, 20, generator=torch.Generator().manual_seed(0))
    values[1] = values[0]
    scores = left_out(values).flatten()
    assert np.isfinite(scores).all()
    assert scores[:2].max() < 0.5 * scores[2:].min()


def test_two_images_are_too_few():
    with pytest.raises(DataError, match="--no-calibrate"):
        left_out(torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("first", "more"), [(6, [3]), (9, [9]), (20, [7]), (20, [30]), (2, [1]), (20, [4] * 10)]
)
@pytest.mark.parametrize("dimensions", [16, CHANNELS])
def test_gaussians_that_learn_more_are_those_of_a_fit_on_all(first, more, dimensions):
    fitter = GaussianFitter(dimensions).prepared(CHANNELS, CPU)
    values = torch.cat([embeddings(first), embeddings(sum(more), seed=1, offset=0.7)])
    values = values @ fitter.projection
    known, grown = first, fitter.fit(batched(values[:first]))
    for count in more:
        grown = fitter.incremental(grown, known).fit(batched(values[known : known + count]))
        known += count
    whole = fitter.fit(batched(values))
    shapes = [[t.shape for t in model.tensors().values()] for model in (grown, whole)]
    assert shapes[0] == shapes[1]
    others = embeddings(5, seed=77, offset=2.0) @ fitter.projection
    scores = [model.score(torch.cat([values[:5], others])).scores for model in (grown, whole)]
    torch.testing.assert_close(*scores, rtol=2e-3, atol=1e-4)
