"""The subspace against numpy's PCA; sums that merge, and that come apart again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.methods.base import PatchBatch
from anomaly.methods.subspace import PatchStatistics, SubspaceFitter, scorer

CHANNELS = 24


def saved(tensors):
    return scorer(tensors, {}, device=torch.device("cpu"))


def embeddings(count, *, seed=0, offset=0.0, grid=(3, 4)):
    """(N, h, w, D) with a falling spectrum."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(CHANNELS, CHANNELS))
    latent = rng.normal(size=(count, *grid, CHANNELS)) * np.logspace(0, -2, CHANNELS)
    return torch.from_numpy((latent @ mixing + offset).astype(np.float32))


def batched(values, size=5):
    return [
        PatchBatch(part, tuple(range(i * size, i * size + len(part))))
        for i, part in enumerate(values.split(size))
    ]


def reference(train, test, share):
    """Residual norms (B, h, w) by numpy's singular values, float64, and k."""
    x = train.double().numpy().reshape(-1, CHANNELS)
    mean = x.mean(axis=0)
    _, strength, axes = np.linalg.svd(x - mean, full_matrices=False)
    kept = np.cumsum(strength**2) / np.sum(strength**2)
    k = int(np.searchsorted(kept, share)) + 1
    r = test.double().numpy() - mean
    return np.linalg.norm(r - r @ axes[:k].T @ axes[:k], axis=-1), k


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_scores_are_those_of_numpys_pca(share, offset):
    train, test = embeddings(40, offset=offset), embeddings(6, seed=1, offset=offset)
    model = SubspaceFitter(share).fit(batched(train))
    expected, k = reference(train, test, share)
    assert model.basis.shape == (CHANNELS, k)
    scores = model.score(test)
    assert scores.nearest is None
    assert scores.scores.dtype == torch.float32
    np.testing.assert_allclose(scores.scores, expected, rtol=1e-3, atol=1e-5)


def test_components_win_over_the_share_and_leave_a_distance():
    train = embeddings(20)
    model = SubspaceFitter(0.5, 7).fit(batched(train))
    assert model.basis.shape == (CHANNELS, 7)
    torch.testing.assert_close(model.basis.T @ model.basis, torch.eye(7))
    with pytest.raises(ConfigError, match=r"choose 1 to 23"):
        SubspaceFitter(0.5, CHANNELS).prepared(CHANNELS, torch.device("cpu"))
    # However much is asked for, one direction at least is left to be far away in.
    assert SubspaceFitter(math.nextafter(1, 0)).fit(batched(train)).basis.shape[1] < CHANNELS


def assert_same(one: PatchStatistics, two: PatchStatistics) -> None:
    assert one.count == two.count
    scale = float(two.scatter.abs().max())
    torch.testing.assert_close(one.mean, two.mean, rtol=0, atol=1e-8 * float(two.mean.abs().max()))
    torch.testing.assert_close(one.scatter, two.scatter, rtol=0, atol=1e-8 * scale)


@given(cut=st.integers(1, 19), offset=st.sampled_from([0.0, 50.0]))
def test_merged_halves_equal_the_whole_and_come_apart_again(cut: int, offset: float) -> None:
    train = embeddings(20, offset=offset)
    whole, first, second = (
        SubspaceFitter().fit(batched(part)).statistics for part in (train, train[:cut], train[cut:])
    )
    assert_same(first.merge(second), whole)
    assert_same(whole.without(second), first)


def test_batches_and_company_change_no_bit():
    train = embeddings(11)
    model = SubspaceFitter().fit(batched(train, 11))
    for size in (1, 3, 4):
        other = SubspaceFitter().fit(batched(train, size))
        assert all(torch.equal(v, other.tensors()[k]) for k, v in model.tensors().items())


def test_patches_outside_a_region_are_not_learned_from():
    train = embeddings(12)
    inside = torch.ones(12, 3, 4, dtype=torch.bool)
    inside[:, 0] = False
    inside[3] = False  # a tile of which nothing counts
    masked = PatchBatch(train, tuple(range(12)), inside=inside)
    kept = train[[i for i in range(12) if i != 3], 1:]
    assert_same(
        SubspaceFitter().fit([masked]).statistics,
        SubspaceFitter().fit(batched(kept, 1)).statistics,
    )


class _Set:
    def __init__(self, values):
        self.values, self.count = values, values[..., 0].numel()

    def __iter__(self):
        return iter(batched(self.values, 3))

    def only(self, images):
        return [
            PatchBatch(self.values[i : i + 1], (i,)) for i in range(len(self.values)) if i in images
        ]


@pytest.mark.parametrize("grouped", [True, False])
def test_held_out_scores_are_those_of_refits(grouped: bool) -> None:
    train = embeddings(12)
    patches, folds = _Set(train), [(0, 5, 11), (1, 2, 3), (4, 6, 7, 8, 9, 10)]
    fitter = SubspaceFitter(0.9)
    parts = list(fitter.held_out(fitter.fit(patches), patches, folds, grouped=grouped))
    assert [fold for fold, _ in parts] == folds
    for fold, left in parts:
        refit = fitter.fit(patches.only([i for i in range(12) if i not in fold]))
        assert_same(left.statistics, refit.statistics)
        torch.testing.assert_close(
            left.score(train[list(fold)]).scores, refit.score(train[list(fold)]).scores,
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_saved_and_read_it_is_the_same_to_the_bit():
    model = SubspaceFitter().fit(batched(embeddings(9)))
    again = saved({k: v.clone() for k, v in model.tensors().items()})
    test = embeddings(3, seed=1)
    assert torch.equal(model.score(test).scores, again.score(test).scores)
    assert torch.equal(model.statistics.scatter, again.statistics.scatter)


def test_patches_that_are_all_alike_have_a_distance_too():
    flat = torch.ones(2, 3, 4, CHANNELS)
    model = SubspaceFitter().fit(batched(flat))
    assert float(model.score(flat).scores.max()) < 1e-5
    assert float(model.score(flat + embeddings(2)).scores.max()) > 0.1


def test_nothing_to_learn_from_is_told():
    with pytest.raises(DataError, match="no training patches"):
        SubspaceFitter().fit([])
    broken = embeddings(2)
    broken[0, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        SubspaceFitter().fit(batched(broken))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("basis", lambda t: t[:, :0], "basis"),
        ("basis", lambda t: t * 2, "unit vectors"),
        ("basis", lambda t: torch.eye(CHANNELS), "can't be"),
        ("count", lambda t: t * 0, "can't be"),
        ("scatter", lambda t: t[:-1], "scatter"),
        ("mean", lambda t: t.float(), "mean"),
        ("mean", lambda t: t + torch.inf, "NaN or infinite"),
    ],
)
def test_foreign_tensors_are_refused(name, change, says):
    tensors = SubspaceFitter().fit(batched(embeddings(9))).tensors()
    with pytest.raises(ModelError, match=says):
        saved({**tensors, name: change(tensors[name])})
    with pytest.raises(ModelError, match="vectors"):
        saved({"vectors": torch.ones(3, 2)})


def test_another_networks_embeddings_are_refused():
    model = SubspaceFitter().fit(batched(embeddings(9)))
    with pytest.raises(DataError, match="23 channels where the subspace has 24"):
        model.score(torch.ones(1, 2, 2, 23))
    with pytest.raises(ModelError):
        model.check_origin(23, 9)
