"""What another light costs, and what would mend it: false rejects and defects caught.

    python -m benchmarks.light --data FOLDER… [--weights FILE] [--train 1000]

Each set is learned as it is. Then its good and defective test images are made darker and brighter
by 10, 20 and 30 %, or red by 10 % and blue by -10 %. Ways: `today`; `copies`, training images 20 %
darker and brighter, too, in a bank of the same size; `gain`, every image brought to the training
images' mean brightness; `contrast`, to their mean and standard deviation. *Said*: good images that
are for review because of the image as a whole, whatever their score.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

import anomaly
from anomaly.datasets import Sample
from anomaly.imaging.array_input import ArrayFormat, sources
from anomaly.imaging.decoder_pool import load_shared
from anomaly.imaging.loading import by_shape
from benchmarks.inputs import machine

Picture = NDArray[np.uint8]
Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
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


def evenly(files: Sequence[Path], count: int) -> list[Picture]:
    return [read(f) for f in files[:: max(1, -(-len(files) // count))]]


def scores(images: Sequence[Picture], detectors: Sequence[anomaly.AnomalyDetector]) -> Scored:
    """Image scores by each of some detectors that share a network, and who says what of images."""
    values, said = np.zeros((len(detectors), len(images))), np.zeros(len(images), bool)
    models: list[Any] = [detector.model for detector in detectors]
    loaded = load_shared(sources(images, models[0].array_format()), models[0].loading)
    for batch in by_shape(loaded, 4):
        assert isinstance(batch, list)
        with models[0].embedder.inference_mode():
            embedded = models[0].embedded(batch)
            for row, model in enumerate(models):
                _, own = model.patches_of(embedded, batch[0].layout)
                values[row, [item.index for item in batch]] = own
        for item, statistics in zip(batch, embedded.statistics, strict=True):
            said[item.index] = bool(models[0].review_reason(statistics))
    return values, said


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Print each way's figures in each light."""
    train = evenly(sorted((folder / "train" / "good").iterdir()), args.train)
    files = sorted((folder / "test").glob("*/*.*"))
    good = evenly([f for f in files if f.parent.name == "good"], args.good)
    bad = evenly([f for f in files if f.parent.name != "good"], args.defects)
    named = {"name": args.network} | ({"weights": args.weights} if args.weights else {})
    today = fitted(train, "today", named, None)
    size = len(today.model.scorer.vectors)  # type: ignore[union-attr]
    ways = {"today": today, "copies": fitted(train, "copies", named, size)}
    tables = [(ways, lambda image: image)]
    for way in ("gain", "contrast")[: args.normalisers]:
        normalise = normaliser(way, train)
        own = fitted([normalise(image) for image in train], way, named, size)
        tables.append(({way: own}, normalise))
    for detectors, normalise in tables:
        for light, factors in LIGHTS.items():
            shown = [normalise(lit(image, factors)) for image in (*good, *bad)]
            values, said = scores(shown, list(detectors.values()))
            for (way, detector), own in zip(detectors.items(), values, strict=True):
                assert detector.thresholds is not None
                flagged = own > detector.thresholds.review
                shares = flagged[: len(good)], flagged[len(good) :], said[: len(good)]
                cells = " | ".join(f"{share.mean():.0%}" for share in shares)
                print(f"| {folder.name} | {way} | {light} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="MVTec AD layout")
    parser.add_argument("--network", default="timm/tf_efficientnet_lite2", help="backbone.name")
    parser.add_argument("--weights", default="", help="as backbone.weights")
    parser.add_argument("--train", type=int, default=1000, help="training images, at most")
    parser.add_argument("--good", type=int, default=60, help="good test images, at most")
    parser.add_argument("--defects", type=int, default=60, help="defects, at most")
    parser.add_argument("--normalisers", type=int, default=2, help="1 for `gain` alone")
    args = parser.parse_args()
    print(machine(), "\n\n| set | way | light | good flagged | caught | said |", flush=True)
    for folder in args.data:
        compare(folder, args)


if __name__ == "__main__":
    main()
