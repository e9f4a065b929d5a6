"""What is written for each scored image, besides its row. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anomaly.files.own_outputs import HEATMAPS, MAPS, MASKS
from anomaly.files.writing import write
from anomaly.imaging.read import Image
from anomaly.maps.anomaly_map import SourceMap
from anomaly.maps.colour_bar import with_colour_bar
from anomaly.maps.heatmap import RgbImage, display, encode_png, heatmap
from anomaly.maps.map_files import encode_float32, encode_uint16
from anomaly.maps.regions import MARKED, MarkedRegion, marked_regions, outlined_areas
from anomaly.maps.thumbnails import Thumbnail, thumbnail


@dataclass(frozen=True)
class Shown:
    """What a heatmap says of its image.

    Attributes:
        heatmap: whether there is to be one.
        verdict: `good`, `review` or `reject`; empty without thresholds.
        score: the image score.
        times: that, in multiples of the reject threshold; None without thresholds.
        small: pixels that a small copy of it may have; 0 for no copy.
        limit: the anomaly map's value where marking starts; None takes the image's own highest
            patch score, for models without thresholds: they have no masks, regions or 16-bit maps.
        review: a lower value, which a heatmap outlines fainter; None for none.
    """

    heatmap: bool = True
    verdict: str = ""
    score: float = math.nan
    times: float | None = None
    small: int = 0
    limit: float | None = None
    review: float | None = None


PLAIN = Shown()


@dataclass(frozen=True)
class Drawn:
    """What was found on the way.

    Attributes:
        regions: what is marked, where that is wanted.
        small: the small copy of the heatmap, where that is wanted.
    """

    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class Pictures:
    """What to write, and where.

    Attributes:
        output: the folder for folders of heatmaps, masks and maps.
        beside: what the scores are, to show image, heatmap and colour bar side by side; None for
            the image under its heatmap alone.
        masks: whether to write predicted masks.
        regions: whether to find the masks' regions.
        maps: how to write anomaly maps, if at all.
    """

    output: Path
    beside: str | None = None
    masks: bool = False
    regions: bool = False
    maps: Literal["float32", "uint16"] | None = None

    def write(self, image: Image, found: SourceMap, name: str, shown: Shown = PLAIN) -> Drawn:
        """Write one image's files.

        Args:
            image: the decoded file.
            found: its anomaly map.
            name: the heatmap's path in its folder; the others have the same in theirs.
            shown: what the heatmap says of it.

        Returns:
            The marked regions and a small heatmap, where they are wanted.

        Raises:
            OutputError: no room, no permission.
        """
        if not (shown.heatmap or self.masks or self.regions or self.maps):
            return Drawn()
        found = found.held()
        limit = float(np.nanmax(found.scores)) if shown.limit is None else shown.limit
        if self.maps == "uint16":
            write(self.output / MAPS / name, encode_uint16(found, image.size, limit))
        elif self.maps == "float32":
            file = self.output / MAPS / PurePosixPath(name).with_suffix(".tiff")
            write(file, encode_float32(found, image.size))
        if not (shown.heatmap or self.masks or self.regions):
            return Drawn()
        rejected = shown.verdict == "reject"
        areas = outlined_areas(found, limit, shown.review, rejected=rejected)
        # In a method of its own: of a large image the picture is gone before the mask is encoded.
        small = self._write_heatmap(image, found, limit, areas, name, shown)
        if not (self.masks or self.regions):
            return Drawn(small=small)
        mask = np.where(areas == MARKED, areas, np.uint8(0))
        if self.masks:
            write(self.output / MASKS / name, encode_png(mask))
        return Drawn(marked_regions(mask, found) if self.regions else (), small)

    def _write_heatmap(
        self,
        image: Image,
        found: SourceMap,
        limit: float,
        areas: NDArray[np.uint8],
        name: str,
        shown: Shown,
    ) -> Thumbnail | None:
        if not shown.heatmap:
            return None
        picture = self._captioned(image, heatmap(image, found, limit, areas), limit, shown)
        write(self.output / HEATMAPS / name, encode_png(picture))
        return thumbnail(picture, shown.small) if shown.small else None

    def _captioned(self, image: Image, picture: RgbImage, limit: float, shown: Shown) -> RgbImage:
        if self.beside is None:
            return picture
        caption = f"score {shown.score:.4g}"
        if shown.times is not None:
            caption += f" = {shown.times:.2f} x the reject threshold"
        if shown.verdict:
            caption = f"{shown.verdict}: {caption}"
        return with_colour_bar(display(image), picture, limit, self.beside, shown.review, caption)


def picture_exists(output: Path, name: str) -> bool:
    """Whether any picture of a name is in an output folder."""
    map_name = PurePosixPath(name).with_suffix(".tiff")
    files = (HEATMAPS, name), (MASKS, name), (MAPS, name), (MAPS, map_name)
    return any((output / folder / file).exists() for folder, file in files)
