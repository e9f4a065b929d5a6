"""Good images -> where the part lies in them, and whether it is worth following."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from anomaly.datasets.samples import Sample
from anomaly.errors import DataError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.pose import Grey, Poses, learn, read_grey

# `image.align: rigid` is named where parts turn by so many degrees and turning leaves this share of
# what doesn't match at most (screws 0.1, castings 0.4; hazelnuts 0.8, bottles 1), in the median;
# any where parts lie farther than this share of a side from the middle one.
_TURNED, _LEFT, _FAR = 2.0, 0.6, 0.03


def grey_pictures(
    samples: Sequence[Sample],
    decoders: Decoders,
    *,
    max_pixels: int,
    bit_depth: int | None,
    most: int = 400,
) -> list[tuple[str, Grey]]:
    """Names and small grey pictures of images that can be used.

    Args:
        samples: the images.
        decoders: what reads them.
        max_pixels: as in `anomaly.imaging.read.read_image`.
        bit_depth: as there.
        most: how many to read, evenly taken.
    """
    samples = samples[:: max(1, -(-len(samples) // most))]
    read = partial(read_grey, max_pixels=max_pixels, bit_depth=bit_depth)
    pictures = decoders.map(read, [sample.source for sample in samples])
    return [
        (sample.name, picture)
        for sample, picture in zip(samples, pictures, strict=True)
        if isinstance(picture, np.ndarray)
    ]


def moving(pictures: Sequence[Grey]) -> str:
    """How far parts move and which `image.align` follows them; empty where none is worth it.

    Args:
        pictures: of good images.
    """
    try:
        rigid = learn(pictures, rigid=True).checked()
    except DataError:
        return ""
    shift = learn(pictures, rigid=False)
    turn, away = _spread(rigid)
    left, before = (1 - np.median(poses.correlations) for poses in (rigid, shift))
    if turn > _TURNED and left < _LEFT * before:
        ways = "any way" if turn > 90 else f"turned by up to {turn:.0f}°"
        return (
            f"parts lie {ways}, shifted by up to {away:.0%} of the image's sides: "
            "image.align=rigid finds each one's pose first; `anomaly tune` shows what it gains"
        )
    _, away = _spread(shift)
    if away < _FAR:
        return ""
    return (
        f"parts are shifted by up to {away:.0%} of the image's sides: image.align=shift finds "
        "each one's pose first; `anomaly tune` shows what it gains"
    )


def _spread(poses: Poses) -> tuple[float, float]:
    """Degrees and share of a side by which all parts but 5 % differ less from the middle one."""
    motions = np.abs(np.array(poses.motions))
    turn, x, y = np.quantile(motions, 0.95, axis=0).tolist()
    return float(np.rad2deg(turn)), max(x, y)
