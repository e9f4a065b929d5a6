"""Few numbers for a vector, whose distances are never more than those of the vectors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from anomaly.runtime.parallel import spread

# What squared norms in float32 are off by, at most, relative to themselves.
_OFF = 2.0**-18
# Vectors that axes are fitted to, and how often. Twice as many let 7 % less through.
_FITTED = 2048
_ITERATIONS = 2
_LEAST = torch.finfo(torch.float32).tiny


class Coordinates(Protocol):
    """How far apart vectors are at least, told by few numbers each."""

    def of(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (n, d) of vectors (n, D), and lengths (n,).

        They are the coordinates of vectors that aren't farther from these than that.
        """
        ...


class AllCoordinates:
    """Vectors as they are, less the bank's mean.

    Args:
        bank: (M, D) float32 on the CPU.
    """

    def __init__(self, bank: Tensor) -> None:
        self._mean = bank.mean(0)

    def of(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (n, D) of vectors (n, D), and zeros (n,): nothing is moved."""
        return vectors - self._mean, vectors.new_zeros(len(vectors))


class PrincipalCoordinates:
    """Coordinates along the bank's leading principal axes, then the length of what they leave.

    With orthonormal P and residuals r(x) = x − PPᵀx, ‖Pᵀx − Pᵀy‖² + (‖r(x)‖ − ‖r(y)‖)² never
    exceeds ‖x − y‖²: it is a squared distance of d + 1 numbers a vector.

    Args:
        bank: (M, D) float32 on the CPU.
        count: how many axes; D where that is less, and nothing is left.
    """

    def __init__(self, bank: Tensor, count: int) -> None:
        self._mean = bank.mean(0)
        sample = bank[:: max(1, len(bank) // _FITTED)] - self._mean
        self._axes = _leading_axes(sample, min(count, bank.shape[1]))

    def of(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (n, d + 1) of vectors (n, D), and what rounding moves them by (n,)."""
        centred = vectors - self._mean
        leading = centred @ self._axes
        if leading.shape == vectors.shape:
            return leading, vectors.new_zeros(len(vectors))
        squares = torch.linalg.vector_norm(centred, dim=1).square_()
        rest = (squares - leading.square().sum(1)).clamp_(min=0).sqrt_()
        # The less is left, the more the root makes of what the squares are off by.
        off = _OFF * squares
        moved = off / torch.maximum(rest, off.sqrt()).clamp_(min=_LEAST)
        return torch.cat([leading, rest[:, None]], dim=1), moved


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
