"""Greedy k-center against a brute-force loop in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from anomaly.errors import ConfigError, DataError
from anomaly.methods.patchcore.coreset import (
    coreset_size,
    covering_radius,
    greedy_k_center,
    random_projection,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        ],
    ),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clustered(n: int, dim: int, clusters: int = 40, seed: int = 0) -> torch.Tensor:
    """Blobs of unequal spread: what patch embeddings look like, and what cells are made for."""
    g = seeded(seed)
    centres = 10 * torch.randn(clusters, dim, generator=g)
    spread = torch.rand(clusters, 1, generator=g)
    which = torch.randint(clusters, (n,), generator=g)
    return centres[which] + spread[which] * torch.randn(n, dim, generator=g)


def brute_force(points: np.ndarray, size: int, first: int) -> list[int]:
    """Gonzalez, one pick at a time, in float64."""
    picks = [first]
    nearest = ((points - points[first]) ** 2).sum(1)
    while len(picks) < size:
        nearest[picks[-1]] = -1
        picks.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, ((points - points[picks[-1]]) ** 2).sum(1))
    return picks


def assert_greedy(points: torch.Tensor, picks: torch.Tensor) -> None:
    """Each pick is a farthest point, up to float32's rounding: a check that ties can't upset."""
    exact = points.double().cpu().numpy()
    exact -= exact.mean(0)
    rounding = 2e-6 * (exact**2).sum(1).max()
    nearest = np.full(len(exact), np.inf)
    chosen = picks.tolist()
    for before, pick in itertools.pairwise(chosen):
        nearest = np.minimum(nearest, ((exact - exact[before]) ** 2).sum(1))
        assert nearest[pick] >= nearest.max() - rounding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("n", "dim", "size"),
    [
        (500, 8, 60),  # one pool holds everything
        (5000, 16, 700),  # several rounds
        (9000, 128, 1000),  # cells after the first 128 picks
    ],
)
def test_picks_are_those_of_the_textbook_loop(device: str, n: int, dim: int, size: int) -> None:
    points = clustered(n, dim)
    picks = greedy_k_center(points.to(device), size, generator=seeded()).picks.cpu()
    expected = brute_force(points.double().numpy(), size, int(picks[0]))
    assert picks.dtype == torch.int64
    assert_greedy(points, picks)
    # Two points a rounding error apart may swap places; the choice stays the same.
    assert len(set(picks.tolist()) & set(expected)) >= 0.99 * size
    assert picks[:60].tolist() == expected[:60]


@pytest.mark.parametrize("device", DEVICES)
def test_far_from_the_origin(device: str) -> None:
    points = clustered(6000, 32) + 300.0
    picks = greedy_k_center(points.to(device), 400, generator=seeded()).picks
    assert_greedy(points, picks)


def test_low_precision_storage() -> None:
    points = clustered(5000, 32).bfloat16()
    picks = greedy_k_center(points, 300, generator=seeded()).picks
    assert_greedy(points, picks)


def test_unstructured_points() -> None:
    """Nothing can be skipped among uniform points: only the work grows."""
    points = torch.rand(5000, 64, generator=seeded())
    assert_greedy(points, greedy_k_center(points, 400, generator=seeded()).picks)


def test_largest_distance_that_falls_a_hundredfold() -> None:
    """Once all points that lie far apart are picked."""
    g = seeded(3)
    apart, together = 100 * torch.randn(3000, 16, generator=g), torch.randn(6000, 16, generator=g)
    points = torch.cat([apart, together])[torch.randperm(9000, generator=g)]
    chosen = greedy_k_center(points, 3600, generator=seeded())
    assert_greedy(points, chosen.picks)
    expected = brute_force(points.double().numpy(), 3600, int(chosen.picks[0]))
    assert len(set(chosen.picks.tolist()) & set(expected)) >= 0.99 * 3600
    exact = cdist(points.double(), points[chosen.picks].double()).min(1).max()
    assert chosen.covering_radius == pytest.approx(exact, rel=1e-5)


def test_covering_radius_is_exact() -> None:
    points = clustered(6000, 24)
    chosen = greedy_k_center(points, 500, generator=seeded())
    exact = cdist(points.double(), points[chosen.picks].double()).min(1).max()
    assert chosen.covering_radius == pytest.approx(exact, rel=1e-5)
    assert covering_radius(points, points[chosen.picks]) == pytest.approx(exact, rel=1e-5)


def test_goes_on_from_earlier_centres() -> None:
    points = clustered(6000, 24)
    centres = points[:40].double()
    before = cdist(points.double(), centres).min(1)
    chosen = greedy_k_center(
        points, 300, generator=seeded(), bounds=torch.from_numpy(before).float().square()
    )
    assert chosen.picks[0] == before.argmax()
    both = torch.cat([centres, points[chosen.picks].double()])
    assert chosen.covering_radius == pytest.approx(cdist(points, both).min(1).max(), rel=1e-5)


def test_the_seed_decides_the_first_pick() -> None:
    points = clustered(3000, 8)
    firsts = {int(greedy_k_center(points, 1, generator=seeded(s)).picks[0]) for s in range(8)}
    assert len(firsts) > 1
    again = [greedy_k_center(points, 50, generator=seeded(3)).picks.tolist() for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize("n", [1, 2, 3000, 9000])
def test_equal_points_still_give_distinct_picks(n: int) -> None:
    picks = greedy_k_center(torch.full((n, 4), 3.7), max(1, n - 1), generator=seeded()).picks
    assert len(set(picks.tolist())) == max(1, n - 1)


def test_duplicates_come_last() -> None:
    points = torch.randn(50, 6, generator=seeded()).repeat(20, 1)
    picks = greedy_k_center(points, 200, generator=seeded()).picks
    assert len(set((picks[:50] % 50).tolist())) == 50
    assert len(set(picks.tolist())) == 200


def test_all_points() -> None:
    chosen = greedy_k_center(torch.randn(30, 3, generator=seeded()), 30, generator=seeded())
    assert sorted(chosen.picks.tolist()) == list(range(30))
    assert chosen.covering_radius == 0


@pytest.mark.parametrize("size", [0, -1, 11])
def test_impossible_size(size: int) -> None:
    with pytest.raises(ConfigError, match="outside 1 to 10"):
        greedy_k_center(torch.randn(10, 2), size, generator=seeded())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_values_are_refused(value: float) -> None:
    points = torch.randn(100, 4)
    points[17, 2] = value
    with pytest.raises(DataError, match="1 of 100"):
        greedy_k_center(points, 5, generator=seeded())


def test_progress_ends_at_the_size() -> None:
    seen: list[tuple[int, int]] = []
    greedy_k_center(
        clustered(5000, 8), 600, generator=seeded(), progress=lambda a, b: seen.append((a, b))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (600, 600)


@settings(max_examples=40, deadline=None)
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
    more = greedy_k_center(points, min(n, size + 1), generator=seeded(seed))
    assert more.covering_radius <= chosen.covering_radius + 1e-6


def test_projection_keeps_distances() -> None:
    x = torch.randn(60, 1536, generator=seeded())
    projected = x @ random_projection(1536, 128, generator=seeded(1))
    ratio = torch.pdist(projected) / torch.pdist(x)
    assert projected.shape == (60, 128)
    assert abs(float(ratio.mean()) - 1) < 0.02
    assert float((ratio - 1).abs().max()) < 0.35


def test_projection_to_more_dimensions_is_the_identity() -> None:
    assert torch.equal(random_projection(5, 128, generator=seeded()), torch.eye(5))


@pytest.mark.parametrize(
    ("n", "kwargs", "expected"),
    [
        (1000, {"ratio": 0.1}, 100),
        (3, {"ratio": 0.01}, 1),
        (7, {"ratio": 1.0}, 7),
        (214016, {"ratio": 0.01}, 2140),
        (100, {"ratio": 0.29}, 29),  # 100 * 0.29 is 28.999… in binary
        (7, {"size": 7}, 7),
    ],
)
def test_coreset_size(n: int, kwargs: dict[str, float], expected: int) -> None:
    assert coreset_size(n, **kwargs) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"ratio": 0.1, "size": 3}, {"ratio": 0.0}, {"ratio": 1.1}, {"size": 0}, {"size": 11}],
)
def test_coreset_size_is_checked(kwargs: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        coreset_size(10, **kwargs)  # type: ignore[arg-type]
