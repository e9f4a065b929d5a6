"""Greedy k-center and distances to centres against brute force in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patch_lists import PatchList
from scipy.spatial.distance import cdist

from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import PatchBatch
from anomaly.methods.patchcore.coreset import (
    Selection,
    coreset_size,
    distances_to_nearest,
    greedy_k_center,
    select_coreset,
    squared_to_two_owners,
)

DIM = 12


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clustered(n: int, dim: int, clusters: int = 40, seed: int = 0) -> torch.Tensor:
    """Blobs of unequal spread: what patch embeddings look like, and what cells are made for."""
    g = seeded(seed)
    centres = 10 * torch.randn(clusters, dim, generator=g)
    spread = torch.rand(clusters, 1, generator=g)
    which = torch.randint(clusters, (n,), generator=g)
    return centres[which] + spread[which] * torch.randn(n, dim, generator=g)


def assert_greedy(points: torch.Tensor, picks: torch.Tensor) -> None:
    """Each pick is a farthest point in float64, as in the textbook loop, up to float32's rounding.

    That is the loop itself where no two points are as far, and holds where some are.
    """
    exact = points.double().numpy()
    exact -= exact.mean(0)
    rounding = 2e-6 * (exact**2).sum(1).max()
    nearest = np.full(len(exact), np.inf)
    chosen = picks.tolist()
    for before, pick in itertools.pairwise(chosen):
        nearest = np.minimum(nearest, ((exact - exact[before]) ** 2).sum(1))
        assert nearest[pick] >= nearest.max() - rounding


def falling_a_hundredfold() -> torch.Tensor:
    """The largest distance falls once all points that lie far apart are picked."""
    g = seeded(3)
    apart, together = 100 * torch.randn(700, 16, generator=g), torch.randn(1400, 16, generator=g)
    return torch.cat([apart, together])[torch.randperm(2100, generator=g)]


@pytest.mark.parametrize(
    ("points", "size"),
    [
        (clustered(500, 8), 60),  # one pool holds everything
        (clustered(5000, 32), 500),  # several rounds, and cells after the first 128 picks
        (clustered(4000, 32) + 300.0, 300),
        (torch.rand(2000, 64, generator=seeded()), 200),  # nothing can be skipped
        (falling_a_hundredfold(), 850),
        (clustered(3000, 32).bfloat16(), 200),
    ],
    ids=["one pool", "cells", "far from the origin", "unstructured", "falling", "low precision"],
)
def test_each_pick_is_a_farthest_point(points: torch.Tensor, size: int) -> None:
    chosen = greedy_k_center(points, size, generator=seeded())
    picks = chosen.picks
    assert picks.dtype == torch.int64
    assert_greedy(points, picks)
    exact = cdist(points.double(), points[picks].double()).min(1).max()
    assert chosen.covering_radius == pytest.approx(exact, rel=1e-5)


def test_impossible_sizes_and_bad_values_are_refused() -> None:
    points = torch.randn(100, 4, generator=seeded())
    for size in (0, -1, 101):
        with pytest.raises(ConfigError, match="outside 1 to 100"):
            greedy_k_center(points, size, generator=seeded())
    for value in (math.nan, math.inf, -math.inf):
        points[17, 2] = value
        with pytest.raises(DataError, match="1 of 100"):
            greedy_k_center(points, 5, generator=seeded())


@settings(max_examples=40)
@given(
    n=st.integers(1, 400),
    dim=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([1, 2, 5, 10**6]),
    data=st.data(),
)
def test_holds_for_any_points(
    n: int, dim: int, seed: int, levels: int, data: st.DataObject
) -> None:
    """Distinct picks, each a farthest point, and a radius that more picks never raise."""
    points = torch.randint(levels, (n, dim), generator=seeded(seed)).float() / levels
    size = data.draw(st.integers(1, n))
    chosen = greedy_k_center(points, size, generator=seeded(seed))
    assert len(set(chosen.picks.tolist())) == size
    if size < n:
        assert_greedy(points, chosen.picks)
    else:
        assert chosen.covering_radius == 0
    more = greedy_k_center(points, min(n, size + 1), generator=seeded(seed))
    assert more.covering_radius <= chosen.covering_radius + 1e-6


def test_coreset_size() -> None:
    assert coreset_size(3, 0.01) == 1
    assert coreset_size(7, 1.0) == 7
    assert coreset_size(100, 0.29) == 29  # 100 * 0.29 is 28.999… in binary


def stream_of(sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Images of a changing process: later ones hold kinds of patches that earlier ones don't."""
    g = torch.Generator().manual_seed(seed)
    kinds = 5 * torch.randn(40, DIM, generator=g)
    return [
        kinds[torch.randint(1 + i * 40 // len(sizes), (n,), generator=g)]
        + torch.randn(n, DIM, generator=g)
        for i, n in enumerate(sizes)
    ]


def streamed(stream: list[torch.Tensor], size: int, seed: int) -> Selection:
    """The selection from portions of points in fixed memory, with indices as picks."""
    chosen = select_coreset(
        PatchList(PatchBatch(points[None, None], (i,)) for i, points in enumerate(stream)),
        torch.eye(DIM),
        size / sum(map(len, stream)),
        memory_limit=0,
        generator=seeded(seed),
    )
    firsts = torch.tensor([0, *map(len, stream)]).cumsum(0)
    image, rank = chosen.picks.T
    return Selection(firsts[image] + rank, chosen.covering_radius)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
# As many as are asked for needn't have come when the memory is full for the first time.
@example(sizes=[500] * 10, share=0.5, seed=0)
def test_any_stream(sizes: list[int], share: float, seed: int) -> None:
    """Distinct picks, as many as wanted, and a radius that holds for every point."""
    stream = stream_of(sizes, seed)
    size = max(1, int(share * sum(sizes)))
    chosen = streamed(stream, size, seed)
    points = torch.cat(stream)
    assert len(set(chosen.picks.tolist())) == size
    true = cdist(points.double(), points[chosen.picks].double()).min(1).max()
    assert true <= chosen.covering_radius * (1 + 1e-4) + 1e-4


def _every_pair(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return torch.cdist(points.double(), centres.double()).square()


@pytest.mark.parametrize("in_pick_order", [True, False])
def test_the_two_nearest_owners_are_those_of_all_pairs(in_pick_order: bool) -> None:
    points = clustered(5000, 16)
    picks = greedy_k_center(points, 800, generator=seeded()).picks
    centres = points[picks if in_pick_order else picks.sort().values]
    owners = torch.randint(5, (800,), generator=seeded(1))
    owners[owners == 3] = 4  # the fourth has none
    least, nearest, others = squared_to_two_owners(points, centres, owners, 5)
    every = _every_pair(points, centres)
    by_owner = torch.stack(
        [every[:, owners == k].amin(1) if k != 3 else every[:, 0] + torch.inf for k in range(5)], 1
    )
    two = by_owner.sort(1)
    torch.testing.assert_close(least.double(), two.values[:, 0], rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(others.double(), two.values[:, 1], rtol=1e-4, atol=1e-2)
    clear = two.values[:, 1] - two.values[:, 0] > 0.1
    assert bool((nearest == two.indices[:, 0])[clear].all())
    assert int(clear.sum()) > 4000


@pytest.mark.parametrize("threads", [1, 3])
def test_a_point_has_the_same_distances_among_any_others(threads: int) -> None:
    """Machines of a cluster see some of the points each, and make one machine's model."""
    points, centres = clustered(700, 128, seed=7), clustered(600, 128, seed=8)
    owners = torch.arange(600) % 10
    together = squared_to_two_owners(points, centres, owners, 10)
    torch.set_num_threads(threads)
    parts = [squared_to_two_owners(p, centres, owners, 10) for p in points.split(50)]
    for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(whole, torch.cat(pieces), rtol=1e-6, atol=0)
    exact = _every_pair(points, centres).amin(1).sqrt()
    found = distances_to_nearest(points, centres)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-2)
