"""Lower bounds of many distances in one product, of 8-bit numbers where that is exact."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from anomaly.scorers.patchcore.search.coordinates import Coordinates, PrincipalCoordinates

# Vectors from which on a bank is large.
_LARGE = 1 << 13
# Above float32's rounding of squared distances, relative to the squared norms.
ROUNDING = 1e-5
# Rounded coordinates lie between plus and minus this.
_LARGEST = 127
# Coordinates that hold half a squared norm, with one more for what is left of it.
_DIGITS = 5
# Steps and scales are no smaller, so that one can divide by them.
_LEAST = torch.finfo(torch.float32).tiny
# No bound is as large but those of vectors that mustn't be found.
_BEYOND = 1 << 30


class CoarseScreen(Protocol):
    """Tells which bank vectors may be within a distance. Bounds of it are comparable numbers.

    Args:
        coarse: (M, d) float32 coordinates of the bank.

    Attributes:
        group: vectors of which one first looks at the least bound alone. The last group is filled
            up, with one at least, by vectors at infinity.
        width: how many bounds a query has, whole groups.
        dtype: of the bounds.
    """

    group: int
    width: int
    dtype: torch.dtype

    def __init__(self, coarse: Tensor) -> None: ...

    @staticmethod
    def coordinates(bank: Tensor) -> Coordinates:
        """What pays to look at, of a bank (M, D)."""
        ...

    def prepared(self, coarse: Tensor) -> tuple[Tensor, ...]:
        """Queries as `bounds` and `limits` take them.

        Args:
            coarse: (Q, d), their coordinates.

        Returns:
            Tensors that each have a row, or a number, for each query.
        """
        ...

    def bounds(self, queries: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """(Q, width), lower for nearer.

        Args:
            queries: as `prepared` gave them.
            out: (Q · width,), where they are written, by rows or by columns. Fresh memory for each
                product, which the system fills with zeros first, would take as long as the
                product.
        """
        ...

    def limits(self, queries: tuple[Tensor, ...], squared: Tensor) -> Tensor:
        """(Q,) that bounds don't exceed where the coordinates' squared distance is `squared`.

        No bound is within the limit of a query that is NaN.
        """
        ...

    def only(self, rows: Tensor) -> CoarseScreen:
        """The screen of some of the bank's vectors (m,) int64."""
        ...


def whole_groups(count: int, group: int) -> int:
    """The bounds that so many vectors have in whole groups, of which one at least is to fill."""
    return (count // group + 1) * group


class Float32Screen:
    """Squared distances less the queries' squared norms.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
    """

    group = 64
    dtype = torch.float32

    def __init__(self, coarse: Tensor) -> None:
        self.width = whole_groups(len(coarse), self.group)
        fill = self.width - len(coarse)
        self._coarse = pad(coarse, (0, 0, 0, fill))
        self._norms = pad(coarse.square().sum(1), (0, fill), value=torch.inf)

    @staticmethod
    def coordinates(bank: Tensor) -> Coordinates:
        """So many that they fill whole registers: more of them rule more of a large bank out."""
        return PrincipalCoordinates(bank, 185 if len(bank) >= _LARGE else 121)

    def prepared(self, coarse: Tensor) -> tuple[Tensor, ...]:
        """Coordinates (Q, d) of queries as they are, and their squared norms (Q,)."""
        return coarse, coarse.square().sum(1)

    def bounds(self, queries: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Squared distances (Q, width) of coordinates, less the queries' squared norms."""
        bounds = out.view(-1, self.width)
        return torch.addmm(self._norms, queries[0], self._coarse.T, alpha=-2, out=bounds)

    def limits(self, queries: tuple[Tensor, ...], squared: Tensor) -> Tensor:
        """The most (Q,) that bounds of pairs within a squared distance (Q,) can be."""
        norms = queries[1]
        limits = squared - norms + ROUNDING * (norms + squared)
        return limits.clamp_(max=torch.finfo(torch.float32).max)  # below infinity

    def only(self, rows: Tensor) -> Float32Screen:
        """The screen of some of the bank's vectors (m,) int64."""
        return Float32Screen(self._coarse[rows])


class Int8Screen:
    """Squared distances of coordinates rounded to whole numbers from -127 to 127.

    A product of such numbers is exact, and several times as quick as one in float32. Rounding moves
    a vector by a known length, so the rounded ones are no farther apart than the distance and these
    lengths together (triangle inequality): limits are that much wider, and nothing is ruled out
    wrongly. All coordinates are rounded to multiples of one step, so they should be about equally
    wide. What lies beyond what the bank has is cut off, and moved by more.

    Bounds are half the squared distances in steps, less half the queries' squared norms. Half the
    squared norms of the bank are coordinates of their own, as digits of base 127.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
    """

    group = 64
    dtype = torch.int32

    def __init__(self, coarse: Tensor) -> None:
        self._count, self.width = len(coarse), whole_groups(len(coarse), self.group)
        self._centre = coarse.mean(0)
        centred = coarse - self._centre
        farthest = float(torch.linalg.vector_norm(centred, dim=1).amax())
        most = (2 * _DIGITS) ** 0.5 * _LARGEST - coarse.shape[1] ** 0.5  # rounding adds a little
        self._step = max(float(centred.abs().amax()) / _LARGEST, farthest / most, _LEAST)
        rounded, moved = self._rounded(centred)
        self._moved = float(moved.amax())
        digits = _digits((rounded.square().sum(1) / 2).int())
        rows = torch.cat([rounded, digits], dim=1).to(torch.int8)
        self._coarse = pad(rows, (0, 0, 0, self.width - self._count))

    @staticmethod
    def coordinates(bank: Tensor) -> Coordinates:
        """As many as in float32: with the digits they fill whole registers."""
        return Float32Screen.coordinates(bank)

    def prepared(self, coarse: Tensor) -> tuple[Tensor, ...]:
        """Queries as `bounds` and `limits` take them.

        Rows of the product, squared norms of the rounded coordinates in steps, the most by which
        rounding moves a query and a vector together, and the squared norms.
        """
        rounded, moved = self._rounded(coarse - self._centre)
        units = rounded.new_full((len(coarse), _DIGITS + 1), _LARGEST)
        units[:, -1] = 1
        factors = torch.cat([-rounded, units], dim=1).to(torch.int8)
        return factors, rounded.square().sum(1), moved + self._moved, coarse.square().sum(1)

    def bounds(self, queries: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Half the squared distances (Q, width) less half the queries' squared norms, in steps²."""
        bounds = out.view(-1, self.width)
        torch._int_mm(queries[0], self._coarse.T, out=bounds)
        bounds[:, self._count :] = _BEYOND + 1
        return bounds

    def limits(self, queries: tuple[Tensor, ...], squared: Tensor) -> Tensor:
        """The most (Q,) that bounds of pairs within a squared distance (Q,) can be."""
        _, lengths, moved, norms = queries
        widest = (squared.sqrt() + moved).square() + ROUNDING * (norms + squared)
        halves: Tensor = (widest.double() / self._step**2 - lengths) / 2
        # What is no number lets nothing through, and what is too large lets all through.
        return halves.nan_to_num_(nan=-_BEYOND).floor_().clamp_(-_BEYOND, _BEYOND).int()

    def only(self, rows: Tensor) -> Int8Screen:
        """The screen of some of the bank's vectors (m,) int64."""
        some = copy(self)
        some._count, some.width = len(rows), whole_groups(len(rows), self.group)
        some._coarse = pad(self._coarse[rows], (0, 0, 0, some.width - len(rows)))
        return some

    def _rounded(self, centred: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates (n, d) in whole steps, and the lengths (n,) by which that moves them."""
        rounded = (centred / self._step).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_(nan=0.0)
        return rounded, torch.linalg.vector_norm(rounded * self._step - centred, dim=1)


def _digits(halves: Tensor) -> Tensor:
    """Numbers (n,) int32 as 127 · (the sum of some digits) + the last one, each at most 127."""
    rest, digits = halves // _LARGEST, []
    for _ in range(_DIGITS):
        digits.append(rest.clamp(max=_LARGEST))
        rest = rest - digits[-1]
    return torch.stack([*digits, halves % _LARGEST], dim=1)


@lru_cache(maxsize=1)
def has_exact_int8() -> bool:
    """Whether the CPU multiplies whole numbers of 8 bits faster than float32, and exactly.

    Where it has no instruction for sums of four products (VNNI), or oneDNN mayn't use it, sums of
    two are cut off at 16 bits.
    """
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    if not (found.get("avx512_vnni") or found.get("avx_vnni")) or not torch._C._has_mkldnn:
        return False
    rows = torch.full((64, 128), _LARGEST, dtype=torch.int8)
    products = torch._int_mm(rows, -rows.T.contiguous())
    return bool((products == -128 * _LARGEST**2).all())
