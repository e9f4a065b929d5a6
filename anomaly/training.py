"""Good images -> a fitted detector."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from anomaly.backbones import build, default_layers, fill, normalisation, read_weights
from anomaly.config import Config
from anomaly.datasets import Sample, hold_out
from anomaly.detector import AnomalyDetector, Thresholds, embedder_of, loading_of
from anomaly.embedding import TrainingPatches
from anomaly.features import FeatureExtractor, truncate
from anomaly.loading import Refused
from anomaly.scorers.base import Progress, Scorer
from anomaly.scorers.gaussian import GaussianFitter
from anomaly.scorers.memory_bank import MemoryBankFitter
from anomaly.scorers.projection import Projection

HELD_OUT_SHARE = 0.1

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Training:
    """A fitted detector and what is worth knowing about how it came to be.

    Attributes:
        detector: ready to predict.
        weights_sha256: of the backbone's weights file; None for random weights.
        hashes: sha256 of every training image learned from, by name, in order.
        held_out: sha256 of the good images that only set the threshold, by name.
        refused: why a training image couldn't be used, by name.
        patches: how many patches were learned from.
        seconds: by stage.
    """

    detector: AnomalyDetector
    weights_sha256: str | None
    hashes: dict[str, str]
    held_out: dict[str, str]
    refused: dict[str, str]
    patches: int
    seconds: dict[str, float]


def fit(
    config: Config,
    samples: Sequence[Sample],
    *,
    device: torch.device,
    scratch: Path,
    workers: int = 2,
    progress: StageProgress,
) -> Training:
    """Learn what good looks like.

    Args:
        config: all settings; `config.data` isn't read.
        samples: good images.
        device: where the network and the scorer run.
        scratch: an existing folder for temporary files.
        workers: decoding threads.
        progress: called with (stage, done, total).

    Raises:
        AnomalyError: weights, layers or images can't be used as configured.
    """
    clock = _Clock()
    extractor, weights_sha256 = _backbone(config, device)
    order = np.random.default_rng(config.seed).permutation(len(samples)).tolist()
    learned, held_out = hold_out(samples, HELD_OUT_SHARE, order)
    clock.lap("backbone")

    normalise = normalisation(config.backbone.name)
    fitter = _fitter(config)
    projection = None
    if isinstance(fitter, GaussianFitter):
        projection = fitter.draw(extractor.channels).to(device)
    patches = TrainingPatches(
        [s.path for s in learned],
        loading_of(config, extractor),
        embedder_of(config, extractor, normalise, device, projection),
        batch_size=config.batch_size,
        workers=workers,
        spill=scratch if config.model.kind == "patchcore" else None,
        progress=lambda done, total: progress("features", done, total),
    )
    try:
        scorer = _learn(fitter, patches, projection, lambda done, n: progress("scorer", done, n))
    finally:
        patches.close()
    clock.lap("scorer")
    clock.move("scorer", "features", patches.seconds)

    detector = AnomalyDetector(config, extractor, normalise, scorer, None, device)
    thresholds, held_hashes, held_refused = _provisional(detector, held_out, workers, progress)
    clock.lap("threshold")
    return Training(
        detector=replace(detector, thresholds=thresholds),
        weights_sha256=weights_sha256,
        hashes={learned[i].name: patches.hashes[i] for i in sorted(patches.hashes)},
        held_out=held_hashes,
        refused={learned[r.index].name: r.reason for r in patches.refused} | held_refused,
        patches=patches.count,
        seconds=clock.seconds,
    )


def _backbone(config: Config, device: torch.device) -> tuple[FeatureExtractor, str | None]:
    name = config.backbone.name
    full = build(name)
    layers = config.backbone.layers or default_layers(name, full, config.model.kind)
    truncated = truncate(build(name), layers)
    state, sha256 = read_weights(name, config.backbone.weights, config.seed)
    fill(truncated.network, state, full, f"the weights file for backbone.name {name}")
    return truncated.extractor().to(device), sha256


def _learn(
    fitter: GaussianFitter | MemoryBankFitter,
    patches: TrainingPatches,
    projection: Projection | None,
    progress: Progress,
) -> Scorer:
    if isinstance(fitter, GaussianFitter):
        return fitter.fit(patches, progress, projection)
    return fitter.fit(patches, progress)


def _fitter(config: Config) -> GaussianFitter | MemoryBankFitter:
    model = config.model
    if model.kind == "padim":
        return GaussianFitter(model.dimensions, model.projection, model.regularisation, config.seed)
    ratio = None if model.coreset_size is not None else model.coreset_ratio
    return MemoryBankFitter(ratio, model.coreset_size, seed=config.seed)


def _provisional(
    detector: AnomalyDetector,
    held_out: Sequence[Sample],
    workers: int,
    progress: StageProgress,
) -> tuple[Thresholds | None, dict[str, str], dict[str, str]]:
    """The highest scores among good images that the model hasn't learned from.

    Returns:
        The thresholds, the images' hashes by name, and the refused ones' reasons by name.
    """
    image, pixel = [], []
    hashes: dict[int, str] = {}
    refused: dict[str, str] = {}
    results = detector.predict([s.path for s in held_out], workers=workers)
    for done, result in enumerate(results, 1):
        if isinstance(result, Refused):
            refused[held_out[result.index].name] = result.reason
        else:
            hashes[result.index] = result.image.sha256
            image.append(result.image_score)
            pixel.append(float(np.nanmax(result.anomaly_map())))
        progress("threshold", done, len(held_out))
    named = {held_out[i].name: hashes[i] for i in sorted(hashes)}
    if not image:
        return None, named, refused
    return Thresholds(max(image), max(pixel), "provisional", len(image)), named, refused


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now

    def move(self, source: str, target: str, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] = seconds
