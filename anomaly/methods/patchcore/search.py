"""Nearest bank vectors: exact, or by faiss; an index is derived from the bank, never saved.

Torch tensors and numpy arrays alike; imports torch to ask what a processor can do.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anomaly.arrays import Array, as_numpy, like, module_of
from anomaly.errors import ConfigError, nearest
from anomaly.methods.base import device_of
from anomaly.methods.patchcore.distances import (
    ROUNDING,
    Dtype,
    Floats,
    Screen,
    distances_to,
    half_squared_distances,
    squared_distances,
    squared_norms,
)
from anomaly.runtime.devices import has_bf16
from anomaly.runtime.parallel import get_threads, one_blas_thread, parallel_map

METHODS = ("exact", "faiss", "ivf")
# Numbers of one product, queries × bank: 16 MiB stay in a CPU's cache; a GPU wants few launches.
_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 27}
# Queries of one product at most.
_QUERIES = {"cpu": 512, "cuda": 1 << 16}
# Below so many vectors one product of all dimensions is quicker than a screen.
_LEAST_SCREENED = 1024
# When more than this share of the bank may be nearest to a query, the whole product is quicker.
_MANY = 1 / 16
# Of the inverted lists: measured recall 0.988 to 0.998.
_LISTS_PROBED = 4
# Queries whose squared norms are larger are as good as infinite: products would overflow.
_LARGEST = 1e30


class Index(Protocol):
    """Finds the nearest bank vectors."""

    def candidates(self, queries: Array, k: int) -> Array:
        """The k nearest (Q, k) int64 of queries (Q, D), in any order, 1 <= k <= M."""
        ...


class NearestNeighbors:
    """The k nearest bank vectors and their measured distances.

    An index only names candidates. Their distances are taken afterwards as ‖x − y‖, not from
    ‖x‖² − 2xy + ‖y‖², which cancels: a vector of the bank is at distance 0 from itself, and a
    query's distance doesn't depend on what else is searched with it.

    Args:
        bank: (M, D) float32, a tensor on the device where queries will be, or an array.
        method: `exact`, or `faiss` (Flat, CPU), or `ivf` (faiss inverted lists, approximate, CPU).
        cache: a folder for trained `ivf` indices; they are trained anew where it is None.
        index: what finds candidates; None to make it.

    Raises:
        ConfigError: an unknown method, or one that doesn't run on the bank's device.
    """

    def __init__(
        self,
        bank: Array,
        method: str = "exact",
        cache: Path | None = None,
        index: Index | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"search method {method!r} is unknown; {nearest(method, METHODS)}")
        if method != "exact" and device_of(bank).type != "cpu":
            raise ConfigError(f"search method {method!r} runs on the CPU only; use 'exact'")
        self._bank = bank
        if index is None and method == "exact":
            index = ExactIndex(bank, quickest_screen(bank))
        elif index is None:
            index = FaissIndex(bank, ExactIndex(bank, None) if method == "faiss" else None, cache)
        self._index = index

    def of_most(self, bank: Array) -> NearestNeighbors | None:
        """Neighbours in a bank of mostly the same vectors; None where that saves no time."""
        if not isinstance(self._index, ExactIndex):
            return None
        return NearestNeighbors(bank, index=self._index.of_most(bank))

    def search(self, queries: Array, k: int = 1) -> tuple[Array, Array]:
        """Find the nearest bank vectors.

        Args:
            queries: (Q, D) float32.
            k: how many each; at most M are returned.

        Returns:
            (Q, k) float32 Euclidean distances, ascending and differentiable in the queries, and
            (Q, k) int64 indices. NaN, and any vector, for a query with NaN.
        """
        k = min(k, len(self._bank))
        if not len(queries):
            empty = np.empty((0, k))
            return like(empty.astype(np.float32), queries), like(empty.astype(np.int64), queries)
        candidates = self._index.candidates(queries, k)
        distances = distances_to(self._bank, queries, candidates)
        if k == 1:
            return distances, candidates
        order = like(np.arange(len(queries))[:, None], queries), _ascending(distances)
        return distances[order], candidates[order]


class ExactIndex:
    """Exact search: lower bounds rule out most vectors, the others are measured.

    The k vectors with the least bounds are measured first. No other vector whose bound is beyond
    the farthest of these can be among the k nearest; the rest are measured, too. Patch embeddings
    lie near few dimensions, so that the bounds of a `Screen` rule out all but some dozen vectors of
    a large bank. Where they don't (a query unlike anything, or embeddings without structure), in
    small banks and on a GPU the bounds are the distances by a product of all dimensions, less
    rounding. The result is exact in every case.

    Args:
        bank: (M, D) float32. Tensors on the CPU are searched as arrays.
        dtype: of the screen, on the CPU; None for the product of all dimensions.
        axes: the screen's, see `Screen`; None for the bank's own.
    """

    def __init__(self, bank: Array, dtype: Dtype | None, axes: Floats | None = None) -> None:
        self._device = device_of(bank)
        self._bank = as_numpy(bank) if self._device.type == "cpu" else bank
        self._mean = self._bank.mean(0)
        self._screen = None
        if dtype is not None:
            with one_blas_thread():
                self._screen = Screen.of(self._bank, self._mean, dtype, axes)

    def of_most(self, bank: Array) -> ExactIndex:
        """That of a bank of mostly the same vectors, on the same axes; finding these takes long."""
        screen = self._screen
        if screen is None or len(bank) < _LEAST_SCREENED:
            return ExactIndex(bank, quickest_screen(bank))
        return ExactIndex(bank, screen.dtype, screen.axes)

    def candidates(self, queries: Array, k: int) -> Array:
        """The k nearest (Q, k) int64 of queries (Q, D); any of a query that isn't finite."""
        values = as_numpy(queries) if self._device.type == "cpu" else queries.detach()
        finite = squared_norms(values) <= _LARGEST
        values = module_of(values).where(finite[:, None], values, 0)
        indices = self._in_blocks(values, k, self._screen)
        undecided = indices[:, 0] < 0
        if undecided.any():
            indices[undecided] = self._in_blocks(values[undecided], k, None)
        return like(indices, queries) if self._device.type == "cpu" else indices

    def _in_blocks(self, queries: Array, k: int, screen: Screen | None) -> Array:
        """`_nearest` of queries (Q, D), block by block."""
        kind = self._device.type
        threads = get_threads() if kind == "cpu" else 1
        most = max(1, min(_QUERIES[kind], _BLOCK[kind] // len(self._bank)))
        count = -(-len(queries) // (most * threads)) * threads  # so that threads have equal shares
        step = -(-len(queries) // count)
        blocks = [queries[start : start + step] for start in range(0, len(queries), step)]
        with one_blas_thread():
            indices = parallel_map(partial(self._nearest, k=k, screen=screen), blocks, self._device)
        return module_of(queries).concatenate(indices)

    def _nearest(self, queries: Array, k: int, screen: Screen | None) -> Array:
        """The k nearest (Q, k) of each query; -1 where the screen rules out too few."""
        xp, bank, centred = module_of(queries), self._bank, queries - self._mean
        moved: Array = 0.0
        if screen is None:
            bounds = half_squared_distances(centred, bank, self._mean)
        else:
            bounds, moved = screen.bounds(centred)
        every = like(np.arange(len(queries)), queries)
        rows = xp.concatenate([every] * k)
        columns = xp.concatenate([_take_least(bounds, every) for _ in range(k)])
        squared = squared_distances(queries, bank, rows, columns)
        farthest = xp.amax(squared.reshape(k, -1), 0)
        rounding = ROUNDING * (squared_norms(centred) + farthest)
        limits = ((xp.sqrt(farthest) + moved) ** 2 + rounding) / 2
        near, others = _places(bounds <= (screen.limits(limits) if screen else limits)[:, None])
        many = xp.bincount(near, minlength=len(queries)) > (_MANY if screen else 1) * len(bank)
        near, others = near[~many[near]], others[~many[near]]
        more = squared_distances(queries, bank, near, others)
        rows, columns = xp.concatenate([rows, near]), xp.concatenate([columns, others])
        nearest = columns[_first_of_each(rows, xp.concatenate([squared, more]), k)]
        nearest[many] = -1
        return nearest


class FaissIndex:
    """Search by faiss on the CPU, with the program's number of threads.

    Args:
        bank: (M, D) float32 on the CPU.
        exact: finds what faiss's float32 products can't tell apart; None to search inverted lists,
            of which the 4 nearest of about 4√M are: approximate.
        cache: folder for the trained inverted lists.
    """

    def __init__(self, bank: Array, exact: Index | None, cache: Path | None = None) -> None:
        # Heavy, and wanted by few.
        import faiss

        self._faiss: Any = faiss
        # Relative to the mean: faiss multiplies distances out, and large norms would cancel.
        self._mean = as_numpy(bank.mean(0))
        vectors = np.ascontiguousarray(as_numpy(bank) - self._mean)
        self._exact = exact
        self._farthest = float(squared_norms(vectors).max())
        self._index: Any
        if exact is None:
            self._index = _inverted(vectors, cache)
        else:
            self._index = faiss.IndexFlatL2(vectors.shape[1])
            self._index.add(vectors)

    def candidates(self, queries: Array, k: int) -> Array:
        """The k nearest (Q, k) int64 of queries (Q, D); any of a query that is NaN."""
        self._faiss.omp_set_num_threads(get_threads())
        rows = np.ascontiguousarray(as_numpy(queries) - self._mean)
        if self._exact is not None:
            return self._flat(self._exact, queries, rows, k)
        nearest = self._index.search(rows, k)[1]
        # The probed lists may hold fewer than k vectors; then all of them are searched.
        short = (nearest < 0).any(1)
        if short.any():
            every = self._faiss.SearchParametersIVF(nprobe=self._index.nlist)
            nearest[short] = self._index.search(rows[short], k, params=every)[1]
        return like(nearest.clip(0), queries)

    def _flat(self, exact: Index, queries: Array, rows: Floats, k: int) -> Array:
        """The k nearest by faiss; measured if float32 products are ambiguous."""
        scores, indices = self._index.search(rows, min(k + 1, self._index.ntotal))
        nearest = indices[:, :k].copy()
        if indices.shape[1] > k:
            slack = ROUNDING * (squared_norms(rows) + self._farthest)
            close = scores[:, k] - scores[:, k - 1] <= slack
            if close.any():
                nearest[close] = as_numpy(exact.candidates(queries[close], k))
        return like(nearest.clip(0), queries)


def _inverted(vectors: Floats, cache: Path | None) -> Any:
    """Inverted lists of vectors (M, D), trained or from the cache."""
    import faiss  # heavy, and wanted by few

    key = hashlib.sha256(vectors.data).hexdigest()[:32]
    file = cache and cache / f"ivf-{key}-faiss{faiss.__version__}.index"
    index: Any = None
    if file is not None and file.is_file():
        with suppress(RuntimeError):  # one that is damaged is made, and written, anew
            index = faiss.read_index(str(file))
    if index is None:
        count, dim = vectors.shape
        # faiss wants 39 vectors a list to train
        lists = max(1, min(int(4 * count**0.5), count // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, lists)
        index.train(vectors)
        index.add(vectors)
        if file is not None:
            _write_index(index, file)
    index.nprobe = _LISTS_PROBED
    return index


def _write_index(index: Any, file: Path) -> None:
    import faiss  # heavy, and wanted by few

    # A cache that can't be written to costs time, no more.
    with suppress(OSError, RuntimeError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=file.parent, suffix=".part")
        os.close(handle)
        faiss.write_index(index, draft)
        Path(draft).replace(file)


def quickest_screen(bank: Array) -> Dtype | None:
    """The fastest dtype of the screen for a bank (M, D) on this machine.

    None where one product of all dimensions is quicker: in small banks, and on a GPU, which
    multiplies faster than it gathers. Arrays are searched where torch may be absent: in float32.
    """
    device = device_of(bank)
    if device.type != "cpu" or len(bank) < _LEAST_SCREENED:
        return None
    return "bfloat16" if not isinstance(bank, np.ndarray) and has_bf16(device) else "float32"


def _take_least(bounds: Array, rows: Array) -> Array:
    """The column (Q,) of each row's lowest bound; that bound is then set to infinity."""
    columns = bounds.argmin(1)
    bounds[rows, columns] = np.iinfo(np.int16).max if bounds.dtype == np.int16 else np.inf
    return columns


def _places(mask: Array) -> tuple[Array, Array]:
    """Rows and columns of True values, faster than `nonzero`."""
    flat = module_of(mask).argwhere(mask.reshape(-1))[:, 0]
    return flat // mask.shape[1], flat % mask.shape[1]


def _first_of_each(rows: Array, values: Array, k: int) -> Array:
    """The columns (Q, k) of the k lowest values of each row, ascending.

    Args:
        rows: (n,) int64; each of the numbers from 0 to Q − 1 occurs k times at least.
        values: (n,).
        k: how many.
    """
    xp, order = module_of(values), _ascending(values)
    order = order[_ascending(rows[order])]
    counts = xp.bincount(rows)
    starts = counts.cumsum(0) - counts
    return xp.stack([order[starts + place] for place in range(k)], 1)


def _ascending(values: Array) -> Array:
    """The stable order along the last axis."""
    if isinstance(values, np.ndarray):
        return values.argsort(kind="stable")
    return values.argsort(stable=True)
