"""Nearest bank vectors: exact, or by faiss; an index is derived from the bank, never saved.

Torch tensors and numpy arrays alike; imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import OutputError
from anomaly.files.writing import draft
from anomaly.imaging.arrays import Array, as_numpy, like, module_of
from anomaly.methods.base import device_of
from anomaly.runtime import get_threads, one_blas_thread, parallel_map

Floats = NDArray[np.float32]

# Numbers of one product, queries × bank: 16 MiB stay in a CPU's cache; a GPU wants few launches.
_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 27}
# Queries of one product at most.
_QUERIES = {"cpu": 512, "cuda": 1 << 16}
# Below so many vectors one product of all dimensions is quicker than a screen.
_LEAST_SCREENED = 1024
# When more than this share of the bank may be nearest to a query, the whole product is quicker.
_MANY = 1 / 16
# Inverted lists that are searched: measured recall 0.988 to 0.998.
_LISTS_PROBED = 4
# Queries with larger squared norms aren't searched: their products would overflow.
_LARGEST = 1e30
# Above float32's rounding of squared distances by products, relative to the squared norms.
_ROUNDING = 1e-5
# Above float32's rounding of squared norms, relative to themselves.
_NORM_ROUNDING = 2.0**-18
# Numbers of the pairs measured at once in `_distances_to`: 4 MiB; a GPU wants few launches.
_MEASURED = {"cpu": 1 << 20, "cuda": 1 << 28}
# Likewise in `_squared_distances`: 512 KiB stay in cache.
_GATHERED = {"cpu": 1 << 17, "cuda": 1 << 28}
# Bank vectors centred at once.
_CENTRED = 2048
# Principal axes of a screen for 1,536 dimensions; for others the number goes with their root.
# Vectors that these axes don't rule out are measured in all dimensions.
AXES = 185
_DIMENSIONS = 1536
# Vectors that the axes are fitted to, and steps of the iteration.
_FITTED = 2048
_ITERATIONS = 2


class NearestNeighbors:
    """The k nearest bank vectors and their measured distances.

    An index only names candidates. Their distances are taken afterwards as ‖x − y‖, not from
    ‖x‖² − 2xy + ‖y‖², which cancels: a vector of the bank is at distance 0 from itself, and a
    query's distance doesn't depend on the queries beside it.

    Args:
        bank: (M, D) float32, a tensor on the device of the queries, or an array.
        method: `exact`, or `faiss` (Flat, CPU), or `ivf` (faiss inverted lists, approximate, CPU).
        index: an exact index of the bank; None to make one by `method`.
    """

    def __init__(self, bank: Array, method: str = "exact", index: ExactIndex | None = None) -> None:
        self._bank = bank
        if index is not None or method == "exact":
            self._index: ExactIndex | FaissIndex = index or ExactIndex(bank, is_screened(bank))
        else:
            exact = ExactIndex(bank, screened=False) if method == "faiss" else None
            self._index = FaissIndex(bank, exact)

    def for_similar(self, bank: Array) -> NearestNeighbors | None:
        """The search in a bank of mostly the same vectors; None where faiss searches."""
        if not isinstance(self._index, ExactIndex):
            return None
        return NearestNeighbors(bank, index=self._index.for_similar(bank))

    def search(self, queries: Array, k: int = 1) -> tuple[Array, Array]:
        """Find the nearest bank vectors.

        Args:
            queries: (Q, D) float32.
            k: number of vectors for each query; at most M are returned.

        Returns:
            (Q, k) float32 Euclidean distances, ascending and differentiable in the queries, and
            (Q, k) int64 indices. NaN, and any vector, for a query with NaN; any vector and its
            distance for one with a squared norm above 1e30.
        """
        k = min(k, len(self._bank))
        if not len(queries):
            empty = np.empty((0, k))
            return like(empty.astype(np.float32), queries), like(empty.astype(np.int64), queries)
        candidates = self._index.candidates(queries, k)
        distances = _distances_to(self._bank, queries, candidates)
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
        screened: use a screen, on the CPU; else the product of all dimensions.
        axes: the screen's axes, see `Screen`; None for the bank's principal axes.
    """

    def __init__(self, bank: Array, screened: bool, axes: Floats | None = None) -> None:
        self._device = device_of(bank)
        self._bank = as_numpy(bank) if self._device.type == "cpu" else bank
        self._mean = self._bank.mean(0)
        self._screen = None
        if screened:
            with one_blas_thread():
                self._screen = Screen.of(self._bank, self._mean, axes)

    def for_similar(self, bank: Array) -> ExactIndex:
        """The index of a bank of mostly the same vectors; the axes, slow to find, are kept."""
        return ExactIndex(bank, is_screened(bank), self._screen.axes if self._screen else None)

    def candidates(self, queries: Array, k: int) -> Array:
        """Indices (Q, k) int64 of the k vectors nearest to queries (Q, D); any for one with NaN."""
        values = as_numpy(queries) if self._device.type == "cpu" else queries.detach()
        finite = _squared_norms(values) <= _LARGEST
        values = module_of(values).where(finite[:, None], values, 0)
        indices = self._in_blocks(values, k, self._screen)
        undecided = indices[:, 0] < 0  # the whole product is quicker for these
        if undecided.any():
            indices[undecided] = self._in_blocks(values[undecided], k, None)
        return like(indices, queries) if self._device.type == "cpu" else indices

    def _in_blocks(self, queries: Array, k: int, screen: Screen | None) -> Array:
        """`_nearest` of queries (Q, D), block by block."""
        kind = self._device.type
        threads = get_threads() if kind == "cpu" else 1
        most = max(1, min(_QUERIES[kind], _BLOCK[kind] // len(self._bank)))
        # Rounded up to a multiple of the threads, so that all have equal shares.
        count = -(-len(queries) // (most * threads)) * threads
        step = -(-len(queries) // count)
        blocks = [queries[start : start + step] for start in range(0, len(queries), step)]
        with one_blas_thread():
            indices = parallel_map(partial(self._nearest, k=k, screen=screen), blocks, self._device)
        return module_of(queries).concatenate(indices)

    def _nearest(self, queries: Array, k: int, screen: Screen | None) -> Array:
        """Indices (Q, k) of vectors nearest to queries (Q, D); -1: a screen excludes too few."""
        xp = module_of(queries)
        centred = queries - self._mean
        moved: Array = 0.0  # length by which rounding moves vectors
        if screen is None:
            bounds = _half_squared_distances(centred, self._bank, self._mean)
        else:
            bounds, moved = screen.bounds(centred)
        # The k vectors with the least bounds are measured.
        all_rows = like(np.arange(len(queries)), queries)
        rows = xp.concatenate([all_rows] * k)
        columns = xp.concatenate([_take_least(bounds, all_rows) for _ in range(k)])
        squared = _squared_distances(queries, self._bank, rows, columns)
        farthest = xp.amax(squared.reshape(k, -1), 0)
        rounding = _ROUNDING * (_squared_norms(centred) + farthest)
        # All others with bounds, half squared distances, up to the farthest of these are measured.
        limits = ((xp.sqrt(farthest) + moved) ** 2 + rounding) / 2
        more_rows, more_columns = _places(bounds <= limits[:, None])
        counts = xp.bincount(more_rows, minlength=len(queries))
        undecided = counts > (_MANY if screen else 1) * len(self._bank)
        decided = ~undecided[more_rows]
        more_rows, more_columns = more_rows[decided], more_columns[decided]
        more = _squared_distances(queries, self._bank, more_rows, more_columns)
        rows = xp.concatenate([rows, more_rows])
        columns = xp.concatenate([columns, more_columns])
        nearest = columns[_lowest_of_each(rows, xp.concatenate([squared, more]), k)]
        nearest[undecided] = -1
        return nearest


@dataclass(frozen=True, eq=False)
class Screen:
    """Lower bounds of distances to a bank, from few numbers of each vector.

    Vectors of few dimensions are multiplied whole. Of others, with orthonormal P and residuals
    r(x) = x − PPᵀx, ‖Pᵀx − Pᵀy‖² + (‖r(x)‖ − ‖r(y)‖)² never exceeds ‖x − y‖². Rounding moves a
    vector by a known length, and computed bounds exceed the distances by these lengths at most
    (triangle inequality).

    Attributes:
        axes: P (D, d), about the bank's leading principal axes; None for all dimensions.
        rows: (M, K) float32, the bank's vectors as rows of the product.
        moved: the largest length by which rounding moves a bank vector.
    """

    axes: Floats | None
    rows: Floats
    moved: Floats

    @classmethod
    def of(cls, bank: Floats, mean: Floats, axes: Floats | None = None) -> Screen:
        """The screen of a bank (M, D) with its mean (D,).

        Its axes (D, d) are the bank's principal axes unless orthonormal ones are given.
        """
        count = round(AXES * math.sqrt(bank.shape[1] / _DIMENSIONS))
        if axes is None and bank.shape[1] > count:
            axes = _principal_axes(bank[:: max(1, len(bank) // _FITTED)] - mean, count)
        parts = [
            _rows(bank[start : start + _CENTRED] - mean, axes, of_bank=True)
            for start in range(0, len(bank), _CENTRED)
        ]
        rows, moved = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls(axes, rows, moved.max())

    def bounds(self, centred: Floats) -> tuple[Floats, Floats]:
        """Half the squared distances (Q, M) of rounded vectors, from centred queries (Q, D).

        Also the lengths (Q,) by which rounding moves a query and a bank vector together.
        """
        rows, moved = _rows(centred, self.axes, of_bank=False)
        return rows @ self.rows.T, moved + self.moved


def _rows(centred: Floats, axes: Floats | None, *, of_bank: bool) -> tuple[Floats, Floats]:
    """Rows (n, K) of a product, and the lengths (n,) by which rounding moves their vectors.

    A query's row times a bank vector's row is half the squared distance of their coordinates, for
    each row holds half its squared norm, too; that is a lower bound, see `Screen`.

    Args:
        centred: (n, D), vectors less the bank's mean.
        axes: (D, d), orthonormal; None for all dimensions.
        of_bank: rows of bank vectors; else of queries.
    """
    coordinates, moved = centred, np.zeros(len(centred), np.float32)
    if axes is not None:
        leading, squares = centred @ axes, _squared_norms(centred)
        residuals = np.sqrt(np.maximum(squares - _squared_norms(leading), 0))
        # The smaller the residual, the more the root magnifies the rounding of the squares.
        off = np.float32(_NORM_ROUNDING) * squares
        least = np.maximum(np.sqrt(off), np.finfo(np.float32).tiny)
        moved = off / np.maximum(residuals, least)
        coordinates = np.column_stack([leading, residuals])
    half, ones = _squared_norms(coordinates) / 2, np.ones(len(centred), np.float32)
    columns = (-coordinates, half, ones) if of_bank else (coordinates, ones, half)
    return np.column_stack(columns), moved


def _principal_axes(centred: Floats, count: int) -> Floats:
    """About the leading principal axes (D, count) of centred vectors (n, D), orthonormal.

    By subspace iteration (Halko et al. 2011): how close they come decides the screen's speed,
    never its result.
    """
    shape = centred.shape[1], min(count, *centred.shape)
    axes = np.random.default_rng(0).standard_normal(shape, np.float32)
    for _ in range(_ITERATIONS):
        axes = np.linalg.qr(centred.T @ (centred @ axes))[0]
    return axes


class FaissIndex:
    """Search by faiss on the CPU, with the program's number of threads.

    Args:
        bank: (M, D) float32 on the CPU.
        exact: index that decides where faiss's float32 products are ambiguous; None to search the
            4 nearest of up to 4√M inverted lists, which is approximate.
    """

    def __init__(self, bank: Array, exact: ExactIndex | None) -> None:
        import faiss  # heavy, and used by few

        self._faiss: Any = faiss
        # Relative to the mean: faiss multiplies distances out, and large norms would cancel.
        self._mean = as_numpy(bank.mean(0))
        vectors = np.ascontiguousarray(as_numpy(bank) - self._mean)
        self._exact = exact
        self._farthest = float(_squared_norms(vectors).max())
        if exact is None:
            self._index: Any = _inverted(vectors)
        else:
            self._index = faiss.IndexFlatL2(vectors.shape[1])
            self._index.add(vectors)

    def candidates(self, queries: Array, k: int) -> Array:
        """Indices (Q, k) int64 of the k vectors nearest to queries (Q, D); any for one with NaN."""
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

    def _flat(self, exact: ExactIndex, queries: Array, rows: Floats, k: int) -> Array:
        """Indices (Q, k) int64 of the k nearest by faiss; by `exact` where products are ambiguous.

        Takes the queries (Q, D), and as rows (Q, D) the same less the bank's mean.
        """
        scores, indices = self._index.search(rows, min(k + 1, self._index.ntotal))
        nearest = indices[:, :k].copy()
        if indices.shape[1] > k:
            slack = _ROUNDING * (_squared_norms(rows) + self._farthest)
            close = scores[:, k] - scores[:, k - 1] <= slack
            if close.any():
                nearest[close] = as_numpy(exact.candidates(queries[close], k))
        return like(nearest.clip(0), queries)


def _inverted(vectors: Floats) -> Any:
    """Faiss's inverted lists of vectors (M, D): from the user's cache, else trained and cached."""
    import faiss  # heavy, and used by few

    key = hashlib.sha256(vectors.data).hexdigest()[:32]
    index: Any = None
    file: Path | None = None
    with suppress(RuntimeError):  # no home folder, or a damaged index, which is made anew
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        file = cache / "anomaly" / f"ivf-{key}-faiss{faiss.__version__}.index"
        if file.is_file():
            index = faiss.read_index(str(file))
    if index is None:
        count, dim = vectors.shape
        # Faiss warns below 39 training vectors a list.
        lists = max(1, min(int(4 * count**0.5), count // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, lists)
        index.train(vectors)
        index.add(vectors)
        if file is not None:
            # A cache that can't be written to costs time, no more.
            with suppress(OutputError, RuntimeError), draft(file) as unfinished:
                faiss.write_index(index, str(unfinished))
    index.nprobe = _LISTS_PROBED
    return index


def is_screened(bank: Array) -> bool:
    """True if a screen is quicker for a bank (M, D) than one product of all dimensions.

    Small banks and GPUs, which multiply faster than they gather, have none.
    """
    return device_of(bank).type == "cpu" and len(bank) >= _LEAST_SCREENED


def _take_least(bounds: Array, rows: Array) -> Array:
    """Columns (Q,) of each row's lowest bound (Q, M); it is then set to infinity."""
    columns = bounds.argmin(1)
    bounds[rows, columns] = np.inf
    return columns


def _places(mask: Array) -> tuple[Array, Array]:
    """Rows and columns of a mask's True values, faster than `nonzero`."""
    flat = module_of(mask).argwhere(mask.reshape(-1))[:, 0]
    return flat // mask.shape[1], flat % mask.shape[1]


def _lowest_of_each(rows: Array, values: Array, k: int) -> Array:
    """Indices (Q, k) of each row's k lowest among n values, ascending by value.

    Args:
        rows: (n,) int64, the row of each value; each row from 0 to Q − 1 has at least k.
        values: (n,).
        k: number of values for each row.
    """
    # By value, then stably by row: a row's values lie together and still ascend.
    by_value = _ascending(values)
    order = by_value[_ascending(rows[by_value])]
    counts = module_of(values).bincount(rows)
    starts = counts.cumsum(0) - counts
    return module_of(values).stack([order[starts + place] for place in range(k)], 1)


def _ascending(values: Array) -> Array:
    """Indices that sort values along the last axis, equal ones in their order."""
    if isinstance(values, np.ndarray):
        return values.argsort(kind="stable")
    return values.argsort(stable=True)


def _squared_norms(vectors: Array) -> Array:
    """Squared norms (n,) of vectors (n, D)."""
    return module_of(vectors).einsum("ij,ij->i", vectors, vectors)


def _distances_to(bank: Array, queries: Array, candidates: Array) -> Array:
    """Euclidean distances (Q, k) float32 of queries to candidates, differentiable in the queries.

    Args:
        bank: (M, D) float32.
        queries: (Q, D) float32.
        candidates: (Q, k) int64, rows of the bank; k is 1 or more.
    """
    xp = module_of(bank)
    step = max(1, _MEASURED[device_of(bank).type] // max(1, candidates.shape[1] * bank.shape[1]))
    blocks = [slice(start, start + step) for start in range(0, len(queries), step)]
    return xp.concatenate(
        [xp.linalg.norm(bank[candidates[b]] - queries[b, None], None, 2) for b in blocks]
    )


def _squared_distances(queries: Array, bank: Array, rows: Array, columns: Array) -> Array:
    """Squared distances (n,) of the pairs queries[rows], bank[columns], measured directly."""
    step = max(1, _GATHERED[device_of(bank).type] // max(1, queries.shape[1]))
    # Without pairs one empty block, because there has to be something to concatenate.
    blocks = [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]
    parts = []
    for block in blocks:
        differences = bank[columns[block]]
        differences -= queries[rows[block]]
        parts.append(_squared_norms(differences))
    return module_of(bank).concatenate(parts)


def _half_squared_distances(centred: Array, bank: Array, mean: Array) -> Array:
    """Half the squared distances (Q, M) of queries to a bank (M, D), by matrix products.

    Relative to the mean, so that large norms don't cancel. The bank is centred block by block: a
    few percent of the product's time, and no copy is kept. The queries (Q, D) come centred.
    """
    halves, parts = _squared_norms(centred)[:, None] / 2, []
    for start in range(0, len(bank), _CENTRED):
        block = bank[start : start + _CENTRED] - mean
        parts.append(_squared_norms(block) / 2 + halves - centred @ block.T)
    return module_of(bank).concatenate(parts, 1)
