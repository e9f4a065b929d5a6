"""No bound is more than the distance, and most bounds rule others out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from anomaly.methods.patchcore.distances import (
    AXES,
    ROUNDING,
    Dtype,
    Screen,
    distances_to,
    half_squared_distances,
    squared_distances,
    squared_norms,
)

Floats = NDArray[np.float32]
# Products of bfloat16 numbers are right on every processor, and quick on some.
DTYPES: list[Dtype] = ["float32", "bfloat16"]


def passing(screen: Screen, centred: Floats, squared: Floats) -> NDArray[np.bool_]:
    """Which bank vectors (Q, M) may be within squared distances (Q,)."""
    bounds, moved = screen.bounds(centred)
    limits = (np.sqrt(squared) + moved) ** 2 + ROUNDING * (squared_norms(centred) + squared)
    return np.asarray(bounds <= screen.limits(limits.astype(np.float32) / 2)[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 140),
    rank=st.integers(1, 140),
    axes=st.integers(1, 140),
    rest=st.sampled_from([0.0, 0.01, 1.0]),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(0, 20),
    near=st.floats(1e-3, 2),
)
@settings(max_examples=40)
def test_nothing_is_ruled_out_wrongly(
    dtype: Dtype, seed: int, dim: int, rank: int, axes: int, rest: float, scale: float,
    offset: float, near: float,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(rank, dim))
    bank = rng.normal(size=(130, rank)) @ mix + rest * rng.normal(size=(130, dim)) + offset
    queries = bank[:40] + near * rng.normal(size=(40, dim))
    bank, queries = ((scale * values).astype(np.float32) for values in (bank, queries))
    mean = bank.mean(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AXES, dtype, axes)
        screen = Screen.of(bank, mean, dtype)
    exact = cdist(queries.astype(float), bank.astype(float), "sqeuclidean")
    for rank_ in (0, 3, 60):
        limit = np.sort(exact, 1)[:, rank_]
        assert passing(screen, queries - mean, limit)[exact <= limit[:, None]].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_most_others_are_ruled_out(dtype: Dtype) -> None:
    rng = np.random.default_rng(0)
    bank = (3 * rng.normal(size=(2000, 128))).astype(np.float32)
    queries = bank[:200] + rng.normal(size=(200, 128)).astype(np.float32)
    exact = cdist(queries, bank, "sqeuclidean")
    mean = bank.mean(0)
    near = passing(Screen.of(bank, mean, dtype), queries - mean, 1.5 * exact.min(1))
    assert near.sum() < 1.05 * (exact <= 1.6 * exact.min(1)[:, None]).sum()


def test_distances_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    bank, queries = (rng.normal(size=(n, 37)).astype(np.float32) + 3 for n in (5000, 60))
    exact = cdist(queries, bank)
    candidates = rng.integers(0, 5000, (60, 90))  # more than one block
    rows, columns = np.repeat(np.arange(60), 90), candidates.reshape(-1)
    expected = np.take_along_axis(exact, candidates, 1)
    for made in (np.asarray, torch.from_numpy):
        bank_, queries_, candidates_, rows_, columns_ = map(
            made, (bank, queries, candidates, rows, columns)
        )
        mean = bank_.mean(0)
        found = distances_to(bank_, queries_, candidates_)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        pairs = squared_distances(queries_, bank_, rows_, columns_)
        np.testing.assert_allclose(pairs, expected.reshape(-1) ** 2, rtol=1e-5)
        halves = half_squared_distances(queries_ - mean, bank_, mean)
        np.testing.assert_allclose(halves, exact**2 / 2, rtol=1e-4, atol=1e-4)
