"""Lower bounds of many distances in one product of bfloat16 numbers."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from anomaly.runtime import has_bf16
from anomaly.scorers.patchcore.search.coarse_screen import LEAST, ROUNDING

# bfloat16 numbers, of 8 binary digits each, that hold half a squared norm as float32 has it.
_PARTS = 3
# Numbers in a row of a tile: rows are filled up with zeros. A row of odd length is read on into the
# next one, whose NaN would reach it, times 0.
_TILE = 32
_LARGEST = torch.finfo(torch.bfloat16).max
_NOTHING = torch.iinfo(torch.int16).min


class BFloat16Screen:
    """Squared distances of coordinates rounded to bfloat16.

    Rounding moves a vector by far less than in `Int8Screen`, so that a third to a fifth of the
    vectors pass; the product is as quick where the processor has tiles for it (AMX). As there,
    limits are wider by the lengths that rounding moves vectors by.

    Bounds are half the squared distances, relative to the bank's radius squared, in bfloat16.
    Both sides of a comparison are rounded the same way, which keeps their order. They are compared
    as whole numbers of 16 bits: that has the order of numbers from 0 up, and what rounding leaves
    below 0 is less than any limit.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
        norms: (M,) float32; infinite for vectors that mustn't be found, which come last.
    """

    axes = 185, 313
    dtype = torch.int16

    def __init__(self, coarse: Tensor, norms: Tensor) -> None:
        count = int(norms.isfinite().sum())
        found = coarse[:count]
        self._centre = found.mean(0)
        radius = torch.linalg.vector_norm(found - self._centre, dim=1).amax()
        self._scale = max(float(radius), LEAST)
        rounded, moved, halves = self._rounded(found)
        self._moved = float(moved.amax())
        width = found.shape[1] + 2 * _PARTS
        rows = found.new_zeros(len(coarse), width + -width % _TILE, dtype=torch.bfloat16)
        rows[:count, :width] = torch.cat([rounded, torch.ones_like(halves), halves], dim=1)
        rows[count:, width - 1] = torch.inf
        # As the product reads it: 12.3 ms instead of 14.0 where it would be turned each time.
        self._coarse = rows.T.contiguous()

    def prepared(self, coarse: Tensor, norms: Tensor) -> tuple[Tensor, ...]:
        """Queries as `bounds` and `limits` take them.

        Rows of the product, the most by which rounding moves a query and a vector together, and
        the squared norms.
        """
        rounded, moved, halves = self._rounded(coarse)
        factors = torch.cat([rounded.neg_(), halves, torch.ones_like(halves)], dim=1)
        filled = pad(factors, (0, len(self._coarse) - factors.shape[1]))
        return filled, moved + self._moved, norms

    def bounds(self, queries: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Half the squared distances (Q, M), relative to the bank's radius squared."""
        torch.mm(queries[0], self._coarse, out=out.view(torch.bfloat16))
        return out

    def limits(self, queries: tuple[Tensor, ...], squared: Tensor) -> Tensor:
        """The most (Q,) that bounds of pairs within a squared distance (Q,) can be."""
        _, moved, norms = queries
        widest = (squared.sqrt() / self._scale + moved).square()
        widest += ROUNDING * (norms + squared) / self._scale**2
        limits = (widest / 2).clamp_(max=_LARGEST).bfloat16().view(torch.int16)
        return limits.masked_fill(widest.isnan(), _NOTHING)

    def only(self, rows: Tensor) -> BFloat16Screen:
        """The screen of some of the bank's vectors (m,) int64."""
        some = copy(self)
        some._coarse = self._coarse[:, rows]
        return some

    def _rounded(self, coarse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates (n, d), relative to the bank's radius, in bfloat16.

        With the lengths (n,) by which rounding moves them, and half the squared norms of what is
        left as a sum of bfloat16 numbers (n, 3).
        """
        centred = (coarse - self._centre).div_(self._scale)
        rounded = centred.bfloat16()
        moved = torch.linalg.vector_norm(centred.sub_(rounded), dim=1)
        # Infinity would become NaN, whose sign, and so whose place in the order, processors choose.
        rest = (rounded.float().square_().sum(1) / 2).clamp_(max=_LARGEST)
        parts = []
        for _ in range(_PARTS):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        return rounded, moved, torch.stack(parts, dim=1)


def has_bf16_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 numbers (AMX).

    Other instructions for bfloat16 do no more than twice what float32's do, which is too little
    for this screen.
    """
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    return bool(found.get("amx_bf16")) and has_bf16(torch.device("cpu"))
