"""Exact nearest neighbours on numpy arrays, for exported models: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anomaly.runtime.devices import CPU
from anomaly.runtime.parallel import spread

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

# As `ScreenedIndex`: dimensions of the screen, vectors that its axes are fitted to, how often.
_DIMENSIONS = 121
_FITTED = 2048
_ITERATIONS = 2
# Below so many vectors one product of all their dimensions is quicker.
_LEAST_SCREENED = 1024
# Above float32's rounding of squared distances by way of products, relative to the squared norms.
_ROUNDING = 1e-5
# What squared norms in float32 are off by, at most, relative to themselves.
_OFF = 2.0**-18
# When more than this share of all pairs passes the screen, multiplying them out is quicker.
_MANY = 1 / 32
# Queries in one product, at most, and its numbers: 8 MiB. Bank vectors that are centred at once.
_QUERIES = 256
_BLOCK = 1 << 21
_CENTRED = 2048
# Pairs that are measured at once, in numbers: 512 KiB stay in cache.
_MEASURED = 1 << 17


@dataclass(frozen=True, eq=False)
class _Screen:
    """Few numbers of each vector, which are never farther apart than the vectors themselves.

    With orthonormal P and residuals r(x) = x − PPᵀx, ‖Pᵀx − Pᵀy‖² + (‖r(x)‖ − ‖r(y)‖)² never
    exceeds ‖x − y‖², see `anomaly.scorers.patchcore.search.coordinates`.

    Attributes:
        axes: P, (D, d).
        moved: the length by which rounding moves a bank's vector in them, at most.
        bank: (d + 2, M), coordinates times −2 and the squared norms of the bank's vectors, so
            that one product gives squared distances less the queries' squared norms.
    """

    axes: Floats
    moved: float
    bank: Floats

    @classmethod
    def of(cls, bank: Floats, mean: Floats) -> _Screen:
        sample = bank[:: max(1, len(bank) // _FITTED)] - mean
        shape = (bank.shape[1], _DIMENSIONS)
        axes = np.random.default_rng(0).standard_normal(shape, np.float32)
        for _ in range(_ITERATIONS):
            axes = np.linalg.qr(sample.T @ (sample @ axes))[0]
        parts, most = [], 0.0
        for i in range(0, len(bank), _CENTRED):
            centred = bank[i : i + _CENTRED] - mean
            reduced, moved = _reduced(centred, axes)
            most = max(most, float(moved.max()))
            parts.append(np.column_stack([-2 * reduced, _squares(centred)]))
        return cls(axes, most, np.ascontiguousarray(np.concatenate(parts).T))

    def bounds(self, centred: Floats) -> tuple[Floats, Floats]:
        """(Q, M), lower bounds of squared distances of (Q, D), less the latter's squared norms.

        And lengths (Q,) by which the distances that they belong to may be off.
        """
        reduced, moved = _reduced(centred, self.axes)
        ones = np.ones((len(centred), 1), np.float32)
        return np.concatenate([reduced, ones], 1) @ self.bank, moved + np.float32(self.moved)


class ArrayIndex:
    """The k nearest vectors of a bank, by distances measured directly.

    A screen or a product of matrices names the vectors that may be among the nearest, rounding
    taken into account; distances to these are measured, so the result is exact.

    Args:
        bank: (M, D) float32.
    """

    def __init__(self, bank: Floats) -> None:
        self._bank = bank
        self._mean = bank.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._squares = np.concatenate([_squares(block) for block in self._centred()])
        wide = min(bank.shape) > _DIMENSIONS and len(bank) >= _LEAST_SCREENED
        self._screen = _Screen.of(bank, self._mean) if wide else None

    def search(self, queries: Floats, k: int = 1) -> tuple[Floats, Indices]:
        """Find the nearest vectors.

        Args:
            queries: (Q, D) float32.
            k: how many each; at most M are given.

        Returns:
            (Q, k) float32 Euclidean distances, ascending, and (Q, k) int64 indices; NaN and 0 for
            a query with NaN.
        """
        k = min(k, len(self._bank))
        rows = max(1, min(_QUERIES, _BLOCK // len(self._bank)))
        blocks = [queries[i : i + rows] for i in range(0, len(queries), rows)]
        found = spread(lambda block: self._search(block, k), blocks, CPU)
        distances = [np.empty((0, k), np.float32), *(d for d, _ in found)]
        indices = [np.empty((0, k), np.int64), *(i for _, i in found)]
        return np.concatenate(distances), np.concatenate(indices)

    def _search(self, queries: Floats, k: int) -> tuple[Floats, Indices]:
        """`search`, of one block."""
        centred = queries - self._mean
        found = self._screened(queries, centred) if k == 1 and self._screen else None
        rows, columns, squared = found or self._multiplied(queries, centred, k)
        order = np.lexsort((squared, rows))
        known = np.bincount(rows, minlength=len(queries)) > 0
        starts = np.searchsorted(rows[order], np.flatnonzero(known))
        nearest = np.zeros((len(queries), k), np.int64)
        distances = np.full((len(queries), k), np.nan, np.float32)
        picked = order[starts[:, None] + np.arange(k)]
        nearest[known], distances[known] = columns[picked], np.sqrt(squared[picked])
        return distances, nearest

    def _screened(self, queries: Floats, centred: Floats) -> tuple[Indices, Indices, Floats] | None:
        """Pairs of queries and vectors that may be nearest, as the screen tells.

        Returns:
            Rows, columns and squared distances, (n,) each; None where they are many.
        """
        assert self._screen is not None
        bounds, moved = self._screen.bounds(centred)
        norms, every = _squares(centred), np.arange(len(queries))
        likely = bounds.argmin(axis=1)
        least = self._measured(queries, every, likely)
        limits = np.square(np.sqrt(least) + moved) - norms + _ROUNDING * (norms + least)
        bounds[every, likely] = np.inf  # is measured
        rows, columns = _places(bounds <= limits[:, None])
        if len(rows) > _MANY * bounds.size:
            return None
        squared = self._measured(queries, rows, columns)
        return (
            np.concatenate([every, rows]),
            np.concatenate([likely, columns]),
            np.concatenate([least, squared]),
        )

    def _multiplied(
        self, queries: Floats, centred: Floats, k: int
    ) -> tuple[Indices, Indices, Floats]:
        """Pairs of queries and vectors that may be among the k nearest, by all dimensions.

        Returns:
            Rows, columns and squared distances, (n,) each.
        """
        products = [centred @ block.T for block in self._centred()]
        values = self._squares - 2 * np.concatenate(products, axis=1)
        farthest = np.partition(values, k - 1, axis=1)[:, k - 1]
        slack = _ROUNDING * (_squares(centred) + self._squares.max())
        rows, columns = _places(values <= (farthest + 2 * slack)[:, None])
        return rows, columns, self._measured(queries, rows, columns)

    def _measured(self, queries: Floats, rows: Indices, columns: Indices) -> Floats:
        """Squared distances (n,) of the pairs queries[rows], bank[columns]."""
        squared = np.empty(len(rows), np.float32)
        size = max(1, _MEASURED // queries.shape[1])
        for some in (slice(i, i + size) for i in range(0, len(rows), size)):
            difference = self._bank[columns[some]]
            difference -= queries[rows[some]]
            squared[some] = _squares(difference)
        return squared

    def _centred(self) -> Iterator[Floats]:
        """The bank relative to its mean, block by block: no copy is kept."""
        for start in range(0, len(self._bank), _CENTRED):
            yield self._bank[start : start + _CENTRED] - self._mean


def _reduced(centred: Floats, axes: Floats) -> tuple[Floats, Floats]:
    """Coordinates of vectors (n, D) for the screen: d along the axes, then the norm of the rest.

    And the lengths (n,) that rounding moves them by: the less is left, the more the root makes of
    what the squares are off by.
    """
    leading, squares = centred @ axes, _squares(centred)
    rest = np.sqrt(np.maximum(squares - _squares(leading), 0))
    off = np.float32(_OFF) * squares
    moved = off / np.maximum(np.maximum(rest, np.sqrt(off)), np.finfo(np.float32).tiny)
    return np.concatenate([leading, rest[:, None]], axis=1), moved


def _places(mask: NDArray[np.bool_]) -> tuple[Indices, Indices]:
    """Rows and columns of what is True; a third of the time that `np.nonzero` takes."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return rows, columns


def _squares(vectors: Floats) -> Floats:
    """Squared norms (n,) of vectors (n, D)."""
    return np.asarray(np.einsum("ij,ij->i", vectors, vectors))
