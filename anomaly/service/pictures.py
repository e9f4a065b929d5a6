"""What is drawn of a scored part, in the process that has decoded it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anomaly.imaging.read import Image
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.heatmap import encode_png, heatmap
from anomaly.maps.regions import MARKED, MarkedRegion, marked_regions, outlined_areas
from anomaly.maps.thumbnails import thumbnail

SMALL_PIXELS = 480_000


@dataclass(frozen=True)
class PictureRequest:
    """What a request wants beside its row."""

    heatmap: bool = False
    mask: bool = False
    regions: bool = False


@dataclass(frozen=True)
class PartPictures:
    """What was drawn.

    Attributes:
        small: heatmap for the page, JPEG.
        heatmap: of the image's size, PNG; empty where it isn't wanted.
        mask: of the image's size, PNG; empty where it isn't wanted.
        regions: what is marked; None where that isn't wanted.
    """

    small: bytes
    heatmap: bytes = b""
    mask: bytes = b""
    regions: tuple[MarkedRegion, ...] | None = None


@dataclass(frozen=True)
class PartPictureWriter:
    """How a model's parts are drawn.

    Attributes:
        limit: the anomaly map's value where marking starts; None takes each image's own highest
            patch score, for models without thresholds: they have no masks and no regions.
        review: a lower value, which a heatmap outlines fainter; None for none.
    """

    limit: float | None
    review: float | None

    def write(
        self, image: Image, found: SourceMap, wanted: PictureRequest, rejected: bool
    ) -> PartPictures:
        """Draw one part.

        Args:
            image: the decoded file.
            found: its anomaly map.
            wanted: what to draw beside the small heatmap.
            rejected: whether its verdict is that.
        """
        limit = float(np.nanmax(found.scores)) if self.limit is None else self.limit
        found = found.held()
        areas = outlined_areas(found, limit, self.review, rejected=rejected)
        picture = heatmap(image, found, limit, areas)
        small = thumbnail(picture, SMALL_PIXELS).photo
        whole = encode_png(picture) if wanted.heatmap else b""
        if self.limit is None or not (wanted.mask or wanted.regions):
            return PartPictures(small, whole)
        mask = np.where(areas == MARKED, areas, np.uint8(0))
        regions = marked_regions(mask, found) if wanted.regions else None
        return PartPictures(small, whole, encode_png(mask) if wanted.mask else b"", regions)
