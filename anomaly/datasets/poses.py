"""Good images -> where the part lies in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.datasets.samples import Sample
from anomaly.errors import DataError
from anomaly.imaging.alignment import (
    PREFERENCE,
    Grey,
    Motion,
    Reference,
    grey_picture,
    moved,
    normed,
)
from anomaly.imaging.pool import read_all
from anomaly.imaging.read import Decoding, made_of

_LEAST_IMAGES = 8  # fewer don't show how far parts move
_ROUNDS = 3
# Of the training images, 95 % match what they have in common by so much at least (screws 0.95,
# transistors 0.89, castings 0.69; cells 0.41, fabric 0.04), and an eighth of a side away by this
# share of that at most (castings 0.69, hazelnuts 0.80, screws 0.84; drawn fabric 0.95, tile 0.98).
_LEAST_CORRELATION, _ELSEWHERE = 0.55, 0.9
_WORSE = 0.8  # of the training images' correlation is enough
_MARGIN = 0.25  # of the training images' range, and at least these shares and radians
_LEAST_SHIFT, _LEAST_TURN = 0.02, math.radians(2)


def grey_pictures(
    samples: Sequence[Sample],
    decoding: Decoding,
    most: int = 400,
) -> list[tuple[str, Grey]]:
    """Names and small grey pictures of images that can be used.

    Args:
        samples: the images.
        decoding: how they are decoded.
        most: how many to read, evenly taken.
    """
    samples = samples[:: max(1, -(-len(samples) // most))]
    read = partial(made_of, grey_picture, decoding)
    pictures = read_all(read, [sample.source for sample in samples])
    return [
        (sample.name, picture)
        for sample, picture in zip(samples, pictures, strict=True)
        if isinstance(picture, np.ndarray)
    ]


@dataclass(frozen=True, eq=False)
class Poses:
    """What training images show of where parts lie.

    Attributes:
        reference: for poses of further images.
        index: of the image in whose coordinates parts are seen: those where to look is drawn in.
        motions: of the images that could be compared: radians, and shares of width and height.
        correlations: of all images with the reference; 0 of those that can't be compared.
        elsewhere: the highest correlation at another place, as a share of that at the pose.
    """

    reference: Reference
    index: int
    motions: tuple[Motion, ...]
    correlations: tuple[float, ...]
    elsewhere: tuple[float, ...]

    def checked(self) -> Poses:
        """The same.

        Raises:
            DataError: the images show no part that lies in each of them.
        """
        typical, elsewhere = np.quantile(self.correlations, 0.05), np.quantile(self.elsewhere, 0.95)
        if typical >= _LEAST_CORRELATION and elsewhere <= _ELSEWHERE:
            return self
        reason = f"match by {typical:.2f}, and {_LEAST_CORRELATION:.2f} is needed"
        if typical >= _LEAST_CORRELATION:
            reason = "match nearly as well at other places"
        raise DataError(
            "image.align: the pose of the part can't be found: aligned with each other, the "
            f"training images {reason}, as images of a surface do; train with image.align=none"
        )


def learn(pictures: Sequence[Grey], *, rigid: bool) -> Poses:
    """The reference of training images.

    Args:
        pictures: as `grey_picture` gives them; those of another shape than most don't match at all.
        rigid: whether parts turn, too.

    Raises:
        DataError: there are none.
    """
    shapes = [picture.shape for picture in pictures]
    if not shapes:
        raise DataError("image.align: none of the training images can be used")
    shape = max(shapes, key=shapes.count)
    usable = [(i, picture) for i, picture in enumerate(pictures) if picture.shape == shape]
    greys = [picture for _, picture in usable]
    reference = Reference(normed(greys[0]), rigid)
    middle = 0
    for _ in range(_ROUNDS):
        fits = [reference.find(grey) for grey in greys]
        motions, fit = [motion for motion, _ in fits], np.array([value for _, value in fits])
        middle = _middle(motions, fit, shape)
        back = motions[middle].inverse()
        alike = np.flatnonzero(fit >= np.median(fit) - 2 * PREFERENCE)
        mean = np.mean([moved(greys[i], motions[i].after(back)) for i in alike], axis=0)
        reference = Reference(normed(mean), rigid)
    fits = [reference.find(grey) for grey in greys]
    shares = tuple(Motion(m.turn, m.x / shape[1], m.y / shape[0]) for m, _ in fits)
    correlations = [value for _, value in fits] + [0.0] * (len(shapes) - len(greys))
    reference = _bounded(reference, shares, correlations)
    elsewhere = tuple(
        reference.elsewhere(grey, motion) for grey, (motion, _) in zip(greys, fits, strict=True)
    )
    return Poses(reference, usable[middle][0], shares, tuple(correlations), elsewhere)


def _middle(motions: Sequence[Motion], fits: NDArray[Any], shape: tuple[int, ...]) -> int:
    """The image in which the part lies most as in the others, of those that show it well."""
    turns = np.exp(1j * np.array([motion.turn for motion in motions]))
    shifts = np.array([complex(motion.x, motion.y) for motion in motions])
    centre = -np.mean(shifts / turns)  # of all parts, in the coordinates of the reference
    away = np.abs(turns * centre + shifts)
    if abs(turns.mean()) > 0.9:  # they all lie about one way
        away += np.abs(np.angle(turns / turns.mean())) * min(shape) / 2
    return int(np.argmin(np.where(fits >= np.median(fits), away, np.inf)))


def _bounded(
    reference: Reference, shares: Sequence[Motion], correlations: Sequence[float]
) -> Reference:
    """The reference with what the training images show of motions and correlations."""
    least = _WORSE * float(np.quantile(correlations, 0.05))
    good = np.array([s for s, c in zip(shares, correlations, strict=False) if c >= least])
    low, high = good.min(axis=0), good.max(axis=0)
    margin = np.maximum(_MARGIN * (high - low), (_LEAST_TURN, _LEAST_SHIFT, _LEAST_SHIFT))
    low, high = low - margin, high + margin
    if len(good) < _LEAST_IMAGES:
        low[:], high[:] = -math.inf, math.inf
    elif high[0] - low[0] > math.pi:
        low[0], high[0] = -math.inf, math.inf
    return replace(reference, least=least, lowest=Motion(*low), highest=Motion(*high))
