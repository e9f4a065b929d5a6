"""What is settled before the first training image is learned from."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.features.backbones import Normalisation, normalisation
from anomaly.features.embedder import network_input
from anomaly.features.extractor import FeatureExtractor
from anomaly.features.precision import choose_precision
from anomaly.imaging.decoder_pool import Decoders, read_mask
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import NetworkInput, size_of
from anomaly.model.build import backbone, fitter_of
from anomaly.model.cluster_patches import ClusterPatches
from anomaly.model.settings import loading_of, region_of
from anomaly.model.training_patches import TrainingPatches
from anomaly.model.untrained import Untrained
from anomaly.runtime.actors import Cluster
from anomaly.scorers.base import Progress

log = logging.getLogger(__name__)

_TRIAL_IMAGES = 4  # that show whether bf16 is safe


@dataclass(frozen=True, eq=False)
class Prepared(Untrained):
    """A model before it has learned, whose precision is chosen.

    Attributes:
        weights_sha256: of the weights file; None for random ones.
    """

    weights_sha256: str | None

    def patches(
        self,
        samples: Sequence[Sample],
        decoders: Decoders,
        scratch: Path,
        cluster: Cluster | None,
        progress: Progress,
    ) -> TrainingPatches:
        """The training images' patches, computed by a cluster's workers where there is one."""
        images = {i: sample.source for i, sample in enumerate(samples)}
        if cluster is None:
            return TrainingPatches(images, decoders, self, scratch, progress=progress)
        return ClusterPatches(cluster, images, decoders, self, scratch, progress=progress)


def prepare(
    config: Config, samples: Sequence[Sample], decoders: Decoders, device: torch.device
) -> Prepared:
    """Load the backbone, tell the decoders what to do, and choose the precision.

    Args:
        config: all settings; `config.data` isn't read.
        samples: the training images.
        decoders: what reads them.
        device: where the network and the scorer are to run.

    Raises:
        AnomalyError: weights, layers or images can't be used as configured.
    """
    extractor, weights_sha256 = backbone(config, device)
    normalise = normalisation(config.backbone.name)
    region, aspect = region_of(config.image, Path(), read_mask), _aspect(config, samples, decoders)
    stride, patch = extractor.coarsest_stride, extractor.patch
    decoders.begin(Task(loading_of(config, stride, region, aspect, patch)))
    extractor = _in_chosen_precision(config, extractor, normalise, samples, decoders, device)
    config = config.model_copy(update={"precision": extractor.precision})
    fitter = fitter_of(config).prepared(sum(extractor.channels), device)
    log.debug(
        "%s: %s, strides %s, in %s",
        config.backbone.name,
        ", ".join(extractor.layers),
        extractor.strides,
        extractor.precision,
    )
    return Prepared(config, extractor, normalise, fitter, region, aspect, device, weights_sha256)


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


def _trial(samples: Sequence[Sample], decoders: Decoders) -> list[NetworkInput]:
    """A few usable images of one size, from all over the list."""
    trial: list[NetworkInput] = []
    for i in range(0, len(samples), max(1, len(samples) // _TRIAL_IMAGES)):
        item = decoders.load(samples[i].source)
        if isinstance(item, NetworkInput):
            item = next(item.tiles(1))[0]
        if isinstance(item, NetworkInput) and (not trial or item.view.size == trial[0].view.size):
            trial.append(item)
    return trial[:_TRIAL_IMAGES]
