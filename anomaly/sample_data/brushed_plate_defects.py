"""What can be wrong with a brushed plate. Severity runs from 0 (subtle) to 1 (obvious)."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
from numpy.random import Generator

from anomaly.sample_data.brushed_plate import (
    HALF_HEIGHT,
    HALF_WIDTH,
    SCREW_AT,
    SCREW_RADIUS,
    SLOT_LENGTH,
    SLOT_RADIUS,
    Plate,
)
from anomaly.sample_data.noise import Field, clouds, distance, grid, smoothstep

_LIMESCALE = np.array([0.50, 0.60, 0.70])
_RUST = np.array([0.35, 0.62, 0.95])


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
    x, y = grid(plate.side)
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
    x, y = grid(plate.side)
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
    x, y = grid(plate.side)
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
    which = int(rng.integers(len(screws)))
    missing = severity > 0.7
    screws[which] = replace(screws[which], missing=missing, wear=0.7 + 0.3 * severity / 0.7)
    return replace(plate, screws=tuple(screws))


def _bare_metal(rng: Generator, clearance: float) -> tuple[float, float]:
    """A place on the plate, `clearance` away from its edge, the slot and the screws."""
    while True:
        x = rng.uniform(clearance - HALF_WIDTH, HALF_WIDTH - clearance)
        y = rng.uniform(clearance - HALF_HEIGHT, HALF_HEIGHT - clearance)
        off_slot = abs(x) > SLOT_LENGTH + clearance or abs(y) > SLOT_RADIUS + clearance
        to_screw = np.hypot(abs(x) - SCREW_AT[0], abs(y) - SCREW_AT[1])
        if off_slot and to_screw > 1.3 * SCREW_RADIUS + clearance:
            return x, y


DEFECTS = {
    "scratch": scratch,
    "dent": dent,
    "stain": stain,
    "edge_nick": edge_nick,
    "faulty_screw": faulty_screw,
}
