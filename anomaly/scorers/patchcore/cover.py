"""How far each point is from the nearest of some centres, kept up to date as centres are added.

A point need not meet every new centre:

- *Cells.* Where many centres come, points are grouped around early ones. By the triangle
  inequality, a centre farther from a cell's origin than its radius plus its largest bound changes
  nothing in it.
- *Rest.* A bound only falls, so a point that is closer to a centre than the farthest will be at the
  end is never the farthest, and rests. How close that is, is foreseen from how fast the largest
  bound falls. Where it falls below what was foreseen, points that rest wake and meet the centres
  that they missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
# Share of the centres with which it is foreseen how far the last one will be from the others, and
# what the level is set to of that, squared: points that wake cost more than some that rest late.
_SEEN = 1 / 16
_LOWER = 0.85
# Points of a cell go to rest when no more than this share of it is left above the level: parting
# them costs as much as letting them meet some centres more.
_AWAKE = 0.75


@dataclass
class _Cell:
    """Points that are updated together.

    Attributes:
        members: (n,) int64, the indices of those that are awake.
        origin: (d,), a place among them: distances are multiplied out relative to it, so that
            large norms don't cancel.
        norms: (n,) squared distance of each to the origin.
        reach: a centre at least this far from the origin is no member's nearest.
        resting: the indices (m,) int64 of points, and how many centres those have met.
    """

    members: Tensor
    origin: Tensor
    norms: Tensor
    reach: float = float("inf")
    resting: list[tuple[Tensor, int]] = field(default_factory=list)


class Cover:
    """The squared distance of every point to its nearest centre, as points become centres.

    Args:
        points: (N, d), any floating dtype.
        spread: hands out work, see `anomaly.runtime.parallel.spreading`.
        expected: about how many centres will be added: cells are made where they are many.

    Attributes:
        bounds: (N,) float32, no less than the squared distances; centres have -1. The owner may
            set them before the first pick.
        level: bounds from here on are the squared distances. The largest of them is, as long as
            there are others than centres.
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
        self._centres = points.new_empty(0, points.shape[1], dtype=torch.float32)
        self.bounds = torch.full((len(points),), float("inf"), device=points.device)
        self.level = 0.0
        self._expected = expected
        self._largest: list[tuple[int, float]] = []
        everything = torch.arange(len(points), device=points.device)
        blocks = [(m, self._mean) for m in torch.split(everything, self._block)]
        self._cells = self._spread(self._cell, blocks)

    def pick(self, members: Tensor) -> None:
        """Make centres of some points (n,)."""
        while len(members):
            some = members[: self._wanted or _CENTRES]
            members = members[len(some) :]
            centres = self._points.index_select(0, some).float()
            self._centres = torch.cat([self._centres, centres])
            self._update(centres)
            self.bounds[some] = -1.0  # even where rounding leaves one above 0
            if self._wanted and len(self._centres) >= self._wanted:
                self._partition(self._centres[: self._wanted])
                self._wanted = 0
        largest = float(self.bounds.max())
        self._largest.append((len(self._centres), largest))
        if len(self._centres) < _SEEN * self._expected:
            return
        while largest < self.level or not self.level:
            self._set_level(_LOWER * self._foreseen(largest))
            if not self.level:  # all points are where a centre is
                return
            largest = float(self.bounds.max())

    def _foreseen(self, largest: float) -> float:
        """What the largest bound, squared, will be with as many centres as are expected.

        It falls as a power of their number, whose exponent is that of the last three quarters.
        """
        now = len(self._centres)
        earlier = [seen for seen in self._largest if seen[0] <= now // 4]
        then, before = earlier[-1] if earlier else self._largest[0]
        if largest <= 0 or now == then:
            return max(largest, 0.0)
        exponent = math.log(before / largest) / math.log(now / then)
        return largest * math.pow(now / max(now, self._expected), exponent)

    def _update(self, centres: Tensor) -> None:
        cells = [cell for cell in self._cells if len(cell.members)]
        if not cells:
            return
        origins = torch.stack([cell.origin for cell in cells]) - self._mean
        away = torch.cdist(origins, centres - self._mean)
        reach = torch.tensor([cell.reach for cell in cells], device=away.device)
        near = away < reach[:, None] * _MARGIN
        work = [(c, hit) for c, hit in zip(cells, near, strict=True) if bool(hit.any())]
        self._spread(lambda w: self._update_cell(w[0], centres[w[1]]), work)

    def _update_cell(self, cell: _Cell, centres: Tensor) -> None:
        offsets = self._offsets(cell.members, cell.origin)
        bounds = self._lowered(cell.members, offsets, cell.norms, centres - cell.origin)
        far = bounds >= self.level
        if int(far.sum()) <= _AWAKE * len(far):
            cell.resting.append((cell.members[~far], len(self._centres)))
            cell.members, cell.norms, bounds = cell.members[far], cell.norms[far], bounds[far]
        if cell.reach < float("inf"):
            cell.reach = _reach(cell.norms, bounds)

    def _lowered(self, members: Tensor, offsets: Tensor, norms: Tensor, centres: Tensor) -> Tensor:
        """Bounds (n,) of some points that have met centres (c, d), relative to one origin."""
        squared = torch.addmm(centres.square().sum(1, True), centres, offsets.T, alpha=-2)
        nearest = squared.amin(0).add_(norms).clamp_(min=0)
        bounds = torch.minimum(nearest, self.bounds.index_select(0, members))
        self.bounds.index_copy_(0, members, bounds)
        return bounds

    def _set_level(self, level: float) -> None:
        """Wake the points that rest above a lower level."""
        self.level = level
        self._spread(self._wake, [cell for cell in self._cells if cell.resting])

    def _wake(self, cell: _Cell) -> None:
        """Let points that rest above the level catch up; those still above it stay awake."""
        awake, resting = [cell.members], []
        for members, met in cell.resting:
            above = self.bounds[members] >= self.level
            some = members[above]
            far = self._caught_up(cell, some, met) >= self.level
            awake.append(some[far])
            resting += [(members[~above], met), (some[~far], len(self._centres))]
        cell.resting = [(members, met) for members, met in resting if len(members)]
        cell.members = torch.cat(awake)
        cell.norms = self._offsets(cell.members, cell.origin).square_().sum(1)
        if cell.reach < float("inf"):
            cell.reach = _reach(cell.norms, self.bounds[cell.members])

    def _caught_up(self, cell: _Cell, members: Tensor, met: int) -> Tensor:
        """Bounds (n,) of some of a cell's points that have met all centres but so many of them."""
        bounds = self.bounds[members]
        if not len(members):
            return bounds
        offsets = self._offsets(members, cell.origin)
        norms = offsets.square().sum(1)
        for centres in torch.split(self._centres[met:] - cell.origin, _CENTRES):
            if cell.reach < float("inf"):
                away = torch.linalg.vector_norm(centres, dim=1)
                centres = centres[away < _reach(norms, bounds) * _MARGIN]
            if len(centres):
                bounds = self._lowered(members, offsets, norms, centres)
        return bounds

    def _partition(self, pivots: Tensor) -> None:
        """Make cells of the points around their nearest pivots (k, d)."""
        self._set_level(0.0)
        members = torch.cat([cell.members for cell in self._cells])
        owners = torch.cat(self._spread(lambda cell: self._nearest(cell, pivots), self._cells))
        order = owners.argsort(stable=True)
        sizes = torch.bincount(owners, minlength=len(pivots)).tolist()
        blocks = [
            (some, pivot)
            for pivot, group in zip(pivots, torch.split(members[order], sizes), strict=True)
            for some in torch.split(group, self._block)
            if len(some)
        ]
        self._cells = self._spread(self._cell, blocks)
        for cell in self._cells:
            cell.reach = _reach(cell.norms, self.bounds[cell.members])

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
    lengths = norms.sqrt() + bounds.clamp(min=0).sqrt()
    return float(lengths.max()) if len(lengths) else 0.0
