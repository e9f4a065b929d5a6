"""Exact nearest neighbour that skips what the triangle inequality rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anomaly.scorers.neighbors import Index

# Few cells are too wide to be skipped, many make products too small to be quick.
_PIVOTS = 256
# Vectors a cell, at most; a larger group becomes several shells around its pivot.
_SHELL = 512
# Queries at once: cells × queries of bounds stay in cache.
_QUERIES = 8192
# Cells are skipped with a margin far above float32's rounding of squared distances.
_MARGIN = 1.0 - 1e-4


class CellIndex:
    """The bank in cells around pivots: its first vectors, which a coreset spreads well.

    A cell of radius R around pivot p holds no vector nearer to x than ‖x − p‖ − R. Each query
    searches the cell of its nearest pivot, then those cells that may still hold a nearer vector.

    Args:
        bank: (M, D) float32 on the CPU.
        several: searches for more than one neighbour, where there is less to skip.
    """

    def __init__(self, bank: Tensor, several: Index) -> None:
        self._several = several
        self._mean = bank.mean(0)
        pivots = bank[:_PIVOTS] - self._mean
        owners = torch.cat(
            [
                _squared_distances(b - self._mean, pivots).argmin(1)
                for b in torch.split(bank, _QUERIES)
            ]
        )
        away = torch.linalg.vector_norm(bank - self._mean - pivots[owners], dim=1)
        order = away.argsort(stable=True)
        self._order: Tensor = order[owners[order].argsort(stable=True)]
        self._vectors = bank[self._order].sub_(self._mean)
        self._norms = self._vectors.square().sum(1)
        counts = torch.bincount(owners, minlength=len(pivots)).tolist()
        self._slices: list[slice] = []
        owner: list[int] = []
        start = 0
        for pivot, count in enumerate(counts):
            for first in range(start, start + count, _SHELL):
                self._slices.append(slice(first, min(first + _SHELL, start + count)))
                owner.append(pivot)
            start += count
        sorted_away = away[self._order]
        self._radii = torch.stack([sorted_away[s.stop - 1] for s in self._slices])
        self._pivots = pivots[owner]

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) int64 of queries (Q, D)."""
        if k > 1:
            return self._several.candidates(queries, k)
        return torch.cat([self._search(q - self._mean) for q in torch.split(queries, _QUERIES)])

    def _search(self, queries: Tensor) -> Tensor:
        norms = queries.square().sum(1)
        squared = _squared_distances(queries, self._pivots).add_(norms[:, None]).clamp_(min=0)
        home = squared.argmin(1)
        # From here on without ‖x‖², as the products are.
        bounds = squared.sqrt_().sub_(self._radii).clamp_(min=0).square_().mul_(_MARGIN)
        bounds = bounds.sub_(norms[:, None]).T.contiguous()
        best = torch.full_like(norms, float("inf"))
        found = torch.zeros_like(home)
        everyone = home.argsort(stable=True)
        at_home = torch.split(everyone, torch.bincount(home, minlength=len(bounds)).tolist())
        for cell, rows in enumerate(at_home):
            self._visit(cell, rows, queries, best, found)
        bounds[home, torch.arange(len(queries))] = float("inf")
        for cell, bound in enumerate(bounds):
            rows = (bound < best).nonzero().squeeze(1)
            self._visit(cell, rows, queries, best, found)
        return self._order.index_select(0, found).unsqueeze(1)

    def _visit(self, cell: int, rows: Tensor, queries: Tensor, best: Tensor, found: Tensor) -> None:
        """Compare the queries `rows` with one cell; `best` and `found` are updated in place."""
        if not len(rows):
            return
        where = self._slices[cell]
        scores = torch.addmm(
            self._norms[where], queries.index_select(0, rows), self._vectors[where].T, alpha=-2
        )
        least = scores.min(dim=1)
        before = best.index_select(0, rows)
        index = torch.where(
            least.values < before, least.indices + where.start, found.index_select(0, rows)
        )
        best.index_copy_(0, rows, torch.minimum(least.values, before))
        found.index_copy_(0, rows, index)


def _squared_distances(queries: Tensor, vectors: Tensor) -> Tensor:
    """‖y‖² − 2xy: squared distances (Q, M) less each query's own ‖x‖²."""
    squared: Tensor = torch.addmm(vectors.square().sum(1), queries, vectors.T, alpha=-2)
    return squared
