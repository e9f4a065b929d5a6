"""Good images -> a fitted detector."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.errors import DataError
from anomaly.features.backbones import Normalisation, normalisation
from anomaly.features.embedder import Embedder, network_input
from anomaly.features.extractor import FeatureExtractor
from anomaly.features.precision import choose_precision
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.preprocessing import Loaded, size_of
from anomaly.imaging.shared_decoders import read_mask
from anomaly.model.appearance_model import AppearanceModel, odd_among
from anomaly.model.build import backbone, fitter_of
from anomaly.model.cluster_patches import ClusterPatches
from anomaly.model.detector import AnomalyDetector
from anomaly.model.detector_fit import DetectorFit, fit_detector
from anomaly.model.saving import manifest_of
from anomaly.model.settings import loading_of, region_of, turns_of
from anomaly.model.shard_worker import ShardJob
from anomaly.model.suspects import Suspect
from anomaly.model.training_patches import TrainingPatches
from anomaly.runtime.actors import Cluster
from anomaly.scorers.base import Scorer

log = logging.getLogger(__name__)

TRIAL_IMAGES = 4  # that show whether bf16 is safe

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class Training:
    """A fitted detector and what is worth knowing about how it came to be.

    Attributes:
        detector: ready to predict.
        learned: how many training images were learned from.
        refused: why a training image couldn't be used, by name.
        patches: how many patches were learned from.
        seconds: by stage.
        patch_pixels: height and width of one patch in original pixels, in the median.
        odd: training images that would be `review` for not being our part, had they not been
            learned from, by name.
        suspects: training images that look least like the others, the worst first; found on the
            way to the thresholds.
        stand_out: scores of those that stand out from all others, the worst first; see
            `anomaly.model.suspects.standing_out`. With `model.leave_out_suspects` nothing was
            learned from them.
    """

    detector: AnomalyDetector
    learned: int
    refused: dict[str, str]
    patches: int
    seconds: dict[str, float]
    patch_pixels: tuple[float, float]
    odd: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    stand_out: Mapping[str, float]


def train(
    config: Config,
    samples: Sequence[Sample],
    *,
    device: torch.device,
    scratch: Path,
    workers: int = 2,
    calibrate: bool = True,
    cluster: Cluster | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Training:
    """Learn what good looks like.

    The thresholds come from cross-fitted scores of the same images (`anomaly.model.cross_fitting`);
    the detector itself learns from all of them.

    Args:
        config: all settings; `config.data` isn't read.
        samples: good images.
        device: where the network and the scorer run.
        scratch: an existing folder for temporary files.
        workers: decoding processes.
        calibrate: whether to find thresholds.
        cluster: whose workers compute features and scores; all its machines see `scratch`.
        progress: called with (stage, done, total).

    Raises:
        DataError: two images have one name; a model knows its training images by their names.
        AnomalyError: weights, layers or images can't be used as configured.
    """
    for name, times in Counter(sample.name for sample in samples).items():
        if times > 1:
            raise DataError(f"{times} training images have the name {name!r}; each needs its own")
    with Decoders(min(workers, len(samples))) as decoders:
        return _train(config, samples, decoders, device, scratch, calibrate, cluster, progress)


def _train(
    config: Config,
    samples: Sequence[Sample],
    decoders: Decoders,
    device: torch.device,
    scratch: Path,
    calibrate: bool,
    cluster: Cluster | None,
    progress: StageProgress,
) -> Training:
    clock = _Clock()
    extractor, weights_sha256 = backbone(config, device)
    normalise = normalisation(config.backbone.name)
    region, aspect = region_of(config.image, Path(), read_mask), _aspect(config, samples, decoders)
    stride, patch = extractor.coarsest_stride, extractor.patch
    decoders.begin(Task(loading_of(config, stride, region, aspect, patch)))
    extractor = _in_chosen_precision(config, extractor, normalise, samples, decoders, device)
    config = config.model_copy(update={"precision": extractor.precision})
    fitter = fitter_of(config).prepared(sum(extractor.channels), device)
    clock.lap("backbone")
    log.debug(
        "%s: %s, strides %s, in %s",
        config.backbone.name,
        ", ".join(extractor.layers),
        extractor.strides,
        extractor.precision,
    )

    made_of: dict[str, Any] = {
        "images": {i: s.source for i, s in enumerate(samples)},
        "decoders": decoders,
        "embedder": Embedder(extractor, normalise, fitter.align, device),
        "batch_size": config.batch_size,
        "scratch": scratch,
        "aligned": fitter.compact,
        "region": region,
        "turns": turns_of(config),
        "progress": lambda done, total: progress("features", done, total),
    }
    shared: ClusterPatches | None = None
    if cluster is not None:
        job = ShardJob(config, extractor, normalise, fitter, region, aspect, device.type)
        shared = ClusterPatches(cluster, job, **made_of)
    patches = shared or TrainingPatches(**made_of)

    def detector_of(scorer: Scorer) -> AnomalyDetector:
        return AnomalyDetector(config, extractor, normalise, scorer, None, device, region, aspect)

    def fitted() -> None:
        clock.lap("scorer")
        clock.move("scorer", "features", patches.seconds)

    try:
        if shared is not None:
            shared.compute()
        fit = fit_detector(
            detector_of,
            patches,
            fitter,
            samples,
            calibrate=calibrate,
            score=None if shared is None else shared.score,
            fitted=fitted,
            selecting=lambda done, total: progress("scorer", done, total),
            calibrating=lambda done, total: progress("calibration", done, total),
        )
        if fit.suspects:
            clock.lap("calibration")
    finally:
        patches.close()
    spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in clock.seconds.items())
    log.debug("time: %s", spent)
    shard = None if shared is None else shared.shard
    return _training(fit, patches, samples, weights_sha256, shard, clock.seconds)


def _training(
    fit: DetectorFit,
    patches: TrainingPatches,
    samples: Sequence[Sample],
    weights_sha256: str | None,
    shard: int | None,
    seconds: dict[str, float],
) -> Training:
    """What came of a fit, with what is known of the images; `shard` of them went together."""
    used, detector = fit.images, fit.detector
    looks = [patches.looks[i] for i in used]
    hashes = {samples[i].name: patches.hashes[i] for i in used}
    unused = {samples[i].name: i for i in sorted({*range(len(samples))} - {*used})}
    manifest = manifest_of(detector, weights_sha256, hashes, unused)
    if shard is not None:
        manifest["made_with"]["shard_images"] = shard
    return Training(
        detector=replace(detector, appearance=AppearanceModel.of(looks), manifest=manifest),
        learned=len(used),
        refused={samples[r.index].name: r.reason for r in patches.refused},
        patches=patches.count_of(frozenset(used)),
        seconds=seconds,
        patch_pixels=_patch_pixels(patches, min(detector.extractor.strides)),
        odd=tuple(samples[used[place]].name for place in odd_among(looks)),
        suspects=fit.suspects,
        stand_out=fit.stand_out,
    )


def _patch_pixels(patches: TrainingPatches, stride: int) -> tuple[float, float]:
    """Original pixels that one patch is high and wide."""
    axes = [[pieces[0] for pieces in view.axes] for view in patches.views.values()]
    height, width = (
        statistics.median(stride * axis.source / axis.resized for axis in one)
        for one in zip(*axes, strict=True)
    )
    return height, width


def _aspect(config: Config, samples: Sequence[Sample], decoders: Decoders) -> float | None:
    """H/W of most training images, where the model needs one for all."""
    if not config.one_aspect:
        return None
    found = decoders.map(size_of, [s.path for s in samples if s.image is None])
    sizes = [size for size in found if isinstance(size, tuple)]
    sizes += [s.image.size for s in samples if s.image is not None]
    return statistics.median(height / width for height, width in sizes) if sizes else None


def _in_chosen_precision(
    config: Config,
    extractor: FeatureExtractor,
    normalise: Normalisation,
    samples: Sequence[Sample],
    decoders: Decoders,
    device: torch.device,
) -> FeatureExtractor:
    """The extractor in the precision that the model will have."""
    precision: str = config.precision
    if precision == "auto":
        trial = _trial(samples, decoders)
        images = network_input(trial, normalise, device) if trial else None
        precision = "fp32" if images is None else choose_precision(extractor, images)
    return extractor.to(device, precision)


def _trial(samples: Sequence[Sample], decoders: Decoders) -> list[Loaded]:
    """A few usable images of one size, from all over the list."""
    trial: list[Loaded] = []
    for i in range(0, len(samples), max(1, len(samples) // TRIAL_IMAGES)):
        item = decoders.load(samples[i].source)
        if isinstance(item, Loaded):
            item = next(item.tiles(1))[0]
        if isinstance(item, Loaded) and (not trial or item.view.size == trial[0].view.size):
            trial.append(item)
    return trial[:TRIAL_IMAGES]


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
