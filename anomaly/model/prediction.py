"""What a detector makes of one image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.geometry import Layout
from anomaly.imaging.image import Image
from anomaly.imaging.region import Region
from anomaly.maps.anomaly_map import SourceMap


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a detector makes of one image.

    Attributes:
        index: the image's place in the list of files.
        sha256: of the file's bytes.
        image: the decoded file; None where it wasn't asked for.
        view: how the network saw it.
        patch_scores: (h, w) float32, distances; higher is more anomalous. NaN doesn't count. With
            tiles, the mosaic of their patches.
        nearest: (h, w) int64, the nearest bank vector of each patch; None without a bank.
        image_score: in the same unit; with tiles, the highest of theirs.
        smoothing: of the anomaly map, in network pixels.
        region: what of the image counts; None for all of it.
        oddness: why the image isn't like the training images at all, so that its score means
            little, or that it is blank; empty where it is.
    """

    index: int
    sha256: str
    image: Image | None
    view: Layout
    patch_scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    image_score: float
    smoothing: float
    region: Region | None = None
    oddness: str = ""

    @property
    def anomaly_map(self) -> SourceMap:
        """The anomaly map in the image's own pixels: call it, for all rows or some."""
        return SourceMap(self.patch_scores, self.view, self.smoothing, self.region)
