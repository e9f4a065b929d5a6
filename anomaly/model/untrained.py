"""A model before it has learned: all of its stages but the scorer, and what fits one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anomaly.config.schema import Config
from anomaly.features.backbones import Normalisation
from anomaly.features.embedder import Embedder
from anomaly.features.extractor import FeatureExtractor
from anomaly.imaging.region import Region
from anomaly.model.scoring import Model
from anomaly.scorers.base import Fitter, Scorer


@dataclass(frozen=True, eq=False)
class Untrained:
    """What is settled before the first training image is learned from.

    Attributes:
        config: all settings, the precision chosen.
        extractor: the backbone on its device, in that precision.
        normalise: what the backbone expects of its input.
        fitter: of the method, prepared.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        device: where the network and the scorer run.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    fitter: Fitter[Any]
    region: Region | None
    aspect: float | None
    device: torch.device

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
