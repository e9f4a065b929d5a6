"""How far each point is from the nearest of some centres, kept up to date as centres are added."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.runtime.parallel import Spread

# Few cells are too wide to be skipped, many make products too small to be quick and cost more to
# find. Of 64 to 384, 128 measured best, and twice as many for the most centres.
_CELLS = 128
# Centres from which on cells save more than finding them costs, and twice as many cells do.
_MANY, _MOST = 6 * _CELLS, 100 * _CELLS
# Points a block: rows of one product. A GPU wants few launches.
_BLOCK = {"cpu": 4096, "cuda": 65536}
# Centres a product, so that it never exceeds _CENTRES × _BLOCK numbers.
_CENTRES = 2048
# Cells are skipped with a margin far above float32's rounding of the distances.
_MARGIN = 1.0 + 1e-4


@dataclass
class _Cell:
    """Points that are updated together.

    Attributes:
        members: (n,) int64, their indices.
        origin: (d,), a place among them: distances are multiplied out relative to it, so that
            large norms don't cancel.
        norms: (n,) squared distance of each to the origin.
        reach: a centre at least this far from the origin is no member's nearest.
    """

    members: Tensor
    origin: Tensor
    norms: Tensor
    reach: float = float("inf")


class Cover:
    """The squared distance of every point to its nearest centre, as centres are added.

    Args:
        points: (N, d), any floating dtype.
        spread: hands out work, see `anomaly.runtime.parallel.spreading`.
        expected: about how many centres will be added: cells are made where they are many.

    Attributes:
        bounds: (N,) float32. Entries that the owner sets to -1 stay so.
    """

    def __init__(self, points: Tensor, spread: Spread, expected: int) -> None:
        self._points = points
        self._spread = spread
        self._mean = points.mean(0, dtype=torch.float32)
        if not bool(self._mean.isfinite().all()):
            bad = int((~points.isfinite().all(1)).sum())
            raise DataError(
                f"{bad} of {len(points)} patch embeddings hold NaN or infinite values; "
                "check the backbone's weights and the precision it runs in"
            )
        self._block = _BLOCK[points.device.type]
        # Cells to be made; a GPU multiplies faster than it could be told what to skip.
        self._wanted = 0
        if points.device.type == "cpu" and len(points) >= 32 * _CELLS and expected >= _MANY:
            self._wanted = _CELLS if expected < _MOST else 2 * _CELLS
        self._seen = points.new_empty(0, points.shape[1], dtype=torch.float32)
        self.bounds = torch.full((len(points),), float("inf"), device=points.device)
        everything = torch.arange(len(points), device=points.device)
        blocks = [(m, self._mean) for m in torch.split(everything, self._block)]
        self._cells = self._spread(self._cell, blocks)

    def pick(self, members: Tensor) -> None:
        """Make centres of some points (n,), whose bounds are -1 from then on."""
        self.add(self._points.index_select(0, members))
        self.bounds[members] = -1.0  # even where rounding leaves one above 0

    def add(self, centres: Tensor) -> None:
        """Bring all bounds up to date with more centres (c, d)."""
        while len(centres):
            some = centres[: self._wanted or _CENTRES].float()
            centres = centres[len(some) :]
            self._update(some)
            if self._wanted:
                self._seen = torch.cat([self._seen, some])
                if len(self._seen) >= self._wanted:
                    self._cells = self._partition(self._seen[: self._wanted])
                    self._wanted = 0

    def _update(self, centres: Tensor) -> None:
        origins = torch.stack([cell.origin for cell in self._cells]) - self._mean
        away = torch.cdist(origins, centres - self._mean)
        reach = torch.tensor([cell.reach for cell in self._cells], device=away.device)
        near = away < reach[:, None] * _MARGIN
        work = [(c, hit) for c, hit in zip(self._cells, near, strict=True) if bool(hit.any())]
        self._spread(lambda w: self._update_cell(w[0], centres[w[1]]), work)

    def _update_cell(self, cell: _Cell, centres: Tensor) -> None:
        centres = centres - cell.origin
        offsets = self._offsets(cell.members, cell.origin)
        squared = torch.addmm(centres.square().sum(1, True), centres, offsets.T, alpha=-2)
        nearest = squared.amin(0).add_(cell.norms).clamp_(min=0)
        bounds = torch.minimum(nearest, self.bounds.index_select(0, cell.members))
        self.bounds.index_copy_(0, cell.members, bounds)
        if cell.reach < float("inf"):
            cell.reach = _reach(cell.norms, bounds)

    def _partition(self, pivots: Tensor) -> list[_Cell]:
        """Cells of the points around their nearest pivots (k, d)."""
        owners = torch.cat(self._spread(lambda cell: self._nearest(cell, pivots), self._cells))
        order = owners.argsort(stable=True)
        groups = torch.split(order, torch.bincount(owners, minlength=len(pivots)).tolist())
        blocks = [
            (members, pivot)
            for pivot, group in zip(pivots, groups, strict=True)
            for members in torch.split(group, self._block)
            if len(members)
        ]
        cells = self._spread(self._cell, blocks)
        for cell in cells:
            cell.reach = _reach(cell.norms, self.bounds[cell.members])
        return cells

    def _cell(self, block: tuple[Tensor, Tensor]) -> _Cell:
        members, origin = block
        return _Cell(members, origin, self._offsets(members, origin).square_().sum(1))

    def _nearest(self, cell: _Cell, pivots: Tensor) -> Tensor:
        """Which pivot (n,) is nearest to each member."""
        pivots = pivots - cell.origin
        offsets = self._offsets(cell.members, cell.origin)
        return torch.addmm(pivots.square().sum(1), offsets, pivots.T, alpha=-2).argmin(1)

    def _offsets(self, members: Tensor, origin: Tensor) -> Tensor:
        return self._points.index_select(0, members).float().sub_(origin)


def _reach(norms: Tensor, bounds: Tensor) -> float:
    return float((norms.sqrt() + bounds.clamp(min=0).sqrt()).max())
