"""AnomalyDetector: wires the stages from files to scores. `anomaly.training` makes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.aligner import PATCHCORE_ALIGNERS
from anomaly.anomaly_map import image_scores, network_map, source_map
from anomaly.backbones import Normalisation
from anomaly.config import Config
from anomaly.embedding import Embedder
from anomaly.errors import DataError
from anomaly.features import FeatureExtractor
from anomaly.geometry import Sizing, View
from anomaly.images import Image
from anomaly.lanes import side_by_side
from anomaly.loading import Loaded, Loading, Refused, by_shape, load_all
from anomaly.scorers.base import PatchScores, Scorer
from anomaly.scorers.gaussian import PatchGaussian
from anomaly.scorers.memory_bank import MemoryBank
from anomaly.scorers.projection import Projection


@dataclass(frozen=True)
class Thresholds:
    """Where good ends.

    Attributes:
        image: an image score above this is rejected.
        pixel: an anomaly-map value above this is marked.
        label: how the thresholds were found; `provisional` until calibrated.
        images: how many good images stand behind them.
    """

    image: float
    pixel: float
    label: str
    images: int

    def verdict(self, score: float) -> str:
        """`good` or `reject`."""
        return "reject" if score > self.image else "good"


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a detector makes of one image.

    Attributes:
        index: the image's place in the list of files.
        image: the decoded file.
        view: how the network saw it.
        patch_scores: (h, w) float32, distances; higher is more anomalous.
        nearest: (h, w) int64, the nearest bank vector of each patch; None without a bank.
        image_score: in the same unit.
        smoothing: of the anomaly map, in network pixels.
    """

    index: int
    image: Image
    view: View
    patch_scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    image_score: float
    smoothing: float

    def anomaly_map(self, strip: slice | None = None) -> NDArray[np.float32]:
        """(H0, W0) float32 in the image's own pixels; NaN where a crop hid it from the network."""
        return source_map(self.patch_scores, self.view, self.smoothing, strip)


@dataclass(frozen=True, eq=False)
class AnomalyDetector:
    """A trained detector. Immutable; made by `anomaly.training.fit` or `anomaly.checkpoint.load`.

    Attributes:
        config: all settings; `config.data` isn't read.
        extractor: the truncated backbone.
        normalise: what the backbone expects of its input.
        scorer: what good patches look like.
        thresholds: None where there were no good images to find them with.
        device: where the network and the scorer are.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    scorer: Scorer
    thresholds: Thresholds | None
    device: torch.device

    @property
    def loading(self) -> Loading:
        """How files become network inputs."""
        return loading_of(self.config, self.extractor)

    @property
    def embedder(self) -> Embedder:
        """How network inputs become patch embeddings."""
        projection = self.scorer.projection if isinstance(self.scorer, PatchGaussian) else None
        return embedder_of(self.config, self.extractor, self.normalise, self.device, projection)

    def predict(
        self, paths: Sequence[Path], *, batch_size: int | None = None, workers: int = 2
    ) -> Iterator[Prediction | Refused]:
        """Score image files.

        Args:
            paths: image files.
            batch_size: images at once; the config's by default.
            workers: decoding threads.

        Yields:
            One result for each file, `Refused` for those that can't be used. With images of
            several shapes the order isn't that of `paths`; `index` tells.
        """
        batches = by_shape(
            load_all(paths, self.loading, workers), batch_size or self.config.batch_size
        )
        for results in side_by_side(lambda b: self._attempt(b, paths), batches, self.device):
            yield from results

    def _attempt(
        self, batch: list[Loaded] | Refused, paths: Sequence[Path]
    ) -> Sequence[Prediction | Refused]:
        if isinstance(batch, Refused):
            return [batch]
        try:
            return self.score(batch)
        except DataError as error:  # another grid than PaDiM has learned, say
            return [
                Refused(item.index, "unsupported", f"{paths[item.index]}: {error}")
                for item in batch
            ]

    def score(self, batch: Sequence[Loaded]) -> list[Prediction]:
        """Score loaded images of one network size."""
        with torch.inference_mode():
            patches, scores = self.score_patches(self.embedder(batch), batch[0].view.size)
        patch_scores = patches.scores.cpu().numpy()
        nearest = None if patches.nearest is None else patches.nearest.cpu().numpy()
        return [
            Prediction(
                index=item.index,
                image=item.image,
                view=item.view,
                patch_scores=patch_scores[i],
                nearest=None if nearest is None else nearest[i],
                image_score=float(scores[i]),
                smoothing=self.config.model.smoothing,
            )
            for i, item in enumerate(batch)
        ]

    def score_patches(
        self, embeddings: Tensor, size: tuple[int, int]
    ) -> tuple[PatchScores, Tensor]:
        """Score patch embeddings.

        Args:
            embeddings: (B, h, w, D), as `embedder` makes them.
            size: (H, W) of the network's input that they come from.

        Returns:
            The patch scores, and the image scores (B,) float32 on the CPU.
        """
        model = self.config.model
        how = model.image_score_in_force
        patches = self.scorer.score(embeddings)
        if how == "reweighted" and isinstance(self.scorer, MemoryBank):
            return patches, self.scorer.reweighted(embeddings, patches, model.neighbours).cpu()
        maps = network_map(patches.scores, size, model.smoothing)
        return patches, image_scores(patches.scores, maps, how).cpu()


def loading_of(config: Config, extractor: FeatureExtractor) -> Loading:
    """How a config turns files into network inputs."""
    image = config.image
    sizing = Sizing(image.resize, image.crop, image.area, extractor.coarsest_stride)
    return Loading(sizing, image.bit_depth, image.max_pixels)


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
