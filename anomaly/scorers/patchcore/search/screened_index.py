"""Exact nearest neighbour that measures only what a few dimensions can't rule out."""

from __future__ import annotations

import warnings
from copy import copy

import torch
from torch import Tensor

from anomaly.runtime.parallel import spread
from anomaly.runtime.threads import get_threads
from anomaly.scorers.patchcore.search.bfloat16_screen import BFloat16Screen, has_bf16_tiles
from anomaly.scorers.patchcore.search.coarse_screen import (
    ROUNDING,
    CoarseScreen,
    Float32Screen,
    Int8Screen,
    has_exact_int8,
)
from anomaly.scorers.patchcore.search.measuring import distances_to
from anomaly.scorers.patchcore.search.product_index import ProductIndex

# Queries in one product of the screen, at most, and its bytes: 16 MiB stay in cache.
_QUERIES = 512
_BLOCK = 1 << 24
# Queries whose pairs are multiplied together, at most.
_TOGETHER = 1024
# Rows of the bank whose coordinates are found at once.
_REDUCED = 2048
# When more than this share of all pairs passes the screen, multiplying them out is quicker.
_MANY = 1 / 16
# What squared distances by way of products are off by at most, relative to the squared norms.
_SLACK = 4 * ROUNDING
# Numbers that are gathered at once to measure pairs: 4 MiB.
_GATHERED = 1 << 20


class ScreenedIndex:
    """Lower bounds from a few coordinates, then distances to what may still be nearest.

    Their product takes a fifth to a twelfth of the time that one at 1536 dimensions does (or
    numbers of fewer digits are multiplied, see the screens). Patch embeddings lie near few
    dimensions, so all but some dozen vectors of a large bank are ruled out. Where they don't (a
    query unlike anything, or embeddings without structure), the whole product decides. The result
    is exact in every case.

    Args:
        bank: (M, D) float32 on the CPU.
    """

    def __init__(self, bank: Tensor) -> None:
        # Said of each first use of what `_squared` stands on.
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        self._bank = bank
        self._product = ProductIndex(bank)
        screen = _screen()
        self._coordinates = screen.coordinates(bank)
        parts = [self._coordinates.of(rows) for rows in torch.split(bank, _REDUCED)]
        self._screen = screen(torch.cat([coarse for coarse, _ in parts]))
        self._moved = max(float(moved.amax()) for _, moved in parts)
        self._squares = bank.square().sum(1)

    def only(self, bank: Tensor, rows: Tensor) -> ScreenedIndex:
        """The index of some of the vectors, for which nothing is computed anew.

        Args:
            bank: these vectors (m, D).
            rows: (m,) int64, which ones they are.
        """
        some = copy(self)
        some._bank, some._squares, some._product = bank, self._squares[rows], ProductIndex(bank)
        some._screen = self._screen.only(rows)
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
        coarse, moved = self._coordinates.of(queries)
        moved = moved + self._moved
        prepared = self._screen.prepared(coarse)
        dtype, width = self._screen.dtype, self._screen.width
        most = min(max(1, _BLOCK // (dtype.itemsize * width)), _QUERIES)
        size = -(-len(queries) // -(-len(queries) // most))  # equal blocks
        undecided = torch.zeros(len(queries), dtype=torch.bool)
        room = torch.empty(size * width, dtype=dtype)
        pairs = []
        for start in range(0, len(queries), size):
            block = slice(start, start + size)
            some = queries[block]
            ready = tuple(each[block] for each in prepared)
            rows, columns = self._near(some, ready, moved[block], k, room[: len(some) * width])
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
        self, queries: Tensor, prepared: tuple[Tensor, ...], moved: Tensor, k: int, room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows and columns of the pairs of queries and vectors that may be of the k nearest.

        `moved` are lengths (Q,) by which coordinates are off. Bounds are written into `room`.
        """
        bounds = self._screen.bounds(prepared, room).view(len(queries), -1, self._screen.group)
        # Into memory of the bounds' order, whichever that is: 80 times as fast as across it.
        least = torch.amin(bounds, 2, out=torch.empty_like(bounds[..., 0])).contiguous()
        # Of a query that is NaN any are the least, those that fill the last group among them.
        nearest = _least(bounds, least, k).clamp_(max=len(self._bank) - 1)
        limit = (distances_to(self._bank, queries, nearest).amax(1) + moved).square_()
        return _passing(bounds, least, self._screen.limits(prepared, limit))

    def _nearest(self, queries: Tensor, rows: Tensor, columns: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) among pairs, of which each row has k at least.

        Products tell most of them apart; what may be rounding is measured.
        """
        norms = torch.linalg.vector_norm(queries, dim=1).square_()
        squared = self._squared(queries, norms, rows, columns)
        farthest = squared[_least_pairs(squared, rows, len(queries), k)].amax(1)
        close = squared <= (farthest + 2 * _SLACK * (norms + farthest.clamp(min=0)))[rows]
        rows, columns, squared = rows[close], columns[close], squared[close]
        tied = (torch.bincount(rows, minlength=len(queries)) > k)[rows]
        squared[tied] = _measure(queries, self._bank, rows[tied], columns[tied])
        return columns[_least_pairs(squared, rows, len(queries), k)]

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


def _screen() -> type[CoarseScreen]:
    """What rules most out on this processor, in the least time (`benchmarks.search`)."""
    if has_bf16_tiles():
        return BFloat16Screen
    return Int8Screen if has_exact_int8() else Float32Screen


def _least(bounds: Tensor, least: Tensor, k: int) -> Tensor:
    """Columns (Q, k) of the k least of each row's bounds (Q, groups, G); `least` of each group."""
    queries, groups, size = bounds.shape
    rows = torch.arange(queries)[:, None]
    if k == 1:  # a tenth of the time that argmin over all takes, and a third of `topk`
        chosen = least.argmin(1, keepdim=True)
        member = bounds[rows, chosen].flatten(1).argmin(1, keepdim=True)
    else:  # the k least lie in the k groups whose least are the least
        chosen = least.topk(min(k, groups), dim=1, largest=False).indices
        member = bounds[rows, chosen].flatten(1).topk(k, dim=1, largest=False).indices
    return chosen.gather(1, member // size) * size + member % size


def _passing(bounds: Tensor, least: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the bounds (Q, groups, G) that are within their row's limit (Q,).

    Most groups of columns hold none, which their least bound tells.
    """
    rows, groups = (least <= limit[:, None]).nonzero().unbind(1)
    inside = bounds[rows, groups]
    pair, member = (inside <= limit[rows, None]).nonzero().unbind(1)
    return rows[pair], groups[pair] * bounds.shape[2] + member


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
