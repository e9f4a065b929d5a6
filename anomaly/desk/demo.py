"""The demo's product: a brushed steel plate with a slot and four socket screws, on a rubber mat.

The plate and its defects are drawn as a scene, which a camera photographs; a mask shows what of a
defect can be seen. Nothing of it is a photograph.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.errors import OutputError
from anomaly.files.writing import write
from anomaly.runtime import Progress, cores
from anomaly.storage.folder import appearing

# float32 throughout: numpy's stubs lose sight of that in a product with a Python float.
Field = NDArray[np.floating[Any]]


@lru_cache(maxsize=2)
def pixel_centres(side: int) -> tuple[Field, Field]:
    """The x and y (S, S) of every pixel's centre, in shares of the side S from the middle."""
    # All images of one size share these arrays.
    axis = ((np.arange(side) + 0.5) / side - 0.5).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    return x, y


def white_noise(rng: Generator, shape: tuple[int, ...]) -> Field:
    """Independent noise, mean 0 and standard deviation 1, to be blurred.

    Uniform, not normal: after any blur nobody can tell, and it costs a tenth of the time.
    """
    byte = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    return (byte - np.float32(127.5)) / np.float32(73.9)


# Lengths are shares of the scene's side.
HALF_WIDTH, HALF_HEIGHT, _CORNER = 0.395, 0.345, 0.036
SLOT_LENGTH, SLOT_RADIUS = 0.113, 0.0247
SCREW_AT = (0.324, 0.270)
SCREW_RADIUS = 0.035
_CHAMFER = 0.0056

_STEEL = np.array([0.600, 0.595, 0.585], np.float32)
_RUBBER = np.array([0.95, 1.00, 1.06], np.float32)
_SCREW_STEEL = np.array([0.98, 1.00, 1.02], np.float32)
_BRIGHT_SIDE = 0.75 * np.pi  # radians: a countersink is brightest down and to the left
_COARSE = 4  # clouds are drawn on every fourth pixel, fine enough for anything smooth


@dataclass(frozen=True)
class Screw:
    """A countersunk socket screw, or its empty hole.

    Attributes:
        x, y: centre.
        turn: angle of the hexagon, in radians.
        glint: direction of the highlight on the turned head, in radians.
        tone: brightness of the head against its fellows.
        wear: 0 sound, 1 stripped.
        missing: there is only the hole.
    """

    x: float
    y: float
    turn: float
    glint: float
    tone: float
    wear: float = 0.0
    missing: bool = False


@dataclass(frozen=True)
class Plate:
    """A plate on its mat, as the light falls on it.

    Attributes:
        outline: (S, S) signed distance to the plate's edges, negative on the metal.
        relief: (S, S) height of the surface, in scene pixels.
        brush: (S, S) brushing, mean 0 and standard deviation 1.
        gloss: (S, S) factor on the reflected light.
        film: (3, 1, 1) or (3, S, S) factor on its colour, linear RGB.
        mat: (S, S) brightness of the rubber mat.
        screws: the four screws.
        lamp: x, y and strength of the soft box's reflection.
    """

    outline: Field
    relief: Field
    brush: Field
    gloss: Field
    film: Field
    mat: Field
    screws: tuple[Screw, ...]
    lamp: tuple[float, float, float]

    @property
    def side(self) -> int:
        """The side S of the plate, in scene pixels."""
        return int(self.outline.shape[0])


def good_plate(rng: Generator, side: int) -> Plate:
    """A good plate in a scene of `side` pixels."""
    brush = (
        0.62 * streaks(rng, side, side // 8)
        + 0.62 * streaks(rng, side, side // 2, 0.7)
        + 0.48 * streaks(rng, side, side, 3.0)
    )
    grit = cv2.GaussianBlur(white_noise(rng, (side, side)), (0, 0), 1.6) * 0.020
    mat = np.maximum(0.030 + grit + 0.0012 * clouds(rng, side, side / 9, 2), 0.004)
    return Plate(
        outline=_outline(side),
        relief=clouds(rng, side, side / 2) * (side * 0.0006),
        brush=brush,
        gloss=1 + 0.012 * clouds(rng, side, side / 3, 3),
        film=np.exp(rng.uniform(-0.015, 0.015, (3, 1, 1))).astype(np.float32),
        mat=mat,
        screws=tuple(_screw(rng, x, y) for y in (-1, 1) for x in (-1, 1)),
        lamp=(rng.uniform(-0.18, -0.02), rng.uniform(-0.35, -0.15), rng.uniform(0.95, 1.05)),
    )


@lru_cache(maxsize=2)
def _outline(side: int) -> Field:
    """Signed distance to the plate's outer edge and to its slot, negative on the metal."""
    x, y = pixel_centres(side)
    body = _rounded_box(x, y, (HALF_WIDTH, HALF_HEIGHT), _CORNER)
    slot = _rounded_box(x, y, (SLOT_LENGTH, SLOT_RADIUS), SLOT_RADIUS)
    return np.maximum(body, -slot)


def _rounded_box(x: Field, y: Field, half: tuple[float, float], corner: float) -> Field:
    """Signed distance to a rectangle with rounded corners, negative inside."""
    dx = np.abs(x) - (half[0] - corner)
    dy = np.abs(y) - (half[1] - corner)
    outside = distance(np.maximum(dx, 0), np.maximum(dy, 0))
    return outside + np.minimum(np.maximum(dx, dy), 0) - corner


def _screw(rng: Generator, column: int, row: int) -> Screw:
    """A sound screw in one of the four corners, -1 or 1 each way."""
    return Screw(
        x=column * SCREW_AT[0] + rng.uniform(-0.001, 0.001),
        y=row * SCREW_AT[1] + rng.uniform(-0.001, 0.001),
        turn=rng.uniform(0, np.pi / 3),
        glint=rng.uniform(0.2, 0.8),
        tone=rng.uniform(0.92, 1.08),
    )


def shade(plate: Plate) -> Field:
    """Linear light (S, S, 3), RGB, from the plate to the camera."""
    x, y = pixel_centres(plate.side)
    rim = smoothstep(-_CHAMFER, 0, plate.outline)
    relief = plate.relief - rim * (_CHAMFER * plate.side * 0.55)
    # A mirror's reflection moves by twice its slope; brushed metal answers a little less.
    u = 0.9 * x + cv2.Sobel(relief, cv2.CV_32F, 1, 0, scale=1.6 / 8)
    v = 0.9 * y + cv2.Sobel(relief, cv2.CV_32F, 0, 1, scale=1.6 / 8)
    metal = _sky(u, v, plate.lamp) * plate.gloss
    metal *= 1 + plate.brush * (0.055 * (1 - rim))
    cover = smoothstep(1 / plate.side, -1 / plate.side, plate.outline)
    mat = _shadowed(plate, cover) * (1 - cover)
    metal *= cover
    colours = zip(plate.film, _STEEL, _RUBBER, strict=True)
    planes = [metal * film * steel + mat * rubber for film, steel, rubber in colours]
    radiance = np.asarray(cv2.merge(planes), np.float32)
    for screw in plate.screws:
        _paint(radiance, screw)
    return radiance


def _shadowed(plate: Plate, cover: Field) -> Field:
    """The mat around the plate, darker on the side away from the lamp."""
    x, y = pixel_centres(plate.side)
    # A quarter of the side is plenty for something this soft.
    small = cv2.resize(cover, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
    small = cv2.GaussianBlur(small, (0, 0), plate.side * 0.003)
    small = np.roll(small, (round(plate.side * 0.0015), round(plate.side * 0.002)), (0, 1))
    shadow = cv2.resize(small, cover.shape[::-1])
    return plate.mat * (1 - 0.8 * shadow) * (1 - 0.5 * x - 0.4 * y)


def _sky(u: Field, v: Field, lamp: tuple[float, float, float]) -> Field:
    """Light that a mirror facing (u, v) sends to the camera: soft box, window, dim room.

    Brushing along x scatters light along y: the soft box is seen drawn out in v.
    """
    x, y, strength = lamp
    box = ((u - x) / 0.5) ** 2 + ((v - y) / 1.6) ** 2
    window = ((u + 1.5) / 0.7) ** 2 + (v + 1.3) ** 2
    light = (0.85 * strength) * cv2.exp(-box) + 0.9 * cv2.exp(-window)
    return np.asarray(light + 0.28, np.float32)


def _paint(radiance: Field, screw: Screw) -> None:
    """Paint one screw in its countersink over the shaded plate."""
    side = radiance.shape[0]
    reach = int(SCREW_RADIUS * 1.25 * side) + 2
    column, row = (int((c + 0.5) * side) for c in (screw.x, screw.y))
    window = (slice(row - reach, row + reach), slice(column - reach, column + reach))
    x, y = pixel_centres(side)
    dx, dy = x[window] - screw.x, y[window] - screw.y
    r = distance(dx, dy) * (1 / SCREW_RADIUS)
    angle = np.arctan2(dy, dx)
    soft = 1 / (SCREW_RADIUS * side)
    patch = radiance[window]
    # Countersink: a cone that faces the lamp on one side and the dark room on the other.
    cone = 0.30 + 0.34 * np.cos(angle - _BRIGHT_SIDE) + 0.12 * np.cos(2 * angle)
    sink = smoothstep(1.12 + soft, 1.12 - soft, r)[..., None]
    patch += (np.maximum(cone, 0.04)[..., None] - patch) * sink
    face = _empty_hole(r, angle) if screw.missing else _screw_head(screw, r, angle)
    head = smoothstep(1 + soft, 1 - soft, r)[..., None]
    patch += (face[..., None] * _SCREW_STEEL - patch) * head


def _screw_head(screw: Screw, r: Field, angle: Field) -> Field:
    """Brightness of a turned head with its hexagon socket; r in head radii."""
    wedge = np.abs(np.cos(angle - screw.glint)) ** 6
    rings = 1 + 0.05 * np.sin(r * 46) + 0.03 * np.sin(r * 71 + 1)
    face = (0.20 + 0.42 * wedge) * rings * screw.tone
    face *= 0.25 + 0.75 * smoothstep(1.0, 0.88, r)
    sector = np.mod(angle - screw.turn, np.pi / 3) - np.pi / 6
    hexagon = r * np.cos(sector)
    # A stripped socket is worn towards a circle, with a torn, shiny edge.
    ragged = 0.10 * np.sin(5 * angle + 7 * screw.turn) + 0.04 * np.sin(11 * angle)
    hexagon += screw.wear * (r * (0.88 + ragged) - hexagon)
    edge = 0.46 + 0.20 * screw.wear
    socket = smoothstep(edge + 0.03, edge - 0.03, hexagon)
    lip = np.exp(-(((hexagon - edge - 0.06) / 0.05) ** 2))
    face += lip * (0.10 + 0.8 * screw.wear * (0.5 + 0.5 * np.sin(3 * angle + 9 * screw.turn)))
    wall = 0.02 + 0.08 * smoothstep(0.2, edge, hexagon) * (1 + np.cos(angle - 2.4))
    return np.asarray(face + (wall - face) * socket, np.float32)


def _empty_hole(r: Field, angle: Field) -> Field:
    """Brightness of a countersunk hole without its screw; r in head radii."""
    cone = np.maximum(0.16 + 0.22 * np.cos(angle - _BRIGHT_SIDE) + 0.05 * np.sin(r * 40), 0.05)
    wall = 0.015 + 0.05 * smoothstep(0.3, 0.55, r) * (1 + np.cos(angle - _BRIGHT_SIDE + np.pi))
    bore = smoothstep(0.58, 0.54, r)
    return np.asarray(cone + (wall - cone) * bore, np.float32)


_LIMESCALE = np.array([0.50, 0.60, 0.70])
_RUST = np.array([0.35, 0.62, 0.95])


# Severities go from 0 (subtle) to 1 (obvious).


def scratch(plate: Plate, severity: float, rng: Generator) -> Plate:
    """A groove across the brushing, with a shining burr along its upper side."""
    thickness = max(1, round(plate.side / 845 * (1.7 + 1.7 * severity)))
    groove = _groove(rng, plate.side, (0.15 + 0.17 * severity) * rng.uniform(0.8, 1.2), thickness)
    offset = -round(thickness * 0.8)
    burr = np.roll(groove, (offset, offset - 1), (0, 1))
    depth = 0.52 + 0.48 * severity
    marks = (1 + 0.9 * depth * burr) * (1 - 0.6 * depth * groove)
    return replace(plate, gloss=plate.gloss * marks)


def _groove(rng: Generator, side: int, length: float, thickness: int) -> Field:
    """(S, S) depth, 0 to 1, of a slightly bent, trembling line that fades at its ends."""
    steps = np.linspace(-0.5, 0.5, 60)
    heading = rng.uniform(0.35, np.pi - 0.35) + rng.normal(0, 0.35) * steps
    heading += np.cumsum(rng.normal(0, 0.01, steps.size))
    stride = np.column_stack([np.cos(heading), np.sin(heading)]) * length / steps.size
    path = np.cumsum(stride, axis=0)
    path += np.array(_bare_metal(rng, 0.03)) - path.mean(axis=0)
    points = np.round((path + 0.5) * side * 16).astype(np.int32).tolist()
    fade = np.sqrt(np.maximum(np.cos(np.pi * steps), 0))
    pressure = fade * (0.75 + 0.25 * np.sin(9 * steps + rng.uniform(0, 6)))
    line = np.zeros((side, side), np.float32)
    for start, end, depth in zip(points[:-1], points[1:], pressure[:-1].tolist(), strict=True):
        cv2.line(line, start, end, depth, thickness, cv2.LINE_8, shift=4)
    return np.asarray(cv2.GaussianBlur(line, (0, 0), 0.8), np.float32)


def dent(plate: Plate, severity: float, rng: Generator) -> Plate:
    """A shallow blow: the hollow mirrors another part of the room."""
    x, y = pixel_centres(plate.side)
    radius = (0.019 + 0.021 * severity) * rng.uniform(0.9, 1.15)
    x0, y0 = _bare_metal(rng, radius * 1.6)
    turn, squeeze = rng.uniform(0, np.pi), rng.uniform(0.75, 1)
    sin, cos = float(np.sin(turn)), float(np.cos(turn))
    dx, dy = x - x0, y - y0
    r = distance(dx * cos + dy * sin, (dy * cos - dx * sin) / squeeze) / radius
    hollow = cv2.exp(-cv2.pow(r, 2.6)) - 0.18 * cv2.exp(-(((r - 1.25) / 0.3) ** 2))
    depth = radius * plate.side * (0.12 + 0.33 * severity)
    return replace(plate, relief=plate.relief - depth * hollow)


def stain(plate: Plate, severity: float, rng: Generator) -> Plate:
    """A dried drop: a tinted film with a darker, irregular rim."""
    x, y = pixel_centres(plate.side)
    radius = (0.034 + 0.039 * severity) * rng.uniform(0.85, 1.15)
    x0, y0 = _bare_metal(rng, radius)
    wobble = clouds(rng, plate.side, radius * plate.side * 0.9, 3)
    height = radius * rng.uniform(0.7, 1)
    r = distance((x - x0) / radius, (y - y0) / height)
    r += 0.13 * wobble
    body = smoothstep(1.0, 0.9, r) * (0.33 + 0.06 * wobble)
    rim = 0.65 * cv2.exp(-(((r - 0.93) / 0.06) ** 2))
    absorbed = (0.30 + 0.45 * severity) * np.clip(body + rim, 0, 1)
    colour = (_LIMESCALE, _RUST)[int(rng.integers(2))].astype(np.float32)
    return replace(plate, film=plate.film * (1 - absorbed * colour[:, None, None]))


def edge_nick(plate: Plate, severity: float, rng: Generator) -> Plate:
    """A bite out of the outer edge, with the metal around it pushed up."""
    x, y = pixel_centres(plate.side)
    radius = (0.010 + 0.022 * severity) * rng.uniform(0.9, 1.1)
    place, far = rng.uniform(-0.75, 0.75), float(rng.choice([-1, 1]))
    x0, y0 = (place, far) if rng.random() < 0.5 else (far, place)
    ragged = clouds(rng, plate.side, radius * plate.side, 3) * (radius * 0.16)
    bite = distance(x - x0 * HALF_WIDTH, y - y0 * HALF_HEIGHT) + ragged
    bite -= radius
    ridge = cv2.exp(-((bite / (0.35 * radius)) ** 2)) * (radius * plate.side / 10)
    return replace(plate, outline=np.maximum(plate.outline, -bite), relief=plate.relief + ridge)


def faulty_screw(plate: Plate, severity: float, rng: Generator) -> Plate:
    """A missing screw, or one whose socket has been stripped."""
    screws = list(plate.screws)
    faulty = int(rng.integers(len(screws)))
    wear = 0.7 + 0.3 * severity / 0.7
    screws[faulty] = replace(screws[faulty], missing=severity > 0.7, wear=wear)
    return replace(plate, screws=tuple(screws))


def _bare_metal(rng: Generator, clearance: float) -> tuple[float, float]:
    """A place (x, y) on the plate, `clearance` away from its edges, the slot and the screws."""
    while True:
        x = rng.uniform(clearance - HALF_WIDTH, HALF_WIDTH - clearance)
        y = rng.uniform(clearance - HALF_HEIGHT, HALF_HEIGHT - clearance)
        off_slot = abs(x) > SLOT_LENGTH + clearance or abs(y) > SLOT_RADIUS + clearance
        to_screw = np.hypot(abs(x) - SCREW_AT[0], abs(y) - SCREW_AT[1])
        if off_slot and to_screw > 1.3 * SCREW_RADIUS + clearance:
            return x, y


def clouds(rng: Generator, side: int, grain: float, octaves: int = 1) -> Field:
    """Smooth noise without a direction.

    Args:
        rng: source of randomness.
        side: side of the square field, in pixels.
        grain: size of the largest features, in pixels; the smallest possible is 4.
        octaves: number of layers; each has half the grain and half the strength of the last.

    Returns:
        (S, S) float32, mean about 0, standard deviation about 1.
    """
    coarse = -(-side // _COARSE)
    field = np.zeros((coarse, coarse), np.float32)
    for octave in range(octaves):
        cell = max(round(grain / 2**octave / _COARSE), 1)
        points = -(-coarse // cell) + 4
        lattice = rng.standard_normal((points, points), np.float32)
        wide = cv2.resize(lattice, None, fx=cell, fy=cell, interpolation=cv2.INTER_CUBIC)
        # A random start keeps the lattice from lining up with the frame in every image.
        row, column = rng.integers(cell, 2 * cell, 2)
        field += 0.5**octave * wide[row : row + coarse, column : column + coarse]
    # Cubic interpolation of white noise leaves 0.72 of its standard deviation.
    field *= 1 / (0.72 * sum(0.25**octave for octave in range(octaves)) ** 0.5)
    return np.asarray(cv2.resize(field, (side, side)), np.float32)


def streaks(rng: Generator, side: int, length: int, width: float = 0) -> Field:
    """Noise drawn out along the rows, like the marks of a brush.

    Args:
        rng: source of randomness.
        side: side of the square field, in pixels.
        length: reach of a streak, in pixels.
        width: Gaussian σ across the streaks, in pixels; 0 leaves the rows independent.

    Returns:
        (S, S) float32, mean 0, standard deviation 1.
    """
    # Streaks vary slowly along their length: draw them short and pull them out.
    cell = max(length // 4, 1)
    points = side // cell + 8
    short = cv2.blur(white_noise(rng, (side, points)), (4, 1), borderType=cv2.BORDER_REFLECT)
    if width:
        short = cv2.GaussianBlur(short, (1, 0), sigmaX=1, sigmaY=width)
    field = cv2.resize(short, (points * cell, side))[:, :side]
    return np.asarray((field - field.mean()) / field.std(), np.float32)


def smoothstep(edge0: float, edge1: float, x: Field) -> Field:
    """A smooth ramp from 0 at `edge0` to 1 at `edge1`; either may be the larger."""
    t: Field = np.clip((x - edge0) / (edge1 - edge0), 0, 1)
    return t * t * (3 - 2 * t)


def distance(x: Field, y: Field) -> Field:
    """√(x² + y²); several times as fast as `np.hypot`, which guards against overflow."""
    return np.asarray(np.sqrt(x * x + y * y))


DEFECTS = {defect.__name__: defect for defect in (scratch, dent, stain, edge_nick, faulty_screw)}


_SUPERSAMPLING = 2
_MARGIN = 1.07  # scene's side over the picture's: no shift or turn shows the scene's border
_VISIBLE = 0.028  # least difference in display brightness (0 to 1) that is clearly visible


def scene_side(size: int) -> int:
    """Side of the scene, in scene pixels, behind a picture of `size` pixels."""
    return round(size * _SUPERSAMPLING * _MARGIN)


@dataclass(frozen=True)
class Camera:
    """The camera's place and settings for one exposure.

    Attributes:
        size: side of the picture, in pixels.
        placement: (2, 3) affine map from the supersampled picture to the scene.
        gain: (size, size, 3) exposure, white balance (RGB) and vignetting.
        blur: Gaussian σ of the lens, in picture pixels.
        grain: sensor noise at full brightness, as a share of it.
    """

    size: int
    placement: NDArray[np.float64]
    gain: Field
    blur: float
    grain: float

    @classmethod
    def set_up(cls, rng: Generator, size: int) -> Camera:
        """Place and set the camera about as well as a fixture and its operator would.

        Everything varies between limits, not around a mean: a fixture has stops, and a good part
        that lies like no other would be an anomaly.
        """
        fine = size * _SUPERSAMPLING
        angle = np.deg2rad(rng.uniform(-0.8, 0.8))
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        turn *= 1 + rng.uniform(-0.006, 0.006)
        target = scene_side(size) / 2 + rng.uniform(-0.005, 0.005, 2) * fine
        x, y = pixel_centres(size)
        x0, y0 = rng.uniform(-0.08, 0.08, 2)
        falloff = 1 - rng.uniform(0.3, 0.5) * ((x - x0) ** 2 + (y - y0) ** 2)
        balance = np.exp(rng.uniform(-0.05, 0.05) + rng.uniform(-0.01, 0.01, 3))
        return cls(
            size=size,
            placement=np.column_stack([turn, target - turn @ np.full(2, fine / 2)]),
            gain=np.asarray(falloff[..., None] * balance, np.float32),
            blur=rng.uniform(0.45, 0.7),
            grain=rng.uniform(0.009, 0.013),
        )

    def expose(self, radiance: Field) -> Field:
        """Light on the sensor.

        Args:
            radiance: (S, S, 3) linear light, RGB, S = `scene_side(size)`.

        Returns:
            (size, size, 3) linear light, RGB, 1 = saturation.
        """
        fine = self.size * _SUPERSAMPLING
        view = cv2.warpAffine(
            radiance,
            self.placement,
            (fine, fine),
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        light = cv2.resize(view, (self.size, self.size), interpolation=cv2.INTER_AREA)
        return np.asarray(cv2.GaussianBlur(light, (0, 0), self.blur) * self.gain, np.float32)

    def develop(self, light: Field, rng: Generator) -> NDArray[np.uint8]:
        """Sensor noise, tone curve and 8 bits: linear light (H, W, 3) to RGB (H, W, 3)."""
        # A colour sensor interpolates two thirds of its values, which softens the grain.
        noise = cv2.GaussianBlur(white_noise(rng, light.shape), (0, 0), 0.55)
        shot = np.sqrt(light + 0.02) * (1.7 * self.grain)
        return np.asarray(_display(light + shot * noise) * 255 + 0.5, np.uint8)


def _display(light: Field) -> Field:
    """Tone curve from linear light to display brightness, 0 to 1, with a soft shoulder."""
    light = np.maximum(light, 0)
    rolled = light * (1 + light * 0.16) / (1 + light * 0.42)
    return np.asarray(np.minimum(rolled, 1) ** (1 / 2.2), np.float32)


def visible_change(before: Field, after: Field) -> NDArray[np.uint8]:
    """Mask of the change that a person sees between two exposures.

    Args:
        before: (H, W, 3) linear light of the good part.
        after: (H, W, 3) linear light of the same part with its defect.

    Returns:
        (H, W) uint8, 255 on the defect and 0 elsewhere.
    """
    change = np.abs(_display(after) - _display(before)).max(axis=2)
    change = cv2.GaussianBlur(change, (0, 0), 1.0)
    # The flanks of a strong change aren't part of it; a faint defect is still a defect.
    peak = float(change.max())
    bar = min(max(_VISIBLE, 0.12 * peak), 0.4 * peak)
    mask = np.asarray(change > bar, np.uint8) * np.uint8(255)
    # One defect is one region, though it may shine through the brushing in bits.
    gap = round(change.shape[0] / 28) | 1
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (gap, gap))
    padded = cv2.copyMakeBorder(mask, gap, gap, gap, gap, cv2.BORDER_CONSTANT, value=0)
    closed = cv2.morphologyEx(padded, cv2.MORPH_CLOSE, disc)[gap:-gap, gap:-gap]
    outlines, _ = cv2.findContours(closed, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    areas = [cv2.contourArea(outline) for outline in outlines]
    kept = [o for o, area in zip(outlines, areas, strict=True) if area >= 0.02 * max(areas)]
    cv2.drawContours(solid := np.zeros_like(mask), kept, -1, 255, cv2.FILLED)
    return solid


def severity_of(index: int) -> float:
    """Severity of an image's defect: 1 for index 0, then 0, 1/2, 3/4, 1/4, 7/8, 3/8, …

    It depends on the index alone, so a smaller set is a part of a larger one.
    """
    if index < 2:
        return 1.0 - index
    # Van der Corput's sequence: the binary digits of the number, mirrored behind the point.
    mirrored = int(f"{index - 1:b}"[::-1], 2)
    return 1.0 - float(mirrored / 2 ** (index - 1).bit_length())


def photograph(
    split: str, kind: str, index: int, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Image of a part, and its mask; the same arguments give the same pixels.

    Args:
        split: `train` or `test`.
        kind: `good`, or one of the plate's defects.
        index: number of the image within its folder.
        size: side of the image, in pixels.

    Returns:
        (size, size, 3) uint8 RGB image, and the (size, size) mask of its defect (0 or 255), or
        None for a good part.
    """
    # crc32, not hash(): the same in every process.
    entropy = [0, zlib.crc32(f"brushed_plate/{split}/{kind}".encode()), index]
    of_part, of_defect, of_camera = np.random.default_rng(entropy).spawn(3)
    part = good_plate(of_part, scene_side(size))
    camera = Camera.set_up(of_camera, size)
    light = camera.expose(shade(part))
    if kind == "good":
        return camera.develop(light, of_camera), None
    faulty = DEFECTS[kind](part, severity_of(index), of_defect)
    changed = camera.expose(shade(faulty))
    return camera.develop(changed, of_camera), visible_change(light, changed)


_README = """\
A brushed steel plate with a slot and four socket screws. Every picture ({size} x {size} pixels) is
generated by the program `anomaly`; none is a photograph, or contains anything made by others.
test/<type> holds defects ({kinds}): 000 is the most obvious one, 001 the most subtle one.
ground_truth/<type>/NNN_mask.png is 255 where the defect in test/<type>/NNN.png shows.
Licence: CC0 1.0 (https://creativecommons.org/publicdomain/zero/1.0/). Use it as you like.
"""


def write_sample_data(
    folder: Path,
    *,
    size: int = 384,
    n_train: int = 40,
    n_good: int = 20,
    n_defect: int = 30,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Generate the sample data set: brushed steel plates, and their defects.

    The same arguments give the same bytes; a smaller set is a part of a larger one.

    Args:
        folder: the data set's folder, for `train`, `test` and `ground_truth`.
        size: side of the images, in pixels, at least 128.
        n_train: number of good training images.
        n_good: number of good test images.
        n_defect: number of defective test images, dealt out evenly to the types of defect.
        overwrite: replace a folder that exists already.
        progress: called with (done, total) after every image.

    Raises:
        OutputError: a file has the folder's name, files in it would be replaced without
            `overwrite`, or writing failed.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not overwrite):
        raise OutputError(f"{folder} exists; name another folder, or give overwrite=True")
    kinds = tuple(DEFECTS)
    shots = [
        *(("train", "good", i) for i in range(n_train)),
        *(("test", "good", i) for i in range(n_good)),
        *(("test", kinds[i % len(kinds)], i // len(kinds)) for i in range(n_defect)),
    ]
    # The threads end before the draft is removed, also on an error.
    with appearing(folder) as draft, ThreadPoolExecutor(cores()) as pool:
        write(draft / "readme.txt", _README.format(size=size, kinds=", ".join(kinds)))
        for done, _ in enumerate(pool.map(partial(_write_shot, draft, size), shots), 1):
            progress(done, len(shots))


def _write_shot(folder: Path, size: int, shot: tuple[str, str, int]) -> None:
    """Write the image of a part, given by (split, kind, index), and the mask of its defect."""
    split, kind, index = shot
    image, mask = photograph(split, kind, index, size)
    _write_png(folder / split / kind / f"{index:03d}.png", image[..., ::-1])
    if mask is not None:
        _write_png(folder / "ground_truth" / kind / f"{index:03d}_mask.png", mask)


def _write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write an image (H, W) or (H, W, 3), BGR."""
    # Not cv2.imwrite, which reports a full disk only by its return value; and sensor noise doesn't
    # compress, so the quickest way makes files as small.
    _, png = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    write(path, png.tobytes())
