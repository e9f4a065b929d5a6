"""Differences of an export and its model on golden images; too large a one is an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anomaly.arrays import as_numpy
from anomaly.backbones.engine import Graph
from anomaly.datasets import Sample
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, ModelError
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.listing import list_images
from anomaly.imaging.loading import (
    NetworkInput,
    UnusableImage,
    by_shape,
    size_of,
    tile_by_tile,
)
from anomaly.imaging.read import read_image
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction

VERDICTS = ("good", "review", "reject")  # as a graph from pixels counts them
COUNT = 16  # golden images drawn from the training images
# Largest difference of scores, as a share. bf16 rounds to 8 bits where the engine decides: up to a
# percent is that rounding. ResNet-50 on bottle: 0.12 %.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.01}
# Differs from a run's, to detect a batch size that was written into a whole graph.
_BATCH = 3


@dataclass(frozen=True)
class Compared:
    """Differences of an export's scores and verdicts on golden images.

    Attributes:
        images: the names of the compared images; unusable images aren't compared.
        shares: for each, the difference from torch's score in the export's number format, as a
            share of the score.
        shifts: the same, from the model's score in the number format of its training.
        verdicts_changed: image, verdict and score `before` and `after`, as in export.json.
    """

    images: tuple[str, ...]
    shares: tuple[float, ...]
    shifts: tuple[float, ...]
    verdicts_changed: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Camera:
    """The images that a graph takes: 8 bits, three channels.

    Attributes:
        size: (H0, W0).
        bgr: whether blue comes first, as OpenCV reads files.
    """

    size: tuple[int, int]
    bgr: bool = False


def golden_images(
    model: Model, folder: Path, given: Path | None, recorded: Path | None = None
) -> list[Path]:
    """The images for a comparison.

    Args:
        model: the model.
        folder: the run, or the model folder, that it was loaded from.
        given: a folder of images; None for the recorded ones.
        recorded: the folder of the model's golden parts; if there are none, training images are
            drawn with the seed.

    Raises:
        DataError: there are none.
    """
    if given is not None:
        return find_inputs([given], option="--golden").paths
    if recorded is not None and (parts := list_images(recorded)):
        return parts
    draw, present = random.Random(model.config.seed), list[Path]()
    with suppress(DataError):
        hashes = model.manifest["training_images"]
        training_images = TrainingImages(hashes, dataset_images(model, folder, None))
        for name in draw.sample(sorted(hashes), len(hashes)):
            if isinstance(sample := training_images.find(name), Sample):
                present.append(sample.path)
            if len(present) == COUNT:
                break
    if not present:
        raise DataError(
            f"{folder}: its training images have moved, so there are none to compare the export "
            f"on; give a folder of good and defective images with --golden"
        )
    return sorted(present)


def compare(
    model: Model,
    reference: Model,
    exported: Model,
    paths: Sequence[Path],
    *,
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Compared:
    """Check that an exported model has torch's scores and, in training's precision, its verdicts.

    Args:
        model: the source, in the number format of its training.
        reference: the source in the exported model's number format; `model` itself if that is
            the same.
        exported: the exported model.
        paths: images.
        workers: decoding processes.
        progress: called with images compared.

    Raises:
        ModelError: it differs; the message names the image and the difference.
        DataError: none of the images can be scored.
    """
    precision = exported.extractor.precision
    limit, hint = TOLERANCE[precision], "" if precision == "fp32" else "; try --precision fp32"
    expected = _scored(reference, paths, workers)
    originals = expected if reference is model else _scored(model, paths, workers)
    if not any(isinstance(result, Prediction) for result in expected.values()):
        raise DataError(f"none of the golden images can be scored: {_described(expected[0])}")
    scale = _scale(reference)
    shares: dict[int, float] = {}
    compared: list[tuple[int, Prediction, Prediction]] = []
    for after in exported.score_all(paths, batch_size=_BATCH, workers=workers):
        before, original = expected[after.index], originals[after.index]
        share = shares[after.index] = _difference(before, after, scale)
        is_changed = reference is model and _verdict(after) != _verdict(before)
        if not share <= limit or is_changed:
            raise ModelError(
                f"the exported model's scores differ: {paths[after.index]} has "
                f"{_described(after)} with {exported.extractor.engine} and {_described(before)} "
                f"with torch, a difference of {share:.2g} of the score (allowed: {limit:g}). "
                f"Nothing was exported{hint}"
            )
        if isinstance(original, Prediction) and isinstance(after, Prediction):
            compared.append((after.index, original, after))
        progress(len(shares))
    compared.sort(key=lambda pair: pair[0])
    return Compared(
        tuple(paths[i].name for i, _, _ in compared),
        tuple(shares[i] for i, _, _ in compared),
        tuple(_difference(before, after, scale) for _, before, after in compared),
        tuple(
            {
                "image": paths[i].name,
                "before": before.verdict,
                "after": after.verdict,
                "scores": [before.score, after.score],
            }
            for i, before, after in compared
            if before.verdict != after.verdict
        ),
    )


def compare_patches(
    reference: Model, graph: Graph, paths: Sequence[Path], *, workers: int
) -> float:
    """Check that a graph from images to patch scores has the patch scores of a detector.

    Args:
        reference: in fp32.
        graph: of the whole detector.
        paths: images.
        workers: decoding processes.

    Returns:
        The largest difference, as a share of the image's highest patch score, or of the review
        threshold where that is higher.

    Raises:
        ModelError: one is too large; the message names the image.
    """
    largest, limit = 0.0, TOLERANCE["fp32"]
    with Decoders(min(workers, len(paths)), Task(reference.loading)) as decoders:
        loaded = reference.fitting(decoders.load_all(enumerate(paths)))
        for batch in tile_by_tile(by_shape(loaded, _BATCH), _BATCH):
            if isinstance(batch, UnusableImage):
                continue
            for item, share in zip(batch, _patch_differences(reference, graph, batch), strict=True):
                if not share <= limit:
                    raise ModelError(
                        f"the whole graph's scores differ: a patch of {paths[item.index]} by "
                        f"{share:.2g} of the image's highest score (allowed: {limit:g}). Nothing "
                        "was exported"
                    )
                largest = max(largest, share)
    return largest


def compare_pixels(
    reference: Model, graph: Graph, paths: Sequence[Path], camera: Camera, *, workers: int
) -> float:
    """Check that a graph from pixels to the verdict has a detector's scores and verdicts.

    Args:
        reference: in fp32.
        graph: of pixels.
        paths: images; those of another size aren't compared.
        camera: what the graph takes.
        workers: decoding processes.

    Returns:
        The largest difference of an image score, or of a map's value, as a share of the score or
        of the map's highest value; or of the review threshold where that is higher.

    Raises:
        ModelError: one is too large, or a verdict differs; the message names the image.
        DataError: no image has the camera's size and 8 bits.
    """
    largest, limit, count = 0.0, TOLERANCE["fp32"], 0
    fitting = [path for path in paths if size_of(path) == camera.size]
    for prediction in reference.score_all(fitting, workers=workers):
        if not isinstance(prediction, Prediction):
            continue
        image = read_image(fitting[prediction.index])
        if image.pixels.dtype != np.uint8:
            continue
        pixels = image.pixels[..., ::-1] if camera.bgr else image.pixels
        codes, scores, reasons, maps, _ = graph(pixels[None])
        scale = _scale(reference)
        shares = [
            abs(float(scores[0]) - prediction.score) / max(abs(prediction.score), scale),
            float(np.nanmax(np.abs(maps[0] - prediction.anomaly_map)))
            / max(float(np.nanmax(prediction.anomaly_map)), scale),
        ]
        verdict = VERDICTS[int(codes[0])]
        is_changed = (verdict, bool(reasons[0])) != _verdict(prediction)
        if not max(shares) <= limit or is_changed:
            raise ModelError(
                f"the scores of the graph from pixels differ: {prediction.name} has score "
                f"{scores[0]:.6g} ({verdict}) there and {_described(prediction)} with torch; "
                f"score and map differ by "
                f"{max(shares):.2g} (allowed: {limit:g}). Nothing was exported"
            )
        largest, count = max(largest, *shares), count + 1
    if not count:
        raise DataError(
            f"none of {len(paths)} golden images has 8 bits and "
            f"{camera.size[1]}×{camera.size[0]} pixels, as in --pixels; give a folder of the "
            f"camera's images with --golden"
        )
    return largest


def _patch_differences(
    reference: Model, graph: Graph, batch: Sequence[NetworkInput]
) -> list[float]:
    pixels = np.stack([item.pixels for item in batch]).transpose(0, 3, 1, 2)
    patch_scores = graph(pixels)[0]
    with reference.embedder.inference_mode():
        wanted = as_numpy(reference.scorer.score(reference.embedder(batch)).scores)
    scale = np.maximum(wanted.max(axis=(1, 2)), _scale(reference))
    shares: list[float] = (np.abs(patch_scores - wanted).max(axis=(1, 2)) / scale).tolist()
    return shares


def _scored(
    detector: Model, paths: Sequence[Path], workers: int
) -> dict[int, Prediction | UnusableImage]:
    return {result.index: result for result in detector.score_all(paths, workers=workers)}


def _scale(detector: Model) -> float:
    """Smallest score that differences are shares of: a training image may score 0."""
    return 1e-12 if detector.thresholds is None else max(detector.thresholds.review, 1e-12)


def _difference(
    before: Prediction | UnusableImage, now: Prediction | UnusableImage, scale: float
) -> float:
    if isinstance(before, Prediction) and isinstance(now, Prediction):
        return abs(now.score - before.score) / max(abs(before.score), scale)
    return 0.0 if type(before) is type(now) else float("inf")


def _verdict(result: Prediction | UnusableImage) -> tuple[str, bool]:
    """The verdict, or the status without one, and whether a person is given a reason to look."""
    verdict = result.status if isinstance(result, UnusableImage) else result.verdict
    return verdict, bool(result.reason)


def _described(result: Prediction | UnusableImage) -> str:
    if isinstance(result, UnusableImage):
        return f"no score ({result.reason})"
    return f"score {result.score:.6g} ({result.verdict or 'no verdict'})"
