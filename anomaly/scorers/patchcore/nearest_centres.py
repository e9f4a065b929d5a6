"""How far points are from the nearest of given centres, most of which needn't be looked at.

Points are grouped into cells around the first centres, and each cell meets all centres from the
nearest to its origin on. By the triangle inequality, a centre at a distance D from the origin is at
least D − r from a member at a distance r from it, so that a cell is done as soon as that exceeds
what each of its members has found. On real embeddings an eighth of the products is left with 21,401
centres, a third with 2,140. The first picks of greedy k-center are far apart, and so cells around
them are small; centres in another order give the same distances, and take longer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from anomaly.runtime.parallel import spread

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
    cells = torch.cat(spread(partial(_nearest_origin, origins), blocks, device))
    members = cells.bincount(minlength=len(origins)).tolist()
    groups = enumerate(torch.split(cells.argsort(stable=True), members))
    work = [(c, some) for c, group in groups for some in torch.split(group, rows) if len(some)]

    def measure(item: tuple[int, Tensor]) -> None:
        cell, some = item
        if len(some) < _LEAST:
            some = torch.cat([some, some[:1].expand(_LEAST - len(some))])
        offsets = points.index_select(0, some).float().sub_(origins[cell])
        around = origins[cell], order[cell], away[cell]
        by_owner = _to_owners(offsets, centres, owners, count, *around, enough)
        values, found = by_owner.topk(min(2, count), 0, largest=False)
        least[some], nearest[some] = values[0], found[0]
        if count > 1:
            others[some] = values[1]

    spread(measure, work, device)
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
    some = squared.clone()
    step = _COLUMNS[offsets.device.type]
    for first in range(0, len(centres), step):
        if first:
            second = some.topk(min(2, len(some)), 0, largest=False).values[-1]
            left = int((~(second <= enough)).sum())  # what is NaN stays so, and is never done
            if not left:
                break
            if left <= _LEFT * len(second):  # those that aren't done yet go on alone
                squared[:, members] = some
                going = second.topk(max(left, _LEAST)).indices
                members, second, norms = members[going], second[going], norms[going]
                some, offsets = some.index_select(1, going), offsets.index_select(0, going)
            reach = float((norms.sqrt() + second.sqrt()).amax())
            if float(away[first]) > reach * _MARGIN:
                break
        near = order[first : first + step]
        whose, by_owner = owners[near].sort(stable=True)
        around = centres.index_select(0, near[by_owner]).sub_(origin)
        product = torch.addmm(around.square().sum(1, True), around, offsets.T, alpha=-2)
        sizes = whose.bincount(minlength=len(some)).tolist()
        lower = torch.full_like(some, torch.inf)
        for owner, part in enumerate(torch.split(product, sizes)):
            if len(part):
                torch.amin(part, 0, out=lower[owner])
        torch.minimum(some, lower.add_(norms).clamp_(min=0), out=some)
    squared[:, members] = some
    return squared
