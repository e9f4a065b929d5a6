"""Greedy k-center (Gonzalez 1985): the memory bank's patches, chosen to cover all of them.

The textbook loop reads all N points for each pick. The same picks come out of several kinds of
laziness, all exact, because a distance that wasn't brought up to date is an upper bound:

- *Pool.* The loop runs among the few points with the largest bounds, which stay in cache, for as
  long as the best of them is at least as far as every bound outside the pool. Points that fall
  below that leave the pool.
- *Blocks.* All picks of one pool then meet all N points in blocked matrix products.
- *End.* The picks of the last pool needn't: what is left of it holds the farthest of all points.

`select_streamed` does it in a fixed amount of memory. While all points fit, the selection is exact.
When they don't, the first half of the picks comes from a uniform sample; the stream is read again,
keeping the points that those leave farthest away, and the other half is picked from these. Every
other point is covered already, so the covering radius of all points is known, and comes within a
few percent of the exact one: greedy reductions of shards, the usual way, measured 12 to 16 % above
it, at several times the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import Progress
from anomaly.methods.patchcore.nearest_centres import distances_to_nearest
from anomaly.runtime.parallel import ParallelMap, parallel_pool

# A pool is 1 MiB at 128 numbers a point, and a pick reads it once; with a larger one, picks cost
# more than the rounds that are saved.
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

_Array = NDArray[Any]


@dataclass(frozen=True)
class Selection:
    """The result of greedy k-center: picks and covering radius.

    Attributes:
        picks: (K,) int64, distinct indices in the order of the picks.
        covering_radius: no point is farther than this from its nearest pick.
        exact: the picks are those of greedy k-center over all points.
    """

    picks: Tensor
    covering_radius: float
    exact: bool = True


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
        size: how many to pick, 1 to N.
        generator: draws the first pick; not used where there are bounds.
        bounds: (N,) float32, squared distances to centres that were chosen before, elsewhere: the
            first pick is the farthest from them.
        progress: called as `progress(done, size)` now and then.

    Returns:
        The picks, on the points' device; all N in their own order when `size` is N.

    Raises:
        ConfigError: `size` is outside 1 to N.
        DataError: a point is NaN or infinite.
    """
    n = len(points)
    if not 1 <= size <= n:
        raise ConfigError(f"coreset size {size} is outside 1 to {n}, the number of patches")
    with parallel_pool(points.device) as parallel_map:
        nearest = MinDistances(points, parallel_map)
        if size == n:
            return Selection(torch.arange(n, device=points.device), 0.0)
        if bounds is not None:
            nearest.squared.copy_(bounds)
            new, rest = _pick_from_pool(points, nearest, size)
        else:
            first = torch.randint(n, (1,), generator=generator, device=generator.device)
            new, rest = first.to(points.device), first[:0]
        picks = new
        while len(picks) < size:
            nearest.add_centres(new)
            if progress is not None:
                progress(len(picks), size)
            new, rest = _pick_from_pool(points, nearest, size - len(picks))
            picks = torch.cat([picks, new])
        if len(rest) < _FARTHEST:  # too few to be sure in spite of rounding
            nearest.add_centres(new)
            rest = _farthest(nearest.squared)
        if progress is not None:
            progress(size, size)
        before = None if bounds is None else bounds[rest]
        return Selection(picks, _radius(points[rest], points[picks], before))


def pick_beyond(points: Tensor, bounds: Tensor, radius: float, most: int | None = None) -> Tensor:
    """Pick points, each the farthest from all centres and picks, until none is beyond a radius.

    Args:
        points: (N, d) float32; N may be 0.
        bounds: (N,) float32, squared distances to centres that were chosen before, elsewhere.
        radius: the distance to its nearest centre or pick that a point may have.
        most: how many to pick at most; None for as many as it takes.

    Returns:
        (n,) int64, indices in the order of the picks.

    Raises:
        DataError: a point is NaN or infinite.
    """
    picks = torch.empty(0, dtype=torch.int64, device=points.device)
    wanted = len(points) if most is None else min(most, len(points))
    if not wanted:
        return picks
    with parallel_pool(points.device) as parallel_map:
        nearest = MinDistances(points, parallel_map)
        nearest.squared.copy_(bounds)
        while len(new := _pick_from_pool(points, nearest, wanted - len(picks), radius**2)[0]):
            picks = torch.cat([picks, new])
            nearest.add_centres(new)
    return picks


class MinDistances:
    """Keeps the squared distance of every point to its nearest centre.

    Args:
        points: (N, d), any floating dtype.
        parallel_map: hands out work, see `anomaly.runtime.parallel.parallel_pool`.

    Attributes:
        squared: (N,) float32; centres have -1. The owner may set them before the first centre.

    Raises:
        DataError: a point is NaN or infinite.
    """

    def __init__(self, points: Tensor, parallel_map: ParallelMap) -> None:
        self._points = points
        self._parallel_map = parallel_map
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
            self._parallel_map(partial(self._update, centres), self._blocks)
            self.squared[batch] = -1.0  # even where rounding leaves one above 0

    def _update(self, centres: Tensor, block: slice) -> None:
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
        nearest: how far they are from the picks.
        wanted: the most picks to return.
        covered: a point up to this squared distance isn't picked.

    Returns:
        The picks, and the few farthest points that are left: none nearer than one outside the pool.
    """
    values, members = nearest.squared.topk(min(_POOL + 1, len(points)))
    floor = max(0.0, float(values[_POOL])) if len(values) > _POOL else 0.0
    left = values[:_POOL] >= 0  # picks have -1
    values, members = values[:_POOL][left], members[:_POOL][left]
    pool = points.index_select(0, members).float()
    pool -= pool.mean(0)
    picked = _loop(pool.cpu(), values.cpu(), wanted, floor, covered)
    picks, rest = (members[torch.tensor(x, dtype=torch.int64).to(members.device)] for x in picked)
    return picks, rest


def _loop(
    pool: Tensor, bounds: Tensor, wanted: int, floor: float, covered: float
) -> tuple[list[int], list[int]]:
    """The step-wise loop in a pool, on a CPU, until the farthest point is below the floor.

    A pick takes microseconds: the calls count, and numpy's are the cheaper ones. The product is
    torch's, because numpy's may use threads, which wait for one another.

    Args:
        pool: (n, d) float32.
        bounds: (n,) float32, squared distances to the nearest pick.
        wanted: the most picks to return.
        floor: the largest bound outside the pool.
        covered: a point up to this squared distance isn't picked.

    Returns:
        Places in the pool: of the picks, and of the farthest points that still reach the floor.
    """
    norms: _Array = pool.square().sum(1).numpy()
    left: _Array = bounds.numpy()
    places = np.arange(len(pool))
    picked: list[int] = []
    while len(picked) < wanted:
        if len(picked) % _SIFT == 0:
            far = left >= min(floor, left.max())  # never none
            pool = pool[torch.from_numpy(far)]
            norms, left, places = norms[far], left[far], places[far]
        best = int(left.argmax())
        if left[best] < floor or left[best] <= covered:
            break
        picked.append(int(places[best]))
        away = torch.mv(pool, pool[best]).numpy()
        away *= -2
        away += norms
        away += norms[best]
        np.minimum(left, away.clip(min=0, out=away), out=left)
        left[best] = -1.0
    farthest = (-left).argsort()[:_FARTHEST]
    return picked, places[farthest[left[farthest] >= floor]].tolist()


def covering_radius(points: Tensor, centres: Tensor) -> float:
    """The largest distance of any point (N, d) to its nearest centre (K, d)."""
    far = _farthest(distances_to_nearest(points, centres))
    return _radius(points[far], centres)


def _farthest(bounds: Tensor) -> Tensor:
    return bounds.topk(min(_FARTHEST, len(bounds))).indices


def _radius(points: Tensor, centres: Tensor, before: Tensor | None = None) -> float:
    """The largest distance of a few points (n, d) to their nearest centres (K, d), by differences.

    Args:
        points: (n, d).
        centres: (K, d).
        before: (n,) squared distances to centres that were chosen before, elsewhere.
    """
    by_differences = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(points.float(), centres.float(), compute_mode=by_differences).amin(1)
    if before is not None:
        nearest = torch.minimum(nearest, before.clamp(min=0).sqrt())
    return float(nearest.max())


class Stream(Protocol):
    """Points read in portions; can be read repeatedly, always the same."""

    def __iter__(self) -> Iterator[Tensor]:
        """Points (n, d) float32, n of any size."""
        ...

    def distances(self, centres: Tensor) -> Iterator[Tensor]:
        """The distance (n,) of each portion's points to the nearest of some centres (K, d)."""
        ...


def select_streamed(
    stream: Stream,
    wanted: Callable[[int], int],
    *,
    memory_limit: int,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> Selection:
    """Select a coreset from a stream by greedy k-center.

    Args:
        stream: the points. Read once, or twice where they don't fit.
        wanted: how many of N points to pick.
        memory_limit: bytes of points held at once. It gives way to coresets of more than half of
            what fits, whose full vectors take a multiple of that.
        generator: on the CPU; draws the sample and the first pick.
        progress: called with (picks done, all of them).

    Raises:
        ConfigError: `wanted` asks for an impossible number.
        DataError: a point is NaN or infinite.
    """
    sample = _Reservoir(memory_limit, wanted)
    for points in stream:
        chances = torch.rand(len(points), generator=generator).to(points.device)
        sample.add(points, chances)
    size = wanted(sample.count)
    if sample.complete:
        return greedy_k_center(sample.points, size, generator=generator, progress=progress)

    first = greedy_k_center(
        sample.points, max(1, size // 2), generator=generator, progress=progress
    )
    places, centres = sample.places[first.picks], sample.points[first.picks]
    del sample
    if size == 1:
        radius = max(covering_radius(points, centres) for points in stream if len(points))
        return Selection(places, radius, exact=False)
    rest = _Reservoir(memory_limit, wanted)
    for points, distances in zip(stream, stream.distances(centres), strict=True):
        rest.add(points, distances)
    bounds = rest.priorities.square()
    chosen = greedy_k_center(rest.points, size - len(places), generator=generator, bounds=bounds)
    radius = max(chosen.covering_radius, rest.cut)
    if progress is not None:
        progress(size, size)
    return Selection(torch.cat([places, rest.places[chosen.picks]]), radius, exact=False)


class _Reservoir:
    """Keeps the points of a stream with the highest priorities.

    Attributes:
        count: points offered so far.
        cut: the highest priority of a point that was dropped; 0 if none was.
        complete: none was dropped.
    """

    def __init__(self, memory_limit: int, wanted: Callable[[int], int]) -> None:
        self._memory_limit = memory_limit
        self._wanted = wanted
        self._points = torch.empty(0, 0)
        self._places = torch.empty(0, dtype=torch.int64)
        self._priorities = torch.empty(0)
        self._used = 0
        self.count = 0
        self.cut = 0.0
        self.complete = True

    @property
    def points(self) -> Tensor:
        """The kept points (n, d)."""
        return self._points[: self._used]

    @property
    def places(self) -> Tensor:
        """Positions (n,) int64 of the kept points in the stream."""
        return self._places[: self._used]

    @property
    def priorities(self) -> Tensor:
        """Priorities (n,) float32 of the kept points."""
        return self._priorities[: self._used]

    def add(self, points: Tensor, priorities: Tensor) -> None:
        """Offer points (n, d) with priorities (n,)."""
        if not self.count:
            self._allocate(max(1024, self._memory_limit // points[0].nbytes), points)
        while self._used + len(points) > len(self._points):
            self._make_room(len(points))
        where = slice(self._used, self._used + len(points))
        self._points[where] = points
        self._places[where] = torch.arange(len(points), device=points.device) + self.count
        self._priorities[where] = priorities
        self._used += len(points)
        self.count += len(points)

    def _make_room(self, needed: int) -> None:
        half = len(self._points) // 2
        if self._used < 2 or self._is_wanted_more_than(half, needed) or needed > half:
            self._allocate(2 * len(self._points), self._points)
            return
        order = self._priorities[: self._used].argsort(descending=True, stable=True)
        self.cut = max(self.cut, float(self._priorities[order[half]]))
        kept = order[:half].sort().values  # in the order of the stream
        for held in (self._points, self._places, self._priorities):
            held[:half] = held[kept]
        self._used = half
        self.complete = False

    def _is_wanted_more_than(self, half: int, needed: int) -> bool:
        try:
            return self._wanted(self.count + needed) > half
        except ConfigError:  # more than have come so far; whether others come is seen at the end
            return True

    def _allocate(self, rows: int, like: Tensor) -> None:
        """Allocate `rows` points; untouched rows use no memory."""
        old = (self._points, self._places, self._priorities)
        self._points = like.new_empty(rows, like.shape[1])
        self._places = like.new_empty(rows, dtype=torch.int64)
        self._priorities = like.new_empty(rows, dtype=torch.float32)
        if self._used:
            for new, before in zip(
                (self._points, self._places, self._priorities), old, strict=True
            ):
                new[: self._used] = before[: self._used]


def random_projection(dim: int, target: int, *, generator: torch.Generator) -> Tensor:
    """A Gaussian projection that keeps distances in the mean (Johnson & Lindenstrauss 1984).

    Args:
        dim: dimensions of the embeddings.
        target: dimensions wanted. With `target >= dim` there is nothing to gain and the
            identity is returned.
        generator: draws the entries, on its own device.

    Returns:
        (dim, target) float32, entries N(0, 1/target); or the (dim, dim) identity.
    """
    if target >= dim:
        return torch.eye(dim, device=generator.device)
    entries = torch.randn(dim, target, generator=generator, device=generator.device)
    return entries.div_(target**0.5)


def coreset_size(n: int, ratio: float) -> int:
    """The number of `n` patches that the memory bank keeps: `ratio` of them, at least one."""
    return max(1, int(n * ratio + 1e-9))  # 100 × 0.29 is 28.999… in binary
