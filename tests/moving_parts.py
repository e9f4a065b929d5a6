"""Drawn parts that lie anyhow: a plate with a cut corner, a hole, a slot and a label."""

import math
from pathlib import Path

import cv2
import numpy as np

SIZE = (160, 200)
_PLATE = [(-55, -35), (35, -35), (55, -15), (55, 35), (-55, 35)]
_SLOT = [(-40, 12), (15, 12), (15, 22), (-40, 22)]
LABEL = [(5, -25), (30, -25), (30, -10), (5, -10)]
_FINE = 6  # drawn so many times as large: OpenCV's smooth lines are off by parts of a pixel


def place(points: list[tuple[float, float]], pose: tuple[float, float, float]) -> np.ndarray:
    """Where points of the part (n, 2), (0, 0) in its middle, lie in an image, as x and y."""
    turn, x, y = math.radians(pose[0]), pose[1] + SIZE[1] / 2, pose[2] + SIZE[0] / 2
    matrix = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    return np.asarray(points, float) @ matrix.T + (x, y)


def draw(
    pose: tuple[float, float, float],
    seed: int = 0,
    mark: tuple[float, float] | None = None,
    *,
    serial: bool = False,
) -> np.ndarray:
    """A picture (160, 200, 3) of a part.

    Args:
        pose: degrees clockwise about the part's middle, and its pixels to the right and down.
        seed: of the noise.
        mark: where on the part a red square of 10 × 10 has its middle.
        serial: whether the label has bars that differ from part to part.
    """
    rng = np.random.default_rng(seed)
    picture = np.full((_FINE * SIZE[0], _FINE * SIZE[1], 3), 50, np.uint8)

    def fill(points: list[tuple[float, float]], colour: tuple[int, int, int]) -> None:
        corners = np.rint(place(points, pose) * _FINE - 0.5).astype(np.int32)
        cv2.fillPoly(picture, [corners], colour)

    fill(_PLATE, (170, 165, 160))
    fill(_SLOT, (60, 60, 60))
    circle = [(35 + 9 * math.cos(a), 15 + 9 * math.sin(a)) for a in np.linspace(0, 6.2, 40)]
    fill(circle, (60, 60, 60))
    fill(LABEL, (225, 225, 225))
    for i in range(5 if serial else 0):
        if rng.random() < 0.5:
            fill(
                [(7 + 4 * i, -23), (10 + 4 * i, -23), (10 + 4 * i, -12), (7 + 4 * i, -12)], (0,) * 3
            )
    if mark is not None:
        x, y = mark
        fill([(x - 5, y - 5), (x + 5, y - 5), (x + 5, y + 5), (x - 5, y + 5)], (30, 30, 220))
    small = cv2.resize(picture, SIZE[::-1], interpolation=cv2.INTER_AREA)
    noisy = small + rng.normal(0, 3, small.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


def poses(count: int, seed: int, turn: float = 12, shift: float = 14) -> list[tuple]:
    """Poses within so many degrees and pixels."""
    values = np.random.default_rng(seed).uniform(-1, 1, (count, 3)) * (turn, shift, shift)
    return [tuple(row) for row in values.tolist()]


def write(root: Path, turn: float = 12, *, serial: bool = False) -> Path:
    """A product in MVTec AD's layout, 24 parts to learn from; marks lie at (-20, -10) of parts."""
    splits = {
        "train/good": (24, 1, None),
        "test/good": (4, 2, None),
        "test/spot": (4, 3, (-20, -10)),
    }
    for name, (count, seed, mark) in splits.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i, pose in enumerate(poses(count, seed, turn)):
            picture = draw(pose, 100 * seed + i, mark, serial=serial)
            cv2.imwrite(str(root / name / f"{i:03}.png"), picture)
    return root
