"""Three generated products that are hard in ways the sample products aren't, in MVTec AD layout.

- perforated: a fine regular texture in which one hole is closed, smaller or shifted.
- assembly: parts on a board, always in the same places; one is absent, turned, or another's.
- glossy: a domed, polished part under a lamp that moves, so that highlights wander; a dent, a
  scratch or a dull spot.

Their scenes are photographed by the camera of the sample data set.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from anomaly.sample_data.camera import (
    Camera,
    Field,
    clouds,
    distance,
    grid,
    scene_side,
    smoothstep,
    streaks,
    visible_change,
)

_GREY = np.array([1.0, 0.98, 0.95], np.float32)


@dataclass(frozen=True)
class Perforated:
    """A perforated sheet: hole centres (N, 2) and radii (N,), in scene pixels."""

    side: int
    centres: NDArray[np.float64]
    radii: NDArray[np.float64]
    tone: Field


def _perforated(rng: Generator, side: int) -> Perforated:
    pitch = side / 24
    start = rng.uniform(0, pitch, 2) - pitch
    rows, columns = np.mgrid[0:28, 0:27].reshape(2, -1)
    x = start[0] + pitch * (columns + 0.5 * (rows % 2))
    y = start[1] + pitch * 0.866 * 1.1 * rows
    centres = np.column_stack([x, y]) + rng.normal(0, 0.01 * pitch, (len(x), 2))
    radii = pitch * (0.3 + rng.normal(0, 0.006, len(x)))
    tone = 0.5 + 0.03 * streaks(rng, side, side // 3, 1.0) + 0.02 * clouds(rng, side, side / 6)
    return Perforated(side, centres, radii, tone)


def _shade_perforated(scene: Perforated) -> Field:
    holes = np.zeros((scene.side, scene.side), np.uint8)
    for (x, y), radius in zip(scene.centres * 16, scene.radii * 16, strict=True):
        cv2.circle(holes, (round(x), round(y)), round(radius), 255, cv2.FILLED, cv2.LINE_AA, 4)
    open_ = cv2.GaussianBlur(holes, (0, 0), 0.8).astype(np.float32) / 255
    rim = open_ - np.roll(open_, 2, axis=(0, 1))
    light = scene.tone * (1 - 0.93 * open_) + 0.25 * np.maximum(rim, 0)
    return np.asarray(light[..., None] * _GREY, np.float32)


def _one_hole(scene: Perforated, rng: Generator) -> int:
    inside = np.abs(scene.centres / scene.side - 0.5).max(axis=1) < 0.4
    return int(rng.choice(np.flatnonzero(inside)))


def _closed_hole(scene: Perforated, severity: float, rng: Generator) -> Perforated:
    return _narrowed(scene, 0.3 * (1 - severity), rng)


def _small_hole(scene: Perforated, severity: float, rng: Generator) -> Perforated:
    return _narrowed(scene, 0.85 - 0.35 * severity, rng)


def _narrowed(scene: Perforated, share: float, rng: Generator) -> Perforated:
    radii = scene.radii.copy()
    radii[_one_hole(scene, rng)] *= share
    return replace(scene, radii=radii)


def _shifted_hole(scene: Perforated, severity: float, rng: Generator) -> Perforated:
    centres, angle = scene.centres.copy(), rng.uniform(0, 2 * np.pi)
    step = scene.side / 24 * (0.15 + 0.15 * severity)
    centres[_one_hole(scene, rng)] += step * np.array([np.cos(angle), np.sin(angle)])
    return replace(scene, centres=centres)


@dataclass(frozen=True)
class Assembly:
    """Parts on a board: kind, place in shares of the side from the middle, and turn in degrees."""

    side: int
    parts: tuple[tuple[str, float, float, float], ...]
    board: Field
    seed: int


_KINDS = ("resistor", "diode", "chip")
_PLACES = tuple((x, y) for y in (-0.28, 0.0, 0.28) for x in (-0.3, -0.1, 0.1, 0.3))


def _assembly(rng: Generator, side: int) -> Assembly:
    parts = tuple(
        (_KINDS[i % 3], *(np.array(place) + rng.uniform(-0.006, 0.006, 2)), rng.uniform(-2, 2))
        for i, place in enumerate(_PLACES)
    )
    board = 0.16 + 0.02 * clouds(rng, side, side / 5, 3)
    return Assembly(side, parts, board, int(rng.integers(2**31)))


def _shade_assembly(scene: Assembly) -> Field:
    rng = np.random.default_rng(scene.seed)
    light = scene.board[..., None] * np.array([0.35, 1.0, 0.45], np.float32)
    x0, y0 = grid(scene.side)
    reach = round(0.1 * scene.side)
    for kind, x, y, turn in scene.parts:
        row, column = (round((at + 0.5) * scene.side) for at in (y, x))
        near = np.s_[row - reach : row + reach, column - reach : column + reach]
        c, s = np.cos(np.deg2rad(turn)), np.sin(np.deg2rad(turn))
        dx, dy = x0[near] - x, y0[near] - y
        tint = 1 + 0.06 * rng.standard_normal(3)
        light[near] = _placed(light[near], kind, dx * c + dy * s, dy * c - dx * s, tint)
    return np.asarray(light, np.float32)


def _box(u: Field, v: Field, half_u: float, half_v: float) -> Field:
    return smoothstep(0.004, -0.001, np.maximum(np.abs(u) - half_u, np.abs(v) - half_v))


def _placed(light: Field, kind: str, u: Field, v: Field, tint: Field) -> Field:
    def over(cover: Field, colour: tuple[float, float, float]) -> None:
        nonlocal light
        light = light + cover[..., None] * (np.array(colour, np.float32) * tint - light)

    metal, pads = (0.75, 0.74, 0.7), {"resistor": 0.062, "diode": 0.055, "chip": 0.06}[kind]
    for sign in (-1, 1):
        over(_box(u - sign * pads, v, 0.014, 0.03), metal)
    match kind:
        case "resistor":
            over(_box(u, v, 0.052, 0.026), (0.62, 0.5, 0.33))
            for i, colour in enumerate([(0.5, 0.1, 0.05), (0.08, 0.08, 0.08), (0.6, 0.4, 0.05)]):
                over(_box(u - 0.022 * (i - 1), v, 0.005, 0.026), colour)
        case "diode":
            over(_box(u, v, 0.045, 0.022), (0.12, 0.11, 0.11))
            over(_box(u - 0.028, v, 0.007, 0.022), (0.8, 0.8, 0.78))
        case _:
            over(_box(u, v, 0.05, 0.05), (0.07, 0.07, 0.075))
            over(smoothstep(0.011, 0.008, distance(u + 0.033, v + 0.033)), (0.3, 0.3, 0.3))
    return light


def _changed_part(
    kinds: tuple[str, ...], how: Callable[[str, float, Generator], tuple[str | None, float]]
) -> Callable[[Assembly, float, Generator], Assembly]:
    def change(scene: Assembly, severity: float, rng: Generator) -> Assembly:
        index = int(rng.choice([i for i, part in enumerate(scene.parts) if part[0] in kinds]))
        kind, x, y, turn = scene.parts[index]
        other, more = how(kind, severity, rng)
        new = [(other, x, y, turn + more)] if other is not None else []
        parts = (*scene.parts[:index], *new, *scene.parts[index + 1 :])
        return replace(scene, parts=parts)

    return change


@dataclass(frozen=True)
class Glossy:
    """A dome's height (S, S), the lamp's place, and how dull the surface is where."""

    side: int
    height: Field
    lamp: tuple[float, float]
    dull: Field


def _glossy(rng: Generator, side: int) -> Glossy:
    x, y = grid(side)
    dome = 0.22 * np.sqrt(np.maximum(0.2 - x * x - y * y, 0.0))
    height = dome + 2e-4 * clouds(rng, side, side / 8, 2)
    lamp = (rng.uniform(-0.45, 0.45), rng.uniform(-0.45, 0.45))
    return Glossy(side, np.asarray(height, np.float32), lamp, np.zeros((side, side), np.float32))


def _shade_glossy(scene: Glossy) -> Field:
    gy, gx = np.gradient(cv2.GaussianBlur(scene.height, (0, 0), 1.5) * scene.side)
    x, y = grid(scene.side)
    part = smoothstep(0.445, 0.44, distance(x, y))
    facing = 1 / np.sqrt(1 + gx * gx + gy * gy)
    toward = distance(gx + 1.2 * scene.lamp[0], gy + 1.2 * scene.lamp[1])
    width = 0.08 + 0.25 * scene.dull
    shine = (0.08 / width) * np.exp(-((toward / width) ** 2) / 2)
    window = 0.12 * smoothstep(0.04, 0.02, np.abs(gx - 0.25)) * (1 - scene.dull)
    blue = np.array([0.14, 0.2, 0.36], np.float32)
    light = facing[..., None] * blue + (0.9 * shine + window)[..., None] * _GREY
    return np.asarray(light * part[..., None] + 0.03 * (1 - part[..., None]), np.float32)


def _spot(side: int, rng: Generator, radius: float) -> Field:
    x, y = grid(side)
    angle, far = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.3)
    off = distance(x - far * np.cos(angle), y - far * np.sin(angle))
    return np.asarray(np.exp(-((off / radius) ** 2)), np.float32)


def _dent(scene: Glossy, severity: float, rng: Generator) -> Glossy:
    depth = 0.003 + 0.004 * severity
    return replace(scene, height=scene.height - depth * _spot(scene.side, rng, 0.035))


def _dull_spot(scene: Glossy, severity: float, rng: Generator) -> Glossy:
    spot = smoothstep(0.3, 0.6, _spot(scene.side, rng, 0.05 + 0.03 * severity))
    return replace(scene, dull=np.asarray((0.4 + 0.5 * severity) * spot, np.float32))


def _scratch(scene: Glossy, severity: float, rng: Generator) -> Glossy:
    x, y = grid(scene.side)
    angle, off = rng.uniform(0, np.pi), rng.uniform(-0.2, 0.2)
    across = x * np.cos(angle) + y * np.sin(angle) - off
    along = y * np.cos(angle) - x * np.sin(angle) - rng.uniform(-0.1, 0.1)
    line = np.exp(-((across / 0.004) ** 2)) * smoothstep(0.14, 0.12, np.abs(along))
    height = scene.height - (0.0006 + 0.0012 * severity) * line
    return replace(scene, height=np.asarray(height, np.float32))


# draw, shade, and the defects of each.
_PRODUCTS = {
    "perforated": (
        _perforated,
        _shade_perforated,
        {
            "closed": _closed_hole,
            "small": _small_hole,
            "shifted": _shifted_hole,
        },
    ),
    "assembly": (
        _assembly,
        _shade_assembly,
        {
            "absent": _changed_part(_KINDS, lambda kind, severity, rng: (None, 0)),
            "turned": _changed_part(
                ("diode", "chip"), lambda kind, severity, rng: (kind, 180 if severity < 0.5 else 90)
            ),
            "swapped": _changed_part(
                ("resistor", "diode"),
                lambda kind, severity, rng: ("diode" if kind == "resistor" else "resistor", 0),
            ),
        },
    ),
    "glossy": (
        _glossy,
        _shade_glossy,
        {"dent": _dent, "dull_spot": _dull_spot, "scratch": _scratch},
    ),
}
NAMES = tuple(_PRODUCTS)


def write(name: str, folder: Path, *, size: int = 256, seed: int = 0) -> None:
    """Write one product: 40 good images to train on, 30 good and 45 defective ones to test on.

    Args:
        name: one of `NAMES`.
        folder: made; MVTec AD layout.
        size: side of the images in pixels.
        seed: not negative.
    """
    draw, shade, defects = _PRODUCTS[name]
    shots = [("train", "good", 40), ("test", "good", 30), *(("test", d, 15) for d in defects)]
    for split, kind, count in shots:
        for index in range(count):
            entropy = [seed, zlib.crc32(f"{name}/{split}/{kind}".encode()), index]
            of_part, of_defect, of_camera = np.random.default_rng(entropy).spawn(3)
            scene = draw(of_part, scene_side(size))  # type: ignore[operator]
            camera = Camera.set_up(of_camera, size)
            light = camera.expose(shade(scene))  # type: ignore[operator]
            if kind != "good":
                severity = 1 - index / 14
                faulty = defects[kind](scene, severity, of_defect)  # type: ignore[operator]
                changed = camera.expose(shade(faulty))  # type: ignore[operator]
                mask = folder / "ground_truth" / kind / f"{index:03d}_mask.png"
                _write(mask, visible_change(light, changed))
                light = changed
            image = camera.develop(light, of_camera)
            _write(folder / split / kind / f"{index:03d}.png", image[..., ::-1])


def _write(file: Path, pixels: NDArray[np.uint8]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), pixels)
