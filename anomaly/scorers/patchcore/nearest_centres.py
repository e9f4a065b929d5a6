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

# Of 64 to 512 cells, 128 measured best: few are wide, many make products too small to be quick. A
# GPU multiplies faster than it could be told what to skip.
_CELLS = {"cpu": 128, "cuda": 1}
# Centres, at least, for each of the cells. They don't depend on how many points come at once: each
# point's distances, rounding included, are those that it has among any others.
_CELL_CENTRES = 16
# Points of one product, at least: those of fewer round otherwise.
_LEAST = 16
# Points, and centres, of one product, at most.
_ROWS, _COLUMNS = {"cpu": 1024, "cuda": 65536}, {"cpu": 512, "cuda": 2048}
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
    points: Tensor, centres: Tensor, owners: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which owner has the nearest centre of each point, and how far that of any other owner is.

    Args:
        points: (N, d), any floating dtype. Distances are taken in float32.
        centres: (M, d).
        owners: (M,) int64 from 0 to `count` − 1, whose each centre is.
        count: how many owners there are.

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
        offsets = points[some].float() - origins[cell]
        by_owner = offsets.new_full((count, len(some)), torch.inf)
        around = centres[order[cell]] - origins[cell], owners[order[cell]], away[cell]
        values, found = _lower(by_owner, offsets, *around).topk(min(2, count), 0, largest=False)
        least[some], nearest[some] = values[0], found[0]
        if count > 1:
            others[some] = values[1]

    spread(measure, work, device)
    return least, nearest, others


def _nearest_origin(origins: Tensor, points: Tensor) -> Tensor:
    """Which origin (n,) int64 is nearest to each point (n, d)."""
    return torch.cdist(points.float(), origins).argmin(1)


def _lower(
    squared: Tensor, offsets: Tensor, centres: Tensor, owners: Tensor, away: Tensor
) -> Tensor:
    """Lower a cell's squared distances to what its members have to the nearest centres.

    Coordinates are relative to the cell's origin: distances are multiplied out, and large norms
    would cancel.

    Args:
        squared: (count, n), infinite; lowered in place.
        offsets: (n, d), the members.
        centres: (M, d), by their distance to the origin.
        owners: (M,) int64.
        away: (M,), the centres' distance to the origin, ascending.

    Returns:
        `squared`, to the nearest centre of each owner; only the two lowest of each member are sure.
    """
    norms = offsets.square().sum(1)
    lengths = norms.sqrt()
    step = _COLUMNS[offsets.device.type]
    for first in range(0, len(centres), step):
        if first:
            settled = squared.topk(min(2, len(squared)), 0, largest=False).values[-1]
            reach = float((lengths + settled.sqrt()).amax())
            if float(away[first]) > reach * _MARGIN:
                break
        whose, order = owners[first : first + step].sort(stable=True)
        some = centres[first : first + step][order]
        product = torch.addmm(some.square().sum(1, True), some, offsets.T, alpha=-2)
        sizes = whose.bincount(minlength=len(squared)).tolist()
        for owner, part in enumerate(torch.split(product, sizes)):
            if len(part):
                lower = part.amin(0).add_(norms).clamp_(min=0)
                torch.minimum(squared[owner], lower, out=squared[owner])
    return squared
