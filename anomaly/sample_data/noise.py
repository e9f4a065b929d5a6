"""The random fields that real surfaces are made of, and the grid that they lie on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Field = NDArray[np.floating[Any]]
"""float32 throughout: numpy's stubs lose sight of that in a product with a Python float."""

_COARSE = 4
"""Clouds are drawn on every fourth pixel, which is fine enough for anything smooth."""


@lru_cache(maxsize=2)
def grid(side: int) -> tuple[Field, Field]:
    """The x and y of every pixel's centre, (S, S) each, in shares of the side from the middle."""
    axis = ((np.arange(side) + 0.5) / side - 0.5).astype(np.float32)
    x, y = np.meshgrid(axis, axis)
    # One grid serves every image.
    x.setflags(write=False)
    y.setflags(write=False)
    return x, y


def white(rng: Generator, shape: tuple[int, ...]) -> Field:
    """Independent noise, mean 0 and standard deviation 1, to be blurred.

    Uniform, not normal: after any blur nobody can tell, and it costs a tenth of the time.
    """
    byte = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    return (byte - np.float32(127.5)) / np.float32(73.9)


def clouds(rng: Generator, side: int, grain: float, octaves: int = 1) -> Field:
    """Smooth noise without a direction.

    Args:
        rng: source of randomness.
        side: side of the square field, in pixels.
        grain: size of the largest features, in pixels; the smallest possible is 4.
        octaves: how many layers there are; each has half the grain and half the strength.

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
        length: how far a streak reaches, in pixels.
        width: Gaussian σ across the streaks, in pixels; 0 leaves the rows independent.

    Returns:
        (S, S) float32, mean 0, standard deviation 1.
    """
    # Streaks vary slowly along their length: draw them short and pull them out.
    cell = max(length // 4, 1)
    points = side // cell + 8
    short = cv2.blur(white(rng, (side, points)), (4, 1), borderType=cv2.BORDER_REFLECT)
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
