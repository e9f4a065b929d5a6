"""Distances of coordinates are never more than those of vectors, and not much less either."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

from anomaly.scorers.patchcore.search.coordinates import (
    AllCoordinates,
    Coordinates,
    PrincipalCoordinates,
)

KINDS: list[Callable[[Tensor], Coordinates]] = [
    AllCoordinates,
    lambda bank: PrincipalCoordinates(bank, 24),
]


def distances(found: Coordinates, bank: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Of coordinates, and what they are moved by together: (Q, M) each."""
    (theirs, vectors_moved), (mine, moved) = found.of(bank), found.of(queries)
    apart = torch.from_numpy(cdist(mine.double(), theirs.double()))
    return apart, (moved[:, None] + vectors_moved).double()


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 140),
    rank=st.integers(1, 60),
    rest=st.sampled_from([0.0, 0.01, 1.0]),
    scale=st.floats(1e-3, 1e3),
    near=st.floats(1e-3, 2),
)
@settings(max_examples=60)
def test_nothing_comes_out_farther(
    kind: Callable[[Tensor], Coordinates],
    seed: int,
    dim: int,
    rank: int,
    rest: float,
    scale: float,
    near: float,
) -> None:
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, dim, generator=g)
    bank = torch.randn(80, rank, generator=g) @ mix + rest * torch.randn(80, dim, generator=g) + 5
    queries = (bank[:30] + near * torch.randn(30, dim, generator=g)) * scale
    bank *= scale
    exact = torch.from_numpy(cdist(queries.double(), bank.double()))
    apart, moved = distances(kind(bank), bank, queries)
    mean = bank.mean(0)
    squares = (queries - mean).square().sum(1, keepdim=True) + (bank - mean).square().sum(1)
    assert bool((apart**2 <= (exact + moved) ** 2 + 1e-5 * squares).all())


@pytest.mark.parametrize("kind", KINDS)
def test_near_few_dimensions_hardly_nearer(kind: Callable[[Tensor], Coordinates]) -> None:
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(20, 300, generator=g)
    bank = torch.randn(800, 20, generator=g) @ mix + 0.1 * torch.randn(800, 300, generator=g) + 9
    queries = bank[:100] + 0.3 * torch.randn(100, 20, generator=g) @ mix
    exact = torch.from_numpy(cdist(queries.double(), bank.double()))
    apart, moved = distances(kind(bank), bank, queries)
    assert bool((apart + moved >= 0.97 * exact).all())
    assert bool((moved <= 1e-3 * torch.from_numpy(cdist(queries, bank.mean(0)[None]))).all())
