"""Exact nearest neighbour that measures only what a few dimensions can't rule out."""

from __future__ import annotations

import warnings
from copy import copy

import torch
from torch import Tensor

from anomaly.runtime import get_threads, spread
from anomaly.scorers.patchcore.search.bfloat16_screen import BFloat16Screen, has_bf16_tiles
from anomaly.scorers.patchcore.search.coarse_screen import (
    ROUNDING,
    CoarseScreen,
    Float32Screen,
    Int8Screen,
    has_exact_int8,
)
from anomaly.scorers.patchcore.search.product_index import ProductIndex

# Vectors from which on a bank is large, and it pays to look at more of their coordinates.
_LARGE = 1 << 13
# Vectors that the screen's axes are fitted to, and how often. Twice as many let 7 % less through.
_FITTED = 2048
_ITERATIONS = 2
# Queries in one product of the screen, at most, and its bytes: 16 MiB stay in cache.
_QUERIES = 256
_BLOCK = 1 << 24
# Queries whose pairs are multiplied together, at most.
_TOGETHER = 1024
# Vectors of which the screen first looks at the least distance alone.
_GROUP = 64
# When more than this share of all pairs passes the screen, multiplying them out is quicker.
_MANY = 1 / 16
# What squared distances by way of products are off by at most, relative to the squared norms.
_SLACK = 4 * ROUNDING
# Numbers that are gathered at once to measure pairs: 4 MiB.
_GATHERED = 1 << 20


class ScreenedIndex:
    """Lower bounds from a few dimensions, then distances to what may still be nearest.

    With orthonormal P and residuals r(x) = x − PPᵀx, ‖Pᵀx − Pᵀy‖² + (‖r(x)‖ − ‖r(y)‖)² never
    exceeds ‖x − y‖²: it is a squared distance of d + 1 numbers a vector, a fifth to a twelfth
    of the product at 1536. Patch embeddings lie near few dimensions, so all but some dozen vectors
    of a large bank are ruled out. Where they don't (a query unlike anything, or embeddings without
    structure), the whole product decides. The result is exact in every case.

    Args:
        bank: (M, D) float32 on the CPU.
    """

    def __init__(self, bank: Tensor) -> None:
        # Said of each first use of what `_squared` stands on.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        self._bank = bank
        self._product = ProductIndex(bank)
        self._mean = bank.mean(0)
        sample = bank[:: max(1, len(bank) // _FITTED)] - self._mean
        screen = _screen()
        dimensions = screen.axes[len(bank) >= _LARGE]
        self._axes = _leading_axes(sample, min(dimensions, bank.shape[1]))
        # Vectors at infinity, of which there is one at least, fill the last group.
        filled = _filled(len(bank))
        coarse = bank.new_zeros(filled, self._axes.shape[1] + 1)
        norms = bank.new_full((filled,), float("inf"))
        for start in range(0, len(bank), _FITTED):
            rows = slice(start, min(start + _FITTED, len(bank)))
            coarse[rows], norms[rows] = self._reduce(bank[rows])
        self._groups = filled // _GROUP
        self._squares = bank.square().sum(1)
        self._screen = screen(coarse, norms)

    def only(self, bank: Tensor, rows: Tensor) -> ScreenedIndex:
        """The index of some of the vectors, for which nothing is computed anew.

        Args:
            bank: these vectors (m, D).
            rows: (m,) int64, which ones they are.
        """
        some = copy(self)
        some._bank, some._squares, some._product = bank, self._squares[rows], ProductIndex(bank)
        filled = rows.new_full((_filled(len(rows)),), len(self._bank))
        filled[: len(rows)] = rows
        some._screen, some._groups = self._screen.only(filled), len(filled) // _GROUP
        return some

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) int64 of queries (Q, D)."""
        share = -(-len(queries) // get_threads())
        portions = torch.split(queries, min(max(share, _QUERIES), _TOGETHER))
        found = torch.cat(spread(lambda q: self._search(q, k), portions, queries.device))
        undecided = found[:, 0] < 0
        if bool(undecided.any()):
            found[undecided] = self._product.candidates(queries[undecided], k)
        return found

    def _search(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) of each query; -1 for all where too many vectors might be."""
        prepared = self._screen.prepared(*self._reduce(queries))
        dtype = self._screen.dtype
        size = min(max(1, _BLOCK // (dtype.itemsize * len(self._bank))), _QUERIES)
        undecided = torch.zeros(len(queries), dtype=torch.bool)
        room = torch.empty(size, self._groups * _GROUP, dtype=dtype)
        pairs = []
        for start in range(0, len(queries), size):
            block = slice(start, start + size)
            some = queries[block]
            ready = tuple(each[block] for each in prepared)
            rows, columns = self._near(some, ready, k, room[: len(some)])
            # None pass where all queries are NaN.
            if not len(rows) or len(rows) > _MANY * len(some) * len(self._bank):
                undecided[block] = True
            else:
                pairs.append((rows + start, columns))
        if not pairs:
            return torch.full((len(queries), k), -1)
        rows, columns = (torch.cat(each) for each in zip(*pairs, strict=True))
        return self._nearest(queries, rows, columns, k).masked_fill_(undecided[:, None], -1)

    def _near(
        self, queries: Tensor, prepared: tuple[Tensor, ...], k: int, room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows and columns of the pairs of queries and vectors that may be of the k nearest.

        Bounds are written into `room`.
        """
        bounds = self._screen.bounds(prepared, room).view(-1, self._groups, _GROUP)
        least = bounds.amin(2)
        # Of a query that is NaN any are the least, those that fill the last group among them.
        nearest = _least(bounds, least, k).clamp_(max=len(self._bank) - 1)
        limit = self._farthest(queries, nearest)
        return _passing(bounds, least, self._screen.limits(prepared, limit))

    def _nearest(self, queries: Tensor, rows: Tensor, columns: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) among pairs, of which each row has k at least.

        Products tell most of them apart; what may be rounding is measured.
        """
        norms = queries.square().sum(1)
        squared = self._squared(queries, norms, rows, columns)
        farthest = squared[_least_pairs(squared, rows, len(queries), k)].amax(1)
        close = squared <= (farthest + 2 * _SLACK * (norms + farthest.clamp(min=0)))[rows]
        rows, columns, squared = rows[close], columns[close], squared[close]
        tied = (torch.bincount(rows, minlength=len(queries)) > k)[rows]
        squared[tied] = _measure(queries, self._bank, rows[tied], columns[tied])
        return columns[_least_pairs(squared, rows, len(queries), k)]

    def _farthest(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Squared distance (Q,) to the farthest of each query's candidates (Q, k)."""
        rows = torch.arange(len(queries)).repeat_interleave(candidates.shape[1])
        squared = _measure(queries, self._bank, rows, candidates.flatten())
        return squared.view(candidates.shape).amax(1)

    def _squared(self, queries: Tensor, norms: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Squared distances of the pairs queries[rows], bank[columns], by products.

        They are places of a product of matrices of which the rest isn't wanted: nothing is
        gathered, and it takes a fraction of the time of `_measure`. But large norms leave rounding,
        see `_SLACK`. Vector by vector, since queries are the fewer and stay in cache.
        """
        order = (columns * len(queries) + rows).argsort()
        starts = torch.bincount(columns, minlength=len(self._bank)).cumsum(0)
        wanted = torch.sparse_csr_tensor(
            torch.cat([starts.new_zeros(1), starts]),
            rows[order],
            queries.new_zeros(len(rows)),
            (len(self._bank), len(queries)),
            check_invariants=False,
        )
        found = torch.sparse.sampled_addmm(wanted, self._bank, queries.T, beta=0.0).values()
        products = torch.empty_like(found)
        products[order] = found
        return (norms[rows] + self._squares[columns]).sub_(products, alpha=2)

    def _reduce(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates of vectors (n, D) for the screen, and their squared norms (n,).

        d along the axes, then the norm of the rest: (n, d + 1).
        """
        centred = vectors - self._mean
        norms = torch.linalg.vector_norm(centred, dim=1).square_()
        leading = centred @ self._axes
        rest = (norms - leading.square().sum(1)).clamp_(min=0).sqrt_()
        return torch.cat([leading, rest[:, None]], dim=1), norms


def _screen() -> type[CoarseScreen]:
    """What rules most out on this processor, in the least time (`benchmarks.search`)."""
    if has_bf16_tiles():
        return BFloat16Screen
    return Int8Screen if has_exact_int8() else Float32Screen


def _filled(count: int) -> int:
    return (count // _GROUP + 1) * _GROUP


def _least(bounds: Tensor, least: Tensor, k: int) -> Tensor:
    """Columns (Q, k) of the k least of each row's bounds (Q, groups, G); `least` of each group."""
    if k > 1:
        return bounds.flatten(1).topk(k, dim=1, largest=False).indices
    group = least.argmin(1)  # a tenth of the time that argmin over all takes
    member = bounds[torch.arange(len(group)), group].argmin(1)
    return (group * _GROUP + member).unsqueeze(1)


def _passing(bounds: Tensor, least: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the bounds (Q, groups, G) that are within their row's limit (Q,).

    Most groups of columns hold none, which their least bound tells.
    """
    rows, groups = (least <= limit[:, None]).nonzero().unbind(1)
    inside = bounds.flatten(0, 1).index_select(0, rows * least.shape[1] + groups)
    pair, member = (inside <= limit[rows, None]).nonzero().unbind(1)
    return rows[pair], groups[pair] * _GROUP + member


def _least_pairs(values: Tensor, rows: Tensor, count: int, k: int) -> Tensor:
    """For each of `count` rows the places (count, k) of its k pairs of least value.

    All rows have so many, save those of a query with NaN: it has none, and gets any of the others'.
    """
    if k == 1:  # without a sort
        least = values.new_full((count,), float("inf")).scatter_reduce_(0, rows, values, "amin")
        first = (values == least[rows]).nonzero()[:, 0]
        found = rows.new_zeros(count)
        found.scatter_reduce_(0, rows[first], first, "amin", include_self=False)
        return found.unsqueeze(1)
    order = values.argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    pairs = torch.bincount(rows, minlength=count)
    start = pairs.cumsum(0) - pairs
    return order[(start[:, None] + torch.arange(k)).clamp_(max=len(rows) - 1)]


def _measure(queries: Tensor, vectors: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Squared distances of the pairs queries[rows], vectors[columns]."""
    size = max(1, _GATHERED // queries.shape[1])
    parts = [
        vectors.index_select(0, c).sub_(queries.index_select(0, r)).square_().sum(1)
        for r, c in zip(torch.split(rows, size), torch.split(columns, size), strict=True)
    ]
    return torch.cat(parts)


def _leading_axes(vectors: Tensor, count: int) -> Tensor:
    """About the `count` leading principal axes (D, count) of centred vectors, orthonormal.

    By subspace iteration (Halko et al. 2011): how close they come decides the screen's speed,
    never its result.
    """
    generator = torch.Generator().manual_seed(0)
    axes = torch.randn(vectors.shape[1], count, generator=generator)
    for _ in range(_ITERATIONS):
        axes = _orthonormal(vectors.T @ (vectors @ axes))
    # Turned, so that all coordinates are about equally wide, as `Int8Screen` wants them.
    return axes @ _orthonormal(torch.randn(count, count, generator=generator))


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis (D, n) of the span of columns (D, n).

    One thread alone makes it: that takes thousands of small steps, after each of which several
    would wait for each other, for a second where a core is busy.
    """
    (basis,) = spread(lambda one: torch.linalg.qr(one).Q, [columns], columns.device)
    found: Tensor = basis
    return found
