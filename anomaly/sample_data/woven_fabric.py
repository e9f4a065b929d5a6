"""A plain-woven cotton cloth under a raking lamp, close enough to see its yarns."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.sample_data.noise import Field, clouds, grid, streaks

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
        """S, in scene pixels."""
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
