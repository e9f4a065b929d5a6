"""A plain-woven cotton cloth under a raking lamp, close enough to see its yarns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.sample_data.camera import Field, clouds, distance, grid, smoothstep, streaks

# Lengths are in pitches, the distance between neighbouring yarns, unless they say otherwise.
YARNS = 35
"""Yarns across the scene."""
_SPARE = 4
"""Yarns beyond each border, so that a bowed or shifted cloth never runs out of them."""
YARN_COUNT = YARNS + 2 * _SPARE
CENTRE = YARN_COUNT / 2
"""Position of the scene's middle."""
_KNOTS = 64
"""Points along a yarn at which its thickness, place and shade are set."""
_CRIMP = 0.55
"""How far a yarn swings up and down on its way over and under the others, in yarn radii."""
_BENEATH = -1.6
"""Height of the table beneath the cloth, in yarn radii."""

_WARP_DYE = np.array([0.115, 0.185, 0.275], np.float32)
_WEFT_DYE = np.array([0.470, 0.485, 0.470], np.float32)
_LINT = (0.50, 0.52, 0.52)
_TABLE = 0.02


@dataclass(frozen=True)
class Yarns:
    """One of the two sets of parallel yarns.

    Attributes:
        across: (S, S) position across the yarns; yarn n is centred at n + 0.5.
        along: (S, S) position along the yarns.
        character: (knots, yarns, 3) of every yarn along its length: half width and offset from
            its place, in half pitches, and shade (factor on the dye).
        dye: (3,) linear RGB.
        twist: (S, S) fibre texture, mean 0 and standard deviation 1.
        parity: yarn n passes over the others at position m along it if n + m + parity is even.
        width: (1, 1) or (S, S) factor on the half width; 0 where a yarn is missing.
        tint: (3, 1, 1) or (3, S, S) factor on the dye.
    """

    across: Field
    along: Field
    character: Field
    dye: Field
    twist: Field
    parity: int
    width: Field
    tint: Field


@dataclass(frozen=True)
class Cloth:
    """Everything that the light falls on.

    Attributes:
        warp: the vertical yarns.
        weft: the horizontal yarns.
        hairs: (S, S) cover of the stray fibres on top, 0 to 255.
        lamp: (x, y, z) direction to the lamp; x to the right, y down, z to the camera.
        glow: (S, S) brightness of the lamp across the cloth.
    """

    warp: Yarns
    weft: Yarns
    hairs: NDArray[np.uint8]
    lamp: tuple[float, float, float]
    glow: Field

    @property
    def side(self) -> int:
        """The side S of the plate, in scene pixels."""
        return int(self.glow.shape[0])


def draw(rng: Generator, side: int) -> Cloth:
    """A good piece of cloth in a scene of `side` pixels."""
    x, y = grid(side)
    # Cloth never lies straight, and nobody lines its yarns up with the camera.
    column, row = (
        (axis + 0.0022 * clouds(rng, side, side / 2.5)) * YARNS + (CENTRE + rng.uniform(-1, 1))
        for axis in (x, y)
    )
    fall_x, fall_y = rng.uniform(0.1, 0.38), rng.uniform(0.06, 0.34)
    tilt = rng.uniform(2.2, 2.6)
    return Cloth(
        warp=_spin(rng, column, row, _WARP_DYE, vertical=True),
        weft=_spin(rng, row, column, _WEFT_DYE, vertical=False),
        hairs=hairs(rng, side, 60),
        lamp=(0.75 * float(np.cos(tilt)), -0.75 * float(np.sin(tilt)), 1.0),
        glow=1 - fall_x * x - fall_y * y,
    )


def _spin(rng: Generator, across: Field, along: Field, dye: Field, vertical: bool) -> Yarns:
    """Give each yarn its own thickness, place and shade, wandering along its length."""
    side = across.shape[0]
    width = 0.93 * (1 + _wander(rng, 3, 0.045, 0.03))
    offset = _wander(rng, 5, 0.045, 0.035)
    tone = 1 + _wander(rng, 8, 0.02, 0.035)
    # Fibres run aslant: the yarn is spun.
    lean = np.array([[1, 0, 0], [-0.45, 1, 0]])
    straight = streaks(rng, side, side // 40, 0.7)
    fibre = cv2.warpAffine(straight, lean, (side, side), borderMode=cv2.BORDER_WRAP)
    return Yarns(
        across=across,
        along=along,
        character=np.dstack([width, offset, tone]).astype(np.float32),
        dye=dye * rng.uniform(0.975, 1.025),
        twist=np.asarray(cv2.transpose(fibre) if vertical else fibre, np.float32),
        parity=0 if vertical else 1,
        width=np.ones((1, 1), np.float32),
        tint=np.ones((3, 1, 1), np.float32),
    )


def _wander(rng: Generator, length: float, along: float, between: float) -> Field:
    """(knots, yarns) noise with its standard deviations along each yarn and between yarns."""
    knots = rng.standard_normal((_KNOTS, YARN_COUNT), np.float32)
    drift = cv2.GaussianBlur(knots, (1, 0), sigmaX=1, sigmaY=length)
    own = rng.standard_normal(YARN_COUNT, np.float32)
    return np.asarray(along * drift / drift.std() + between * own, np.float32)


def hairs(
    rng: Generator,
    side: int,
    count: int,
    within: tuple[tuple[float, float], float] = ((0.5, 0.5), 0.5),
) -> NDArray[np.uint8]:
    """Cover of curling stray fibres.

    Args:
        rng: source of randomness.
        side: side of the scene, in pixels.
        count: number of fibres.
        within: centre (x, y) and half the side of the square they lie in, in shares of `side`.

    Returns:
        (S, S) uint8, 0 to 255.
    """
    layer = np.zeros((side, side), np.uint8)
    centre, reach = np.array(within[0]), within[1]
    for _ in range(count):
        heading = rng.uniform(0, 2 * np.pi) + np.cumsum(rng.normal(0, 0.22, 24))
        stride = np.column_stack([np.cos(heading), np.sin(heading)]) * rng.uniform(0.001, 0.0028)
        curl = np.cumsum(stride, axis=0)
        path = centre + rng.uniform(-reach, reach, 2) + curl - curl[curl.shape[0] // 2]
        points = np.round(path * side * 16).astype(np.int32)
        cv2.polylines(layer, [points], False, int(rng.integers(50, 130)), 1, cv2.LINE_AA, shift=4)
    return layer


def shade(cloth: Cloth) -> Field:
    """Linear light (S, S, 3), RGB, that the cloth sends to the camera."""
    warp, warp_tone = _lay(cloth.warp)
    weft, weft_tone = _lay(cloth.weft)
    top = warp > weft
    height = np.maximum(warp, weft)
    twist = np.where(top, cloth.warp.twist, cloth.weft.twist)
    light = _lit(height + 0.035 * twist, cloth)
    light *= 1 + 0.07 * twist
    light *= np.where(top, warp_tone, weft_tone)
    nothing = height <= _BENEATH
    hair = cloth.hairs * np.float32(1 / 255)
    planes = []
    for c in range(3):
        over, under = (yarns.dye[c] * yarns.tint[c] for yarns in (cloth.warp, cloth.weft))
        plane = np.where(top, over, under)
        plane[nothing] = _TABLE
        plane += (_LINT[c] - plane) * hair
        planes.append(plane * light)
    return np.asarray(cv2.merge(planes), np.float32)


def _lay(yarns: Yarns) -> tuple[Field, Field]:
    """(S, S) height of a set's upper surface, in yarn radii, and (S, S) shade of its yarns."""
    number = np.floor(yarns.across)
    knot = yarns.along * (_KNOTS / YARN_COUNT)
    half_width, offset, tone = cv2.split(
        cv2.remap(yarns.character, number, knot, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    )
    half_width = half_width * yarns.width
    lateral = (yarns.across - number) * 2 - 1 - offset
    ratio = lateral / np.maximum(half_width, 1e-3)
    bulge = np.sqrt(np.maximum(1 - ratio * ratio, 0)) * half_width
    half = (number + yarns.parity) * 0.5
    sign = 1 - 4 * (half - np.floor(half))
    crimp = np.cos((yarns.along - 0.5) * np.pi) * sign
    height = np.where(bulge > 0, bulge + _CRIMP * crimp, _BENEATH)
    return height, np.asarray(tone, np.float32)


def _lit(height: Field, cloth: Cloth) -> Field:
    """Light on a surface of `height` yarn radii: lamp, sky, and shade between the yarns."""
    radius = cloth.side / YARNS / 2
    right = cv2.Sobel(height, cv2.CV_32F, 1, 0, scale=radius / 8)
    down = cv2.Sobel(height, cv2.CV_32F, 0, 1, scale=radius / 8)
    lx, ly, lz = cloth.lamp
    facing = np.maximum(lz - lx * right - ly * down, 0)
    facing /= np.sqrt((1 + right * right + down * down) * (lx * lx + ly * ly + lz * lz))
    width = round(radius * 1.6) | 1
    around = cv2.blur(cv2.blur(height, (width, width)), (width, width))
    open_sky: Field = np.clip(0.72 + 0.6 * (height - around), 0.12, 1.1)
    return (0.47 + 1.15 * facing) * open_sky * cloth.glow


_FOREIGN = np.array([[0.55, 0.05, 0.04], [0.75, 0.55, 0.04], [0.30, 0.09, 0.02]], np.float32)
"""Linear RGB of yarns that belong to another cloth: red, yellow, rust."""
_OIL = np.array([0.72, 0.80, 0.97], np.float32)
"""How strongly oil absorbs red, green and blue."""

Change = Callable[[Yarns, float, float], Yarns]
"""What happens to one set of yarns around a position across and along it."""


def hole(cloth: Cloth, severity: float, rng: Generator) -> Cloth:
    """Torn yarns: frayed ends stand around an opening, and the neighbours give way."""
    radius = (0.75 + 2.2 * severity) * rng.uniform(0.9, 1.1)

    def tear(yarns: Yarns, across: float, along: float) -> Yarns:
        off = yarns.across - across
        way = yarns.along - along
        near = cv2.exp((off * off + way * way) / -(radius**2))
        bowed = yarns.across - off * near * 0.22
        number = np.floor(bowed)
        middle = number + (0.5 - across)
        reach = np.sqrt(np.maximum(radius**2 - middle * middle, 0))
        before, after = (_each_yarn(rng, number, 0.55, 1.25) for _ in range(2))
        end = np.where(way > 0, after, before) * reach
        frayed = smoothstep(0.0, 0.7, np.abs(way) - end + 0.22 * yarns.twist)
        return replace(yarns, across=bowed, width=np.where(reach > 0, frayed, 1))

    crossing = _crossing(rng, radius + 1)
    torn = _both_sets(cloth, crossing, tear)
    fluff = hairs(rng, cloth.side, round(3 + 3 * radius), (_pixel(cloth, crossing), radius / YARNS))
    return replace(torn, hairs=np.maximum(cloth.hairs, fluff))


def broken_yarn(cloth: Cloth, severity: float, rng: Generator) -> Cloth:
    """A yarn that is missing, or worn thin, over part of its length."""
    length = (8 + 12 * severity) * rng.uniform(0.85, 1.15)
    loss = min(0.86 + 0.25 * severity, 1)

    def wear(yarns: Yarns, across: float, along: float) -> Yarns:
        return replace(yarns, width=1 - loss * _stretch(yarns, across, along, length))

    return _one_set(cloth, rng, length, wear)


def colour_thread(cloth: Cloth, severity: float, rng: Generator) -> Cloth:
    """A yarn of another cloth's colour over part of its length."""
    length = (8 + 14 * severity) * rng.uniform(0.85, 1.15)
    strength = 0.65 + 0.35 * severity
    foreign = rng.choice(_FOREIGN)

    def dye(yarns: Yarns, across: float, along: float) -> Yarns:
        shift = strength * (foreign / yarns.dye - 1)
        return replace(
            yarns, tint=1 + shift[:, None, None] * _stretch(yarns, across, along, length)
        )

    return _one_set(cloth, rng, length, dye)


def slub(cloth: Cloth, severity: float, rng: Generator) -> Cloth:
    """A lump in a yarn that crowds its neighbours."""
    length = (1.7 + 1.7 * severity) * rng.uniform(0.85, 1.15)
    size = 0.57 + 0.18 * severity

    def thicken(yarns: Yarns, across: float, along: float) -> Yarns:
        # Thickest where the yarn passes over the others, or they would hide the lump.
        along += (int(across) + int(along) + yarns.parity) % 2
        off = yarns.across - across
        way = (yarns.along - along) / length
        swell = size * cv2.exp(-way * way - off * off / 2)
        own = swell * (np.abs(off * (1 - swell)) < 0.5)
        return replace(
            yarns,
            across=yarns.across - off * swell,
            width=1 + own,
            tint=1 + 0.45 * np.stack([own] * 3),
        )

    return _one_set(cloth, rng, 2 * length, thicken)


def oil_stain(cloth: Cloth, severity: float, rng: Generator) -> Cloth:
    """Oil soaked into the cloth, drawn further along some yarns than along others."""
    radius = (2.4 + 2.6 * severity) * rng.uniform(0.85, 1.15)
    blot = 0.14 * clouds(rng, cloth.side, cloth.side * radius / YARNS, 2)
    absorbed = (0.60 + 0.34 * severity) * _OIL[:, None, None]

    def soak(yarns: Yarns, across: float, along: float) -> Yarns:
        thirst = _each_yarn(rng, np.floor(yarns.across), 0.82, 1.2)
        off, way = yarns.across - across, (yarns.along - along) / thirst
        wet = smoothstep(1.08, 0.82, distance(off, way) / radius + blot)
        return replace(yarns, tint=1 - absorbed * wet)

    return _both_sets(cloth, _crossing(rng, radius), soak)


def _crossing(rng: Generator, margin: float) -> tuple[float, float]:
    """Column and row of a crossing at least `margin` pitches inside the picture."""
    reach = YARNS / 2.25 - margin
    column, row = np.floor(CENTRE + rng.uniform(-reach, reach, 2)) + 0.5
    return float(column), float(row)


def _pixel(cloth: Cloth, crossing: tuple[float, float]) -> tuple[float, float]:
    """Where a crossing lies in the scene: x and y in shares of its side."""
    off = np.abs(cloth.warp.across - crossing[0])
    off += np.abs(cloth.weft.across - crossing[1])
    row, column = np.unravel_index(int(np.argmin(off)), off.shape)
    return float(column) / cloth.side, float(row) / cloth.side


def _both_sets(cloth: Cloth, crossing: tuple[float, float], change: Change) -> Cloth:
    column, row = crossing
    return replace(
        cloth, warp=change(cloth.warp, column, row), weft=change(cloth.weft, row, column)
    )


def _one_set(cloth: Cloth, rng: Generator, length: float, change: Change) -> Cloth:
    """Change the warp or the weft; most of the `length` pitches concerned are in the picture."""
    column, row = _crossing(rng, max(length / 2 - 4, 1))
    if rng.random() < 0.5:
        return replace(cloth, warp=change(cloth.warp, column, row))
    return replace(cloth, weft=change(cloth.weft, row, column))


def _each_yarn(rng: Generator, number: Field, low: float, high: float) -> Field:
    """(S, S) one random value for each yarn of `number` (S, S)."""
    values = rng.uniform(low, high, YARN_COUNT).astype(np.float32)
    return np.asarray(values[np.clip(number, 0, YARN_COUNT - 1).astype(np.int32)])


def _stretch(yarns: Yarns, across: float, along: float, length: float) -> Field:
    """(S, S) 1 on one yarn over `length` pitches around `along`, 0 elsewhere."""
    on_yarn = np.abs(yarns.across - across) < 0.5
    way = np.abs(yarns.along - along)
    inside = smoothstep(length / 2 + 0.3, length / 2 - 0.3, way)
    return np.where(on_yarn, inside, 0)


DEFECTS = {
    "hole": hole,
    "broken_yarn": broken_yarn,
    "oil_stain": oil_stain,
    "colour_thread": colour_thread,
    "slub": slub,
}
