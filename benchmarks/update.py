"""What an update costs beside a retraining, and what it does to parts under another lamp.

    python -m benchmarks.update --good FOLDER [--kind padim] [--new 30] [--backbone mobilenet_v2]

The images of the folder are good ones; the newest of them are put under another lamp. A model of
the others learns these, and a model of all is trained; both with thresholds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import torch

from anomaly.config.load import parse_config
from anomaly.datasets import Sample
from anomaly.evaluation.update import update
from anomaly.imaging.listing import list_images
from anomaly.training.fit import train
from benchmarks.inputs import machine


def relit(file: Path, to: Path) -> Path:
    """The same part under another lamp: warmer, and darker to the right; written to a folder."""
    picture = cv2.imread(str(file)).astype(np.float32)
    fall = 1 - 0.25 * np.linspace(0, 1, picture.shape[1])[None, :, None]
    to = to / f"{file.stem}.png"
    cv2.imwrite(str(to), np.rint(picture * (0.75, 0.95, 1.0) * fall).astype(np.uint8))
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--good", type=Path, required=True)
    parser.add_argument("--kind", default="patchcore")
    parser.add_argument("--backbone", default="mobilenet_v2")
    parser.add_argument("--weights", default="imagenet")
    parser.add_argument("--new", type=int, default=30)
    options = parser.parse_args()
    backbone = {"name": options.backbone, "weights": options.weights}
    config = parse_config({"model": {"kind": options.kind}, "backbone": backbone}, "the benchmark")
    files = list_images(options.good)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        new = [relit(file, Path(folder)) for file in files[-options.new :]]
        old = [Sample(file, file.name) for file in files[: -options.new]]
        lit = [Sample(file, f"lamp/{file.name}") for file in new]

        def timed(samples: list[Sample]) -> tuple[object, float, float]:
            wall, cpu = time.perf_counter(), time.process_time()
            made = train(config, samples, device=torch.device("cpu"), scratch=Path(folder))
            return made.detector, time.perf_counter() - wall, time.process_time() - cpu

        detector, *_ = timed(old)
        wall, cpu = time.perf_counter(), time.process_time()
        made = update(detector, lit, compare={}, scratch=Path(folder))  # type: ignore[arg-type]
        spent = time.perf_counter() - wall, time.process_time() - cpu
        _, *retrained = timed([*old, *lit])
    print(f"{len(old)} images known, {len(lit)} new, {options.kind} on {options.backbone}")
    for name, one, all_of_them in zip(("wall", "processor"), spent, retrained, strict=True):
        print(
            f"{name}: update {one:.1f} s, retraining {all_of_them:.1f} s: {one / all_of_them:.2f}"
        )
    print("\n".join(made.lines()))


if __name__ == "__main__":
    main()
