"""The stages as a config wants them."""

from __future__ import annotations

import torch

from anomaly.config.schema import Config
from anomaly.features.aligner import PATCHCORE_ALIGNERS
from anomaly.features.backbones import Normalisation, build, default_layers, fill, read_weights
from anomaly.features.embedder import Embedder
from anomaly.features.extractor import FeatureExtractor, truncate
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.preprocessing import Loading
from anomaly.imaging.region import Region
from anomaly.scorers.padim.gaussian import GaussianFitter
from anomaly.scorers.padim.projection import Projection
from anomaly.scorers.patchcore.memory_bank import MemoryBankFitter

# What most networks shrink an image by in all: every layer's grid is then an even number of the
# next one's, and images of many aspects share so few sizes that batches are full.
_LEAST_MULTIPLE = 32


def loading_of(
    config: Config, extractor: FeatureExtractor, region: Region | None, aspect: float | None
) -> Loading:
    """How a config turns files into network inputs."""
    image = config.image
    sizing = Sizing(
        image.resize,
        image.crop,
        image.area,
        max(extractor.coarsest_stride, _LEAST_MULTIPLE),
        aspect,
        image.tile,
        image.overlap_in_force,
    )
    return Loading(sizing, image.bit_depth, image.max_pixels, region)


def embedder_of(
    config: Config,
    extractor: FeatureExtractor,
    normalise: Normalisation,
    device: torch.device,
    projection: Projection | None,
) -> Embedder:
    """How a config turns network inputs into patch embeddings; PaDiM's are projected on the way."""
    align = projection.of_maps if projection else PATCHCORE_ALIGNERS[config.model.embedding]
    return Embedder(extractor, normalise, align, device)


def backbone(config: Config, device: torch.device) -> tuple[FeatureExtractor, str | None]:
    """The truncated backbone that a config names, in fp32, and the hash of its weights' file.

    Raises:
        AnomalyError: the weights or layers can't be used as configured.
    """
    name = config.backbone.name
    full = build(name)
    layers = config.backbone.layers or default_layers(name, full, config.model.kind)
    truncated = truncate(build(name), layers)
    state, sha256 = read_weights(name, config.backbone.weights, config.seed)
    fill(truncated.network, state, full, f"the weights file for backbone.name {name}")
    return truncated.extractor().to(device, "fp32"), sha256


def fitter_of(config: Config) -> GaussianFitter | MemoryBankFitter:
    """What a config learns with."""
    model = config.model
    if model.kind == "padim":
        return GaussianFitter(model.dimensions, model.projection, model.regularisation, config.seed)
    ratio = None if model.coreset_size is not None else model.coreset_ratio
    return MemoryBankFitter(
        ratio, model.coreset_size, seed=config.seed, memory_limit=config.memory_limit * 1024**2
    )
