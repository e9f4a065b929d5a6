"""ScoringPipeline: the stages from network inputs to predictions, wired to one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_numpy, module_of
from anomaly.calibration import Thresholds
from anomaly.config.methods import METHODS
from anomaly.config.schema import Config
from anomaly.features.exported import ExportedNetwork
from anomaly.features.inside import inside_of
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import NetworkInput, Preprocessing
from anomaly.imaging.region import Region
from anomaly.model.appearance import Appearance, appearances_of
from anomaly.model.appearance_model import AppearanceModel
from anomaly.model.image_score import image_scores, network_map, with_border_damped
from anomaly.model.prediction import Prediction
from anomaly.model.settings import loading_of
from anomaly.scorers.base import PatchScores

if TYPE_CHECKING:
    import torch

    from anomaly.features.backbones import Normalisation
    from anomaly.features.embedder import Embedder
    from anomaly.features.extractor import FeatureExtractor
    from anomaly.scorers.base import Scorer


@dataclass(frozen=True, eq=False)
class Embedded:
    """What the backbone makes of a few images or tiles of one network size.

    Attributes:
        embeddings: (B, h, w, D).
        inside: (B, h, w) bool, the patches that count; None for all.
        looks: what each is like as a whole.
    """

    embeddings: Array
    inside: Array | None
    looks: Sequence[Appearance]

    def only(self, places: Sequence[int]) -> Embedded:
        """Those at some of the places, which ascend."""
        if len(places) == len(self.looks):
            return self
        some = list(places)
        inside = None if self.inside is None else self.inside[some]
        return Embedded(self.embeddings[some], inside, [self.looks[i] for i in some])


@dataclass(frozen=True, eq=False)
class Patches:
    """Scores and nearest bank vectors of an image's patches, (h, w) each."""

    scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class ScoringPipeline:
    """A model's stages: backbone, alignment, patch scores, image scores, predictions.

    Nothing in it changes while it runs, so threads may share it. Embeddings and patch scores are
    tensors; numpy arrays where an `ExportedNetwork` and an `ArrayScorer` stand in for extractor and
    scorer, with nothing to normalise, and torch may be absent.

    Attributes:
        config: all settings; `config.data` isn't read.
        extractor: the truncated backbone.
        normalise: what the backbone expects of its input.
        scorer: what good patches look like.
        thresholds: None where there were no good images to find them with.
        device: where the network and the scorer are.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        appearance: what images look like as a whole; None where there were too few to tell.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    scorer: Scorer
    thresholds: Thresholds | None
    device: torch.device
    region: Region | None = None
    aspect: float | None = None
    appearance: AppearanceModel | None = None

    @cached_property
    def loading(self) -> Preprocessing:
        """How files become network inputs."""
        network = self.extractor
        return loading_of(
            self.config, network.coarsest_stride, self.region, self.aspect, network.patch
        )

    @cached_property
    def embedder(self) -> Embedder:
        """How network inputs become patch embeddings."""
        if isinstance(self.extractor, ExportedNetwork):
            return cast(Any, self.extractor)
        from anomaly.features.embedder import Embedder

        return Embedder(self.extractor, self.normalise, self.scorer.align, self.device)

    def embedded(self, batch: Sequence[NetworkInput]) -> Embedded:
        """What the backbone makes of images or tiles of one network size.

        Raises:
            DataError: the region to look at holds none of an image's patches.
        """
        embeddings = self.embedder(batch)
        inside = inside_of(batch, embeddings, self.region)
        return Embedded(embeddings, inside, appearances_of(batch, embeddings, inside))

    def patches_of(self, embedded: Embedded, layout: AnyView) -> tuple[list[Patches], list[float]]:
        """Patches and image scores of images or tiles.

        Args:
            embedded: theirs.
            layout: how the image was turned into the network's inputs that they come from.

        Raises:
            DataError: the scorer doesn't take their grid.
        """
        found, scores = self.score_patches(embedded.embeddings, layout, embedded.inside)
        nearest = None if found.nearest is None else as_numpy(found.nearest)
        patches = [
            Patches(p, None if nearest is None else nearest[i])
            for i, p in enumerate(as_numpy(found.scores))
        ]
        return patches, scores.tolist()

    def prediction(
        self,
        item: NetworkInput,
        look: Appearance,
        patches: Patches,
        score: float,
        product: str,
        reason: str,
    ) -> Prediction:
        """What is made of one image.

        Args:
            item: the image.
            look: what it is like as a whole.
            patches: its own, those of all its tiles together.
            score: its image score.
            product: that it was scored as; empty for a model that isn't one of several.
            reason: why a person has to look at it; empty where nothing is the matter.
        """
        return Prediction(
            index=item.index,
            path=item.path,
            sha256=item.sha256,
            image=item.image,
            view=item.view,
            patch_scores=patches.scores,
            nearest=patches.nearest,
            score=score,
            smoothing=self.config.model.smoothing,
            halo_damping=self.config.model.halo_damping,
            loading=self.loading,
            look=look,
            thresholds=self.thresholds,
            reason=reason,
            product=product,
        )

    def reason_to_look(self, look: Appearance) -> str:
        """Why a person has to look at an image, whatever its score; empty where none does."""
        if look.blank or self.appearance is None:
            return look.blank
        turned = self.config.model.turned_copies != "none"
        return self.appearance.deviation(look, turned=turned)

    def score_patches(
        self, embeddings: Array, layout: AnyView, inside: Array | None = None
    ) -> tuple[PatchScores, Array]:
        """Score patch embeddings.

        Args:
            embeddings: (B, h, w, D), as `embedder` makes them.
            layout: how the image was turned into the network's inputs that they come from.
            inside: (B, h, w) bool, the patches that count; None for all.

        Returns:
            The patch scores, NaN where they don't count, and the image scores (B,) float32; -inf
            where no patch counts, which only a tile can have, and NaN where the score of one that
            counts isn't a finite number.
        """
        model, xp = self.config.model, module_of(embeddings)
        how = self.config.image_score_in_force
        patches = self.scorer.score(embeddings)
        shown, broken = patches, ~xp.isfinite(patches.scores)
        values = self.scorer.weighted(patches)
        if layout.whole:  # the borders of tiles lie amid the image
            values = with_border_damped(values, layout.size, model.border_damping)
        if inside is not None:
            shown = replace(patches, scores=xp.where(inside, patches.scores, math.nan))
            broken &= inside
        if how in METHODS[model.kind].image_scores:
            counted = values if inside is None else xp.where(inside, values, -math.inf)
            scores = self.scorer.image_scores(embeddings, replace(patches, scores=counted))
        else:
            maps = network_map(values, layout.size, model.smoothing, inside)
            counted = values if inside is None else xp.where(inside, values, math.nan)
            scores = image_scores(counted, maps, how)
        return shown, xp.where(broken.reshape(len(broken), -1).any(1), math.nan, scores)
