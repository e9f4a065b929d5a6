"""What can be wrong with a woven cloth. Severity runs from 0 (subtle) to 1 (obvious)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np
from numpy.random import Generator

from anomaly.sample_data.noise import Field, clouds, distance, smoothstep
from anomaly.sample_data.woven_fabric import CENTRE, YARN_COUNT, YARNS, Cloth, Yarns, hairs

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
