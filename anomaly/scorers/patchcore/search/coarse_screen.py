"""Lower bounds of many distances in one product, in bfloat16 where the processor has it."""

from __future__ import annotations

from copy import copy
from typing import Protocol

import torch
from torch import Tensor

# Above float32's rounding of squared distances, relative to the squared norms.
ROUNDING = 1e-5
# bfloat16 keeps 8 bits: a result and the limit that it is compared with are off by 2**-8 each.
_RESULT = 1.009
# Products of bfloat16 numbers are exact in float32, their sum of some 136 terms is not.
_SUM = 4e-5
# Limits stay below infinity, where the vectors are that mustn't be found.
_LARGEST = torch.finfo(torch.bfloat16).max
_NOTHING = torch.iinfo(torch.int16).min


class CoarseScreen(Protocol):
    """Tells which bank vectors may be within a distance. Bounds of it are comparable numbers."""

    def bounds(self, coarse: Tensor, norms: Tensor) -> Tensor:
        """(Q, M), lower for nearer: of coordinates (Q, d) of queries with squared norms (Q,)."""
        ...

    def limits(self, coarse: Tensor, norms: Tensor, squared: Tensor) -> Tensor:
        """(Q,) that bounds don't exceed where the coordinates' squared distance is `squared`.

        No bound is within the limit of a query that is NaN.
        """
        ...

    def only(self, rows: Tensor) -> CoarseScreen:
        """The screen of some of the bank's vectors (m,) int64."""
        ...


class Float32Screen:
    """Squared distances less the queries' squared norms.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
        norms: (M,) float32 squared norms of the bank's vectors, whatever else they have.
    """

    def __init__(self, coarse: Tensor, norms: Tensor) -> None:
        self._coarse = coarse
        self._norms = norms

    def bounds(self, coarse: Tensor, norms: Tensor) -> Tensor:
        """See `CoarseScreen`."""
        return torch.addmm(self._norms, coarse, self._coarse.T, alpha=-2)

    def limits(self, coarse: Tensor, norms: Tensor, squared: Tensor) -> Tensor:
        """See `CoarseScreen`."""
        limits = squared - norms + ROUNDING * (norms + squared)
        return limits.clamp_(max=_LARGEST)

    def only(self, rows: Tensor) -> Float32Screen:
        """See `CoarseScreen`."""
        return Float32Screen(self._coarse[rows], self._norms[rows])


class BFloat16Screen:
    """Squared distances of rounded coordinates, two and a half times as quick.

    A product in bfloat16 is summed in float32, but what comes out has 8 bits. So the norms go into
    the product, as coordinates of their own: what is rounded is then the squared distance itself,
    not a difference of large numbers, and is off by 0.4 %. Rounding moves a vector by a known
    length, so the rounded ones are no farther apart than the distance and these lengths together
    (triangle inequality): limits are that much wider, and nothing is ruled out wrongly.

    Bounds are the bits of those numbers as int16, which have the same order where they are
    positive, and are compared many times as fast; a bound below 0 is as good as 0.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
        norms: (M,) float32; infinite for vectors that mustn't be found.
    """

    def __init__(self, coarse: Tensor, norms: Tensor) -> None:
        rounded = coarse.bfloat16()
        self._moved = float(torch.linalg.vector_norm(rounded.float() - coarse, dim=1).amax())
        squares = _parts(rounded.float().square().sum(1).masked_fill_(norms.isinf(), torch.inf))
        bank = torch.cat([-2 * rounded, torch.ones_like(squares), squares], dim=1)
        # Laid out by coordinates: oneDNN would turn it round for every product, five times as slow.
        self._coarse = bank.T.contiguous()

    def bounds(self, coarse: Tensor, norms: Tensor) -> Tensor:
        """See `CoarseScreen`."""
        rounded = coarse.bfloat16()
        squares = _parts(rounded.float().square().sum(1))
        queries = torch.cat([rounded, squares, torch.ones_like(squares)], dim=1)
        squared: Tensor = queries @ self._coarse
        return squared.view(torch.int16)

    def limits(self, coarse: Tensor, norms: Tensor, squared: Tensor) -> Tensor:
        """See `CoarseScreen`."""
        moved = torch.linalg.vector_norm(coarse.bfloat16().float() - coarse, dim=1) + self._moved
        widest = (squared.sqrt() + moved).square() + _SUM * (norms + squared)
        rounded: Tensor = (_RESULT * widest).bfloat16().clamp_(max=_LARGEST)
        # NaN has bits, too, with either sign, which would let through whatever NaN gave as bounds.
        return rounded.view(torch.int16).masked_fill(rounded.isnan(), _NOTHING)

    def only(self, rows: Tensor) -> BFloat16Screen:
        """See `CoarseScreen`."""
        some = copy(self)
        some._coarse = self._coarse.index_select(1, rows)
        return some


def _parts(values: Tensor) -> Tensor:
    """Numbers (n,) as sums of three bfloat16 each, (n, 3): 24 bits, like float32's."""
    high = values.bfloat16()
    middle = (values - high.float()).nan_to_num_(nan=0.0).bfloat16()
    low = (values - high.float() - middle.float()).nan_to_num_(nan=0.0).bfloat16()
    return torch.stack([high, middle, low], dim=1)
