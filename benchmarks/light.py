"""What another light costs, and what would mend it: false rejects and defects caught.

    python -m benchmarks.light --data FOLDER… [--weights FILE] [--images 30]

Each set is learned as it is. Then its good and defective test images are made darker and brighter
by 10, 20 and 30 %, or red by 10 % and blue by -10 %. Ways: `today`; `copies`, training images 20 %
darker and brighter, too, in a bank of the same size; `gain`, every image brought to the training
images' mean brightness; `contrast`, to their mean and standard deviation. *Said*: good images that
are for review because of the image as a whole, whatever their score.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

import anomaly
from anomaly.datasets import Sample
from anomaly.imaging.array_input import ArrayFormat
from benchmarks.inputs import machine

Picture = NDArray[np.uint8]
LIGHTS = {"as it is": (1.0,) * 3, "red cast": (1.1, 1.0, 0.9)}
LIGHTS |= {f"{percent:+d} %": (1 + percent / 100,) * 3 for percent in (-30, -20, -10, 10, 20, 30)}
COPIES = (1.0, 0.8, 1.2)
_SIDE = 512  # pixels: more change nothing that the network sees


def read(file: Path) -> Picture:
    image = cv2.imread(str(file))
    scale = min(1.0, _SIDE / min(image.shape[:2]))
    small = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return np.asarray(small[..., ::-1], np.uint8)


def clipped(values: NDArray[np.floating]) -> Picture:
    return np.asarray(np.clip(values + 0.5, 0, 255), np.uint8)


def lit(image: Picture, light: Sequence[float]) -> Picture:
    return clipped(image * np.asarray(light, np.float32))


def normaliser(way: str, train: Sequence[Picture]) -> Callable[[Picture], Picture]:
    """What brings an image to the training images' mean, and spread."""
    mean = float(np.mean([image.mean() for image in train]))
    spread = float(np.mean([image.std() for image in train]))

    def gain(image: Picture) -> Picture:
        return clipped(image * (mean / max(float(image.mean()), 1.0)))

    def contrast(image: Picture) -> Picture:
        own = image.astype(np.float32) - image.mean()
        return clipped(own * (spread / max(float(image.std()), 1.0)) + mean)

    return {"gain": gain, "contrast": contrast}.get(way, lambda image: image)


def fitted(
    train: Sequence[Picture], way: str, backbone: dict[str, str], size: int | None
) -> anomaly.AnomalyDetector:
    """A detector; copies of one image are never parted where thresholds are found."""
    factors = COPIES if way == "copies" else COPIES[:1]
    bank = {"coreset_ratio": 0.02} if size is None else {"coreset_size": size}
    shots = [
        Sample(
            Path(f"{i}-{factor}"),
            f"{i}-{factor}",
            group=str(i),
            image=ArrayFormat().source(lit(image, (factor,) * 3)),  # type: ignore[arg-type]
        )
        for i, image in enumerate(train)
        for factor in factors
    ]
    return anomaly.fit(shots, {"backbone": backbone, "model": bank, "precision": "fp32"})


def chosen(folder: Path, count: int) -> tuple[list[Picture], list[Picture]]:
    """Good and defective test images, evenly from all."""
    files = sorted((folder / "test").glob("*/*.*"))
    parts = [[f for f in files if (f.parent.name == "good") == good] for good in (True, False)]
    good, bad = ([read(f) for f in part[:: -(-len(part) // count)]] for part in parts)
    return good, bad


def rows(folder: Path, way: str, args: argparse.Namespace, size: int | None) -> int:
    """Print a way's figures in each light; returns the size of its bank."""
    train = [read(f) for f in sorted((folder / "train" / "good").iterdir())]
    good, bad = chosen(folder, args.images)
    normalise = normaliser(way, train)
    named = {"name": args.network} | ({"weights": args.weights} if args.weights else {})
    start = time.perf_counter()
    detector = fitted([normalise(image) for image in train], way, named, size)
    assert detector.thresholds is not None
    limit = detector.thresholds.review
    for light in LIGHTS:
        shown = [normalise(lit(image, LIGHTS[light])) for image in (*good, *bad)]
        predictions = list(detector.stream(shown))
        flagged = np.array([p.score > limit for p in predictions])
        said = np.array([bool(p.reason) for p in predictions])[: len(good)]
        cells = [flagged[: len(good)].mean(), flagged[len(good) :].mean(), said.mean()]
        text = " | ".join(f"{cell:.0%}" for cell in cells)
        spent = time.perf_counter() - start
        print(
            f"| {folder.name} | {args.network} | {way} | {light} | {text} | {spent:.0f} |",
            flush=True,
        )
    return len(detector.model.scorer.vectors)  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="", help="as backbone.weights")
    parser.add_argument("--images", type=int, default=30, help="good and defective ones, at most")
    parser.add_argument("--ways", nargs="+", default=["today", "copies", "gain", "contrast"])
    args = parser.parse_args()
    print(machine(), "\n\n| set | network | way | light | good flagged | caught | said | seconds |")
    for folder in args.data:
        size = None
        for way in args.ways:
            bank = rows(folder, way, args, size)
            size = bank if size is None else size


if __name__ == "__main__":
    main()
