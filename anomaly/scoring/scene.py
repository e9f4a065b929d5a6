"""The scene changed, not the part: many images in a row that are off in the same way as a whole.

Of each image a small picture is kept. Its brightness, colour, sharpness and position are compared
with those of training pictures, by medians and by the best match of the middle, so that a defect,
which is local, hardly moves them. A cumulative sum watches each of them to either side.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.cusum import Level, Watched, limit_of

if TYPE_CHECKING:
    from anomaly.scoring.pipeline import Model
    from anomaly.scoring.prediction import Prediction

log = logging.getLogger(__name__)

SIDE = 32  # cells of a picture
PICTURES = 64  # of training images that a model keeps, at most
LEAST_PICTURES = 8  # fewer don't show how much good images differ
_OUTSIDE = -1  # a cell that doesn't count

_RANKS = np.linspace(0.05, 0.95, 19)
_DARK = np.array([[0.01], [0.01], [0.01], [0.002]])  # added before logarithms are taken
_SATURATED = 0.9  # brightness that more light hardly changes
_MARGIN = 6  # cells that the middle may have moved by: 19 % of the image
_SURE = 0.03  # how much worse than training pictures a match may be, at least

_NAMES = ("brightness", "red against blue", "sharpness")
# The least changes worth an alarm: of the logarithm of the first three, of position as a share.
_LEAST = np.array([0.09, 0.1, 0.22, 0.015, 0.015])
_UNLIKE = len(_LEAST)  # the last figure: 1 for a part that has to be looked at anyway, else 0
# Whatever a figure's distribution, if it has one peak, no more than 6.1 % lie so many standard
# deviations above the mean (Vysochanskij & Petunin 1980).
_DEVIATIONS, _PROMISED = 2.5, 0.07
_AFTER = 0.9  # share of parts beyond the level once the scene has changed
_FALSE_ALARMS = 0.001  # chance that any sum reaches its limit within `HORIZON` usual parts
_LATEST = 8  # parts whose median says by how much the scene has changed; twice as many are kept

_CHANGED = (
    "%sscene changed at part %d: %s. Check lamp, exposure, lens, camera and product. Parts are "
    "for review until the scene looks right again; if the change stays, let the model learn it "
    "with anomaly update"
)

Picture = NDArray[np.float16]


def picture_of(
    pixels: NDArray[np.float32],
    edges: NDArray[np.float32],
    inside: NDArray[np.bool_] | None,
    tile: tuple[int, int] = (0, 0),
    tiles: tuple[int, int] = (1, 1),
) -> Picture:
    """An image, or its share of one, as (SIDE, SIDE, 4): red, green, blue and detail of each cell.

    Args:
        pixels: (H, W, 3) in [0, 1].
        edges: (H, W) second derivative of the brightness, absolute.
        inside: (h, w), the patches that count; None for all.
        tile: row and column of this tile.
        tiles: rows and columns of tiles; cells of other tiles are 0.
    """
    picture = np.zeros((SIDE, SIDE, 4), np.float16)
    (top, left), (rows, columns) = tile, tiles
    cells = picture[SIDE * top // rows : SIDE * (top + 1) // rows]
    cells = cells[:, SIDE * left // columns : SIDE * (left + 1) // columns]
    if cells.size:
        size = cells.shape[1::-1]
        cells[..., :3] = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        cells[..., 3] = cv2.resize(edges, size, interpolation=cv2.INTER_AREA)
        if inside is not None:
            counted = cv2.resize(inside.astype(np.float32), size, interpolation=cv2.INTER_AREA)
            cells[counted == 0] = _OUTSIDE
    return picture


def evenly(count: int, most: int = PICTURES) -> list[int]:
    """Indices of at most `most` items, evenly spread."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most))})


class _Look:
    """The compared features of a picture: cell values by rank (4, R), brightness by cell."""

    def __init__(self, picture: Picture) -> None:
        cells = np.where(picture == _OUTSIDE, np.nan, picture.astype(np.float32))
        light = cells[..., :3].mean(axis=2)
        detail = cells[..., 3] / (light + np.float32(0.02))
        values = np.stack([light, cells[..., 0], cells[..., 2], detail]).reshape(4, -1)
        self.ranked = np.log(np.nanquantile(values, _RANKS, axis=1).T + _DARK)
        self.light = np.where(np.isnan(light), np.nanmean(light), light)


class Scene:
    """The look of training pictures, and the spread of their figures.

    Args:
        pictures: (K, SIDE, SIDE, 4), at least `LEAST_PICTURES`.
        turned: whether parts may lie other ways than in these, so that position says nothing.
    """

    def __init__(self, pictures: Picture, *, turned: bool) -> None:
        looks = [_Look(picture) for picture in pictures]
        count = len(looks)
        self._ranked = np.mean([look.ranked for look in looks], axis=0)
        self._light = np.mean([look.light for look in looks], axis=0)
        dim = self._ranked[0] < math.log(_SATURATED)
        self._dim = dim if dim.sum() * 4 >= len(dim) else np.ones_like(dim)
        others = [(self._light * count - look.light) / (count - 1) for look in looks]
        matches = [_match(*pair)[2] for pair in zip(others, looks, strict=True)]
        self._like = float(np.mean(matches)) - max(3 * float(np.std(matches)), _SURE)
        self._centre = np.zeros(len(_LEAST))
        figures = np.array([self._figures(look) for look in looks])
        self._centre = figures.mean(axis=0)
        # A few pictures may all be alike by chance.
        usual = _DEVIATIONS * (1 + 4 / count) * figures.std(axis=0, ddof=1)
        self.levels = np.maximum(usual, _LEAST)
        if turned:
            self.levels[3:] = np.inf

    def figures(self, picture: Picture) -> tuple[float, ...]:
        """Signed differences of a picture from training pictures, in units of `_LEAST`."""
        return tuple(round(float(value), 6) for value in self._figures(_Look(picture)))

    def _figures(self, look: _Look) -> NDArray[np.float64]:
        apart = look.ranked - self._ranked
        light, red, blue = apart[:3, self._dim]
        x, y, likeness = _match(self._light, look)
        # Where the middle isn't found again, something else has changed.
        moved = (x, y) if likeness >= self._like else (0.0, 0.0)
        medians = (np.median(values) for values in (light, red - blue, apart[3]))
        return np.array([*medians, *moved]) - self._centre


def _match(light: NDArray[np.float64], look: _Look) -> tuple[float, float, float]:
    """The shift of a picture against another one: right and down, as shares.

    Returns:
        Both, and the correlation there.
    """
    middle = light[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN].astype(np.float32)
    found = cv2.matchTemplate(look.light.astype(np.float32), middle, cv2.TM_CCOEFF_NORMED)
    y, x = np.unravel_index(int(found.argmax()), found.shape)
    places = _peak(found[y].tolist(), int(x)), _peak(found[:, x].tolist(), int(y))
    right, down = ((place - _MARGIN) / SIDE for place in places)
    return right, down, float(found[y, x])


def _peak(values: list[float], at: int) -> float:
    """Where the parabola through the highest value and its neighbours has its peak."""
    if not 0 < at < len(values) - 1:
        return float(at)
    before, here, after = values[at - 1 : at + 2]
    bend = before - 2 * here + after
    return at + 0.5 * (before - after) / bend if bend < 0 else float(at)


class SceneWatch:
    """Watches predictions in the order of the parts, separately for each product.

    Args:
        models: that make them, by product.

    Attributes:
        changed: by product, what has changed, for people; only where something has.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._streams = {p: _Stream(m.scene) for p, m in models.items() if m.scene is not None}
        self.changed: dict[str, str] = {}

    def judged(self, prediction: Prediction) -> tuple[Prediction, tuple[float, ...]]:
        """The prediction, for review while the scene is changed; and the part's figures."""
        product = prediction.product
        if (stream := self._streams.get(product)) is None:
            return prediction, ()
        stream.extent = prediction.view.source[::-1]
        figures = *stream.scene.figures(prediction.statistics.picture), bool(prediction.reason)
        before, name = self.changed.get(product), f"{product}: " if product else ""
        self.add(product, figures)
        if text := self.changed.get(product):
            if not before:
                log.warning(_CHANGED, name, stream.parts, text)
            reasons = (f"scene changed: {text}", prediction.reason)
            prediction = replace(prediction, reason="; ".join(filter(None, reasons)))
        elif before:
            log.warning("%sthe scene looks right again since part %d", name, stream.parts)
        return prediction, figures

    def add(self, product: str, figures: Sequence[float]) -> None:
        """Add a part's figures from `judged`, now or from an earlier run."""
        self.changed.pop(product, None)
        if figures and (text := self._streams[product].add(figures)):
            self.changed[product] = text


class _Stream:
    """The parts of one product, with two-sided sums of each figure."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.parts = scene, 0
        self.extent = (0, 0)  # width and height of the latest image
        levels = [*scene.levels.tolist(), 0.5]
        sides = [(i, side) for i in range(len(levels)) for side in (1, -1)]
        limit = limit_of(_PROMISED, _FALSE_ALARMS / len(sides), _AFTER)
        self._sums = {
            (i, side): Watched(Level("", levels[i], _PROMISED, limit, _AFTER), ends=True)
            for i, side in sides
        }
        self._latest: deque[Sequence[float]] = deque(maxlen=2 * _LATEST)

    def add(self, figures: Sequence[float]) -> str:
        """Add a part's figures; returns what has changed, empty if nothing has."""
        self._latest.append(figures)
        for (figure, side), watched in self._sums.items():
            watched.add(side * figures[figure], self.parts)
        self.parts += 1
        active = {key: watched for key, watched in self._sums.items() if watched.alarm is not None}
        if not active:
            return ""
        parts = self.parts - min(watched.since for watched in active.values())
        if len(active) > 1:
            active.pop((_UNLIKE, 1), None)  # the others say why
        what = [self._described(*key, watched.level.value) for key, watched in active.items()]
        return f"{', '.join(what)} (the last {parts} parts)"

    def _described(self, figure: int, side: int, level: float) -> str:
        if figure == _UNLIKE:
            return "parts are unlike the training images as a whole"
        # Some of the latest parts may look right again already.
        beyond = [side * part[figure] for part in self._latest if side * part[figure] > level]
        value = float(np.median(beyond[-_LATEST:]))
        if figure < len(_NAMES):
            share = abs(100 * math.expm1(side * value))
            where = "higher" if side > 0 else "lower"
            return f"{_NAMES[figure]} is {share:.0f} % {where} than in the training images"
        axis = figure - len(_NAMES)
        where = (("left", "right"), ("up", "down"))[axis][side > 0]
        pixels = value * self.extent[axis]
        return f"the picture is shifted {where} by {pixels:.0f} px ({100 * value:.1f} %)"
