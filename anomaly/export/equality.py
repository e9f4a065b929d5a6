"""Equality of two detectors on golden images: too large a difference is an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
# percent is that rounding. ResNet-50 on bottle: 0.12 %. int8 is compared with the model that was
# trained with the same quantised network, whose integers are the same everywhere.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.01, "int8": 1e-4}
# Differs from a run's, to detect a batch size that was written into a whole graph.
_BATCH = 3


@dataclass(frozen=True)
class Largest:
    """The largest difference of the compared images.

    Attributes:
        share: of the score.
        name: of the image, without its folder.
        images: the names of all compared images; unusable images aren't compared.
    """

    share: float = 0.0
    name: str = ""
    images: tuple[str, ...] = ()


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
    detector: Model, folder: Path, golden: Path | None, known: Sequence[Path] = ()
) -> list[Path]:
    """The images for a comparison: those of a folder, or training images drawn with the seed.

    Args:
        detector: was trained on them.
        folder: the run, or the model folder, that it was loaded from.
        golden: a folder of images; None draws training images.
        known: all training images, if they are already known.

    Raises:
        DataError: there are none.
    """
    if golden is not None:
        return find_inputs([golden], option="--golden").paths
    draw = random.Random(detector.config.seed)
    if known:
        return sorted(draw.sample(known, min(len(known), COUNT)))
    present: list[Path] = []
    with suppress(DataError):
        hashes = detector.manifest["training_images"]
        training_images = TrainingImages(hashes, dataset_images(detector, folder, None))
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
    reference: Model,
    own: Model,
    exported: Model,
    paths: Sequence[Path],
    *,
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Largest:
    """Check that an exported model has the scores and verdicts of its source.

    Args:
        reference: the source, in the exported model's number format: scores are compared.
        own: the source in its own number format: verdicts are compared.
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
    scores = _scored(reference, paths, workers)
    verdicts = scores if own is reference else _scored(own, paths, workers)
    if not any(isinstance(result, Prediction) for result in scores.values()):
        raise DataError(f"none of the golden images can be scored: {_described(scores[0])}")
    largest = Largest()
    results = exported.score_all(paths, batch_size=_BATCH, workers=workers)
    for done, after in enumerate(results, 1):
        before, path = scores[after.index], paths[after.index]
        share = _difference(before, after, _scale(reference))
        verdict = _verdict(verdicts[after.index])
        if not share <= limit or _verdict(after) != verdict:
            raise ModelError(
                f"the exported model's scores differ: {path} has {_described(after)} with "
                f"{exported.extractor.engine} and {_described(before)} with torch, a difference of "
                f"{share:.2g} of the score (allowed: {limit:g}); its verdict was "
                f"{verdict or 'none'}. Nothing was exported{hint}"
            )
        largest = max(largest, Largest(share, path.name), key=lambda largest: largest.share)
        progress(done)
    compared = [paths[i].name for i in sorted(scores) if isinstance(scores[i], Prediction)]
    return replace(largest, images=tuple(compared))


def differences(
    parent: Model, detector: Model, paths: Sequence[Path], *, workers: int
) -> dict[str, Any]:
    """Differences of two models' scores and verdicts on images.

    Args:
        parent: the first model.
        detector: the second model.
        paths: images.
        workers: decoding processes.

    Returns:
        As in export.json: `verdicts_changed`; `correlation` of the scores, None if one model
        gives all images one score; and `shift`, the median share by which they are higher.
    """
    before, after = (_scored(model, paths, workers) for model in (parent, detector))
    pairs = [
        (paths[i].name, first, second)
        for i, first in sorted(before.items())
        if isinstance(first, Prediction) and isinstance(second := after[i], Prediction)
    ]
    scores = np.array([(first.score, second.score) for _, first, second in pairs]).reshape(-1, 2)
    spread = scores.std(axis=0) if len(scores) else np.zeros(2)
    shares = scores[:, 1] / np.maximum(scores[:, 0], _scale(parent)) - 1
    changed = [
        {
            "image": name,
            "before": first.verdict,
            "after": second.verdict,
            "scores": [first.score, second.score],
        }
        for name, first, second in pairs
        if first.verdict != second.verdict
    ]
    return {
        "golden_images": len(pairs),
        "verdicts_changed": changed,
        "correlation": float(np.corrcoef(scores.T)[0, 1]) if spread.all() else None,
        "shift": float(np.median(shares)) if len(pairs) else 0.0,
    }


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
        codes, scores, _, maps, _ = graph(pixels[None])
        scale = _scale(reference)
        shares = [
            abs(float(scores[0]) - prediction.score) / max(abs(prediction.score), scale),
            float(np.nanmax(np.abs(maps[0] - prediction.anomaly_map)))
            / max(float(np.nanmax(prediction.anomaly_map)), scale),
        ]
        verdict = VERDICTS[int(codes[0])]
        if not max(shares) <= limit or verdict != prediction.verdict:
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


def _verdict(result: Prediction | UnusableImage) -> str:
    return result.status if isinstance(result, UnusableImage) else result.verdict


def _described(result: Prediction | UnusableImage) -> str:
    if isinstance(result, UnusableImage):
        return f"no score ({result.reason})"
    return f"score {result.score:.6g} ({result.verdict or 'no verdict'})"
