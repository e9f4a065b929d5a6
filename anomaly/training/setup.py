"""What is settled before the first training image is learned from."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anomaly.backbones.embedder import Embedder, choose_precision, network_input
from anomaly.backbones.extractor import FeatureExtractor
from anomaly.backbones.registry import Normalisation, normalisation
from anomaly.config.schema import Config
from anomaly.datasets import Sample
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import NetworkInput, size_of
from anomaly.imaging.region import Region
from anomaly.methods.base import Fitter, Scorer
from anomaly.scoring.build import backbone, fitter_of, loading_of, region_of
from anomaly.scoring.pipeline import Model

log = logging.getLogger(__name__)

_TRIAL_IMAGES = 4  # that show whether bf16 is safe


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """All stages of a model but the scorer, and what fits one.

    Attributes:
        config: all settings, the precision chosen.
        extractor: the backbone on its device, in that precision.
        normalise: what the backbone expects of its input.
        fitter: of the method, prepared.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        device: where the network and the scorer run.
        weights_sha256: of the weights file; None for random ones.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    fitter: Fitter[Any]
    region: Region | None
    aspect: float | None
    device: torch.device
    weights_sha256: str | None

    @property
    def embedder(self) -> Embedder:
        """How network inputs become patch embeddings."""
        return Embedder(self.extractor, self.normalise, self.fitter.align, self.device)

    def detector(self, scorer: Scorer) -> Model:
        """What a scorer that was fitted makes a detector of."""
        return Model(
            self.config,
            self.extractor,
            self.normalise,
            scorer,
            None,
            self.device,
            self.region,
            self.aspect,
        )


def prepare(
    config: Config, samples: Sequence[Sample], decoders: Decoders, device: torch.device
) -> TrainingSetup:
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
    region, aspect = region_of(config.image, Path()), _aspect(config, samples, decoders)
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
    return TrainingSetup(
        config, extractor, normalise, fitter, region, aspect, device, weights_sha256
    )


def _aspect(config: Config, samples: Sequence[Sample], decoders: Decoders) -> float | None:
    """H/W of most training images, where the model needs one for all."""
    if not config.one_aspect:
        return None
    headers = decoders.map(size_of, [s.path for s in samples if s.image is None])
    sizes = [size for size in headers if isinstance(size, tuple)]
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
