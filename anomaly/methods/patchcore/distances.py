"""Euclidean distances of embeddings: measured directly, by matrix products, and from below.

Torch tensors and numpy arrays alike; `Screen` takes arrays. Imports torch for bfloat16 alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, module_of
from anomaly.methods.base import device_of

Floats = NDArray[np.float32]
Dtype = Literal["float32", "bfloat16"]

# More than float32's rounding of squared distances by products, relative to the squared norms.
ROUNDING = 1e-5
# More than float32's rounding of squared norms, relative to themselves.
_NORM_ROUNDING = 2.0**-18
# Numbers of the pairs measured at once in `distances_to`: 4 MiB; a GPU wants few launches.
_MEASURED = {"cpu": 1 << 20, "cuda": 1 << 28}
# Likewise in `squared_distances`: 512 KiB stay in cache.
_GATHERED = {"cpu": 1 << 17, "cuda": 1 << 28}
# Bank vectors centred at once.
_CENTRED = 2048
# Principal axes of 1,536 dimensions. Twice as many cost bfloat16 no more time than float32. What
# they don't rule out is measured in all dimensions: the fewer these are, the fewer axes pay.
AXES: dict[Dtype, int] = {"float32": 185, "bfloat16": 377}
_DIMENSIONS = 1536
# Numbers of 24 and of 8 binary digits that hold a squared norm.
_PARTS: dict[Dtype, int] = {"float32": 1, "bfloat16": 3}
# Vectors that the axes are fitted to, and steps of the iteration.
_FITTED = 2048
_ITERATIONS = 2


def squared_norms(vectors: Array) -> Array:
    """Squared norms (n,) of vectors (n, D)."""
    return module_of(vectors).einsum("ij,ij->i", vectors, vectors)


def distances_to(bank: Array, queries: Array, candidates: Array) -> Array:
    """Euclidean distances (Q, k) float32 of queries to candidates, differentiable in the queries.

    Args:
        bank: (M, D) float32.
        queries: (Q, D) float32.
        candidates: (Q, k) int64, rows of the bank; k is 1 or more.
    """
    xp, numbers = module_of(bank), candidates.shape[1] * bank.shape[1]
    step = max(1, _MEASURED[device_of(bank).type] // max(1, numbers))
    blocks = [slice(start, start + step) for start in range(0, len(queries), step)]
    return xp.concatenate(
        [xp.linalg.norm(bank[candidates[b]] - queries[b, None], None, 2) for b in blocks]
    )


def squared_distances(queries: Array, bank: Array, rows: Array, columns: Array) -> Array:
    """Squared distances (n,) of the pairs queries[rows], bank[columns], measured directly."""
    step = max(1, _GATHERED[device_of(bank).type] // max(1, queries.shape[1]))
    blocks = [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]
    parts = []
    for block in blocks:
        differences = bank[columns[block]]
        differences -= queries[rows[block]]
        parts.append(squared_norms(differences))
    return module_of(bank).concatenate(parts)


def half_squared_distances(centred: Array, bank: Array, mean: Array) -> Array:
    """Half the squared distances (Q, M) of queries to a bank, by matrix products.

    Relative to the mean, so that large norms don't cancel. The bank is centred block by block: a
    few percent of the product's time, and no copy is kept.

    Args:
        centred: (Q, D) queries less the mean.
        bank: (M, D).
        mean: (D,).
    """
    halves, parts = squared_norms(centred)[:, None] / 2, []
    for start in range(0, len(bank), _CENTRED):
        block = bank[start : start + _CENTRED] - mean
        parts.append(squared_norms(block) / 2 + halves - centred @ block.T)
    return module_of(bank).concatenate(parts, 1)


@dataclass(frozen=True, eq=False)
class Screen:
    """Lower bounds of distances to a bank, from few numbers of each vector.

    Vectors of few dimensions are multiplied whole. Of others, with orthonormal P and residuals
    r(x) = x − PPᵀx, ‖Pᵀx − Pᵀy‖² + (‖r(x)‖ − ‖r(y)‖)² never exceeds ‖x − y‖². These d + 1 numbers
    are rounded to `dtype`, and the norms are those of the rounded ones. Rounding moves a vector by
    a known length, so that distances of rounded vectors exceed those of the vectors by these
    lengths at most (triangle inequality).

    Attributes:
        axes: P (D, d), about the bank's leading principal axes; None for all dimensions.
        dtype: of the product, float32 or bfloat16.
        rows: (M, K), the bank's vectors as rows of the product, in `dtype`.
        moved: the length by which rounding moves a bank vector at most.
    """

    axes: Floats | None
    dtype: Dtype
    rows: Array
    moved: float

    @classmethod
    def of(cls, bank: Floats, mean: Floats, dtype: Dtype, axes: Floats | None = None) -> Screen:
        """The screen of a bank (M, D) with this mean (D,), on given axes or its own."""
        count = round(AXES[dtype] * math.sqrt(bank.shape[1] / _DIMENSIONS))
        if axes is None and bank.shape[1] > count:
            axes = _principal_axes(bank[:: max(1, len(bank) // _FITTED)] - mean, count)
        screen = cls(axes, dtype, None, 0.0)
        parts = [
            screen._rows(bank[start : start + _CENTRED] - mean, of_bank=True)
            for start in range(0, len(bank), _CENTRED)
        ]
        rows = _in_dtype(np.concatenate([rows for rows, _ in parts]), dtype)
        return replace(screen, rows=rows, moved=max(float(moved.max()) for _, moved in parts))

    def bounds(self, centred: Floats) -> tuple[Array, Floats]:
        """Half the squared distances of rounded vectors, and the lengths they are moved by.

        Args:
            centred: (Q, D) queries less the bank's mean.

        Returns:
            (Q, M), to be compared with `limits`, and the lengths (Q,) by which rounding moves a
            query and a bank vector together.
        """
        rows, moved = self._rows(centred, of_bank=False)
        bounds = _in_dtype(rows, self.dtype) @ self.rows.T
        return self._comparable(bounds), moved + np.float32(self.moved)

    def limits(self, halves: Floats) -> Array:
        """Half squared distances (Q,) as `bounds` has them."""
        return self._comparable(_in_dtype(halves, self.dtype))

    def _comparable(self, values: Array) -> Array:
        """An array that sorts like the values (bits of non-negative bfloat16 numbers)."""
        if self.dtype == "float32":
            return values
        import torch

        return values.view(torch.int16).numpy()

    def _rows(self, centred: Floats, *, of_bank: bool) -> tuple[Floats, Floats]:
        """Vectors (n, D) as rows (n, K) of the product, and the lengths (n,) they are moved by.

        A query's row times a bank vector's is half their squared distance: half the squared norms
        are numbers of their own, each as a sum of numbers in `dtype`.
        """
        coordinates, moved = centred, np.zeros(len(centred), np.float32)
        if self.axes is not None:
            leading, squares = centred @ self.axes, squared_norms(centred)
            rest = np.sqrt(np.maximum(squares - squared_norms(leading), 0))
            # The less is left, the more the root makes of what the squares are off by.
            off = np.float32(_NORM_ROUNDING) * squares
            moved = off / np.maximum(np.maximum(rest, np.sqrt(off)), np.finfo(np.float32).tiny)
            coordinates = np.column_stack([leading, rest])
        rounded = _rounded(coordinates, self.dtype)
        moved += np.sqrt(squared_norms(rounded - coordinates))
        half, parts = squared_norms(rounded) / 2, []
        for _ in range(_PARTS[self.dtype]):
            parts.append(_rounded(half, self.dtype))
            half = half - parts[-1]
        norms, ones = np.stack(parts, 1), np.ones((len(centred), len(parts)), np.float32)
        columns = (-rounded, norms, ones) if of_bank else (rounded, ones, norms)
        return np.concatenate(columns, 1), moved


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


def _in_dtype(values: Floats, dtype: Dtype) -> Array:
    """An array as it is, or a tensor in bfloat16."""
    if dtype == "float32":
        return values
    import torch

    return torch.from_numpy(values).bfloat16()


def _rounded(values: Floats, dtype: Dtype) -> Floats:
    """Numbers rounded to a dtype, in float32."""
    return values if dtype == "float32" else _in_dtype(values, dtype).float().numpy()
