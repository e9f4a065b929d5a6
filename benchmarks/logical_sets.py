"""Kits of several parts in the layout of MVTec LOCO: parts missing, surplus, swapped or wrong.

- kit: screws, washers, nuts and a label, drawn, in compartments.
- loose: such parts anywhere in one tray.
- tray: photographs of parts, one a compartment, one of which stays empty.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

NAMES = ("kit", "loose", "tray")
_CELL, _SHAPE = 128, (2, 3)
_KIT = (("screw",) * 2, ("washer",) * 3, ("label",), (), ("nut",) * 2, ("screw", "washer"))
_TRAY = ("bottle", "casting", "casting", "mvtec_screw_512", "magnetic_tile", "")
_LOGICAL = ("missing", "surplus", "swapped", "wrong")
Picture = NDArray[np.float32]
Kit = list[list[str]]
Photos = dict[str, tuple[list[Picture], list[Picture]]]


def changed(cells: Kit, how: str, rng: Generator) -> Kit:
    """The parts of each compartment after a logical defect."""
    cells = [list(cell) for cell in cells]
    kinds = sorted({part for cell in cells for part in cell})
    full = [i for i, cell in enumerate(cells) if cell]
    at = cells[int(rng.choice(full))]
    match how:
        case "missing":
            at.pop()
        case "surplus":
            (cells[cells.index([])] if [] in cells else at).append(str(rng.choice(kinds)))
        case "swapped":
            others = [cell for cell in cells if cell != at]
            other = others[int(rng.integers(len(others)))]
            at[:], other[:] = list(other), list(at)
        case "wrong":
            at[-1] = str(rng.choice([kind for kind in kinds if kind != at[-1]]))
    return cells


def _draw(canvas: Picture, kind: str, at: Sequence[float], rng: Generator, broken: bool) -> None:
    """Draw a part at the place (x, y), turned any way."""
    turn = rng.uniform(0, 2 * np.pi)
    along = np.array([np.cos(turn), np.sin(turn)])
    across = np.array([-along[1], along[0]])
    light = np.array([0.72, 0.72, 0.7]) * rng.uniform(0.92, 1.08)

    def shape(points: Sequence[Sequence[float]], colour: Sequence[float]) -> None:
        corners = np.array([np.asarray(at) + u * along + v * across for u, v in points])
        cv2.fillPoly(canvas, [np.round(corners * 16).astype(np.int32)], colour, cv2.LINE_AA, 4)

    def ring(outer: float, inner: float, corners: int) -> None:
        angles = np.arange(corners) * 2 * np.pi / corners
        for radius, colour in ((outer, light), (inner, np.full(3, 0.16))):
            shape([(radius * np.cos(a), radius * np.sin(a)) for a in angles], tuple(colour))

    match kind:
        case "screw":
            shape([(-22, -4), (18, -4), (22, 0), (18, 4), (-22, 4)], tuple(light * 0.85))
            for u in range(-14, 18, 4):
                shape([(u, -4), (u + 1.5, -4), (u + 3, 4), (u + 1.5, 4)], tuple(light * 0.5))
            shape([(-28, -9), (-21, -9), (-21, 9), (-28, 9)], tuple(light * 1.1))
        case "washer":
            ring(14, 7, 40)
        case "nut":
            ring(15, 8, 6)
        case _:
            shape([(-30, -18), (30, -18), (30, 18), (-30, 18)], (0.85, 0.87, 0.9))
            for v in (-10, -2, 6):
                shape([(-24, v), (20, v), (20, v + 3), (-24, v + 3)], (0.25, 0.2, 0.2))
    if broken:
        shape([(4, -20), (9, -20), (9, 20), (5, 20)], (0.16, 0.16, 0.16))
        shape([(-15, 3), (12, 9), (12, 11), (-15, 5)], (0.45, 0.3, 0.25))


def _spread(
    count: int, low: NDArray[np.float64], high: NDArray[np.float64], rng: Generator, least: float
) -> list[NDArray[np.float64]]:
    """Places that keep apart."""
    while count:
        places: list[NDArray[np.float64]] = []
        for _ in range(400):
            place = rng.uniform(low, high)
            if all(np.hypot(*(place - other)) > least for other in places):
                places.append(place)
            if len(places) == count:
                return places
        least *= 0.95
    return []


def _drawn(name: str, cells: Kit, rng: Generator, broken: bool, photos: Photos) -> Picture:
    rows, columns = _SHAPE
    size = np.array([columns, rows]) * _CELL
    canvas = np.full((size[1], size[0], 3), 0.16, np.float32)
    coarse = rng.normal(0, 0.012, (rows * 16, columns * 16)).astype(np.float32)
    canvas += cv2.resize(coarse, tuple(size), interpolation=cv2.INTER_CUBIC)[..., None]
    if name != "loose":
        for x in range(columns + 1):
            cv2.line(canvas, (x * _CELL, 0), (x * _CELL, int(size[1])), (0.35, 0.33, 0.3), 6)
        for y in range(rows + 1):
            cv2.line(canvas, (0, y * _CELL), (int(size[0]), y * _CELL), (0.35, 0.33, 0.3), 6)
    hurt = int(rng.integers(sum(map(len, cells)))) if broken else -1
    if name == "loose":
        cells = [[part for cell in cells for part in cell]]
    drawn = 0
    for i, cell in enumerate(cells):
        low = np.array([i % columns, i // columns]) * float(_CELL)
        high = low + (size if name == "loose" else _CELL)
        reach = 30.0 if name == "loose" else 36.0
        places = _spread(len(cell), low + reach, high - reach, rng, 58 if name == "loose" else 44)
        for kind, place in zip(cell, places, strict=True):
            if name == "tray":
                photo = photos[kind][int(drawn == hurt)]
                index = int(rng.integers(len(photo)))
                # Training trays share no photograph, or held-out ones would have been learned.
                chosen = photo.pop() if photos[""][0] else photo[index]
                _paste(canvas, chosen, low, rng)
            else:
                _draw(canvas, kind, place, rng, drawn == hurt)
            drawn += 1
    return canvas


def _paste(canvas: Picture, photo: Picture, low: NDArray[np.float64], rng: Generator) -> None:
    left, top = (low + 10 + rng.integers(-4, 5, 2)).astype(int)
    canvas[top : top + len(photo), left : left + len(photo)] = photo * rng.uniform(0.96, 1.04)


Photos = dict[str, tuple[list[Picture], list[Picture]]]


def _photos(data: Path, training: bool) -> Photos:
    """Good and defective photographs of each product; training and test trays share none."""
    photos: Photos = {"": ([np.empty(0)], []) if training else ([], [])}
    for name in sorted(set(_TRAY) - {""}):
        root = next(p for p in data.rglob(name) if (p / "train").is_dir())
        good = sorted((root / "train" / "good").iterdir())
        bad = sorted(f for f in (root / "test").glob("*/*.*") if f.parent.name != "good")
        share = [f for i, f in enumerate(good) if (i % 3 > 0) == training]
        parts = share, bad[:: max(1, len(bad) // 20)]
        photos[name] = tuple([_read(f) for f in part] for part in parts)  # type: ignore[assignment]
    return photos


def _read(file: Path) -> Picture:
    image = cv2.imread(str(file))
    side = _CELL - 20
    small = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
    return np.asarray(small / 255, np.float32)


def write(name: str, folder: Path, data: Path | None, seed: int = 0) -> None:
    """Write 80 good images to train on (`tray` 60), and 40 good, 40 logical, 20 structural ones."""
    usual: Kit = [[p] if p else [] for p in _TRAY] if name == "tray" else [list(c) for c in _KIT]
    shots = [("train/good", 60 if name == "tray" else 80), ("test/good", 40)]
    shots += [("test/logical_anomalies", 40), ("test/structural_anomalies", 20)]
    photos: dict[bool, Photos] = {}
    if name == "tray" and data is not None:
        photos = {training: _photos(data, training) for training in (True, False)}
    for split, count in shots:
        for i in range(count):
            rng = np.random.default_rng([seed, zlib.crc32(f"{name}/{split}".encode()), i])
            logical = split.endswith("logical_anomalies")
            cells = changed(usual, _LOGICAL[i % 4], rng) if logical else usual
            if name == "loose" and logical and i % 4 == 2:
                cells = changed(usual, "missing", rng)
            broken = split.endswith("structural_anomalies")
            image = _drawn(name, cells, rng, broken, photos.get(split.startswith("train"), {}))
            x, y = np.meshgrid(*(np.linspace(-0.5, 0.5, s) for s in image.shape[1::-1]))
            light = 1 + x * rng.uniform(-0.1, 0.1) + y * rng.uniform(-0.1, 0.1)
            image = cv2.GaussianBlur(image, (0, 0), rng.uniform(0.6, 0.9))
            image = image * (light * rng.uniform(0.94, 1.06))[..., None]
            image += rng.normal(0, 0.012, image.shape)
            file = folder / split / f"{i:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(file), np.clip(image * 255, 0, 255).astype(np.uint8))
