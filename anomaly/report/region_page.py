"""A page on which a person draws where to look in an image, for `image.region` of a config."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import cv2
import numpy as np

from anomaly.errors import ImageError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import Preprocessing, UnusableImage, size_of
from anomaly.maps.thumbnails import jpeg
from anomaly.report.page import asset, page

_SIDE = 1200  # of a square as large as the picture on the page
_LONGEST = 8000  # side of the picture


def region_page(path: Path, max_pixels: int, bit_depth: int | None = None) -> str:
    """The page: polygons are drawn over the picture, and shown as YAML.

    Args:
        path: the image.
        max_pixels: images of more pixels are refused.
        bit_depth: significant bits of 16-bit files; None for all.

    Raises:
        ImageError: the image can't be used.
    """
    height, width = size_of(path) or (1, 1)
    longest = _LONGEST / math.sqrt(max(height, width) / min(height, width))
    area = max(1, round(min(_SIDE, longest, math.sqrt(height * width))))
    sizing = Sizing(resize=None, crop=None, area=area, multiple=1)
    with Decoders(1, Task(Preprocessing(sizing, bit_depth, max_pixels))) as decoders:
        item = decoders.load(path)
    if isinstance(item, UnusableImage):
        raise ImageError(item.reason, item.status)
    picture = np.rint(item.pixels * 255).astype(np.uint8)
    photo = base64.b64encode(jpeg(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))).decode()
    return page(
        f"Where to look: {path.name}",
        asset("region.html"),
        styles=("base.css", "report.css", "region.css"),
        scripts=("region.js",),
        data={
            "name": path.name,
            "width": width,
            "height": height,
            "photo": f"data:image/jpeg;base64,{photo}",
        },
    )
