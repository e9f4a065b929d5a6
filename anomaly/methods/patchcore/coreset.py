"""Greedy k-center (Gonzalez 1985): the memory bank's patches, chosen to cover all of them.

The textbook loop reads all N points for each pick. The same picks come out of several kinds of
laziness, all exact, because a distance that wasn't brought up to date is an upper bound:

- *Pool.* The loop runs among the few points with the largest bounds, which stay in cache, for as
  long as the best of them is at least as far as every bound outside the pool. Points that fall
  below that leave the pool.
- *Blocks.* All picks of one pool then meet all N points in blocked matrix products.
- *End.* The picks of the last pool needn't: what is left of it holds the farthest of all points.

`select_coreset` does it in a fixed amount of memory. While all points fit, the selection is exact.
When they don't, the first half of the picks comes from a uniform sample; the patches are read
again, keeping the points that those leave farthest away, and the other half is picked from these.
Every other point is covered already, so the covering radius of all points is known, and comes
within a few percent of the exact one: greedy reductions of shards, the usual way, measured 12 to
16 % above it, at several times the cost.

`squared_to_two_owners` groups points into cells around the first centres, and each cell meets all
centres from the nearest to its origin on. By the triangle inequality, a centre at a distance D from
the origin is at least D − r from a member at a distance r from it, so a cell is done as soon as
that exceeds the distances of all its members. On real embeddings an eighth of the products is left
with 21,401 centres, a third with 2,140. The first picks of greedy k-center are far apart, so cells
around them are small; centres in another order give the same distances, and take longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import PatchSet
from anomaly.runtime import ParallelMap, Progress, parallel_map, parallel_pool

# Points of a pool: 1 MiB at 128 numbers a point, which a pick reads once. With a larger pool, picks
# cost more than the rounds that are saved.
_POOL = 2048
# Picks after which a pool drops the points that have become too near.
_SIFT = 64
# Points that may be the farthest: bounds, multiplied out, are off by a few 1e-4 where distances
# are small beside the points' own spread.
_FARTHEST = 8
# Points a block: rows of one product. A GPU wants few launches.
_BLOCK = {"cpu": 4096, "cuda": 65536}
# Centres a product, so that it never exceeds _CENTRES × _BLOCK numbers.
_CENTRES = 2048
# Of 128 to 1,024 cells, 256 measured best: few are wide, many make products too small to be quick.
# A GPU multiplies all of them faster than it finds those to skip.
_CELLS = {"cpu": 256, "cuda": 1}
# Centres, at least, for each of the cells. They don't depend on how many points come at once: each
# point's distances, rounding included, are those that it has among any others.
_CELL_CENTRES = 16
# Points of one product, at least: a product of fewer rounds differently.
_LEAST = 16
# Points, and centres, of one product, at most.
_ROWS, _COLUMNS = {"cpu": 1024, "cuda": 65536}, {"cpu": 1024, "cuda": 2048}
# Centres are left out with a margin far above float32's rounding of the distances.
_MARGIN = 1.0 + 1e-4
# Points that `in_chunks` joins, at least: enough to be grouped into cells.
_CHUNK = 1 << 17

_Array = NDArray[Any]


@dataclass(frozen=True)
class Selection:
    """The result of greedy k-center: picks and covering radius.

    Attributes:
        picks: (K,) int64, distinct indices in the order of the picks; places (K, 2) from
            `select_coreset`, see `with_places`.
        covering_radius: no point is farther than this from its nearest pick.
    """

    picks: Tensor
    covering_radius: float


def greedy_k_center(
    points: Tensor,
    size: int,
    *,
    generator: torch.Generator,
    bounds: Tensor | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Pick points one by one, each the farthest from all picks.

    Args:
        points: (N, d), any floating dtype, on CPU or CUDA. Distances are taken in float32.
        size: number of points to pick, 1 to N.
        generator: draws the first pick; not used where there are bounds.
        bounds: (N,) float32, squared distances to earlier centres, which aren't among the points;
            the first pick is the farthest from them.
        progress: called as `progress(done, size)` now and then.

    Returns:
        The picks, on the points' device, and their covering radius, which counts the earlier
        centres. When `size` is N, all points in their own order.

    Raises:
        ConfigError: `size` is outside 1 to N.
        DataError: a point is NaN or infinite.
    """
    n = len(points)
    if not 1 <= size <= n:
        raise ConfigError(f"coreset size {size} is outside 1 to {n}, the number of patches")
    with parallel_pool(points.device) as run_parallel:
        nearest = MinDistances(points, run_parallel)  # refuses points that aren't finite
        if size == n:
            return Selection(torch.arange(n, device=points.device), 0.0)
        if bounds is not None:
            nearest.squared.copy_(bounds)
            new, farthest = _pick_from_pool(points, nearest, size)
        else:
            first = torch.randint(n, (1,), generator=generator, device=generator.device)
            new, farthest = first.to(points.device), first[:0]  # none known yet
        picks = new
        while len(picks) < size:
            nearest.add_centres(new)
            if progress is not None:
                progress(len(picks), size)
            new, farthest = _pick_from_pool(points, nearest, size - len(picks))
            picks = torch.cat([picks, new])
        if len(farthest) < _FARTHEST:  # too few to be sure in spite of rounding
            nearest.add_centres(new)
            farthest = nearest.squared.topk(min(_FARTHEST, n)).indices
        if progress is not None:
            progress(size, size)
        return Selection(picks, _covering_radius(points, picks, farthest, bounds))


def _covering_radius(
    points: Tensor, picks: Tensor, farthest: Tensor, bounds: Tensor | None
) -> float:
    """The largest distance of a point from its nearest pick or earlier centre.

    Args:
        points: (N, d).
        picks: (M,) indices of the picked points.
        farthest: indices of the points that may be the farthest.
        bounds: (N,) squared distances to earlier centres; None without these.
    """
    # By differences, which cancel nothing.
    by_differences = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(
        points[farthest].float(), points[picks].float(), compute_mode=by_differences
    ).amin(1)
    if bounds is not None:
        distances = torch.minimum(distances, bounds[farthest].clamp(min=0).sqrt())
    return float(distances.max())


def pick_beyond(points: Tensor, bounds: Tensor, radius: float, most: int | None = None) -> Tensor:
    """Pick points, each the farthest from all centres and picks, until none is beyond a radius.

    Args:
        points: (N, d) float32; N may be 0.
        bounds: (N,) float32, squared distances to earlier centres, which aren't among the points.
        radius: the largest distance that a point may have to its nearest centre or pick.
        most: highest number of picks; None for no limit.

    Returns:
        (n,) int64, indices in the order of the picks.

    Raises:
        DataError: a point is NaN or infinite.
    """
    picks = torch.empty(0, dtype=torch.int64, device=points.device)
    wanted = len(points) if most is None else min(most, len(points))
    if not wanted:
        return picks
    with parallel_pool(points.device) as run_parallel:
        nearest = MinDistances(points, run_parallel)
        nearest.squared.copy_(bounds)
        while len(new := _pick_from_pool(points, nearest, wanted - len(picks), radius**2)[0]):
            picks = torch.cat([picks, new])
            nearest.add_centres(new)
    return picks


class MinDistances:
    """The squared distance of every point to its nearest centre, kept up to date.

    Args:
        points: (N, d), any floating dtype.
        run_parallel: maps a function over work in threads, see `anomaly.runtime.parallel_pool`.

    Attributes:
        squared: (N,) float32, infinite at first; centres have -1. Distances to centres outside the
            points may be written here before any is added.

    Raises:
        DataError: a point is NaN or infinite.
    """

    def __init__(self, points: Tensor, run_parallel: ParallelMap) -> None:
        self._points = points
        self._run_parallel = run_parallel
        self._mean = points.mean(0, dtype=torch.float32)
        if not bool(self._mean.isfinite().all()):
            bad = int((~points.isfinite().all(1)).sum())
            raise DataError(
                f"{bad} of {len(points)} patch embeddings hold NaN or infinite values; "
                "check the backbone's weights and the precision it runs in"
            )
        size = _BLOCK[points.device.type]
        self._blocks = [slice(i, i + size) for i in range(0, len(points), size)]
        self.squared = torch.full((len(points),), torch.inf, device=points.device)

    def add_centres(self, members: Tensor) -> None:
        """Make the points with these indices (n,) int64 centres."""
        for batch in torch.split(members, _CENTRES):
            # Distances are multiplied out: around the mean, large norms don't cancel.
            centres = self._points.index_select(0, batch).float() - self._mean
            self._run_parallel(partial(self._update, centres), self._blocks)
            self.squared[batch] = -1.0  # even where rounding leaves one above 0

    def _update(self, centres: Tensor, block: slice) -> None:
        """Lower the distances of a block of points to those from new centres (n, d)."""
        offsets = self._points[block].float() - self._mean
        squared = torch.addmm(centres.square().sum(1, True), centres, offsets.T, alpha=-2)
        nearest = squared.amin(0).add_(offsets.square().sum(1)).clamp_(min=0)
        self.squared[block] = torch.minimum(nearest, self.squared[block])


def _pick_from_pool(
    points: Tensor, nearest: MinDistances, wanted: int, covered: float = -1.0
) -> tuple[Tensor, Tensor]:
    """The next picks that are certain without points outside the pool.

    Args:
        points: (N, d).
        nearest: distances of the points to the picks.
        wanted: highest number of picks.
        covered: a point up to this squared distance isn't picked.

    Returns:
        Indices (n,) of the picks, and of up to eight of the farthest points left: none of these is
        nearer to the picks than a point outside the pool.
    """
    values, members = nearest.squared.topk(min(_POOL + 1, len(points)))
    floor = max(0.0, float(values[_POOL])) if len(values) > _POOL else 0.0
    unpicked = values[:_POOL] >= 0  # picks have -1
    values, members = values[:_POOL][unpicked], members[:_POOL][unpicked]
    pool = points.index_select(0, members).float()
    pool -= pool.mean(0)  # distances are multiplied out: around the mean, large norms don't cancel
    places = _pick_in_pool(pool.cpu(), values.cpu(), wanted, floor, covered)
    picks, farthest = (torch.tensor(x, dtype=torch.int64).to(members.device) for x in places)
    return members[picks], members[farthest]


def _pick_in_pool(
    pool: Tensor, bounds: Tensor, wanted: int, floor: float, covered: float
) -> tuple[list[int], list[int]]:
    """Pick points of a pool one by one, on the CPU, while the farthest reaches the floor.

    A pick takes microseconds: the calls count, and numpy's are the cheaper ones. The product is
    torch's, because numpy's may use threads, which wait for one another.

    Args:
        pool: (n, d) float32.
        bounds: (n,) float32, squared distances to the nearest pick.
        wanted: highest number of picks.
        floor: the largest bound outside the pool.
        covered: a point up to this squared distance isn't picked.

    Returns:
        Places in the pool: of the picks, and of the farthest points left that reach the floor.
    """
    norms: _Array = pool.square().sum(1).numpy()
    nearest: _Array = bounds.numpy()
    places = np.arange(len(pool))
    picked: list[int] = []
    while len(picked) < wanted:
        if len(picked) % _SIFT == 0:
            far = nearest >= min(floor, nearest.max())  # True for at least one point
            pool = pool[torch.from_numpy(far)]
            norms, nearest, places = norms[far], nearest[far], places[far]
        best = int(nearest.argmax())
        if nearest[best] < floor or nearest[best] <= covered:
            break
        picked.append(int(places[best]))
        # ‖x − y‖² = ‖x‖² − 2xy + ‖y‖², in place.
        squared = torch.mv(pool, pool[best]).numpy()
        squared *= -2
        squared += norms
        squared += norms[best]
        np.minimum(nearest, squared.clip(min=0, out=squared), out=nearest)
        nearest[best] = -1.0
    farthest = (-nearest).argsort()[:_FARTHEST]
    return picked, places[farthest[nearest[farthest] >= floor]].tolist()


def select_coreset(
    patches: PatchSet,
    projection: Tensor,
    ratio: float,
    *,
    memory_limit: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Selection:
    """Select patches by greedy k-center among their projections.

    Args:
        patches: the training patches. Read once, or three times where their points don't fit.
        projection: (D, d), embeddings to points.
        ratio: share of the patches to pick.
        memory_limit: bytes of points held at once; more for a coreset of over half of the points
            that fit, because its full vectors take a multiple of that anyway.
        generator: on the CPU; draws the sample and the first pick.
        progress: called with (picks done, all of them).

    Returns:
        The picks as places (K, 2), see `with_places`, and the covering radius of all points.

    Raises:
        DataError: no patches, or one is NaN or infinite.
    """
    most = coreset_size(patches.count, ratio)
    sample = _Reservoir(memory_limit, most)
    for points, places in with_places(patches.projected(projection)):
        chances = torch.rand(len(points), generator=generator).to(points.device)
        sample.add(points, places, chances)
    if not sample.count:
        raise DataError("no training patches; check the training images")
    size = coreset_size(sample.count, ratio)
    points, places, _ = sample.held()
    if sample.complete:
        chosen = greedy_k_center(points, size, generator=generator, progress=progress)
        return replace(chosen, picks=places[chosen.picks])

    # The points are a uniform sample. It gives half of the picks; those of all points that these
    # leave farthest away give the others.
    first = greedy_k_center(points, max(1, size // 2), generator=generator, progress=progress)
    picks, centres = places[first.picks], points[first.picks]
    del sample, points, places
    distances = chain.from_iterable(patches.each(partial(_distances, projection, centres)))
    if size == 1:
        return Selection(picks, max(float(part.max()) for part in distances if len(part)))
    farthest = _Reservoir(memory_limit, most)
    pieces = with_places(patches.projected(projection))
    for (points, places), priorities in zip(pieces, distances, strict=True):
        farthest.add(points, places, priorities)
    points, places, priorities = farthest.held()
    bounds = priorities.square()
    chosen = greedy_k_center(points, size - len(picks), generator=generator, bounds=bounds)
    if progress is not None:
        progress(size, size)
    radius = max(chosen.covering_radius, farthest.cut)
    return Selection(torch.cat([picks, places[chosen.picks]]), radius)


def _distances(projection: Tensor, centres: Tensor, patches: PatchSet) -> list[Tensor]:
    """Distances (n,) of projected patches to their nearest centre (K, d), image by image."""
    with torch.inference_mode():
        pieces = list(patches.projected(projection))
        nearest = [distances_to_nearest(points, centres) for points, _ in in_chunks(pieces)]
        lengths = [len(points) for _, points in pieces]
        return list(torch.split(torch.cat(nearest), lengths)) if nearest else []


def with_places(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Points (n, d) with places (n, 2) int64: training image, rank among its patches that count.

    Args:
        pieces: index of a training image, and points (n, d) of it or of one of its tiles.
    """
    seen: dict[int, int] = {}
    for image, points in pieces:
        first = seen.get(image, 0)
        seen[image] = first + len(points)
        ranks = torch.arange(first, seen[image], device=points.device)
        yield points, torch.stack([torch.full_like(ranks, image), ranks], 1)


def in_chunks(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Points `with_places`, joined to at least 131,072 points; fewer at the end."""
    held: list[tuple[Tensor, Tensor]] = []
    for piece in with_places(pieces):
        held.append(piece)
        if sum(len(points) for points, _ in held) >= _CHUNK:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(held: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    points, places = zip(*held, strict=True)
    return torch.cat(points), torch.cat(places)


class _Reservoir:
    """Keeps the points with the highest priorities among all that are offered.

    Args:
        memory_limit: bytes of points that are kept, unless `wanted` takes more.
        wanted: number of points that half of the room holds at least.

    Attributes:
        count: points offered so far.
        cut: the highest priority of a point that was dropped; 0 if none was.
        complete: none was dropped.
    """

    def __init__(self, memory_limit: int, wanted: int) -> None:
        self._memory_limit = memory_limit
        self._half = max(512, wanted)
        self._room: tuple[Tensor, ...] = ()
        self._used = 0
        self.count = 0
        self.cut = 0.0
        self.complete = True

    def held(self) -> tuple[Tensor, ...]:
        """The kept points (n, d), places (n, 2) and priorities (n,), in the order offered."""
        return tuple(column[: self._used] for column in self._room)

    def add(self, points: Tensor, places: Tensor, priorities: Tensor) -> None:
        """Offer points (n, d) with places (n, 2) and priorities (n,)."""
        if not len(points):
            return
        offered = points, places, priorities
        if not self._room:
            self._half = max(self._half, self._memory_limit // points[0].nbytes // 2)
            # Untouched rows use no memory.
            self._room = tuple(t.new_empty(2 * self._half, *t.shape[1:]) for t in offered)
        for part in zip(*(torch.split(t, self._half) for t in offered), strict=True):
            if self._used + len(part[0]) > 2 * self._half:
                self._make_room()
            rows = slice(self._used, self._used + len(part[0]))
            for room, new in zip(self._room, part, strict=True):
                room[rows] = new
            self._used = rows.stop
        self.count += len(points)

    def _make_room(self) -> None:
        """Drop all but the half with the highest priorities; the first offered win ties."""
        priorities = self._room[2][: self._used]
        order = priorities.argsort(descending=True, stable=True)
        self.cut = max(self.cut, float(priorities[order[self._half]]))
        kept = order[: self._half].sort().values
        for room in self._room:
            room[: self._half] = room[kept]
        self._used = self._half
        self.complete = False


def random_projection(dim: int, target: int, *, generator: torch.Generator) -> Tensor:
    """A Gaussian projection that keeps distances in the mean (Johnson & Lindenstrauss 1984).

    Returns:
        (dim, target) float32 on the generator's device, entries N(0, 1/target); the identity
        (dim, dim) if `target` isn't below `dim`.
    """
    if target >= dim:
        return torch.eye(dim, device=generator.device)
    entries = torch.randn(dim, target, generator=generator, device=generator.device)
    return entries.div_(target**0.5)


def coreset_size(n: int, ratio: float) -> int:
    """Number of `n` patches that the bank keeps: a share `ratio`, rounded down, at least one."""
    return max(1, int(n * ratio + 1e-9))  # 100 × 0.29 is 28.999… in binary


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
    """The owner of each point's nearest centre, and the distance to the nearest of another owner.

    Args:
        points: (N, d), any floating dtype. Distances are taken in float32.
        centres: (M, d).
        owners: (M,) int64 from 0 to `count` − 1, the owner of each centre.
        count: number of owners.
        enough: the search for a point may end once centres of two owners lie within this squared
            distance; the result is then of any two such owners.

    Returns:
        The squared distance (N,) float32 to the nearest centre, its owner (N,) int64, and the
        squared distance (N,) to the nearest centre of another owner. Infinite where there is none;
        NaN for points that hold NaN or infinite values.
    """
    nearest = torch.full((len(points),), torch.inf, device=points.device)
    owner, second = torch.zeros_like(nearest, dtype=torch.int64), nearest.clone()
    if not len(points) or not len(centres):
        return nearest, owner, second
    device = points.device
    rows = _ROWS[device.type]
    cells = _Cells.around_first(centres.float(), owners, count)
    cell_of = torch.cat(parallel_map(cells.nearest, torch.split(points, rows), device))
    sizes = cell_of.bincount(minlength=len(cells.order)).tolist()
    groups = enumerate(torch.split(cell_of.argsort(stable=True), sizes))
    work = [(c, block) for c, group in groups for block in torch.split(group, rows) if len(block)]

    def measure(item: tuple[int, Tensor]) -> None:
        """Write the results for a cell's points, given by their indices (n,)."""
        cell, block = item
        if len(block) < _LEAST:  # its first point fills the block up
            block = torch.cat([block, block[:1].expand(_LEAST - len(block))])
        by_owner = cells.squared_to_owners(cell, points.index_select(0, block).float(), enough)
        lowest, owner_of = by_owner.topk(min(2, count), 0, largest=False)
        nearest[block], owner[block] = lowest[0], owner_of[0]
        if count > 1:
            second[block] = lowest[1]

    parallel_map(measure, work, device)
    return nearest, owner, second


@dataclass(frozen=True, eq=False)
class _Cells:
    """Cells of points around the first C of M centres, the cells' origins.

    Attributes:
        centres: (M, d) float32.
        owners: (M,) int64 from 0 to `count` − 1.
        count: number of owners.
        order: (C, M) int64, for each cell the centres from the nearest to its origin on.
        distances: (C, M), the distances of these centres to the origin, ascending.
    """

    centres: Tensor
    owners: Tensor
    count: int
    order: Tensor
    distances: Tensor

    @classmethod
    def around_first(cls, centres: Tensor, owners: Tensor, count: int) -> _Cells:
        """Cells around centres (M, d), one for every 16: 1 to 256 on a CPU, 1 on a GPU."""
        cells = max(1, min(len(centres) // _CELL_CENTRES, _CELLS[centres.device.type]))
        distances, order = torch.cdist(centres[:cells], centres).sort(1)
        return cls(centres, owners, count, order, distances)

    def nearest(self, points: Tensor) -> Tensor:
        """The cell (n,) int64 whose origin is nearest to each point (n, d)."""
        return torch.cdist(points.float(), self.centres[: len(self.order)]).argmin(1)

    def squared_to_owners(self, cell: int, members: Tensor, enough: float) -> Tensor:
        """Squared distances of a cell's members (n, d) to the nearest centre of each owner.

        Args:
            cell: the cell's number.
            members: (n, d) float32.
            enough: see `squared_to_two_owners`.

        Returns:
            (count, n). Only the two lowest of each member are exact, and these only where the
            second lowest is above `enough`; all others are upper bounds.
        """
        origin, order, distances = self.centres[cell], self.order[cell], self.distances[cell]
        # Relative to the origin: distances are multiplied out, and large norms would cancel.
        offsets = members - origin
        norms = offsets.square().sum(1)
        squared = offsets.new_full((self.count, len(offsets)), torch.inf)
        step = _COLUMNS[offsets.device.type]
        for first in range(0, len(order), step):
            if first and float(distances[first]) > _reach(squared, norms, enough):
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


def _reach(squared: Tensor, norms: Tensor, enough: float) -> float:
    """The distance from a cell's origin beyond which centres are too far from all members.

    Args:
        squared: (owners, n), squared distances of the members to the nearest centres so far.
        norms: (n,), squared distances of the members to the origin.
        enough: see `squared_to_two_owners`.

    Returns:
        The distance; -1 if no member needs further centres.
    """
    second = squared.topk(min(2, len(squared)), 0, largest=False).values[-1]
    unsettled = ~(second <= enough)  # includes NaN
    if not bool(unsettled.any()):
        return -1.0
    return float((norms.sqrt() + second.sqrt())[unsettled].amax()) * _MARGIN
