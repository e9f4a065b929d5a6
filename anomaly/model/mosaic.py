"""A large image, scored tile by tile, with only a few tiles in memory beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anomaly.imaging.loading import NetworkInput
from anomaly.model.appearance import Appearance
from anomaly.model.prediction import Patches, Prediction
from anomaly.runtime.parallel import in_parallel

if TYPE_CHECKING:
    from anomaly.model.predictor import Predictor

_TILES_AT_ONCE = 4

# Patches and image scores of some tiles, by product.
_Found: TypeAlias = dict[str, tuple[list[Patches], list[float]]]


def score_tiles(predictor: Predictor, item: NetworkInput) -> Prediction:
    """Score one large image.

    Which product it is shows once all its tiles have been seen, so every model scores them all.

    Args:
        predictor: has the models.
        item: the image, not rendered yet.
    """

    def scored(
        batch: list[NetworkInput],
    ) -> tuple[list[NetworkInput], Sequence[Appearance], _Found]:
        with predictor.lead.embedder.quietly():
            embedded = predictor.lead.embedded(batch)
            layout = batch[0].layout
            found = {p: model.patches_of(embedded, layout) for p, model in predictor.models.items()}
        return batch, embedded.looks, found

    rows, columns = (len(pieces) for pieces in item.view.axes)
    mosaics = {product: _Mosaic(rows, columns) for product in predictor.models}
    whole: Appearance | None = None
    # Tiles are many and large: smaller batches keep what is in memory small.
    tiles = item.tiles(min(predictor.batch_size, _TILES_AT_ONCE))
    for batch, looks, found in in_parallel(scored, tiles, predictor.lead.device):
        for look in looks:
            whole = look if whole is None else whole + look
        for product, (patches, scores) in found.items():
            mosaics[product].put(batch, patches, scores)
    assert whole is not None
    product, reason = predictor.product_of(whole)
    model, mosaic = predictor.models[product], mosaics[product]
    return model.prediction(item, whole, mosaic.patches, mosaic.best, product, reason)


class _Mosaic:
    """The patches of a large image, put together from those of its tiles.

    Args:
        rows: of tiles.
        columns: of tiles.

    Attributes:
        best: the highest image score of a tile; NaN once one of them is.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._times = (rows, columns)
        self._patches: Patches | None = None
        self.best = -math.inf

    @property
    def patches(self) -> Patches:
        """Of the whole image, once its tiles have been put in."""
        assert self._patches is not None
        return self._patches

    def put(
        self, tiles: Sequence[NetworkInput], patches: Sequence[Patches], scores: Sequence[float]
    ) -> None:
        """Fill in some tiles."""
        self.best = float(np.max([self.best, *scores]))  # NaN stays NaN
        for tile, part in zip(tiles, patches, strict=True):
            whole = self._patches = self._patches or self._room(part)
            height, width = part.scores.shape
            row, column = tile.tile
            here = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            whole.scores[here] = part.scores
            if whole.nearest is not None and part.nearest is not None:
                whole.nearest[here] = part.nearest

    def _room(self, part: Patches) -> Patches:
        nearest = None if part.nearest is None else np.tile(part.nearest, self._times)
        return Patches(np.tile(part.scores, self._times), nearest)
