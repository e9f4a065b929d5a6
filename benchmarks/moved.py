"""What moved parts cost, and what `image.align` gives back: sets as they are, and moved.

    python -m benchmarks.moved --data FOLDER… [--network NAME] [--weights FILE] [--kinds patchcore]
        [--train 100] [--as-they-are]

Every image of a set (MVTec AD's layout) is shifted by up to 10 % of its sides and turned by up to
10°, its border repeated outwards. With `--as-they-are` nothing is moved: parts that lie anyhow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

import anomaly
from anomaly.datasets import Sample
from anomaly.evaluation.metrics.images import image_metrics, recall_at_false_reject_rates
from anomaly.imaging.pose import Motion, Pose
from anomaly.imaging.read import Image, read_image
from anomaly.imaging.reference import Reference
from benchmarks.inputs import machine

_LONGEST = 512  # pixels of the longer side that are moved: the network sees 256
_SHARE, _TURN = 0.1, np.deg2rad(10)

Picture = NDArray[np.uint8]


def read(samples: Sequence[Sample]) -> list[Picture]:
    """The images of samples, at most `_LONGEST` pixels long."""
    images = []
    for sample in samples:
        pixels = read_image(sample.path).pixels
        if (scale := _LONGEST / max(pixels.shape)) < 1:
            pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        images.append(np.asarray(pixels, np.uint8))
    return images


def moved(images: Sequence[Picture], seed: int) -> list[Picture]:
    """Images shifted and turned at random, their borders repeated outwards."""
    rng, result = np.random.default_rng(seed), []
    for pixels in images:
        height, width = pixels.shape[:2]
        turn, x, y = rng.uniform(-1, 1, 3) * (_TURN, _SHARE * width, _SHARE * height)
        pose = Pose(Motion(turn, x, y), (height, width))
        result.append(pose.part(pixels, slice(0, height), slice(0, width)))
    return result


def figures(
    train: list[Picture], test: list[Picture], labels: list[bool], settings: dict[str, Any]
) -> str:
    """Image AUROC, recall at 5 % false rejects, images for review because of their pose, and ms."""
    detector = anomaly.fit(train, settings, calibrate=False)
    results = {r.index: r for r in detector.model.results(test)}
    scores = [getattr(results[i], "score", np.inf) for i in range(len(test))]
    doubts = sum(bool(getattr(r, "reason", "unusable")) for r in results.values())
    auroc = image_metrics(scores, labels).values["image_auroc"]
    recall = recall_at_false_reject_rates(scores, labels).values["recall_at_frr_0.05"]
    cells = f"{auroc:.3f} | {recall:.3f} | {doubts}"
    images = [result.image for result in results.values() if result.image is not None][:20]
    return f"{cells} | {_milliseconds(detector.model.reference, images):.1f}"


def _milliseconds(reference: Reference | None, images: list[Image]) -> float:
    """Processor time of finding a pose, the median."""
    if reference is None:
        return 0.0
    times = []
    for image in images:
        began = time.process_time()
        reference.pose(image)
        times.append(1000 * (time.process_time() - began))
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="imagenet", help="as backbone.weights")
    parser.add_argument("--kinds", nargs="+", default=["patchcore", "padim"], help="model.kind")
    parser.add_argument("--train", type=int, default=100, help="training images at most")
    parser.add_argument("--as-they-are", action="store_true", help="nothing is moved")
    args = parser.parse_args()
    print(machine())
    print("| set | method | images | align | image AUROC | recall at 5 % | for review | ms |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [(False, "none"), (False, "rigid")]
    if not args.as_they_are:
        cases += [(True, "none"), (True, "rigid")]
    for folder in args.data:
        data = anomaly.open_dataset("mvtec", folder.parent, folder.name)
        labels = [sample.is_defect for sample in data.test]
        train = data.train[:: -(-len(data.train) // args.train)]
        still = read(train), read(data.test)
        shaken = moved(still[0], 0), moved(still[1], 1)
        for kind in args.kinds:
            for is_moved, align in cases:
                settings = {
                    "backbone": {"name": args.network, "weights": args.weights},
                    "model": {"kind": kind, "coreset_ratio": 0.02},
                    "image": {"align": align},
                    "precision": "fp32",
                }
                head = (
                    f"| {folder.name} | {kind} | {'moved' if is_moved else 'as they are'} | {align}"
                )
                try:
                    cells = figures(*(shaken if is_moved else still), labels, settings)
                    print(f"{head} | {cells} |", flush=True)
                except anomaly.AnomalyError as error:
                    print(f"{head} | {error} |", flush=True)


if __name__ == "__main__":
    main()
