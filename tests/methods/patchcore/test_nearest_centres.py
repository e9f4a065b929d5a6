"""Distances to the nearest centres are those of all pairs, whatever is left out on the way."""

import pytest
import torch
from torch import Tensor

from anomaly.methods.patchcore.coreset import (
    distances_to_nearest,
    greedy_k_center,
    squared_to_two_owners,
)


def _clusters(count: int, d: int, seed: int) -> Tensor:
    """Points around 40 places far from zero: most centres are far from most points."""
    g = torch.Generator().manual_seed(seed)
    places = 20 + 10 * torch.randn(40, d, generator=g)
    return places[torch.randint(40, (count,), generator=g)] + torch.randn(count, d, generator=g)


def _every_pair(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points.double(), centres.double()).square()


@pytest.mark.parametrize("in_pick_order", [True, False])
def test_the_two_nearest_owners_are_those_of_all_pairs(in_pick_order: bool) -> None:
    points = _clusters(5000, 16, 0)
    picks = greedy_k_center(points, 800, generator=torch.Generator().manual_seed(0)).picks
    centres = points[picks if in_pick_order else picks.sort().values]
    owners = torch.randint(5, (800,), generator=torch.Generator().manual_seed(1))
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
    points, centres = _clusters(700, 128, 7), _clusters(600, 128, 8)
    owners = torch.arange(600) % 10
    together = squared_to_two_owners(points, centres, owners, 10)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = [squared_to_two_owners(p, centres, owners, 10) for p in points.split(50)]
    finally:
        torch.set_num_threads(before)
    for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(whole, torch.cat(pieces), rtol=1e-6, atol=0)
    exact = _every_pair(points, centres).amin(1).sqrt()
    found = distances_to_nearest(points, centres)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-2)
