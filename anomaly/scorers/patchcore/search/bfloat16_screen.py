"""Lower bounds of many distances in one product of bfloat16 numbers."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from anomaly.runtime.devices import has_bf16
from anomaly.scorers.patchcore.search.coarse_screen import ROUNDING, whole_groups
from anomaly.scorers.patchcore.search.coordinates import (
    AllCoordinates,
    Coordinates,
    PrincipalCoordinates,
)

# Vectors from which on fewer coordinates pay, and how many: with what comes on top they fill tiles.
_LARGE = 6144
_AXES = 377
# bfloat16 numbers, of 8 binary digits each, that hold half a squared norm as float32 has it.
_PARTS = 3
# Numbers in a row of a tile: rows are filled up with zeros. A row of odd length is read on into the
# next one, whose NaN would reach it, times 0.
_TILE = 32
# What rounding moves a vector by at most, relative to what it becomes.
_MOVED = 1.01 * 2.0**-8
_LARGEST = torch.finfo(torch.bfloat16).max
_NOTHING = torch.iinfo(torch.int16).min


class BFloat16Screen:
    """Squared distances of coordinates rounded to bfloat16.

    Rounding moves a vector by far less than in `Int8Screen`, and the product is as quick where the
    processor has tiles for it (AMX). As there, limits are wider by the lengths that rounding moves
    vectors by.

    Bounds are half the squared distances, in bfloat16. Both sides of a comparison are rounded the
    same way, which keeps their order. They are compared as whole numbers of 16 bits: that has the
    order of numbers from 0 up, and what rounding leaves below 0 is less than any limit.

    Args:
        coarse: (M, d) float32 coordinates of the bank.
    """

    group = 16  # a larger one's members are far apart in memory
    dtype = torch.int16

    def __init__(self, coarse: Tensor) -> None:
        rows, _ = _rows(coarse, bank=True)
        moved = torch.linalg.vector_norm(coarse + rows[:, : coarse.shape[1]], dim=1)
        self._moved = float(moved.amax())
        self._fill(rows)

    @staticmethod
    def coordinates(bank: Tensor) -> Coordinates:
        """All where a product of them takes no longer than finding fewer."""
        if len(bank) >= _LARGE and bank.shape[1] > 2 * _AXES:
            return PrincipalCoordinates(bank, _AXES)
        return AllCoordinates(bank)

    def prepared(self, coarse: Tensor) -> tuple[Tensor, ...]:
        """Rows of the product, and the norms of their coordinates."""
        return _rows(coarse, bank=False)

    def bounds(self, queries: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Half the squared distances (Q, width).

        In memory a vector's bounds lie side by side: the product takes 11 ms instead of 19 so, and
        the least of each group 2 instead of 9, by whole registers of queries.
        """
        bounds = out.view(self.width, -1)
        torch.mm(self._coarse, queries[0].T, out=bounds.view(torch.bfloat16))
        return bounds.T

    def limits(self, queries: tuple[Tensor, ...], squared: Tensor) -> Tensor:
        """The most (Q,) that bounds of pairs within a squared distance (Q,) can be."""
        norms = queries[1]
        widest = (squared.sqrt() + _MOVED * norms + self._moved).square()
        widest += ROUNDING * (norms.square() + squared)
        limits = (widest / 2).clamp_(max=_LARGEST).bfloat16().view(torch.int16)
        return limits.masked_fill(widest.isnan(), _NOTHING)

    def only(self, rows: Tensor) -> BFloat16Screen:
        """The screen of some of the bank's vectors (m,) int64."""
        some = copy(self)
        some._fill(self._coarse[rows])
        return some

    def _fill(self, rows: Tensor) -> None:
        """Vectors (M, K), then such as are at infinity."""
        self.width = whole_groups(len(rows), self.group)
        self._coarse = pad(rows, (0, 0, 0, self.width - len(rows)))
        self._coarse[len(rows) :, -1] = torch.inf


def _rows(coarse: Tensor, bank: bool) -> tuple[Tensor, Tensor]:
    """Coordinates (n, d) in bfloat16, as rows (n, K) of a product; the norms (n,) of these.

    A query's row times a vector's is half their squared distance: half the squared norms are
    coordinates of their own, each as a sum of bfloat16 numbers.
    """
    count, d = coarse.shape
    width = d + 2 * _PARTS
    rows = coarse.new_empty(count, width + -width % _TILE, dtype=torch.bfloat16)
    rounded = rows[:, :d]
    rounded.copy_(coarse)
    rows[:, d:] = 0
    norms = torch.linalg.vector_norm(rounded, dim=1, dtype=torch.float32)
    # Infinity would become NaN, whose sign, and so whose place in the order, processors choose.
    rest = (norms.square() / 2).clamp_(max=_LARGEST)
    queries, vectors = rows[:, -2 * _PARTS : -_PARTS], rows[:, -_PARTS:]
    mine, theirs = (vectors, queries) if bank else (queries, vectors)
    theirs.fill_(1)
    for part in mine.unbind(1):
        part.copy_(rest)
        rest = rest - part
    if bank:
        rounded.neg_()
    return rows, norms


def has_bf16_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 numbers (AMX).

    Other instructions for bfloat16 do no more than twice what float32's do, which is too little
    for this screen.
    """
    read = getattr(torch.cpu, "get_capabilities", dict)  # newer than the oldest torch we take
    found: dict[str, object] = read()
    return bool(found.get("amx_bf16")) and has_bf16(torch.device("cpu"))
