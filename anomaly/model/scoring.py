"""ScoringPipeline: the stages from images to predictions, wired to one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_numpy, module_of
from anomaly.calibration import Thresholds
from anomaly.config.methods import METHODS
from anomaly.config.schema import Config
from anomaly.errors import DataError, ImageError
from anomaly.features.exported import ExportedNetwork
from anomaly.features.inside import inside_of
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import AnyView, Tiling
from anomaly.imaging.image import Image
from anomaly.imaging.preprocessing import (
    Loaded,
    Loading,
    UnusableImage,
    by_shape,
    refusal,
    refuse_missed,
)
from anomaly.imaging.region import Region
from anomaly.model.appearance import Appearance, appearances_of
from anomaly.model.appearance_model import AppearanceModel
from anomaly.model.image_score import image_scores, network_map, with_border_damped
from anomaly.model.prediction import Prediction
from anomaly.model.settings import loading_of
from anomaly.runtime import in_parallel, take_threads
from anomaly.scorers.base import PatchScores

if TYPE_CHECKING:
    import torch

    from anomaly.features.backbones import Normalisation
    from anomaly.features.embedder import Embedder
    from anomaly.features.extractor import FeatureExtractor
    from anomaly.scorers.base import Scorer

_TILES_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class ScoringPipeline:
    """From loaded images to predictions: backbone, alignment, patch scores, image scores, verdicts.

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
    def loading(self) -> Loading:
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

    def score_all(
        self,
        images: Sequence[Path | Image],
        *,
        batch_size: int | None = None,
        workers: int = 2,
        keep_images: bool = False,
    ) -> Iterator[Prediction | UnusableImage]:
        """Score images with decoding processes of their own, and tell of those that can't be used.

        Args:
            images: files, or pixels that are decoded already.
            batch_size: images at once; the config's by default.
            workers: decoding processes.
            keep_images: whether the predictions are to have the decoded images.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used. With images of
            several shapes the order isn't that of `images`; `index` tells.
        """
        task = Task(self.loading, keep_image=keep_images)
        with Decoders(min(workers, len(images)), task) as decoders:
            loaded = self.fitting(decoders.load_all(enumerate(images)))
            yield from self.predict_batches(by_shape(loaded, batch_size or self.config.batch_size))

    def fitting(self, items: Iterable[Loaded | UnusableImage]) -> Iterator[Loaded | UnusableImage]:
        """Refuse images whose patches all lie outside the region, so that no batch holds any.

        Args:
            items: loaded images; those refused already pass through.
        """
        return refuse_missed(items, self.embedder.grid, self.region)

    def predict_batches(
        self, batches: Iterable[list[Loaded] | UnusableImage]
    ) -> Iterator[Prediction | UnusableImage]:
        """Score loaded images, as `anomaly.imaging.preprocessing.by_shape` gathers them.

        Args:
            batches: images of one network size each, gathered from what `fitting` lets pass.

        Yields:
            One result for each image, in the batches' order.
        """
        take_threads()
        tiled = self.config.image.tile is not None
        # A large image's tiles go side by side already.
        together = map if tiled else partial(in_parallel, device=self.device)
        for results in together(self._attempt, batches):
            yield from results

    def _attempt(self, batch: list[Loaded] | UnusableImage) -> Sequence[Prediction | UnusableImage]:
        if isinstance(batch, UnusableImage):
            return [batch]
        try:
            scored = self.score(batch)
        except (ImageError, DataError) as error:
            # A large image that has vanished between two tiles; another grid than PaDiM's.
            return [refusal(item.index, item.name, error) for item in batch]
        return [one if math.isfinite(one.score) else _unscored(one) for one in scored]

    def score(self, batch: Sequence[Loaded]) -> list[Prediction]:
        """Score loaded images of one network size, or large images in tiles.

        Raises:
            DataError: the region to look at holds none of an image's patches, or the scorer
                doesn't take its grid.
        """
        if isinstance(batch[0].view, Tiling):
            return [self._score_tiles(item) for item in batch]
        every = zip(batch, *self._scored(batch), strict=True)
        return [self._prediction(*image) for image in every]

    def _score_tiles(self, item: Loaded) -> Prediction:
        """Score one large image; only a few batches of tiles are in memory beside it."""
        rows, columns = (len(pieces) for pieces in item.view.axes)
        mosaic: _Patches | None = None
        whole: Appearance | None = None
        best = -math.inf
        # Tiles are many and large: smaller batches keep what is in memory small.
        tiles = item.tiles(min(self.config.batch_size, _TILES_AT_ONCE))
        done = in_parallel(lambda batch: (batch, *self._scored(batch)), tiles, self.device)
        for batch, patches, scores, looks in done:
            best = float(np.max([best, *scores]))  # NaN stays NaN
            for tile, part, one in zip(batch, patches, looks, strict=True):
                mosaic = mosaic or part.tiled(rows, columns)
                mosaic.put(tile.tile, part)
                whole = one if whole is None else whole + one
        assert mosaic is not None
        assert whole is not None
        return self._prediction(item, mosaic, best, whole)

    def _scored(
        self, batch: Sequence[Loaded]
    ) -> tuple[list[_Patches], list[float], list[Appearance]]:
        """Patches, image scores and looks of images or tiles."""
        with self.embedder.quietly():
            embeddings = self.embedder(batch)
            inside = inside_of(batch, embeddings, self.region)
            looks = appearances_of(batch, embeddings, inside)
            found, scores = self.score_patches(embeddings, batch[0].layout, inside)
        nearest = None if found.nearest is None else as_numpy(found.nearest)
        patches = [
            _Patches(p, None if nearest is None else nearest[i])
            for i, p in enumerate(as_numpy(found.scores))
        ]
        return patches, scores.tolist(), looks

    def _prediction(
        self, item: Loaded, patches: _Patches, score: float, look: Appearance
    ) -> Prediction:
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
            thresholds=self.thresholds,
            reason=self.reason_to_look(look),
        )

    def reason_to_look(self, look: Appearance) -> str:
        """Why a person has to look at an image, whatever its score; empty where none does."""
        return look.blank or ("" if self.appearance is None else self.appearance.deviation(look))

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
        shown, broken, values = patches, ~xp.isfinite(patches.scores), patches.scores
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


def _unscored(one: Prediction) -> UnusableImage:
    return UnusableImage(
        one.index,
        "failed",
        f"{one.name}: its score isn't a finite number, so the model is damaged or numbers overflow "
        "in its network; try another image, --precision fp32, or train again",
    )


@dataclass(frozen=True, eq=False)
class _Patches:
    """Scores and nearest bank vectors of an image's patches, (h, w) each."""

    scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None

    def tiled(self, rows: int, columns: int) -> _Patches:
        """Room for so many grids like this one."""
        times = (rows, columns)
        nearest = None if self.nearest is None else np.tile(self.nearest, times)
        return _Patches(np.tile(self.scores, times), nearest)

    def put(self, tile: tuple[int, int], part: _Patches) -> None:
        """Fill in one tile."""
        height, width = part.scores.shape
        here = np.s_[
            tile[0] * height : (tile[0] + 1) * height, tile[1] * width : (tile[1] + 1) * width
        ]
        self.scores[here] = part.scores
        if self.nearest is not None and part.nearest is not None:
            self.nearest[here] = part.nearest
