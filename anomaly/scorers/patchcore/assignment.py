"""Which of many centres is nearest to each point, in few dimensions and without most products."""

from __future__ import annotations

import torch
from torch import Tensor

from anomaly.runtime import spreading
from anomaly.scorers.patchcore.search.product_index import ProductIndex

# As in `cover`: few cells are too wide to rule anything out, many make products too small.
_CELLS = 256
# Above float32's rounding of the distances that centres are ruled out by.
_MARGIN = 1.0 + 1e-4


class Assignment:
    """Nearest centres by cells, exact up to float32's rounding.

    Points are grouped around their nearest pivot. Where x is at distance a from its pivot and b
    from the nearest centre of that pivot's own, no centre farther than a + b from the pivot is
    nearer to x: on projected patch embeddings that rules out all but a tenth of a large coreset.

    Args:
        centres: (M, d) float32; the first ones serve as pivots, best spread widely, as a
            coreset's are.
    """

    def __init__(self, centres: Tensor) -> None:
        # Distances are multiplied out relative to the mean, so that large norms don't cancel.
        self._mean = centres.mean(0)
        self._centres = centres - self._mean
        self._index = ProductIndex(centres)
        # A GPU multiplies faster than it could be told what to skip.
        self._pruned = centres.device.type == "cpu" and len(centres) >= 4 * _CELLS
        if self._pruned:
            self._pivots = self._centres[:_CELLS]
            self._away = torch.cdist(self._pivots, self._centres)
            self._home = self._away.argmin(0)

    def __call__(self, points: Tensor) -> Tensor:
        """The nearest centre (N,) int64 of points (N, d); thousands at once are quickest."""
        if not self._pruned:
            return self._index.candidates(points, 1)[:, 0]
        points = points - self._mean
        apart, cells = torch.cdist(points, self._pivots).min(1)
        order = cells.argsort(stable=True)
        members = torch.split(order, torch.bincount(cells, minlength=_CELLS).tolist())
        found = torch.empty(len(points), dtype=torch.int64)

        def fill(cell: int) -> None:
            mine = members[cell]
            if len(mine):
                found[mine] = self._inside(cell, points[mine], apart[mine])

        with spreading(points.device) as spread:
            spread(fill, range(_CELLS))
        return found

    def _inside(self, cell: int, points: Tensor, apart: Tensor) -> Tensor:
        """The nearest centre (n,) of the points of one cell, at distance (n,) from its pivot."""
        own = (self._home == cell).nonzero()[:, 0]
        bound = self._squared(cell, points, apart, own).amin(1).clamp_(min=0).sqrt_()
        reach = float((apart + bound).max()) * _MARGIN
        near = (self._away[cell] <= reach).nonzero()[:, 0]
        return near[self._squared(cell, points, apart, near).argmin(1)]

    def _squared(self, cell: int, points: Tensor, apart: Tensor, which: Tensor) -> Tensor:
        """Squared distances (n, c) to some of the centres, multiplied out around the pivot."""
        centres = self._centres.index_select(0, which) - self._pivots[cell]
        norms = apart.square()[:, None] + self._away[cell, which].square()
        return torch.addmm(norms, points - self._pivots[cell], centres.T, alpha=-2)
