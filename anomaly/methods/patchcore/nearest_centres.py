"""How far points are from their nearest centres, most of which needn't be looked at.

Points are grouped into cells around the first centres, and each cell meets all centres from the
nearest to its origin on. By the triangle inequality, a centre at a distance D from the origin is at
least D − r from a member at a distance r from it, so that a cell is done as soon as that exceeds
what each of its members has found. On real embeddings an eighth of the products is left with 21,401
centres, a third with 2,140. The first picks of greedy k-center are far apart, and so cells around
them are small; centres in another order give the same distances, and take longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.runtime import parallel_map

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
# Centres are left out with a margin far above float32's rounding of the distances.
_MARGIN = 1.0 + 1e-4


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
    device = points.device
    rows = _ROWS[device.type]
    cells = _Cells.around_first(centres.float(), owners, count)
    cell_of = torch.cat(parallel_map(cells.nearest, torch.split(points, rows), device))
    sizes = cell_of.bincount(minlength=len(cells.away)).tolist()
    groups = enumerate(torch.split(cell_of.argsort(stable=True), sizes))
    work = [(c, block) for c, group in groups for block in torch.split(group, rows) if len(block)]

    def measure(item: tuple[int, Tensor]) -> None:
        cell, block = item
        if len(block) < _LEAST:
            block = torch.cat([block, block[:1].expand(_LEAST - len(block))])
        by_owner = cells.squared_to_owners(cell, points.index_select(0, block).float(), enough)
        values, owner_of = by_owner.topk(min(2, count), 0, largest=False)
        least[block], nearest[block] = values[0], owner_of[0]
        if count > 1:
            others[block] = values[1]

    parallel_map(measure, work, device)
    return least, nearest, others


@dataclass(frozen=True, eq=False)
class _Cells:
    """Centres, and all of them in order of their distances to the first ones, the cells' origins.

    Attributes:
        centres: (M, d) float32.
        owners: (M,) int64 from 0 to `count` − 1.
        count: how many owners there are.
        order: (C, M) int64, for each cell the centres from the nearest to its origin on.
        away: (C, M), their distances to it, ascending.
    """

    centres: Tensor
    owners: Tensor
    count: int
    order: Tensor
    away: Tensor

    @classmethod
    def around_first(cls, centres: Tensor, owners: Tensor, count: int) -> _Cells:
        """As many cells as suit the number of centres."""
        cells = max(1, min(len(centres) // _CELL_CENTRES, _CELLS[centres.device.type]))
        away, order = torch.cdist(centres[:cells], centres).sort(1)
        return cls(centres, owners, count, order, away)

    def nearest(self, points: Tensor) -> Tensor:
        """The cell (n,) int64 whose origin is nearest to each point (n, d)."""
        return torch.cdist(points.float(), self.centres[: len(self.away)]).argmin(1)

    def squared_to_owners(self, cell: int, members: Tensor, enough: float) -> Tensor:
        """Squared distances of a cell's members (n, d) to the nearest centre of each owner.

        Returns:
            (count, n). Only the two lowest of each member are sure, and none within `enough`, the
            second lowest from which on a member needs no closer centre.
        """
        origin, order, away = self.centres[cell], self.order[cell], self.away[cell]
        # Relative to the origin: distances are multiplied out, and large norms would cancel.
        offsets = members - origin
        norms = offsets.square().sum(1)
        squared = offsets.new_full((self.count, len(offsets)), torch.inf)
        step = _COLUMNS[offsets.device.type]
        for first in range(0, len(order), step):
            if first:
                second = squared.topk(min(2, self.count), 0, largest=False).values[-1]
                going = ~(second <= enough)  # what is NaN stays so, and is never done
                if not bool(going.any()):
                    break
                reach = float((norms.sqrt() + second.sqrt())[going].amax())
                if float(away[first]) > reach * _MARGIN:
                    break
            near = order[first : first + step]
            owners, by_owner = self.owners[near].sort(stable=True)
            around = self.centres.index_select(0, near[by_owner]).sub_(origin)
            product = torch.addmm(around.square().sum(1, True), around, offsets.T, alpha=-2)
            sizes = owners.bincount(minlength=self.count).tolist()
            for owner, part in enumerate(torch.split(product, sizes)):
                if len(part):
                    lower = part.amin(0).add_(norms).clamp_(min=0)
                    torch.minimum(squared[owner], lower, out=squared[owner])
        return squared
