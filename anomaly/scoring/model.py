"""Trained model: images -> predictions, whole or tile by tile."""

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


_LEAST_SCORE = 1e-12  # damping raises scores to a power, which has no gradient at 0
_TILES_AT_ONCE = 4  # tiles are large; small batches save memory


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageStages:
    """The stages from an image file to feature maps.

    Attributes:
        config: all settings, with the precision in use; `config.data` isn't read.
        extractor: the truncated backbone on its device.
        normalise: normalisation of the backbone's input.
        device: device of the network and the scorer.
        region: region of each image that counts; None for the whole image.
        aspect: H/W that images must have; None for any.
        reference: reference image that parts are aligned with; None without alignment.
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
        """Preprocessing from files to network inputs."""
        return loading_of(self.config, self.extractor, self.region, self.aspect, self.reference)


@dataclass(frozen=True, eq=False, kw_only=True)
class Model(ImageStages):
    """A trained model: backbone, alignment, patch scores, image scores, predictions.

    Nothing in it changes while it runs, so threads may share it. Embeddings and patch scores are
    tensors; numpy arrays where an `ExportedNetwork` and an `ArrayScorer` stand in for extractor and
    scorer, with nothing to normalise, and torch may be absent.

    Attributes:
        scorer: scorer of patch embeddings, fitted to good patches.
        thresholds: thresholds of the image score; None if no good images were left to set them.
        training_statistics: statistics of the training images; None if unknown.
        manifest: origin of the model (data, versions, choices), as in the folder's manifest.
        model_id: first 16 digits of the manifest's SHA-256; empty for an unsaved model.
        folder: the model folder that it was loaded from; None for a model trained just now.
        history: earlier changes of thresholds, in lines of JSON: the folder's history.jsonl.
        changes: changes of thresholds since loading; saving appends them to the history.
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
        """Target rates (review, reject) of new thresholds; the second is at most the first.

        Args:
            review_rate: share of good parts that may be called anything but good; by default the
                present thresholds' target, else the config's.
            reject_rate: share of good parts that may be rejected; the same defaults.
        """
        config, now = self.config.calibration, self.thresholds
        review = review_rate or (now and now.to_review.target) or config.review_rate
        reject = reject_rate or (now and now.to_reject.target) or config.reject_rate
        if reject <= review:
            return review, reject
        # A rejected part isn't called good either. The rate that wasn't given adapts; if both were
        # given, the reject rate does.
        return (reject, reject) if reject_rate is not None else (review, review)

    @cached_property
    def embedder(self) -> Embedder:
        """The stage from network inputs to patch embeddings."""
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
            images: files, arrays, PIL images or tensors; read at most a few batches ahead.
            keep_images: keep the decoded images in the predictions.

        Yields:
            One result for each image, `UnusableImage` for those that can't be used. Images of one
            size are batched, so the order changes; `index` is the image's place.
        """
        decoders = Decoders(self.loading, keep_image=keep_images)
        loaded = decoders.load_all(sources(images, self.loading.decoding))
        return self.predict_batches(by_shape(self.fitting(loaded), self.batch_size))

    def fitting(
        self, items: Iterable[NetworkInput | UnusableImage]
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Loaded images; an image without a patch inside the region becomes an unusable one.

        Args:
            items: loaded and unusable images.
        """
        return inspectable(items, self.embedder.grid, self.region)

    def predict_batches(
        self, batches: Iterable[list[NetworkInput] | UnusableImage]
    ) -> Iterator[Prediction | UnusableImage]:
        """Score batches of loaded images.

        Args:
            batches: images of one network size each, from `by_shape` over `fitting`.

        Yields:
            One result for each image, in the batches' order.
        """
        apply_thread_limit()
        check_fork(self.device)
        tiled = self.config.image.tile is not None
        # The tiles of one large image are scored in parallel already.
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
            DataError: the region holds none of an image's patches, or the scorer doesn't take
                the image's patch grid.
        """
        if not batch[0].view.whole:
            return [self._prediction(item, self._tiles_scored(item)) for item in batch]
        return [self._prediction(*both) for both in zip(batch, self._scored(batch), strict=True)]

    def _tiles_scored(self, item: NetworkInput) -> _Scored:
        """Scores of one large image, put together from its tiles."""
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
            DataError: the region holds none of an image's patches, or the scorer doesn't take
                the image's patch grid.
        """
        with self.embedder.inference_mode():
            embeddings, pieces = self.embedder(batch), pieces_of(batch)
            inside = patches_inside(pieces, embeddings, self.region)
            statistics = statistics_of(batch, embeddings, inside)
            patches, scores = self.score_patches(embeddings, pieces, inside)
            nearest = [None] * len(scores) if patches.nearest is None else as_numpy(patches.nearest)
            columns = statistics, as_numpy(patches.scores), nearest, scores.tolist()
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
        """Reason for review of an image whatever its score; empty without one.

        Args:
            view: geometry from the image to the network's input.
            statistics: statistics of the whole image.
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
        """Reason for review if a moved part's `image.region` reaches beyond the photograph.

        Half a patch is allowed. Without `image.region` the whole frame counts, and any shift moves
        a rim of it out of the photograph, in training images, too; then only the pose is limited.
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
            embeddings: patch embeddings (B, h, w, D) from `embedder`.
            pieces: layout, tile and turn of each image.
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
        """The result of `score_patches` from patch scores.

        Args:
            patches: patch scores (B, h, w) from the scorer.
            embeddings: their patch embeddings (B, h, w, D).
            pieces: layout, tile and turn of each image.
            inside: (B, h, w) bool, the patches that count; None for all.
            top: number of values in the highest 1 %; None to count the values first.
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
        """Image scores (B,) by the model's rule, from the patches that count."""
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
        # The map takes no notice of patches that don't count, so `values` may go in as they are.
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
    """Score samples.

    Args:
        model: the trained model.
        samples: the images.
        peaks: compute the highest value of each anomaly map, too.
        progress: called with (images done, number of images).

    Returns:
        One result for each sample, in the samples' order; without a score for unusable images.
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
        statistics: statistics of the whole image or tile.
        patches: (h, w) float32, the patch scores; NaN doesn't count.
        nearest: (h, w) int64, the bank vector nearest to each patch; None without a bank.
        score: the image score; the highest of the tiles' scores.
    """

    statistics: ImageStatistics
    patches: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    score: float


def _mosaic(tiles: Sequence[NDArray[Any]], columns: int) -> NDArray[Any]:
    """The grid of a whole image from its tiles' grids (h, w), given row by row."""
    rows = range(0, len(tiles), columns)
    return np.block([list(tiles[first : first + columns]) for first in rows])
