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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.scorers.parallel import Spread, spreading

Progress = Callable[[int, int], None]

# A pool's 2048² distances are 16 MiB and stay in cache; a larger one costs more to multiply
# out than the rounds it saves.
_POOL = 2048
# Few cells are too wide to be skipped, many make products too small to be quick; 128 to 512
# measured alike.
_CELLS = 256
# Points a block: rows of one product. A GPU wants few launches.
_BLOCK = {"cpu": 4096, "cuda": 65536}
# Centres a product, so that it never exceeds _CENTRES × _BLOCK numbers.
_CENTRES = 2048
# Cells are skipped with a margin far above float32's rounding of the distances.
_MARGIN = 1.0 + 1e-4


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
    progress: Progress | None = None,
) -> Tensor:
    """Pick points one after another, each the farthest from those already picked.

    Args:
        points: (N, d), any floating dtype, on CPU or CUDA. Distances are taken in float32.
        size: how many to pick, 1 to N.
        generator: draws the first pick.
        progress: called as `progress(done, size)` now and then.

    Returns:
        (size,) int64 on the points' device: distinct indices in the order of the picks; all N
        in their own order when `size` is N.

    Raises:
        ConfigError: `size` is outside 1 to N.
        DataError: a point is NaN or infinite.
    """
    return select(points, size, generator=generator, progress=progress).picks


def select(
    points: Tensor,
    size: int,
    *,
    generator: torch.Generator,
    centres: Tensor | None = None,
    progress: Progress | None = None,
) -> Selection:
    """`greedy_k_center` together with the covering radius, which falls out of it.

    Args:
        points: as for `greedy_k_center`.
        size: as for `greedy_k_center`.
        generator: as for `greedy_k_center`; not used where there are centres.
        centres: (c, d) chosen already, elsewhere: the first pick is the farthest from them.
        progress: as for `greedy_k_center`.
    """
    n = len(points)
    if not 1 <= size <= n:
        raise ConfigError(f"coreset size {size} is outside 1 to {n}, the number of patches")
    with spreading(points.device) as spread:
        cover = _Cover(points, spread)
        if size == n:
            return Selection(torch.arange(n, device=points.device), 0.0)
        if centres is not None:
            cover.add(centres)
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
                return Selection(picks, cover.radius())
            new = _pick_from_pool(points, cover.bounds, size - len(picks))


def _pick_from_pool(points: Tensor, bounds: Tensor, wanted: int) -> Tensor:
    """The next picks: as many as are certain without looking outside the pool.

    Args:
        points: (N, d).
        bounds: (N,) squared distance to the nearest pick, up to date; -1 for picks.
        wanted: the most picks to return.
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
        if left[best] < floor:
            break
        picked.append(best)
        np.minimum(left, rows[best], out=left)
        left[best] = -1.0
    return members[torch.tensor(picked, device=members.device)]


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


class _Cover:
    """The squared distance of every point to its nearest centre, as centres are added.

    Attributes:
        bounds: (N,) float32. Entries that the owner sets to -1 stay so.
    """

    def __init__(self, points: Tensor, spread: Spread) -> None:
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
        # A GPU multiplies faster than it could be told what to skip.
        self._pivots_wanted = points.device.type == "cpu" and len(points) >= 16 * _CELLS
        self._seen = points.new_empty(0, points.shape[1], dtype=torch.float32)
        self.bounds = torch.full((len(points),), float("inf"), device=points.device)
        everything = torch.arange(len(points), device=points.device)
        blocks = [(m, self._mean) for m in torch.split(everything, self._block)]
        self._cells = self._spread(self._cell, blocks)

    def add(self, centres: Tensor) -> None:
        """Bring all bounds up to date with more centres (c, d)."""
        while len(centres):
            some = centres[: _CELLS if self._pivots_wanted else _CENTRES].float()
            centres = centres[len(some) :]
            self._update(some)
            if self._pivots_wanted:
                self._seen = torch.cat([self._seen, some])
                if len(self._seen) >= _CELLS:
                    self._cells = self._partition(self._seen[:_CELLS])
                    self._pivots_wanted = False

    def radius(self) -> float:
        """The largest distance of any point to its nearest centre."""
        return float(self.bounds.max().clamp(min=0).sqrt())

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


def distances_to_nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Distance (N,) of each point (N, d) to its nearest centre (K, d).

    Quickest where early centres are spread well, as those of a coreset are.
    """
    with spreading(points.device) as spread:
        cover = _Cover(points, spread)
        cover.add(centres)
    return cover.bounds.sqrt()


def covering_radius(points: Tensor, centres: Tensor) -> float:
    """The largest distance of any point (N, d) to its nearest centre (K, d)."""
    return float(distances_to_nearest(points, centres).max())


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
