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
    from anomaly.imaging.geometry import AnyView
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
_LEAST = np.array([0.1, 0.07, 0.22, 0.015, 0.015])
# Whatever a figure's distribution, if it has one peak, no more than 6.1 % lie so many standard
# deviations above the mean (Vysochanskij & Petunin 1980).
_DEVIATIONS, _PROMISED = 2.5, 0.07
_AFTER = 0.9  # share of parts beyond the level once the scene has changed
_FALSE_ALARMS = 0.001  # chance that any sum reaches its limit within `HORIZON` usual parts
_LATEST = 8  # parts whose median says by how much the scene has changed; twice as many are kept

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
    cells = picture[
        tuple(slice(SIDE * i // n, SIDE * (i + 1) // n) for i, n in zip(tile, tiles, strict=True))
    ]
    if cells.size:
        size = cells.shape[1::-1]
        cells[..., :3] = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        cells[..., 3] = cv2.resize(edges, size, interpolation=cv2.INTER_AREA)
        if inside is not None:
            counted = cv2.resize(inside.astype(np.float32), size, interpolation=cv2.INTER_AREA)
            cells[counted == 0] = _OUTSIDE
    return picture


def evenly(count: int, most: int = PICTURES) -> list[int]:
    """Places of at most so many of a number of things, evenly spread."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most))})


class _Look:
    """What of a picture is compared: values of its cells by rank (4, R), and brightness by cell."""

    def __init__(self, picture: Picture) -> None:
        cells = np.where(picture == _OUTSIDE, np.nan, picture.astype(np.float32))
        light = cells[..., :3].mean(axis=2)
        detail = cells[..., 3] / (light + np.float32(0.02))
        values = np.stack([light, cells[..., 0], cells[..., 2], detail]).reshape(4, -1)
        self.ranked = np.log(np.nanquantile(values, _RANKS, axis=1).T + _DARK)
        self.light = np.where(np.isnan(light), np.nanmean(light), light)


class Scene:
    """How training pictures look, and how much their figures differ.

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
        """By how much a picture differs from training pictures, signed, as `_LEAST` says."""
        return tuple(map(float, self._figures(_Look(picture))))

    def _figures(self, look: _Look) -> NDArray[np.float64]:
        apart = look.ranked - self._ranked
        light, red, blue = apart[:3, self._dim]
        x, y, likeness = _match(self._light, look)
        # Where the middle isn't found again, something else has changed.
        moved = (x, y) if likeness >= self._like else (0.0, 0.0)
        medians = (np.median(values) for values in (light, red - blue, apart[3]))
        return np.array([*medians, *moved]) - self._centre


def _match(light: NDArray[np.float64], look: _Look) -> tuple[float, float, float]:
    """Where the middle of a picture lies in another one: to the right and down, as shares.

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
    """Watches predictions in the order of the parts, those of each product by themselves.

    Args:
        models: that make them, by product.

    Attributes:
        changed: by product, what has changed, for people; empty where nothing has.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._streams = {
            product: _Stream(model.scene)
            for product, model in models.items()
            if model.scene is not None
        }
        self.changed: dict[str, str] = {}

    def judged(self, prediction: Prediction) -> tuple[Prediction, tuple[float, ...]]:
        """The prediction, for review while the scene is changed; and the part's figures."""
        stream = self._streams.get(prediction.product)
        if stream is None:
            return prediction, ()
        figures = *stream.scene.figures(prediction.statistics.picture), bool(prediction.reason)
        self.add(prediction.product, figures)
        if not (changed := stream.text(_extent(prediction.view))):
            return prediction, figures
        self.changed[prediction.product] = changed
        reason = "; ".join(filter(None, (f"scene changed: {changed}", prediction.reason)))
        return replace(prediction, reason=reason), figures

    def add(self, product: str, figures: Sequence[float]) -> None:
        """Take a part's figures, as `judged` gave them; of a part that was scored before, say."""
        if (stream := self._streams.get(product)) is None or not figures:
            return
        before, name = stream.changed, f"{product}: " if product else ""
        stream.add(figures)
        if stream.changed and not before:
            log.warning(
                "%sscene changed at part %d: %s. Look at lamp, exposure, lens, camera and product. "
                "Parts are for review until they look right again; where they are to look like "
                "this from now on, the model can learn it: anomaly update",
                name,
                stream.parts,
                stream.text(None),
            )
        elif before and not stream.changed:
            self.changed.pop(product, None)
            log.warning("%sthe scene looks right again since part %d", name, stream.parts)


class _Stream:
    """The parts of one product, and the sums that watch them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.parts = scene, 0
        count = len(_LEAST)
        sides = [(i, sign) for i in range(count) for sign in (1, -1)] + [(count, 1)]
        limit = limit_of(_PROMISED, _FALSE_ALARMS / len(sides), _AFTER)
        self._charts = {
            (i, sign): Watched(Level("", value, _PROMISED, limit, _AFTER), ends=True)
            for i, sign in sides
            for value in [0.5 if i == count else float(scene.levels[i])]
        }
        self._latest: deque[Sequence[float]] = deque(maxlen=2 * _LATEST)

    def add(self, figures: Sequence[float]) -> None:
        for (i, sign), watched in self._charts.items():
            watched.add(sign * figures[i], self.parts)
        self._latest.append(figures)
        self.parts += 1

    @property
    def changed(self) -> bool:
        return any(watched.alarm is not None for watched in self._charts.values())

    def text(self, extent: tuple[float, float] | None) -> str:
        """What has changed, and for how many parts; empty while nothing has.

        Args:
            extent: width and height of what is looked at, in original pixels, if they are known.
        """
        active = [key for key, watched in self._charts.items() if watched.alarm is not None]
        if not active:
            return ""
        parts = self.parts - min(self._charts[key].since for key in active)
        what = ", ".join(_described(key[0], self._median(*key), extent) for key in active)
        return f"{what} (the last {parts} parts)"

    def _median(self, figure: int, sign: int) -> float:
        """Of the latest parts beyond the level: some may look right again already."""
        level = self._charts[figure, sign].level.value
        beyond = [part[figure] for part in self._latest if sign * part[figure] > level]
        return float(np.median(beyond[-_LATEST:]))


def _described(figure: int, value: float, extent: tuple[float, float] | None) -> str:
    if figure == len(_LEAST):
        return "parts are unlike the training images as a whole"
    if figure < len(_NAMES):
        side = "above" if value > 0 else "below"
        share = abs(100 * math.expm1(value))
        return f"{_NAMES[figure]} is {share:.0f} % {side} the training images'"
    axis = figure - len(_NAMES)
    where = (("left", "right"), ("up", "down"))[axis][value > 0]
    pixels = f" ({abs(value) * extent[axis]:.0f} px)" if extent else ""
    return f"the picture is shifted {where} by {abs(100 * value):.1f} %{pixels}"


def _extent(view: AnyView) -> tuple[float, float]:
    """Width and height of what the network sees of an image, in its own pixels."""
    rows, columns = (
        float(axis[-1].to_source(np.array(axis[-1].size)) - axis[0].to_source(np.array(0)))
        for axis in view.axes
    )
    return columns, rows
