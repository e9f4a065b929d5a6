"""Greedy k-center (Gonzalez 1985): the memory bank's patches, chosen to cover all of them.

The textbook loop reads all N points for each pick. The same picks come out of three kinds of
laziness, all exact, because a distance that wasn't brought up to date is an upper bound:

- *Pool.* Picks are made among the few points with the largest bounds, for as long as the best
  of them is at least as far as every bound outside the pool.
- *Blocks.* All picks of one pool then meet all N points in blocked matrix products.
- *Cells.* Points are grouped around early picks. By the triangle inequality, a centre farther
  from a cell's origin than its radius plus its largest bound changes nothing in it: on real
  embeddings this leaves about a twentieth of the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.errors import ConfigError
from anomaly.runtime import spreading
from anomaly.scorers.base import Progress
from anomaly.scorers.patchcore.cover import Cover

# A pool's 2048² distances are 16 MiB and stay in cache; a larger one costs more to multiply
# out than the rounds it saves.
_POOL = 2048
# Points that may be the farthest: bounds, multiplied out, are off by a few 1e-4 where distances
# are small beside the points' own spread.
_FARTHEST = 8


@dataclass(frozen=True)
class Selection:
    """What greedy k-center chose.

    Attributes:
        picks: (K,) int64, distinct indices in the order of the picks.
        covering_radius: the largest distance of any point to its nearest pick.
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
    """Pick points one after another, each the farthest from those already picked.

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
    with spreading(points.device) as spread:
        cover = Cover(points, spread)
        if size == n:
            return Selection(torch.arange(n, device=points.device), 0.0)
        if bounds is not None:
            cover.bounds.copy_(bounds)
            new = _pick_from_pool(points, cover.bounds, size)
        else:
            first = torch.randint(n, (1,), generator=generator, device=generator.device)
            new = first.to(points.device)
        picks = new[:0]
        while True:
            picks = torch.cat([picks, new])
            cover.add(points.index_select(0, new))
            cover.bounds[picks] = -1.0  # never again, even where rounding leaves one above 0
            if progress is not None:
                progress(len(picks), size)
            if len(picks) == size:
                return Selection(picks, _radius(points, cover.bounds, points[picks], bounds))
            new = _pick_from_pool(points, cover.bounds, size - len(picks))


def pick_beyond(points: Tensor, bounds: Tensor, radius: float) -> Tensor:
    """Pick points, each the farthest from all centres and picks, until none is beyond a radius.

    Args:
        points: (N, d) float32; N may be 0.
        bounds: (N,) float32, squared distances to centres that were chosen before, elsewhere.
        radius: the distance to its nearest centre or pick that a point may have.

    Returns:
        (n,) int64, indices in the order of the picks.

    Raises:
        DataError: a point is NaN or infinite.
    """
    picks = torch.empty(0, dtype=torch.int64, device=points.device)
    if not len(points):
        return picks
    with spreading(points.device) as spread:
        cover = Cover(points, spread)
        cover.bounds.copy_(bounds)
        while len(new := _pick_from_pool(points, cover.bounds, len(points), radius**2)):
            picks = torch.cat([picks, new])
            cover.add(points.index_select(0, new))
            cover.bounds[picks] = -1.0
    return picks


def _pick_from_pool(points: Tensor, bounds: Tensor, wanted: int, covered: float = -1.0) -> Tensor:
    """The next picks: as many as are certain without looking outside the pool.

    Args:
        points: (N, d).
        bounds: (N,) squared distance to the nearest pick, up to date; -1 for picks.
        wanted: the most picks to return.
        covered: a point up to this squared distance isn't picked.
    """
    values, members = bounds.topk(min(_POOL + 1, len(bounds)))
    # Picks have -1, so that an exhausted pool ends the loop below as well.
    floor = max(float(values[_POOL]), 0.0) if len(values) > _POOL else 0.0
    values, members = values[:_POOL], members[:_POOL]
    pool = points.index_select(0, members).float()
    pool -= pool.mean(0)
    norms = pool.square().sum(1)
    between = torch.addmm(norms[:, None] + norms, pool, pool.T, alpha=-2).clamp_(min=0)

    # A pick is two passes over 8 KiB: the calls dominate, and numpy's are the cheaper ones.
    rows: NDArray[Any] = between.cpu().numpy()
    left: NDArray[Any] = values.cpu().numpy().copy()
    picked: list[int] = []
    while len(picked) < wanted:
        best = int(left.argmax())
        if left[best] < floor or left[best] <= covered:
            break
        picked.append(best)
        np.minimum(left, rows[best], out=left)
        left[best] = -1.0
    return members[torch.tensor(picked, dtype=torch.int64, device=members.device)]


def distances_to_nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Distance (N,) of each point (N, d) to its nearest centre (K, d).

    Quickest where early centres are spread well, as those of a coreset are.
    """
    with spreading(points.device) as spread:
        cover = Cover(points, spread)
        cover.add(centres)
    return cover.bounds.sqrt()


def covering_radius(points: Tensor, centres: Tensor) -> float:
    """The largest distance of any point (N, d) to its nearest centre (K, d)."""
    return _radius(points, distances_to_nearest(points, centres).square(), centres)


def _radius(points: Tensor, bounds: Tensor, centres: Tensor, before: Tensor | None = None) -> float:
    """The covering radius, by differences of points and centres.

    Args:
        points: (N, d).
        bounds: (N,) squared distance of each to its nearest centre, multiplied out.
        centres: (K, d).
        before: (N,) squared distances to centres that were chosen before, elsewhere.
    """
    farthest = bounds.topk(min(_FARTHEST, len(bounds))).indices
    by_differences = "donot_use_mm_for_euclid_dist"
    away = torch.cdist(points[farthest].float(), centres.float(), compute_mode=by_differences)
    nearest = away.amin(1)
    if before is not None:
        nearest = torch.minimum(nearest, before[farthest].clamp(min=0).sqrt())
    return float(nearest.max())


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


def coreset_size(n: int, *, ratio: float | None = None, size: int | None = None) -> int:
    """How many of `n` patches the memory bank keeps: `size`, or `ratio` of them, at least one.

    Raises:
        ConfigError: not exactly one of the two is given, `ratio` is outside (0, 1], or `size`
            is outside 1 to `n`.
    """
    if (ratio is None) == (size is None):
        raise ConfigError("give exactly one of coreset_ratio and coreset_size")
    if size is not None:
        if not 1 <= size <= n:
            raise ConfigError(f"coreset_size {size} is outside 1 to {n}, the number of patches")
        return size
    if ratio is None or not 0 < ratio <= 1:
        raise ConfigError(f"coreset_ratio {ratio} is outside (0, 1]")
    return max(1, int(n * ratio + 1e-9))  # 100 × 0.29 is 28.999… in binary
