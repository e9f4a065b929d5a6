"""What is written for each scored image, besides its row. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anomaly.colour_bar import side_by_side
from anomaly.files import write
from anomaly.heatmap import display, encode_png, heatmap
from anomaly.images import Image
from anomaly.source_map import SourceMap


@dataclass(frozen=True)
class Pictures:
    """What to write, and where.

    Attributes:
        heatmaps: the folder for heatmaps.
        limit: the anomaly map's value where marking starts; None takes each image's own highest
            patch score, for models without thresholds.
        beside: what the scores are, to show image, heatmap and colour bar side by side; None for
            the image under its heatmap alone.
    """

    heatmaps: Path
    limit: float | None
    beside: str | None = None

    def write(self, image: Image, found: SourceMap, name: str) -> None:
        """Write one image's files.

        Args:
            image: the decoded file.
            found: its anomaly map.
            name: the heatmap's path in its folder.

        Raises:
            OutputError: no room, no permission.
        """
        limit = float(np.nanmax(found.scores)) if self.limit is None else self.limit
        picture = heatmap(image, found, limit)
        if self.beside is not None:
            picture = side_by_side(display(image), picture, limit, self.beside)
        write(self.heatmaps / name, encode_png(picture))
