"""Nearest neighbours against the whole distance matrix in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import most_bytes
from scipy.spatial.distance import cdist
from torch import Tensor

from anomaly.methods.patchcore.search import ExactIndex, NearestNeighbors

# By a product of all dimensions, by a screen, by faiss, in arrays where torch isn't installed.
EXACT = ["product", "screen", "faiss", "arrays"]


class Arrays:
    """The search in arrays, for tensors."""

    def __init__(self, bank: Tensor) -> None:
        self._search = NearestNeighbors(bank.numpy()).search

    def search(self, queries: Tensor, k: int = 1) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, self._search(queries.numpy(), k)))


def neighbours(bank: Tensor, way: str) -> NearestNeighbors | Arrays:
    """The search of a bank in one of the ways in `EXACT`."""
    if way == "arrays":
        return Arrays(bank)
    if way == "faiss":
        return NearestNeighbors(bank, "faiss")
    return NearestNeighbors(bank, index=ExactIndex(bank, way == "screen"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(n: int, dim: int, seed: int = 0, clusters: int = 30) -> Tensor:
    g = seeded(seed)
    centres = torch.randn(clusters, dim, generator=seeded(99))
    which = torch.randint(clusters, (n,), generator=g)
    return centres[which] + torch.rand(n, 1, generator=g) * torch.randn(n, dim, generator=g)


def in_clusters() -> tuple[Tensor, Tensor]:
    return blobs(3000, 64), blobs(300, 64, seed=1)


def closer_than_products_can_tell() -> tuple[Tensor, Tensor]:
    """Bank vectors in bunches of 8 that differ by less than what float32 leaves of large norms."""
    g = seeded(3)
    centres = 1000 + 100 * torch.randn(300, 24, generator=g)
    bank = centres.repeat_interleave(8, 0) + 0.01 * torch.randn(2400, 24, generator=g)
    return bank, bank[:400] + 0.01 * torch.randn(400, 24, generator=g)


def in_the_bank() -> tuple[Tensor, Tensor]:
    """At distance 0, and far from the origin, where squares cancel."""
    bank = blobs(3000, 48) + 500
    return bank, bank[:300]


def far_from_everything() -> tuple[Tensor, Tensor]:
    """The screen rules out little for such queries."""
    return blobs(3000, 32), 40 * torch.randn(100, 32, generator=seeded(5))


def without_structure() -> tuple[Tensor, Tensor]:
    """The screen lets nearly all vectors of uniform noise pass: the whole product decides."""
    return torch.rand(3000, 400, generator=seeded(0)), torch.rand(60, 400, generator=seeded(1))


SITUATIONS = [
    in_clusters,
    closer_than_products_can_tell,
    in_the_bank,
    far_from_everything,
    without_structure,
]


@cache
def measured(made: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, np.ndarray]:
    bank, queries = made()
    return bank, queries, cdist(queries.double(), bank.double())


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("made", SITUATIONS)
def test_same_as_the_distance_matrix(way: str, made: Callable[[], tuple[Tensor, Tensor]]) -> None:
    bank, queries, exact = measured(made)
    search = neighbours(bank, way).search
    for k in (1, 4):
        distances, indices = (t.numpy() for t in search(queries, k))
        expected = np.sort(exact, axis=1)[:, :k]
        assert indices.dtype == np.int64
        assert distances == pytest.approx(expected, rel=1e-5)
        assert np.take_along_axis(exact, indices, 1) == pytest.approx(expected, rel=1e-6)
        assert all(len(set(row)) == k for row in indices.tolist())
    apart = torch.cat([search(part)[0] for part in queries.tensor_split(3)])
    assert float((apart - search(queries)[0]).abs().max()) <= 1e-5


def test_distances_can_be_differentiated() -> None:
    bank, queries = blobs(2000, 200), blobs(20, 200, seed=1).requires_grad_()
    distances, indices = NearestNeighbors(bank).search(queries, 2)
    distances.sum().backward()
    ways = torch.nn.functional.normalize(queries.detach()[:, None] - bank[indices], dim=2)
    torch.testing.assert_close(queries.grad, ways.sum(1))


@settings(max_examples=40)
@given(
    m=st.integers(1, 700),
    q=st.integers(0, 60),
    dim=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 4, 10**6]),
    way=st.sampled_from(EXACT),
    k=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_any_bank(m: int, q: int, dim: int, levels: int, way: str, k: int, seed: int) -> None:
    """Few levels make duplicates and ties, one level a bank of equal vectors."""
    g = seeded(seed)
    bank = torch.randint(levels, (m, dim), generator=g).float() / levels
    queries = torch.randint(levels, (q, dim), generator=g).float() / levels
    distances, indices = neighbours(bank, way).search(queries, k)
    assert distances.shape == indices.shape == (q, min(k, m))
    if q:
        expected = np.sort(cdist(queries.double(), bank.double()), axis=1)[:, :k]
        assert distances.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where inverted lists are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "anomaly"


def test_inverted_lists_find_nearly_all_and_are_cached(cached: Path) -> None:
    bank, queries = blobs(6000, 32), blobs(500, 32, seed=3)
    exact = neighbours(bank, "product").search(queries)[1]
    first = NearestNeighbors(bank, "ivf").search(queries)[1]
    assert float((exact == first).float().mean()) > 0.9
    (file,) = cached.iterdir()
    stamp = file.stat().st_mtime_ns
    again = NearestNeighbors(bank, "ivf").search(queries)[1]
    assert file.stat().st_mtime_ns == stamp
    file.write_bytes(b"damaged")
    repaired = NearestNeighbors(bank, "ivf").search(queries)[1]
    assert len(file.read_bytes()) > 1000
    assert torch.equal(first, again)
    assert torch.equal(first, repaired)


@pytest.mark.usefixtures("cached")
def test_inverted_lists_that_hold_too_few() -> None:
    bank = blobs(100, 4)
    distances, indices = NearestNeighbors(bank, "ivf").search(bank[:3], 90)
    assert int(indices.min()) >= 0
    assert distances.numpy() == pytest.approx(
        np.sort(cdist(bank[:3].double(), bank.double()), 1)[:, :90], rel=1e-5, abs=1e-5
    )


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("way", [*EXACT, "ivf"])
def test_a_query_that_is_no_number_harms_no_other(way: str) -> None:
    bank, queries = blobs(3000, 17), blobs(20, 17, seed=1)
    search = NearestNeighbors(bank, "ivf") if way == "ivf" else neighbours(bank, way)
    expected = search.search(queries)[0]
    others = torch.arange(20) != 7
    for strange in (math.nan, -math.nan, math.inf, 1e30):
        queries[7, 3] = strange
        distances = search.search(queries)[0]
        assert not bool(distances[7] < 1e18)
        assert bool(distances[7].isnan()) == math.isnan(strange)
        assert torch.equal(distances[others], expected[others])
    for k in (1, 3):
        distances, indices = search.search(torch.full((5, 17), math.nan), k)
        assert indices.shape == (5, k)
        assert bool(distances.isnan().all())


@pytest.mark.parametrize("way", ["product", "screen"])
def test_the_matrix_is_never_whole(way: str) -> None:
    """It would take 128 MB; each thread has a part of its own."""
    bank, queries = blobs(8000, 8), blobs(4000, 8, seed=1)
    search = neighbours(bank, way)
    torch.set_num_threads(1)
    with most_bytes(60e6):
        search.search(queries)
