"""When "scene changed" is said: lamps, cameras and lenses that change, and defects in a row.

    python -m benchmarks.scene --data FOLDER… [--network NAME] [--weights FILE]

Every other training image of a set (MVTec AD's layout) is learned. 50 of the others and the good
ones of the test split, at most 512 pixels long, are changed and seen once; streams of parts are
drawn from their figures, with replacement and a little noise in light, colour and sharpness.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

import anomaly
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.scoring.scene import SceneWatch
from benchmarks.inputs import machine
from benchmarks.moved import Picture, read

Figures = NDArray[np.float64]
Models = Mapping[str, Model]

REPEATS, STREAMS, PARTS = 100, 20, 2000
BEFORE, WAIT = 100, 50  # usual parts before a change; parts that it is waited for
BURST, HELD = 20, 50  # defects in a row; training images that weren't learned
DIMMING = 200  # parts over which a lamp loses 30 %
NOISE = np.array([0.02, 0.01, 0.03, 0, 0, 0])
LIGHTS = (0.7, 0.775, 0.85, 0.925, 1.0)


def light(gain: float) -> Callable[[Picture], Picture]:
    return lambda pixels: np.clip(pixels * gain + 0.5, 0, 255).astype(np.uint8)


def shift(by: float, axis: int) -> Callable[[Picture], Picture]:
    """A camera that moves by a share of the width: 1 aside, 0 down."""
    return lambda p: p.take(np.arange(p.shape[axis]) - round(by * p.shape[1]), axis, mode="clip")


def blur(share: float) -> Callable[[Picture], Picture]:
    return lambda p: np.asarray(cv2.GaussianBlur(p, (0, 0), share * p.shape[1]), np.uint8)


CHANGES = {
    **{f"light {gain - 1:+.0%}": light(gain) for gain in (0.7, 0.85, 1.15, 1.3)},
    **{f"camera {share:.0%} aside": shift(share, 1) for share in (0.03, 0.06)},
    **{f"camera {share:.0%} down": shift(share, 0) for share in (0.03, 0.06)},
    **{f"defocus, σ {share:.1%}": blur(share) for share in (0.004, 0.008)},
}


def figures(detector: anomaly.AnomalyDetector, images: list[Picture]) -> Figures:
    """What the watch makes of each image."""
    watch = SceneWatch(detector.model.models)
    found = {r.index: r for r in detector.model.results(images) if isinstance(r, Prediction)}
    return np.array([watch.judged(found[i])[1] for i in range(len(images))], np.float64)


def drawn(rng: Generator, pool: Figures, count: int) -> Figures:
    some = pool[rng.integers(len(pool), size=count)]
    return np.asarray(some + rng.normal(size=(count, 6)) * NOISE)


def first(watch: SceneWatch, parts: Figures) -> int | None:
    """After how many parts the scene is called changed."""
    for number, part in enumerate(parts, 1):
        watch.add("", part.tolist())
        if watch.changed:
            return number
    return None


def change_cells(rng: Generator, models: Models, usual: Figures, changed: Figures) -> str:
    """After how many parts a change is said, and after how many its end."""
    delays, backs = np.zeros(REPEATS), np.zeros(REPEATS)
    for i in range(REPEATS):
        watch = SceneWatch(models)
        first(watch, drawn(rng, usual, BEFORE))
        delays[i] = first(watch, drawn(rng, changed, WAIT)) or WAIT + 1
        while watch.changed:
            backs[i] += 1
            watch.add("", drawn(rng, usual, 1)[0].tolist())
    within = f"{np.mean(delays <= 10):.0%} within 10"
    if np.median(delays) > WAIT:
        return f"not seen: {within}, {np.mean(delays <= WAIT):.0%} within {WAIT} | "
    return f"{np.median(delays):.0f}; {within} | {np.median(backs):.0f}"


def dimming(rng: Generator, models: Models, dims: Figures) -> str:
    """At which part a lamp that dims is noticed: the figures of images by light, (L, N, 6)."""
    gains = 1 - 0.3 * np.arange(DIMMING) / DIMMING
    nearest = np.abs(gains[:, None] - LIGHTS).argmin(1)
    numbers = []
    for _ in range(REPEATS):
        parts = dims[nearest, rng.integers(dims.shape[1], size=DIMMING)]
        noisy = parts + rng.normal(size=parts.shape) * NOISE
        numbers.append(first(SceneWatch(models), noisy) or DIMMING + 1)
    part = int(np.median(numbers))
    return f"{part}, at {gains[part - 1] - 1:.0%}" if part <= DIMMING else "not seen"


def rows(root: Path, settings: dict[str, object]) -> Iterator[str]:
    data, rng = anomaly.open_dataset("mvtec", root.parent, root.name), np.random.default_rng(0)
    detector = anomaly.fit(read(data.train[::2]), settings, calibrate=False)
    models = detector.model.models
    good = read([*data.train[1::2][:HELD], *(s for s in data.test if not s.is_defect)])
    usual = figures(detector, good)
    streams = (drawn(rng, usual, PARTS) for _ in range(STREAMS))
    false = sum(first(SceneWatch(models), stream) is not None for stream in streams)
    yield f"none, {STREAMS} streams of {PARTS} | {false} of {STREAMS} |"
    for change, make in CHANGES.items():
        changed = figures(detector, [make(pixels) for pixels in good])
        yield f"{change} | {change_cells(rng, models, usual, changed)}"
    dims = np.stack([figures(detector, [light(gain)(p) for p in good]) for gain in LIGHTS])
    yield f"light -30 % over {DIMMING} parts | {dimming(rng, models, dims)} |"
    defects = [sample for sample in data.test if sample.is_defect]
    every, kinds = figures(detector, read(defects)), [sample.defect_type for sample in defects]
    for kind in ("all kinds", *sorted(set(kinds))):
        pool = every[[kind in ("all kinds", other) for other in kinds]]
        bursts = (drawn(rng, pool, BURST) for _ in range(REPEATS))
        called = sum(first(SceneWatch(models), burst) is not None for burst in bursts)
        yield f"{BURST} defects: {kind} | {called} of {REPEATS} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="imagenet", help="as backbone.weights")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(machine())
    print("| set | change | after how many parts, or how often | over after |\n|---|---|---|---|")
    network = {"name": args.network, "weights": args.weights}
    for folder in args.data:
        for row in rows(folder, {"backbone": network, "model": {"coreset_ratio": 0.02}}):
            print(f"| {folder.name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
