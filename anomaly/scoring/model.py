"""Model: images -> predictions, whole or tile by tile, and how the model was made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from anomaly.backbones.engine import ExportedNetwork
from anomaly.calibration.thresholds import Thresholds
from anomaly.config.schema import METHODS, Config
from anomaly.datasets.samples import Sample
from anomaly.errors import DataError, ImageError
from anomaly.imaging.alignment import Reference
from anomaly.imaging.arrays import Array, ImageLike, as_numpy, is_one, module_of, sources
from anomaly.imaging.geometry import Region, View, beyond
from anomaly.imaging.loading import (
    NetworkInput,
    Preprocessing,
    UnusableImage,
    by_shape,
    inspectable,
    to_unusable,
)
from anomaly.imaging.pool import Decoders
from anomaly.maps.anomaly_map import without_halo
from anomaly.methods.base import PatchScores, Scorer
from anomaly.runtime import Progress, apply_thread_limit, check_fork, in_parallel
from anomaly.scoring.build import loading_of, smallest_area
from anomaly.scoring.image_score import (
    Piece,
    area_on_map,
    image_scores,
    levels_of_areas,
    network_map,
    patches_inside,
    pieces_of,
)
from anomaly.scoring.image_statistics import ImageStatistics, TrainingStatistics, statistics_of
from anomaly.scoring.prediction import Prediction, Scored

if TYPE_CHECKING:
    import torch

    from anomaly.backbones.extractor import Embedder, FeatureExtractor, Normalisation


_LEAST_SCORE = 1e-12  # where a power has a gradient
# Tiles are large: small batches keep what is in memory small.
_TILES_AT_ONCE = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStages:
    """The stages from an image to what the network makes of it.

    Attributes:
        config: all settings, the precision chosen; `config.data` isn't read.
        extractor: the truncated backbone on its device.
        normalise: what the backbone expects of its input.
        device: where the network and the scorer are.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        reference: says where the part lies in each image; None where images are seen as they are.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    device: torch.device
    region: Region | None = None
    aspect: float | None = None
    reference: Reference | None = None

    @cached_property
    def loading(self) -> Preprocessing:
        """Preprocessing that makes network inputs of files."""
        return loading_of(self.config, self.extractor, self.region, self.aspect, self.reference)


@dataclass(frozen=True, eq=False, kw_only=True)
class Model(ImageStages):
    """A trained model: backbone, alignment, patch scores, image scores, predictions.

    Nothing in it changes while it runs, so threads may share it. Embeddings and patch scores are
    tensors; numpy arrays where an `ExportedNetwork` and an `ArrayScorer` stand in for extractor and
    scorer, with nothing to normalise, and torch may be absent.

    Attributes:
        scorer: what good patches look like.
        thresholds: None where there were no good images to find them with.
        training_statistics: what its training images have in common; None where that isn't known.
        manifest: what the model folder says, or will say, of how the model was made.
        model_id: names the model in a folder, the first 16 digits of its manifest's sha256; empty
            for one that hasn't been saved.
        folder: the model folder that it was loaded from; None where there is none.
        history: earlier changes of thresholds, in lines of JSON: that folder's history.jsonl.
        changes: of thresholds since; saving adds them to the history.
    """

    scorer: Scorer
    thresholds: Thresholds | None
    training_statistics: TrainingStatistics | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    model_id: str = ""
    folder: Path | None = None
    history: bytes = b""
    changes: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The model's name in its config."""
        return self.config.name

    @property
    def method(self) -> str:
        """The method's name in the literature."""
        return METHODS[self.config.model.kind].title

    @property
    def unit(self) -> str:
        """Name of the score's unit, for people."""
        return self.scorer.unit

    def rates(
        self, review_rate: float | None = None, reject_rate: float | None = None
    ) -> tuple[float, float]:
        """Shares of good parts for review and for rejection, to find thresholds for.

        Args:
            review_rate: that may not be called good; by default that of the present thresholds,
                else the config's.
            reject_rate: that may be rejected; by default as well.

        Returns:
            Both; a rejected part isn't called good either, so the second is at most the first.
        """
        config, now = self.config.calibration, self.thresholds
        review = review_rate or (now and now.to_review.target) or config.review_rate
        reject = reject_rate or (now and now.to_reject.target) or config.reject_rate
        if reject <= review:
            return review, reject
        # One of them gives way: the one that wasn't given, or the rate of rejection.
        return (reject, reject) if reject_rate is not None else (review, review)

    @cached_property
    def embedder(self) -> Embedder:
        """How network inputs become patch embeddings."""
        if isinstance(self.extractor, ExportedNetwork):
            return cast(Any, self.extractor)
        from anomaly.backbones.extractor import Embedder

        return Embedder(self.extractor, self.normalise, self.scorer.align, self.device)

    @property
    def batch_size(self) -> int:
        """Default number of images computed together."""
        return self.embedder.max_batch_size(self.config.batch_size)

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction | list[Prediction]:
        """Score one image, or several; see `anomaly.Detector.predict`.

        Raises:
            ImageError: an image can't be used; says which and why.
        """
        if is_one(images):
            (prediction,) = map(_usable, self.results([images]))
            return prediction
        results = self.results(cast(Iterable[ImageLike], images))
        return sorted(map(_usable, results), key=lambda prediction: prediction.index)

    def results(
        self, images: Iterable[ImageLike], *, keep_images: bool = False
    ) -> Iterator[Prediction | UnusableImage]:
        """Results of images; unusable images have one too.

        Args:
            images: files, arrays, PIL images or tensors; read only a few batches ahead of what
                is yielded.
            keep_images: whether the predictions are to have the decoded images.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used; in another
            order than the images', as `index` tells.
        """
        decoders = Decoders(self.loading, keep_image=keep_images)
        loaded = decoders.load_all(sources(images, self.loading.decoding))
        return self.predict_batches(by_shape(self.fitting(loaded), self.batch_size))

    def fitting(
        self, items: Iterable[NetworkInput | UnusableImage]
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Refuse images whose patches all lie outside the region.

        Args:
            items: loaded images; those refused already pass through.
        """
        return inspectable(items, self.embedder.grid, self.region)

    def predict_batches(
        self, batches: Iterable[list[NetworkInput] | UnusableImage]
    ) -> Iterator[Prediction | UnusableImage]:
        """Score loaded images, as `anomaly.imaging.loading.by_shape` gathers them.

        Args:
            batches: images of one network size each, gathered from what `fitting` lets pass.

        Yields:
            One result for each image, in the batches' order.
        """
        apply_thread_limit()
        check_fork(self.device)
        tiled = self.config.image.tile is not None
        # A large image's tiles go side by side already.
        together = map if tiled else partial(in_parallel, device=self.device)
        for results in together(self._attempt, batches):
            yield from results

    def _attempt(
        self, batch: list[NetworkInput] | UnusableImage
    ) -> Sequence[Prediction | UnusableImage]:
        if isinstance(batch, UnusableImage):
            return [batch]
        try:
            predictions = self.score(batch)
        except (ImageError, DataError) as error:
            # A large image that has vanished between two tiles; another grid than PaDiM's.
            return [to_unusable(item.index, item.name, error) for item in batch]
        return [p if math.isfinite(p.score) else _without_score(p) for p in predictions]

    def score(self, batch: Sequence[NetworkInput]) -> list[Prediction]:
        """Score loaded images of one network size, or large images in tiles.

        Raises:
            DataError: the region to look at holds none of an image's patches, or the scorer
                doesn't take its grid.
        """
        if not batch[0].view.whole:
            return [self._prediction(item, self._tiles_scored(item)) for item in batch]
        return [self._prediction(*both) for both in zip(batch, self._scored(batch), strict=True)]

    def _tiles_scored(self, item: NetworkInput) -> _Scored:
        """The scores of one large image, from its tiles' in rows."""
        batches = item.tiles(min(self.batch_size, _TILES_AT_ONCE))
        tiles = chain.from_iterable(in_parallel(self._scored, batches, self.device))
        statistics, patches, nearest, scores = zip(*tiles, strict=True)
        columns = len(item.view.axes[1])
        return _Scored(
            reduce(add, statistics),
            _mosaic(patches, columns),
            None if nearest[0] is None else _mosaic(nearest, columns),
            float(np.max(scores)),  # NaN if one is
        )

    def _scored(self, batch: Sequence[NetworkInput]) -> list[_Scored]:
        """Scores of images or tiles of one network size.

        Raises:
            DataError: the region to look at holds none of an image's patches, or the scorer
                doesn't take its grid.
        """
        with self.embedder.inference_mode():
            embeddings, pieces = self.embedder(batch), pieces_of(batch)
            inside = patches_inside(pieces, embeddings, self.region)
            statistics = statistics_of(batch, embeddings, inside)
            found, scores = self.score_patches(embeddings, pieces, inside)
            nearest = [None] * len(scores) if found.nearest is None else as_numpy(found.nearest)
            columns = statistics, as_numpy(found.scores), nearest, scores.tolist()
            return [_Scored(*row) for row in zip(*columns, strict=True)]

    def _prediction(self, item: NetworkInput, scored: _Scored) -> Prediction:
        return Prediction(
            index=item.index,
            path=item.path,
            sha256=item.sha256,
            image=item.image,
            view=item.view,
            patch_scores=scored.patches,
            nearest=scored.nearest,
            score=scored.score,
            smoothing=self.config.model.smoothing,
            halo_damping=self.config.model.halo_damping,
            loading=self.loading,
            statistics=scored.statistics,
            thresholds=self.thresholds,
            reason=self.review_reason(item.view, scored.statistics),
        )

    def review_reason(self, view: View, statistics: ImageStatistics) -> str:
        """The reason for which an image isn't called good whatever its score; empty without one.

        Args:
            view: how the network saw the image.
            statistics: of the image as a whole.
        """
        pose, learned = view.pose, self.training_statistics
        reasons = ["" if pose is None else pose.reason or self.uninspected(view)]
        if statistics.blank or learned is None:
            reasons.append(statistics.blank)
        else:
            turned = self.config.model.turned_copies != "none"
            reasons.append(learned.deviation(statistics, turned=turned))
        return "; ".join(filter(None, reasons))

    def uninspected(self, view: View) -> str:
        """Reason for review where a moved part's `image.region` reaches beyond the photograph.

        Half a patch is no matter. Without `image.region` all of the frame counts, and any shift
        leaves a rim of it outside, in training images, too: the pose alone has limits then.
        """
        if self.region is None or self.region.look is None:
            return ""
        half = min(self.extractor.strides) / 2
        height, width = (half * axis[0].source / axis[0].resized for axis in view.axes)
        across, down = beyond(self.region, view)
        if across <= width and down <= height:
            return ""
        return (
            f"the region to look at reaches {math.ceil(max(across, down))} pixels beyond the "
            "photograph, so a part of it wasn't inspected (part out of view?)"
        )

    def score_patches(
        self, embeddings: Array, pieces: Sequence[Piece], inside: Array | None = None
    ) -> tuple[PatchScores, Array]:
        """Score patch embeddings.

        Args:
            embeddings: (B, h, w, D), as `embedder` makes them.
            pieces: where each comes from.
            inside: (B, h, w) bool, the patches that count; None for all.

        Returns:
            The patch scores, NaN where they don't count, and the image scores (B,) float32; -inf
            where no patch counts, and NaN where the score of one that counts isn't a finite number.
        """
        return self.image_scores_of(self.scorer.score(embeddings), embeddings, pieces, inside)

    def image_scores_of(
        self,
        patches: PatchScores,
        embeddings: Array,
        pieces: Sequence[Piece],
        inside: Array | None = None,
        top: int | None = None,
    ) -> tuple[PatchScores, Array]:
        """The result of `score_patches` for known patch scores.

        Args:
            patches: as the scorer gave them.
            embeddings: (B, h, w, D), those that were scored.
            pieces: where each comes from.
            inside: (B, h, w) bool, the patches that count; None for all.
            top: how many values the highest 1 % are; None to count them.
        """
        xp = module_of(embeddings)
        shown, broken = patches, ~xp.isfinite(patches.scores)
        values = self.scorer.weighted(patches)
        if inside is not None:
            shown = replace(patches, scores=xp.where(inside, patches.scores, math.nan))
            broken &= inside
        weighted = replace(patches, scores=values)
        scores = self._image_scores(weighted, embeddings, pieces, inside, top)
        return shown, xp.where(broken.reshape(broken.shape[0], -1).any(1), math.nan, scores)

    def _image_scores(
        self,
        patches: PatchScores,
        embeddings: Array,
        pieces: Sequence[Piece],
        inside: Array | None,
        top: int | None,
    ) -> Array:
        """Scores (B,) of the patches that count."""
        model = self.config.model
        how = "smallest_defect" if model.smallest_defect else model.image_score
        values, xp, size = patches.scores, module_of(embeddings), pieces[0][0].size
        if how in METHODS[model.kind].image_scores:
            counted = values if inside is None else xp.where(inside, values, -math.inf)
            return self.scorer.image_scores(embeddings, replace(patches, scores=counted))
        if how == "smallest_defect":
            sharp = values if inside is None else xp.where(inside, values, 0.0)
            sharp = without_halo(sharp.clip(_LEAST_SCORE), model.halo_damping)
            maps = network_map(sharp, size, model.smoothing, inside)
            least = smallest_area(self.config)
            return levels_of_areas(maps, [area_on_map(least, piece[0]) for piece in pieces])
        maps = network_map(values, size, model.smoothing, inside)
        counted = values if inside is None else xp.where(inside, values, math.nan)
        return image_scores(counted, maps, how, top)


def score(
    model: Model,
    samples: Sequence[Sample],
    *,
    peaks: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Scored]:
    """Score images.

    Args:
        model: trained.
        samples: the images.
        peaks: whether the highest value of each anomaly map is wanted.
        progress: called with (images done, all of them).

    Returns:
        One for each sample, in their order; those that can't be used have no score.
    """
    scored: dict[int, Scored] = {}
    sources = [sample.source for sample in samples]
    for result in model.results(sources):
        scored[result.index] = Scored.of(samples[result.index], result, peak=peaks)
        progress(len(scored), len(samples))
    return [scored[i] for i in range(len(samples))]


def _usable(result: Prediction | UnusableImage) -> Prediction:
    """The prediction; raises the error of an unusable image."""
    if isinstance(result, UnusableImage):
        raise ImageError(result.reason, result.status)
    return result


def _without_score(prediction: Prediction) -> UnusableImage:
    return UnusableImage(
        prediction.index,
        "failed",
        f"{prediction.name}: its score isn't a finite number, so the model is damaged or numbers "
        "overflow in its network; try another image, --precision fp32, or train again",
    )


class _Scored(NamedTuple):
    """The scores of an image, or of a tile.

    Attributes:
        statistics: of it as a whole.
        patches: (h, w) float32, the patch scores; NaN doesn't count.
        nearest: (h, w) int64, the bank vector nearest to each patch; None without a bank.
        score: the image score, of tiles the highest.
    """

    statistics: ImageStatistics
    patches: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    score: float


def _mosaic(tiles: Sequence[NDArray[Any]], columns: int) -> NDArray[Any]:
    """The grids (h, w) of tiles, row by row, as one of the whole image."""
    rows = range(0, len(tiles), columns)
    return np.block([list(tiles[first : first + columns]) for first in rows])
