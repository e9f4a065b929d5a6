"""Nearest neighbours against the whole distance matrix in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from anomaly.scorers.patchcore.search.array_index import ArrayIndex
from anomaly.scorers.patchcore.search.bfloat16_screen import BFloat16Screen
from anomaly.scorers.patchcore.search.coarse_screen import (
    Float32Screen,
    Int8Screen,
    has_exact_int8,
)
from anomaly.scorers.patchcore.search.screened_index import ScreenedIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from anomaly.errors import ConfigError
from anomaly.report.product_index import product_index
from anomaly.scorers.patchcore.search import NearestNeighbors, coordinates, screened_index

EXACT = ["product", "screened", "faiss"]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
PLACES = [(m, "cpu") for m in EXACT] + [pytest.param("product", "cuda", marks=GPU)]


def blobs(n: int, dim: int, seed: int = 0, clusters: int = 30) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(clusters, (n,), generator=g)
    return centres[which] + torch.rand(n, 1, generator=g) * torch.randn(n, dim, generator=g)


@pytest.mark.parametrize(("method", "device"), PLACES)
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize(("m", "dim"), [(1, 3), (37, 8), (3000, 64), (5000, 200)])
def test_same_as_the_distance_matrix(method: str, device: str, k: int, m: int, dim: int) -> None:
    bank, queries = blobs(m, dim), blobs(300, dim, seed=1)
    found = NearestNeighbors(bank.to(device), method).search(queries.to(device), k)
    distances, indices = (t.cpu().numpy() for t in found)
    exact = cdist(queries.double(), bank.double())
    expected = np.sort(exact, axis=1)[:, :k]
    assert distances.shape == indices.shape == expected.shape
    assert indices.dtype == np.int64
    assert distances == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert np.take_along_axis(exact, indices, 1) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


@pytest.mark.parametrize(("method", "device"), PLACES)
def test_a_vector_of_the_bank_is_at_distance_zero(method: str, device: str) -> None:
    bank = (blobs(4500, 48) + 500).to(device)  # far from the origin, where squares cancel
    distances, indices = NearestNeighbors(bank, method).search(bank[:700])
    assert float(distances.max()) == 0
    assert torch.equal(indices[:, 0].cpu(), torch.arange(700))


@pytest.mark.parametrize(("method", "device"), PLACES)
@pytest.mark.parametrize("k", [1, 3])
def test_neighbours_closer_than_products_can_tell(method: str, device: str, k: int) -> None:
    """Bank vectors in bunches of 8 that differ by less than what float32 leaves of large norms."""
    g = torch.Generator().manual_seed(3)
    centres = 1000 + 100 * torch.randn(300, 24, generator=g)
    bank = (centres.repeat_interleave(8, 0) + 0.01 * torch.randn(2400, 24, generator=g)).to(device)
    queries = bank[torch.randperm(2400, generator=g)[:400]].cpu()
    queries = queries + 0.01 * torch.randn(400, 24, generator=g)
    distances, indices = NearestNeighbors(bank, method).search(queries.to(device), k)
    exact = cdist(queries.double(), bank.double().cpu())
    expected = np.sort(exact, axis=1)[:, :k]
    assert distances.cpu().numpy() == pytest.approx(expected, rel=1e-5)
    assert np.take_along_axis(exact, indices.cpu().numpy(), 1) == pytest.approx(expected, rel=1e-5)


quick = pytest.mark.skipif(not has_exact_int8(), reason="no exact products of 8-bit numbers here")
SCREENS = [Float32Screen, BFloat16Screen, pytest.param(Int8Screen, marks=quick)]


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize(("m", "k"), [(1024, 1), (2999, 3), (3008, 1)])  # 3008 = 47 · 64
def test_some_vectors_of_a_larger_bank(
    m: int, k: int, screen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screened_index, "_screen", lambda: screen)
    bank, queries = blobs(4032, 200), blobs(500, 200, seed=1)  # 4032 = 63 · 64
    rows = torch.randperm(4032, generator=torch.Generator().manual_seed(2))[:m]
    whole = NearestNeighbors(bank)
    monkeypatch.setattr(coordinates, "_leading_axes", None)  # nothing is fitted anew
    distances, indices = NearestNeighbors(bank[rows], within=(whole, rows)).search(queries, k)
    expected = NearestNeighbors(bank[rows], "product").search(queries, k)
    assert torch.equal(distances, expected[0])
    assert torch.equal(indices, expected[1])
    monkeypatch.undo()
    again = whole.search(queries, k)[0]  # which stays as it is
    assert torch.equal(again, NearestNeighbors(bank, "product").search(queries, k)[0])


@pytest.mark.parametrize(("method", "device"), PLACES)
def test_alone_or_in_a_batch(method: str, device: str) -> None:
    bank, queries = blobs(5000, 96).to(device), blobs(2500, 96, seed=2).to(device)
    search = NearestNeighbors(bank, method).search
    together = search(queries)[0]
    parts = torch.cat([search(part)[0] for part in queries.split(611)])
    assert float((together - parts).abs().max()) <= 1e-5
    assert torch.equal(together, search(queries)[0])


def test_queries_far_from_everything() -> None:
    """The screen rules out little for such queries; the answer stays exact."""
    bank, queries = blobs(4500, 32), 40 * torch.randn(200, 32)
    distances, _ = NearestNeighbors(bank, "screened").search(queries)
    assert distances[:, 0].numpy() == pytest.approx(
        cdist(queries.double(), bank.double()).min(1), rel=2e-6
    )


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 700),
    q=st.integers(0, 60),
    dim=st.integers(1, 12),
    levels=st.sampled_from([1, 2, 4, 10**6]),
    method=st.sampled_from(EXACT),
    k=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_any_bank(m: int, q: int, dim: int, levels: int, method: str, k: int, seed: int) -> None:
    """Few levels make duplicates and ties, one level a bank of equal vectors."""
    g = torch.Generator().manual_seed(seed)
    bank = torch.randint(levels, (m, dim), generator=g).float() / levels
    queries = torch.randint(levels, (q, dim), generator=g).float() / levels
    distances, indices = NearestNeighbors(bank, method).search(queries, k)
    assert distances.shape == indices.shape == (q, min(k, m))
    if q:
        expected = np.sort(cdist(queries.double(), bank.double()), axis=1)[:, :k]
        assert distances.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_inverted_lists_find_nearly_all() -> None:
    bank, queries = blobs(6000, 32), blobs(500, 32, seed=3)
    exact = NearestNeighbors(bank, "product").search(queries)[1]
    found = NearestNeighbors(bank, "ivf").search(queries)[1]
    assert float((exact == found).float().mean()) > 0.9


def test_inverted_lists_that_hold_too_few() -> None:
    bank = blobs(100, 4)
    distances, indices = NearestNeighbors(bank, "ivf").search(bank[:3], 90)
    assert int(indices.min()) >= 0
    assert distances.numpy() == pytest.approx(
        np.sort(cdist(bank[:3].double(), bank.double()), 1)[:, :90], rel=1e-5, abs=1e-5
    )


def test_inverted_lists_are_cached(tmp_path: Path) -> None:
    bank, queries = blobs(3000, 16), blobs(200, 16, seed=4)
    first = NearestNeighbors(bank, "ivf", tmp_path / "cache").search(queries)
    (file,) = (tmp_path / "cache").iterdir()
    stamp = file.stat().st_mtime_ns
    again = NearestNeighbors(bank, "ivf", tmp_path / "cache").search(queries)
    assert file.stat().st_mtime_ns == stamp
    assert torch.equal(first[1], again[1])
    file.write_bytes(b"damaged")
    repaired = NearestNeighbors(bank, "ivf", tmp_path / "cache").search(queries)
    assert torch.equal(first[1], repaired[1])
    assert len(file.read_bytes()) > 1000


def test_auto_goes_by_size_and_is_exact() -> None:
    small, large = (NearestNeighbors(blobs(n, 8)) for n in (1000, 5000))
    assert small.method == "product"
    assert large.method == "screened"


def test_embeddings_without_structure() -> None:
    """The screen lets nearly all vectors of uniform noise pass: the whole product decides."""
    g = torch.Generator().manual_seed(0)
    bank, queries = torch.rand(6000, 512, generator=g), torch.rand(100, 512, generator=g)
    distances, indices = NearestNeighbors(bank, "screened").search(queries)
    exact = cdist(queries.double(), bank.double())
    assert indices[:, 0].tolist() == exact.argmin(1).tolist()
    assert distances[:, 0].numpy() == pytest.approx(exact.min(1), rel=1e-5)


@pytest.mark.parametrize("method", ["product", "screened", "faiss", "ivf"])
def test_a_query_with_nan_harms_no_other(method: str) -> None:
    bank, queries = blobs(3000, 16), blobs(20, 16, seed=1)
    expected = NearestNeighbors(bank, method).search(queries)[0]
    queries[7, 3] = float("nan")
    distances = NearestNeighbors(bank, method).search(queries)[0]
    assert bool(distances[7].isnan())
    others = torch.arange(20) != 7
    assert torch.equal(distances[others], expected[others])


@pytest.mark.parametrize("screen", SCREENS)
def test_queries_that_are_all_nan_are_no_error(
    screen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screened_index, "_screen", lambda: screen)
    index = NearestNeighbors(blobs(3000, 16), "screened")
    for k in (1, 3):
        distances, found = index.search(torch.full((5, 16), float("nan")), k)
        assert found.shape == (5, k)
        assert bool(distances.isnan().all())


def test_the_screen_spares_most_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of structured embeddings only a few vectors a query are measured whole."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(40, 600, generator=g)
    bank = torch.randn(4096, 40, generator=g) @ mix + 0.1 * torch.randn(4096, 600, generator=g)
    queries = bank[:500] + torch.randn(500, 600, generator=g)
    whole = 0
    original = ScreenedIndex._squared

    def spy(index: ScreenedIndex, *args: torch.Tensor) -> torch.Tensor:
        nonlocal whole
        whole += len(args[-1])
        return original(index, *args)

    monkeypatch.setattr(ScreenedIndex, "_squared", spy)
    NearestNeighbors(bank, "screened").search(queries)
    assert 500 <= whole < 500 * 4096 / 50


@pytest.mark.parametrize("find", [*SCREENS, ArrayIndex])
@pytest.mark.parametrize(("reach", "seed"), [(1.0, 1), (3.0, 1), (10.0, 2)])
def test_queries_with_hardly_anything_beside_the_axes(
    find: type, reach: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There float32 moves what is left of them by much, and distances are what is left of vectors.

    Each query has two neighbours, of nearly the same distance.
    """
    g = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(300, 122, generator=g))[0].T
    spread, beside = axes[:121], axes[121]
    places = 100 * torch.randn(2000, 121, generator=g)
    bank = places @ spread + 30 * torch.rand(2000, 1, generator=g) * beside
    near = torch.randint(0, 2000, (800,), generator=g)
    queries = places[near] @ spread + reach * torch.rand(800, 1, generator=g) * beside
    ways = torch.nn.functional.normalize(torch.randn(800, 121, generator=g))
    apart = 1.0001 * (bank[near] @ beside)
    bank = torch.cat([bank, queries + apart[:, None] * (ways @ spread)])
    if find is ArrayIndex:
        found = torch.from_numpy(ArrayIndex(bank.numpy()).search(queries.numpy())[1])
    else:
        monkeypatch.setattr(screened_index, "_screen", lambda: find)
        found = NearestNeighbors(bank, "screened").search(queries)[1]
    exact = cdist(queries.double(), bank.double())
    distances = np.take_along_axis(exact, found.numpy(), 1)[:, 0]
    assert bool((distances <= exact.min(1) * (1 + 2e-6) + 1e-6).all())


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match="did you mean 'faiss'"):
        NearestNeighbors(torch.zeros(3, 2), "fais")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", ["screened", "faiss", "ivf"])
def test_cpu_methods_refuse_cuda(method: str) -> None:
    with pytest.raises(ConfigError, match="CPU only"):
        NearestNeighbors(torch.zeros(3, 2, device="cuda"), method)


def test_the_matrix_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest product is a block: 1024 × 2048, however many queries and vectors there are."""
    largest = 0
    original = torch.addmm

    def spy(*args: torch.Tensor, **kwargs: float) -> torch.Tensor:
        nonlocal largest
        out = original(*args, **kwargs)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(product_index.torch, "addmm", spy)
    NearestNeighbors(blobs(9000, 8), "product").search(blobs(9000, 8))
    assert 0 < largest <= 1024 * 2048


def test_faiss_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, torch; "
        "from anomaly.scorers.patchcore.search.neighbors import NearestNeighbors as N; "
        "N(torch.rand(50, 4)).search(torch.rand(5, 4)); assert 'faiss' not in sys.modules; "
        "N(torch.rand(50, 4), 'faiss').search(torch.rand(5, 4)); assert 'faiss' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
