"""Coreset selection from more points than memory holds: merge and reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from anomaly.scorers.coreset import Progress, Selection, select

# A full buffer is reduced to this share of it.
_KEPT = 0.5


class ShardedSelection:
    """Collects points in a buffer of fixed size; a full one is reduced by greedy k-center.

    As long as everything fits, the selection is exact.

    Args:
        dim: d.
        device: where the points will be.
        memory_limit: bytes of points held, at most.
        generator: draws the first pick of each selection.
    """

    def __init__(
        self, dim: int, device: torch.device, memory_limit: int, generator: torch.Generator
    ) -> None:
        rows = max(1024, memory_limit // (4 * dim))
        # Memory that isn't written to isn't taken from the machine.
        self._points = torch.empty(rows, dim, device=device)
        self._indices = torch.empty(rows, dtype=torch.int64, device=device)
        self._used = 0
        self._generator = generator
        self.count = 0
        self.shards = 1

    def add(self, points: Tensor) -> None:
        """Take further points (n, d)."""
        for some in torch.split(points, max(1, int(len(self._points) * (1 - _KEPT)))):
            if self._used + len(some) > len(self._points):
                self._reduce(int(len(self._points) * _KEPT))
            where = slice(self._used, self._used + len(some))
            self._points[where] = some
            self._indices[where] = torch.arange(
                self.count, self.count + len(some), device=points.device
            )
            self._used += len(some)
            self.count += len(some)

    def select(self, size: int, progress: Progress | None = None) -> Selection:
        """Choose among all points taken; picks count them in the order they came."""
        points, indices = self._points[: self._used], self._indices[: self._used]
        chosen = select(points, size, generator=self._generator, progress=progress)
        return Selection(indices[chosen.picks], chosen.covering_radius)

    def _reduce(self, size: int) -> None:
        points = self._points[: self._used]
        kept = select(points, size, generator=self._generator).picks.sort().values
        self._points[:size] = points[kept]
        self._indices[:size] = self._indices[kept]
        self._used = size
        self.shards += 1
