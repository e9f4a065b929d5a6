"""Nearest neighbours against the whole distance matrix in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from anomaly.errors import ConfigError
from anomaly.methods.patchcore import search as search_module
from anomaly.methods.patchcore.distances import AXES, Dtype
from anomaly.methods.patchcore.search import ExactIndex, NearestNeighbors, quickest_screen

# By a product of all dimensions, by a screen in a dtype, by faiss.
EXACT = ["product", "float32", "bfloat16", "faiss"]
SCREENS: list[Dtype] = ["float32", "bfloat16"]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
PLACES = [(m, "cpu") for m in EXACT] + [pytest.param("product", "cuda", marks=GPU)]


def neighbours(bank: torch.Tensor, way: str) -> NearestNeighbors:
    """The search of a bank in one of the ways in `EXACT`."""
    if way == "faiss":
        return NearestNeighbors(bank, "faiss")
    dtypes: dict[str, Dtype | None] = {"float32": "float32", "bfloat16": "bfloat16"}
    return NearestNeighbors(bank, index=ExactIndex(bank, dtypes.get(way)))


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
    found = neighbours(bank.to(device), method).search(queries.to(device), k)
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
    distances, indices = neighbours(bank, method).search(bank[:700])
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
    distances, indices = neighbours(bank, method).search(queries.to(device), k)
    exact = cdist(queries.double(), bank.double().cpu())
    expected = np.sort(exact, axis=1)[:, :k]
    assert distances.cpu().numpy() == pytest.approx(expected, rel=1e-5)
    assert np.take_along_axis(exact, indices.cpu().numpy(), 1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("way", ["product", *SCREENS])
@pytest.mark.parametrize("k", [1, 4])
def test_all_find_the_nearest(way: str, k: int) -> None:
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(40, 500, generator=g)
    bank = torch.randn(3000, 40, generator=g) @ mix + 0.3 * torch.randn(3000, 500, generator=g) + 9
    queries = bank[:300] + torch.randn(300, 500, generator=g)
    indices = neighbours(bank, way).search(queries, k)[1]
    exact = cdist(queries.double(), bank.double()).argsort(1)[:, :k]
    np.testing.assert_array_equal(indices, exact)


def test_tensors_that_are_searched_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There by torch's functions, not numpy's; this machine may have no GPU."""
    monkeypatch.setattr(search_module, "device_of", lambda values: SimpleNamespace(type="cuda"))
    bank, queries = blobs(3000, 60), blobs(400, 60, seed=1)
    queries[7] = float("nan")
    for k in (1, 3):
        distances, indices = neighbours(bank, "product").search(queries, k)
        exact = cdist(queries.double(), bank.double()).argsort(1)[:, :k]
        others = np.arange(400) != 7
        np.testing.assert_array_equal(indices.numpy()[others], exact[others])
        assert bool(distances[7].isnan().all())


def test_distances_can_be_differentiated() -> None:
    bank, queries = blobs(2000, 200), blobs(20, 200, seed=1).requires_grad_()
    distances, indices = NearestNeighbors(bank).search(queries, 2)
    distances.sum().backward()
    ways = torch.nn.functional.normalize(queries.detach()[:, None] - bank[indices], dim=2)
    torch.testing.assert_close(queries.grad, ways.sum(1))


@pytest.mark.parametrize(("method", "device"), PLACES)
def test_alone_or_in_a_batch(method: str, device: str) -> None:
    bank, queries = blobs(5000, 96).to(device), blobs(2500, 96, seed=2).to(device)
    search = neighbours(bank, method).search
    together = search(queries)[0]
    parts = torch.cat([search(part)[0] for part in queries.split(611)])
    assert float((together - parts).abs().max()) <= 1e-5
    assert torch.equal(together, search(queries)[0])


def test_queries_far_from_everything() -> None:
    """The screen rules out little for such queries; the answer stays exact."""
    bank, queries = blobs(4500, 32), 40 * torch.randn(200, 32)
    distances, _ = neighbours(bank, "float32").search(queries)
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
    distances, indices = neighbours(bank, method).search(queries, k)
    assert distances.shape == indices.shape == (q, min(k, m))
    if q:
        expected = np.sort(cdist(queries.double(), bank.double()), axis=1)[:, :k]
        assert distances.numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_inverted_lists_find_nearly_all() -> None:
    bank, queries = blobs(6000, 32), blobs(500, 32, seed=3)
    exact = neighbours(bank, "product").search(queries)[1]
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


@pytest.mark.parametrize(
    ("capabilities", "allowed", "dimensions", "expected"),
    [
        ({"amx_bf16": True}, True, 500, "bfloat16"),
        ({"avx512_bf16": True}, True, 500, "bfloat16"),
        ({"avx512_bf16": True}, True, 100, "bfloat16"),
        ({"amx_bf16": True}, False, 500, "float32"),
        ({"avx512_vnni": True}, True, 500, "float32"),
        ({}, True, 500, "float32"),
        ({}, True, 100, "float32"),
    ],
)
def test_the_screen_is_the_processors(
    capabilities: dict[str, bool], allowed: bool, dimensions: int, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: allowed)
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    bank = torch.zeros(2000, dimensions)
    assert quickest_screen(bank) == expected
    assert quickest_screen(bank[:1000]) is None
    # Torch may be absent where arrays are searched.
    assert quickest_screen(bank.numpy()) == "float32"


def test_embeddings_without_structure() -> None:
    """The screen lets nearly all vectors of uniform noise pass: the whole product decides."""
    g = torch.Generator().manual_seed(0)
    bank, queries = torch.rand(6000, 512, generator=g), torch.rand(100, 512, generator=g)
    distances, indices = neighbours(bank, "float32").search(queries)
    exact = cdist(queries.double(), bank.double())
    assert indices[:, 0].tolist() == exact.argmin(1).tolist()
    assert distances[:, 0].numpy() == pytest.approx(exact.min(1), rel=1e-5)


@pytest.mark.parametrize("method", [*EXACT, "ivf"])
@pytest.mark.parametrize("strange", [math.nan, -math.nan, math.inf, 1e30])
def test_a_query_that_is_no_number_harms_no_other(method: str, strange: float) -> None:
    bank, queries = blobs(3000, 17), blobs(20, 17, seed=1)
    search = NearestNeighbors(bank, "ivf") if method == "ivf" else neighbours(bank, method)
    expected = search.search(queries)[0]
    queries[7, 3] = strange
    distances = search.search(queries)[0]
    assert not bool(distances[7] < 1e18)
    assert bool(distances[7].isnan()) == math.isnan(strange)
    others = torch.arange(20) != 7
    assert torch.equal(distances[others], expected[others])


@pytest.mark.parametrize("way", EXACT)
def test_queries_that_are_all_nan_are_no_error(way: str) -> None:
    search = neighbours(blobs(3000, 16), way).search
    for k in (1, 3):
        distances, indices = search(torch.full((5, 16), float("nan")), k)
        assert indices.shape == (5, k)
        assert bool(distances.isnan().all())


@pytest.mark.parametrize("way", SCREENS)
def test_the_screen_spares_most_distances(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of structured embeddings only a few vectors a query are measured whole."""
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(40, 600, generator=g)
    bank = torch.randn(4096, 40, generator=g) @ mix + 0.1 * torch.randn(4096, 600, generator=g)
    queries = bank[:500] + torch.randn(500, 600, generator=g)
    measured = 0
    original = search_module.squared_distances

    def spy(*args: np.ndarray) -> np.ndarray:
        nonlocal measured
        measured += len(args[-1])
        return original(*args)

    monkeypatch.setattr(search_module, "squared_distances", spy)
    monkeypatch.setattr(search_module, "half_squared_distances", None)
    neighbours(bank, way).search(queries)
    assert 500 <= measured < 500 * 4096 / 50


@pytest.mark.parametrize("way", SCREENS)
@pytest.mark.parametrize(("reach", "seed"), [(1.0, 1), (3.0, 1), (10.0, 2)])
def test_queries_with_hardly_anything_beside_the_axes(
    way: Dtype, reach: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There float32 moves what is left of them by much, and distances are what is left of vectors.

    Each query has two neighbours, of nearly the same distance.
    """
    monkeypatch.setitem(AXES, way, 121)
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
    indices = neighbours(bank, way).search(queries)[1]
    exact = cdist(queries.double(), bank.double())
    distances = np.take_along_axis(exact, indices.numpy(), 1)[:, 0]
    assert bool((distances <= exact.min(1) * (1 + 2e-6) + 1e-6).all())


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match="did you mean 'faiss'"):
        NearestNeighbors(torch.zeros(3, 2), "fais")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", ["faiss", "ivf"])
def test_cpu_methods_refuse_cuda(method: str) -> None:
    with pytest.raises(ConfigError, match="CPU only"):
        NearestNeighbors(torch.zeros(3, 2, device="cuda"), method)


@pytest.mark.parametrize("way", ["product", *SCREENS])
def test_the_matrix_is_never_whole(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest product is a block, however many queries and vectors there are."""
    largest = 0
    original = search_module._take_least

    def spy(bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        nonlocal largest
        largest = max(largest, bounds.size)
        return original(bounds, rows)

    monkeypatch.setattr(search_module, "_take_least", spy)
    neighbours(blobs(9000, 8), way).search(blobs(9000, 8))
    assert 0 < largest <= 1 << 22


def test_faiss_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, torch; "
        "from anomaly.methods.patchcore.search import NearestNeighbors as N; "
        "N(torch.rand(50, 4)).search(torch.rand(5, 4)); assert 'faiss' not in sys.modules; "
        "N(torch.rand(50, 4), 'faiss').search(torch.rand(5, 4)); assert 'faiss' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
