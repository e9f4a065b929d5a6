"""How far points are from their nearest centres, most of which needn't be looked at.

Centres that are added one after another are those of `MinDistances`. Where all are given, points
are grouped into cells around the first centres, and each cell meets all centres from the
nearest to its origin on. By the triangle inequality, a centre at a distance D from the origin is at
least D − r from a member at a distance r from it, so that a cell is done as soon as that exceeds
what each of its members has found. On real embeddings an eighth of the products is left with 21,401
centres, a third with 2,140. The first picks of greedy k-center are far apart, and so cells around
them are small; centres in another order give the same distances, and take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.runtime.parallel import ParallelMap, parallel_map

# Of 128 to 1,024 cells, 256 measured best: few are wide, many make products too small to be quick.
# A GPU multiplies faster than it could be told what to skip.
_CELLS = {"cpu": 256, "cuda": 1}
# Centres, at least, for each of the cells. They don't depend on how many points come at once: each
# point's distances, rounding included, are those that it has among any others.
_CELL_CENTRES = 16
# Points of one product, at least: those of fewer round otherwise.
_LEAST = 16
# Points, and centres, of one product, at most.
_ROWS, _COLUMNS = {"cpu": 1024, "cuda": 65536}, {"cpu": 1024, "cuda": 2048}
# Points that aren't done yet go on without the others when no more than this share of them is left.
_LEFT = 0.75
# Centres are left out with a margin far above float32's rounding of the distances.
_MARGIN = 1.0 + 1e-4

# Cells where centres are added. Few are too wide to be skipped, many make products too small to be
# quick and cost more to find. Of 64 to 384, 128 measured best, and twice as many for the most
# centres.
_GROUPS = 128
# Centres from which on cells save more than finding them costs, and twice as many cells do.
_MANY, _MOST = 6 * _GROUPS, 100 * _GROUPS
# Points a block: rows of one product. A GPU wants few launches.
_BLOCK = {"cpu": 4096, "cuda": 65536}
# Centres a product, so that it never exceeds _CENTRES × _BLOCK numbers.
_CENTRES = 2048


def distances_to_nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Distance (N,) of each point (N, d) to its nearest centre (M, d); infinite without centres."""
    return squared_to_nearest(points, centres).sqrt()


def squared_to_nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distance (N,) of each point (N, d) to its nearest centre (M, d).

    Infinite without centres; NaN for points that hold NaN or infinite values.
    """
    owners = torch.zeros(len(centres), dtype=torch.int64, device=centres.device)
    return squared_to_two_owners(points, centres, owners, 1)[0]


def squared_to_two_owners(
    points: Tensor, centres: Tensor, owners: Tensor, count: int, enough: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Which owner has the nearest centre of each point, and how far that of any other owner is.

    Args:
        points: (N, d), any floating dtype. Distances are taken in float32.
        centres: (M, d).
        owners: (M,) int64 from 0 to `count` − 1, whose each centre is.
        count: how many owners there are.
        enough: a point that has centres of two owners within this squared distance needs no closer
            ones: what is returned of it is of any two such owners.

    Returns:
        The squared distance (N,) float32 to the nearest centre, its owner (N,) int64, and the
        squared distance (N,) to the nearest centre of another owner. Infinite where there is none;
        NaN for points that hold NaN or infinite values.
    """
    least = torch.full((len(points),), torch.inf, device=points.device)
    nearest, others = torch.zeros_like(least, dtype=torch.int64), least.clone()
    if not len(points) or not len(centres):
        return least, nearest, others
    centres = centres.float()
    device = points.device
    wanted = min(len(centres) // _CELL_CENTRES, _CELLS[device.type])
    origins = centres[: max(1, wanted)]
    away, order = torch.cdist(origins, centres).sort(1)
    rows = _ROWS[device.type]
    blocks = torch.split(points, rows)
    cells = torch.cat(parallel_map(partial(_nearest_origin, origins), blocks, device))
    members = cells.bincount(minlength=len(origins)).tolist()
    groups = enumerate(torch.split(cells.argsort(stable=True), members))
    work = [(c, block) for c, group in groups for block in torch.split(group, rows) if len(block)]

    def measure(item: tuple[int, Tensor]) -> None:
        cell, block = item
        if len(block) < _LEAST:
            block = torch.cat([block, block[:1].expand(_LEAST - len(block))])
        offsets = points.index_select(0, block).float().sub_(origins[cell])
        around = origins[cell], order[cell], away[cell]
        by_owner = _to_owners(offsets, centres, owners, count, *around, enough)
        values, owner_of = by_owner.topk(min(2, count), 0, largest=False)
        least[block], nearest[block] = values[0], owner_of[0]
        if count > 1:
            others[block] = values[1]

    parallel_map(measure, work, device)
    return least, nearest, others


def _nearest_origin(origins: Tensor, points: Tensor) -> Tensor:
    """Which origin (n,) int64 is nearest to each point (n, d)."""
    return torch.cdist(points.float(), origins).argmin(1)


def _to_owners(
    offsets: Tensor,
    centres: Tensor,
    owners: Tensor,
    count: int,
    origin: Tensor,
    order: Tensor,
    away: Tensor,
    enough: float,
) -> Tensor:
    """Squared distances of a cell's members to the nearest centre of each owner.

    Args:
        offsets: (n, d), the members relative to the cell's origin: distances are multiplied out,
            and large norms would cancel.
        centres: (M, d).
        owners: (M,) int64 from 0 to `count` − 1.
        count: how many owners there are.
        origin: (d,), of the cell.
        order: (M,) int64, centres from the nearest to the origin on.
        away: (M,), their distances to it, ascending.
        enough: second lowest squared distance from which on a member meets no more centres.

    Returns:
        (count, n). Only the two lowest of each member are sure, and within `enough` none is.
    """
    squared = offsets.new_full((count, len(offsets)), torch.inf)
    members = torch.arange(len(offsets), device=offsets.device)
    norms = offsets.square().sum(1)
    lowest = squared.clone()
    step = _COLUMNS[offsets.device.type]
    for first in range(0, len(centres), step):
        if first:
            second = lowest.topk(min(2, len(lowest)), 0, largest=False).values[-1]
            left = int((~(second <= enough)).sum())  # what is NaN stays so, and is never done
            if not left:
                break
            if left <= _LEFT * len(second):  # those that aren't done yet go on alone
                squared[:, members] = lowest
                going = second.topk(max(left, _LEAST)).indices
                members, second, norms = members[going], second[going], norms[going]
                lowest, offsets = lowest.index_select(1, going), offsets.index_select(0, going)
            reach = float((norms.sqrt() + second.sqrt()).amax())
            if float(away[first]) > reach * _MARGIN:
                break
        near = order[first : first + step]
        whose, by_owner = owners[near].sort(stable=True)
        around = centres.index_select(0, near[by_owner]).sub_(origin)
        product = torch.addmm(around.square().sum(1, True), around, offsets.T, alpha=-2)
        sizes = whose.bincount(minlength=len(lowest)).tolist()
        lower = torch.full_like(lowest, torch.inf)
        for owner, part in enumerate(torch.split(product, sizes)):
            if len(part):
                torch.amin(part, 0, out=lower[owner])
        torch.minimum(lowest, lower.add_(norms).clamp_(min=0), out=lowest)
    squared[:, members] = lowest
    return squared


class MinDistances:
    """The squared distance of every point to its nearest centre, as points become centres.

    Where many centres come, points are grouped into cells around the first ones. By the triangle
    inequality, a centre farther from a cell's origin than a member is, plus that member's distance
    to its nearest centre, is no nearer to it.

    Args:
        points: (N, d), any floating dtype.
        parallel_map: hands out work, see `anomaly.runtime.parallel.parallel_pool`.
        expected: about how many centres will be added: cells are made where they are many.

    Attributes:
        squared: (N,) float32; centres have -1. The owner may set them before the first centre.

    Raises:
        DataError: a point is NaN or infinite.
    """

    def __init__(self, points: Tensor, parallel_map: ParallelMap, expected: int) -> None:
        self._points = points
        self._parallel_map = parallel_map
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
        if points.device.type == "cpu" and len(points) >= 32 * _GROUPS and expected >= _MANY:
            self._wanted = _GROUPS if expected < _MOST else 2 * _GROUPS
        self.squared = torch.full((len(points),), float("inf"), device=points.device)
        self._pivots = points.new_empty(0, points.shape[1], dtype=torch.float32)
        everything = torch.arange(len(points), device=points.device)
        blocks = [(m, self._mean) for m in torch.split(everything, self._block)]
        self._cells = self._parallel_map(self._cell, blocks)

    def add_centres(self, members: Tensor) -> None:
        """Make centres of some points (n,) int64."""
        while len(members):
            batch = members[: self._wanted or _CENTRES]
            members = members[len(batch) :]
            centres = self._points.index_select(0, batch).float()
            self._update(centres)
            self.squared[batch] = -1.0  # even where rounding leaves one above 0
            if self._wanted:
                self._pivots = torch.cat([self._pivots, centres])
                if len(self._pivots) >= self._wanted:
                    self._partition(self._pivots[: self._wanted])
                    self._wanted = 0

    def _update(self, centres: Tensor) -> None:
        origins = torch.stack([cell.origin for cell in self._cells]) - self._mean
        away = torch.cdist(origins, centres - self._mean)
        reach = torch.tensor([cell.reach for cell in self._cells], device=away.device)
        near = away < reach[:, None] * _MARGIN
        work = [(c, hit) for c, hit in zip(self._cells, near, strict=True) if bool(hit.any())]
        self._parallel_map(lambda w: self._update_cell(w[0], centres[w[1]]), work)

    def _update_cell(self, cell: _Cell, centres: Tensor) -> None:
        offsets, centres = self._offsets(cell.members, cell.origin), centres - cell.origin
        squared = torch.addmm(centres.square().sum(1, True), centres, offsets.T, alpha=-2)
        nearest = squared.amin(0).add_(cell.norms).clamp_(min=0)
        nearest = torch.minimum(nearest, self.squared.index_select(0, cell.members))
        self.squared.index_copy_(0, cell.members, nearest)
        if cell.reach < float("inf"):
            cell.reach = _reach(cell.norms, nearest)

    def _partition(self, pivots: Tensor) -> None:
        """Make cells of the points around their nearest pivots (k, d)."""
        members = torch.cat([cell.members for cell in self._cells])
        nearest = self._parallel_map(lambda cell: self._nearest(cell, pivots), self._cells)
        owners = torch.cat(nearest)
        order = owners.argsort(stable=True)
        sizes = torch.bincount(owners, minlength=len(pivots)).tolist()
        blocks = [
            (part, pivot)
            for pivot, group in zip(pivots, torch.split(members[order], sizes), strict=True)
            for part in torch.split(group, self._block)
            if len(part)
        ]
        self._cells = self._parallel_map(self._cell, blocks)
        for cell in self._cells:
            cell.reach = _reach(cell.norms, self.squared[cell.members])

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


def _reach(norms: Tensor, squared: Tensor) -> float:
    return float((norms.sqrt() + squared.clamp(min=0).sqrt()).max())
