"""Do two detectors say the same? Golden images through both; what differs too far is an error."""

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
COUNT = 16  # golden images that are taken of the training images
# How far scores may be apart, as a share. bf16 rounds to 8 bits wherever an engine likes: up to a
# percent is that rounding. ResNet-50 on bottle: 0.12 %. int8 is compared with the model that was
# learned from the same quantised network, whose whole numbers are the same everywhere.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.01, "int8": 1e-4}
# Other than a run's, so that a batch size that was written into a whole graph shows.
_BATCH = 3


@dataclass(frozen=True)
class Largest:
    """The largest difference that was found.

    Attributes:
        share: of the score.
        name: of the image, without its folder.
        images: the names of all images that were compared, which are those that can be scored.
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
    """The images to compare with: those of a folder, or some training images, drawn by the seed.

    Args:
        detector: was trained on them.
        folder: the run, or the model folder, that it was loaded from.
        golden: a folder of images; None for training images.
        known: all training images, where somebody has found them already.

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
        there = TrainingImages(hashes, dataset_images(detector, folder, None))
        for name in draw.sample(sorted(hashes), len(hashes)):
            if isinstance(found := there.find(name), Sample):
                present.append(found.path)
            if len(present) == COUNT:
                break
    if not present:
        raise DataError(
            f"{folder}: its training images have moved, and the export has to be compared on "
            "images; give a folder of good and defective images with --golden"
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
    """See that an exported model says what its source says.

    Args:
        reference: the source, in the exported model's number format: scores are compared.
        own: the source in its own number format: verdicts are compared.
        exported: the exported model.
        paths: images.
        workers: decoding processes.
        progress: called with images compared.

    Raises:
        ModelError: it doesn't; the message says of which image, and by how much.
        DataError: none of the images can be scored.
    """
    precision = exported.extractor.precision
    limit, hint = TOLERANCE[precision], "" if precision == "fp32" else "; try --precision fp32"
    scores = _scored(reference, paths, workers)
    verdicts = scores if own is reference else _scored(own, paths, workers)
    if not any(isinstance(one, Prediction) for one in scores.values()):
        raise DataError(f"none of the golden images can be scored: {_said(scores[0])}")
    largest = Largest()
    found = exported.score_all(paths, batch_size=_BATCH, workers=workers)
    for done, one in enumerate(found, 1):
        before, path = scores[one.index], paths[one.index]
        share = _difference(before, one, _scale(reference))
        verdict = _verdict(verdicts[one.index])
        if not share <= limit or _verdict(one) != verdict:
            raise ModelError(
                f"the exported model's scores differ: {path} has {_said(one)} with "
                f"{exported.extractor.engine} and {_said(before)} with torch, a difference of "
                f"{share:.2g} of the score (allowed: {limit:g}); its verdict was "
                f"{verdict or 'none'}. Nothing was exported{hint}"
            )
        largest = max(largest, Largest(share, path.name), key=lambda one: one.share)
        progress(done)
    compared = [paths[i].name for i in sorted(scores) if isinstance(scores[i], Prediction)]
    return replace(largest, images=tuple(compared))


def differences(
    parent: Model, detector: Model, paths: Sequence[Path], *, workers: int
) -> dict[str, Any]:
    """How another model's scores and verdicts differ on images.

    Args:
        parent: the one model.
        detector: the other one.
        paths: images.
        workers: decoding processes.

    Returns:
        As export.json tells it: `verdicts_changed`; `correlation` of the scores, None where either
        model's are all the same; and `shift`, by which share they are higher in the median.
    """
    before, after = (_scored(one, paths, workers) for one in (parent, detector))
    pairs = [
        (paths[i].name, one, other)
        for i, one in sorted(before.items())
        if isinstance(one, Prediction) and isinstance(other := after[i], Prediction)
    ]
    scores = np.array([(one.score, other.score) for _, one, other in pairs]).reshape(-1, 2)
    spread = scores.std(axis=0) if len(scores) else np.zeros(2)
    shares = scores[:, 1] / np.maximum(scores[:, 0], _scale(parent)) - 1
    changed = [
        {
            "image": name,
            "before": one.verdict,
            "after": other.verdict,
            "scores": [one.score, other.score],
        }
        for name, one, other in pairs
        if one.verdict != other.verdict
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
    """See that a graph from images to patch scores gives the patch scores of a detector.

    Args:
        reference: in fp32.
        graph: of the whole detector.
        paths: images.
        workers: decoding processes.

    Returns:
        The largest difference, as a share of the image's highest patch score, or of the review
        threshold where that is higher.

    Raises:
        ModelError: one is too large; the message says of which image.
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
    """See that a graph from pixels to the verdict says what a detector says of files.

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
        ModelError: one is too large, or a verdict is another; the message says of which image.
        DataError: no image has the camera's size and 8 bits.
    """
    largest, limit, count = 0.0, TOLERANCE["fp32"], 0
    fitting = [path for path in paths if size_of(path) == camera.size]
    for one in reference.score_all(fitting, workers=workers):
        if not isinstance(one, Prediction):
            continue
        image = read_image(fitting[one.index])
        if image.pixels.dtype != np.uint8:
            continue
        pixels = image.pixels[..., ::-1] if camera.bgr else image.pixels
        codes, scores, _, maps, _ = graph(pixels[None])
        scale = _scale(reference)
        shares = [
            abs(float(scores[0]) - one.score) / max(abs(one.score), scale),
            float(np.nanmax(np.abs(maps[0] - one.anomaly_map)))
            / max(float(np.nanmax(one.anomaly_map)), scale),
        ]
        verdict = VERDICTS[int(codes[0])]
        if not max(shares) <= limit or verdict != one.verdict:
            raise ModelError(
                f"the scores of the graph from pixels differ: {one.name} has score {scores[0]:.6g} "
                f"({verdict}) there and {_said(one)} with torch; score and map differ by "
                f"{max(shares):.2g} (allowed: {limit:g}). Nothing was exported"
            )
        largest, count = max(largest, *shares), count + 1
    if not count:
        raise DataError(
            f"none of {len(paths)} golden images has 8 bits and {camera.size[1]}×{camera.size[0]} "
            "pixels, as --pixels says; give --golden, a folder of images from that camera"
        )
    return largest


def _patch_differences(
    reference: Model, graph: Graph, batch: Sequence[NetworkInput]
) -> list[float]:
    pixels = np.stack([item.pixels for item in batch]).transpose(0, 3, 1, 2)
    found = graph(pixels)[0]
    with reference.embedder.inference_mode():
        wanted = as_numpy(reference.scorer.score(reference.embedder(batch)).scores)
    scale = np.maximum(wanted.max(axis=(1, 2)), _scale(reference))
    shares: list[float] = (np.abs(found - wanted).max(axis=(1, 2)) / scale).tolist()
    return shares


def _scored(
    detector: Model, paths: Sequence[Path], workers: int
) -> dict[int, Prediction | UnusableImage]:
    return {one.index: one for one in detector.score_all(paths, workers=workers)}


def _scale(detector: Model) -> float:
    """Differences are shares of this at least: an image the model knows by heart may score 0."""
    return 1e-12 if detector.thresholds is None else max(detector.thresholds.review, 1e-12)


def _difference(
    before: Prediction | UnusableImage, now: Prediction | UnusableImage, scale: float
) -> float:
    if isinstance(before, Prediction) and isinstance(now, Prediction):
        return abs(now.score - before.score) / max(abs(before.score), scale)
    return 0.0 if type(before) is type(now) else float("inf")


def _verdict(one: Prediction | UnusableImage) -> str:
    return one.status if isinstance(one, UnusableImage) else one.verdict


def _said(one: Prediction | UnusableImage) -> str:
    if isinstance(one, UnusableImage):
        return f"no score ({one.reason})"
    return f"score {one.score:.6g} ({one.verdict or 'no verdict'})"
