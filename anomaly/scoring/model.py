"""Trained model: images -> predictions, whole or tile by tile.

Patch scores become anomaly maps at the network's size, and image scores, here;
`anomaly.maps.anomaly_map` makes the map in an image's own pixels, by the same matrices.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.backbones.engine import ExportedNetwork
from anomaly.calibration.thresholds import Thresholds
from anomaly.config.schema import METHODS
from anomaly.datasets.samples import Sample
from anomaly.errors import DataError, ImageError, ModelError
from anomaly.imaging.arrays import Array, ImageLike, as_numpy, is_one, like, module_of, sources
from anomaly.imaging.geometry import Region, View, overhang, patch_mask
from anomaly.imaging.loading import (
    NetworkInput,
    Preprocessing,
    UnusableImage,
    by_shape,
    inspectable,
    to_unusable,
    turned,
)
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image, described
from anomaly.maps.anomaly_map import (
    MarkedRegion,
    SourceMap,
    highest,
    marked_regions,
    predicted_mask,
    upsampling_matrix,
    without_halo,
)
from anomaly.maps.heatmap import RgbImage, encode_png, heatmap
from anomaly.methods.base import PatchScores, Scorer
from anomaly.runtime import Progress, apply_thread_limit, check_fork, in_parallel
from anomaly.scoring.build import ImageStages, smallest_area
from anomaly.scoring.image_statistics import ImageStatistics, TrainingStatistics, statistics_of

if TYPE_CHECKING:
    from anomaly.backbones.extractor import Embedder


_NOTEBOOK_PIXELS = 600_000  # of a heatmap shown in a notebook
_LEAST_SCORE = 1e-12  # damping raises scores to a power, which has no gradient at 0
_TILES_AT_ONCE = 4  # tiles are large; small batches save memory

# Layout of an image, tile (row, column) and turn (0 to 7, see `anomaly.imaging.loading.turned`).
Piece: TypeAlias = tuple[View, tuple[int, int], int]


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The result of a detector for one image.

    Attributes:
        index: the image's place in the list of images, from 0.
        path: the image file; None for pixels from memory.
        sha256: SHA-256 of the file's bytes, or of the pixels where there is no file.
        image: the decoded image; None for a file, which `heatmap` reads again.
        view: geometry from the image to the network's input.
        patch_scores: (h, w) float32, distances; higher is more anomalous. NaN doesn't count. With
            tiles, the mosaic of their patches.
        nearest: (h, w) int64, the nearest bank vector of each patch; None without a bank.
        score: the image score, in the same unit; with tiles, the highest of the tiles' scores.
        smoothing: standard deviation of the anomaly map's Gaussian, in network pixels.
        halo_damping: exponent γ that lowers a patch beside a higher one, see `without_halo`.
        loading: preprocessing of the image, with the region that counts.
        statistics: statistics of the whole image.
        thresholds: the model's thresholds; None without any.
        reason: reason for review whatever the score: the image isn't like the training images, it
            is blank, the part's pose is doubtful, or a part of the region lies outside the
            photograph. Empty without a reason.
    """

    index: int
    path: Path | None
    sha256: str
    image: Image | None
    view: View
    patch_scores: NDArray[np.float32]
    nearest: NDArray[np.int64] | None
    score: float
    smoothing: float
    halo_damping: float
    loading: Preprocessing
    statistics: ImageStatistics
    thresholds: Thresholds | None = None
    reason: str = ""

    def __repr__(self) -> str:
        limit = "" if self.thresholds is None else f" (reject above {self.thresholds.image:.4g})"
        verdict = f"{self.verdict}, " if self.verdict else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"<Prediction of {self.name}: {verdict}score {self.score:.4g}{limit}{reason}>"

    @property
    def name(self) -> str:
        """The image's name in messages: its path, or its position."""
        return described(self.index, self.path)

    @property
    def verdict(self) -> str:
        """`good`, `review` or `reject`; empty without thresholds and without a reason."""
        return verdict(self.score, self.thresholds, self.reason)

    @property
    def calibrated_score(self) -> float | None:
        """Rarity of the score among good parts, in powers of ten; None without thresholds."""
        return None if self.thresholds is None else self.thresholds.calibrated(self.score)

    @cached_property
    def source_map(self) -> SourceMap:
        """The anomaly map as a function of the rows wanted, computed at each call."""
        region = self.loading.region
        return SourceMap(self.patch_scores, self.view, self.smoothing, self.halo_damping, region)

    @cached_property
    def anomaly_map(self) -> NDArray[np.float32]:
        """(H0, W0) float32 in score units, in the image's own pixels.

        NaN where a crop hid the image from the network, and outside the region that counts.
        """
        return self.source_map()

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Mask (H0, W0): True around each peak above the pixel threshold.

        Raises:
            ModelError: the model has no thresholds.
        """
        if self.thresholds is None:
            raise ModelError(
                "the model has no thresholds, so no defects can be marked; find thresholds with "
                "detector.calibrate(good_images)"
            )
        return predicted_mask(self._held_map, self.thresholds.pixel) > 0

    @property
    def regions(self) -> tuple[MarkedRegion, ...]:
        """The connected parts of `mask`, in original pixels, the highest peak first.

        Raises:
            ModelError: the model has no thresholds.
        """
        return marked_regions(self.mask.view(np.uint8), self._held_map)

    def heatmap(self) -> RgbImage:
        """The image under its anomaly map, (H0, W0, 3) uint8 RGB.

        Without thresholds, marking starts at the image's own highest patch score. A file is read
        again.

        Raises:
            ImageError: the file can't be read any more, or was changed.
        """
        limits = self.thresholds
        limit = float(np.nanmax(self.patch_scores)) if limits is None else limits.pixel
        review = None if limits is None else limits.review_pixel
        rejected = self.verdict == "reject"
        return heatmap(self._decoded(), self.source_map.held(), limit, review, rejected=rejected)

    def _repr_png_(self) -> bytes | None:
        """The heatmap as PNG for notebooks, of 600,000 pixels at most; None without the file."""
        try:
            picture = self.heatmap()
        except ImageError:  # the notebook then shows the text of `__repr__`
            return None
        height, width = picture.shape[:2]
        scale = (_NOTEBOOK_PIXELS / (height * width)) ** 0.5
        if scale < 1:
            size = max(1, round(width * scale)), max(1, round(height * scale))
            picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
        return encode_png(picture)

    @property
    def _held_map(self) -> SourceMap:
        """The map with its values computed; `mask`, `regions` and `anomaly_map` share them."""
        return replace(self.source_map, values=self.anomaly_map)

    def _decoded(self) -> Image:
        """The image; a file is decoded again, and must be unchanged."""
        if self.image is not None:
            return self.image
        assert self.path is not None  # pixels from memory stay in `image`
        item = Decoders(self.loading, keep_image=True).load(self.path, self.index)
        if isinstance(item, UnusableImage):
            raise ImageError(item.reason, item.status)
        assert isinstance(item, NetworkInput)
        # The map of a changed file would lie over another picture.
        if item.sha256 != self.sha256:
            raise ImageError(f"{self.path} was changed since it was scored; predict it again")
        return item.decoded


def verdict(score: float, thresholds: Thresholds | None, reason: str) -> str:
    """`good`, `review` or `reject`; empty without thresholds and without a reason for review.

    A reason makes a verdict stricter, never milder: what would be good is for review, and what the
    score rejects stays rejected.
    """
    by_score = "" if thresholds is None else thresholds.verdict(score)
    return "review" if reason and by_score != "reject" else by_score


@dataclass(frozen=True)
class Scored:
    """One image with its score.

    Attributes:
        sample: the image.
        score: the image score; None if the image couldn't be scored.
        reason: reason why there is no score, or for review whatever the score; else empty.
        sha256: SHA-256 of the file's bytes; empty without a score.
        status: `ok`, or the status of an `UnusableImage`.
        peak: the highest value of the anomaly map; NaN if it wasn't computed.
        width: the defect's greatest width in original pixels; None without a mask.
    """

    sample: Sample
    score: float | None
    reason: str = ""
    sha256: str = ""
    status: str = "ok"
    peak: float = math.nan
    width: float | None = None

    @classmethod
    def of(
        cls, sample: Sample, result: Prediction | UnusableImage, *, peak: bool = False
    ) -> Scored:
        """The score of a sample from its result; with `peak`, the map's highest value, too."""
        if isinstance(result, UnusableImage):
            return cls(sample, None, result.reason, status=result.status)
        highest_value = highest(result.source_map) if peak else math.nan
        return cls(sample, result.score, result.reason, result.sha256, peak=highest_value)

    def verdict(self, thresholds: Thresholds | None) -> str:
        """`good`, `review` or `reject`, the same as from `infer`; empty without a score."""
        return "" if self.score is None else verdict(self.score, thresholds, self.reason)


@dataclass(frozen=True, eq=False, kw_only=True)
class Model(ImageStages):
    """A trained model: backbone, alignment, patch scores, image scores, predictions.

    Nothing in it changes while it runs, so threads may share it. Embeddings and patch scores are
    tensors. In an exported model they are NumPy arrays: its extractor is an `ExportedNetwork`,
    which normalises by itself, and torch may be absent.

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
        config, present = self.config.calibration, self.thresholds
        review = review_rate or (present and present.to_review.target) or config.review_rate
        reject = reject_rate or (present and present.to_reject.target) or config.reject_rate
        if reject <= review:
            return review, reject
        # A rejected part isn't called good either. The rate that wasn't given adapts; if both were
        # given, the review rate does.
        return (reject, reject) if reject_rate is not None else (review, review)

    @cached_property
    def embedder(self) -> Embedder:
        """The stage from network inputs to patch embeddings."""
        if isinstance(self.extractor, ExportedNetwork):  # its graph ends in patch embeddings
            return cast(Any, self.extractor)
        from anomaly.backbones.extractor import Embedder

        return Embedder(self.extractor, self.normalise, self.scorer.align, self.device)

    @property
    def batch_size(self) -> int:
        """Default number of images computed together."""
        return self.embedder.max_batch_size(self.config.batch_size)

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction | list[Prediction]:
        """The prediction of one image, or a list of predictions in the order of several.

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
        """Loaded images; an image without a patch inside the region becomes an unusable one."""
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
        map_batches = map if tiled else partial(in_parallel, device=self.device)
        for results in map_batches(self._attempt, batches):
            yield from results

    def _attempt(
        self, batch: list[NetworkInput] | UnusableImage
    ) -> Sequence[Prediction | UnusableImage]:
        """Results of a batch; images that can't be scored become unusable ones."""
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
        scored = zip(batch, self._scored(batch), strict=True)
        return [self._prediction(item, scores) for item, scores in scored]

    def _tiles_scored(self, item: NetworkInput) -> _Scores:
        """Scores of one large image, put together from its tiles."""
        batches = item.tiles(min(self.batch_size, _TILES_AT_ONCE))
        tiles = chain.from_iterable(in_parallel(self._scored, batches, self.device))
        statistics, patches, nearest, scores = zip(*tiles, strict=True)
        columns = len(item.view.axes[1])
        return _Scores(
            reduce(add, statistics),
            _mosaic(patches, columns),
            None if nearest[0] is None else _mosaic(nearest, columns),
            float(np.max(scores)),  # NaN if one is
        )

    def _scored(self, batch: Sequence[NetworkInput]) -> list[_Scores]:
        """Scores of images or tiles of one network size; raises as `score`."""
        with self.embedder.inference_mode():
            embeddings, pieces = self.embedder(batch), pieces_of(batch)
            inside = patches_inside(pieces, embeddings, self.region)
            statistics = statistics_of(batch, embeddings, inside)
            patches, scores = self.score_patches(embeddings, pieces, inside)
            nearest = [None] * len(scores) if patches.nearest is None else as_numpy(patches.nearest)
            columns = statistics, as_numpy(patches.scores), nearest, scores.tolist()
            return [_Scores(*row) for row in zip(*columns, strict=True)]

    def _prediction(self, item: NetworkInput, scored: _Scores) -> Prediction:
        return Prediction(
            index=item.index,
            path=item.path,
            sha256=item.sha256,
            image=item.image if item.keep_image else None,
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
        """Reason for review of a whole image whatever its score; empty without one."""
        learned = self.training_statistics
        # Without a pose, parts weren't aligned, and the region can't have moved.
        reasons = ["" if view.pose is None else view.pose.reason or self.uninspected(view)]
        if statistics.blank or learned is None:
            reasons.append(statistics.blank)
        else:
            turned = self.config.model.turned_copies != "none"
            reasons.append(learned.deviation(statistics, turned=turned))
        return "; ".join(filter(None, reasons))

    def uninspected(self, view: View) -> str:
        """Reason for review if a moved part's `image.region` reaches beyond the photograph.

        Half a patch is allowed. Without `image.region` the whole frame counts, and any shift moves
        a rim of it out of the photograph, in training images, too; then nothing is said.
        """
        if self.region is None or self.region.look is None:
            return ""
        half = min(self.extractor.strides) / 2  # half a patch, in pixels of the network's input
        height, width = (half * axis[0].source / axis[0].resized for axis in view.axes)
        across, down = overhang(self.region, view)
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
        """The result of `score_patches`, from the scorer's patch scores (B, h, w).

        `top` is the number of values in the highest 1 %; None to count the values first.
        """
        xp = module_of(embeddings)
        shown, broken = patches, ~xp.isfinite(patches.scores)
        if inside is not None:
            shown = replace(patches, scores=xp.where(inside, patches.scores, math.nan))
            broken &= inside
        weighted = replace(patches, scores=self.scorer.weighted(patches))
        scores = self._image_scores(weighted, embeddings, pieces, inside, top)
        # One broken patch makes the image score NaN: the other patches mustn't stand for the image.
        return shown, xp.where(broken.reshape(broken.shape[0], -1).any(1), math.nan, scores)

    def _image_scores(
        self,
        patches: PatchScores,
        embeddings: Array,
        pieces: Sequence[Piece],
        inside: Array | None,
        top: int | None,
    ) -> Array:
        """Image scores (B,) by the model's formula, from the patches that count."""
        model, xp = self.config.model, module_of(embeddings)
        size = pieces[0][0].size  # one for all images of a batch

        def counted(fill: float) -> Array:
            """Patch scores, with the value `fill` where they don't count."""
            return patches.scores if inside is None else xp.where(inside, patches.scores, fill)

        if model.smallest_defect:
            damped = without_halo(counted(0.0).clip(_LEAST_SCORE), model.halo_damping)
            maps = network_map(damped, size, model.smoothing, inside)
            least = smallest_area(self.config)
            return levels_of_areas(maps, [area_on_map(least, piece[0]) for piece in pieces])
        if model.image_score in METHODS[model.kind].image_scores:
            scores = replace(patches, scores=counted(-math.inf))
            return self.scorer.image_scores(embeddings, scores)
        # The map ignores patches that don't count, so all may go in as they are.
        maps = network_map(patches.scores, size, model.smoothing, inside)
        return image_scores(counted(math.nan), maps, model.image_score, top)


def score(
    model: Model,
    samples: Sequence[Sample],
    *,
    peaks: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[Scored]:
    """Results of samples, in their order; those of unusable images have no score.

    With `peaks`, also the highest value of each anomaly map. `progress` is called with (images
    done, number of images).
    """
    scored: dict[int, Scored] = {}
    for result in model.results([sample.source for sample in samples]):
        scored[result.index] = Scored.of(samples[result.index], result, peak=peaks)
        progress(len(scored), len(samples))
    return [scored[i] for i in range(len(samples))]


def _usable(result: Prediction | UnusableImage) -> Prediction:
    if isinstance(result, UnusableImage):
        raise ImageError(result.reason, result.status)
    return result


def _without_score(prediction: Prediction) -> UnusableImage:
    """The unusable image in place of a prediction whose score isn't a finite number."""
    return UnusableImage(
        prediction.index,
        "failed",
        f"{prediction.name}: its score isn't a finite number, so the model is damaged or numbers "
        "overflow in its network; try another image, --precision fp32, or train again",
    )


class _Scores(NamedTuple):
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


def network_map(
    scores: Array, size: tuple[int, int], smoothing: float, inside: Array | None = None
) -> Array:
    """Anomaly maps at the size of the network's input.

    Args:
        scores: patch scores (B, h, w).
        size: (H, W).
        smoothing: standard deviation of the Gaussian in network pixels; 0 for none.
        inside: (B, h, w) bool, the patches that count; None for all.

    Returns:
        (B, H, W) float32, in score units, on the device of `scores`; NaN where the nearest patch
        doesn't count.
    """
    height, width = scores.shape[1:]
    rows = like(upsampling_matrix(height, size[0], smoothing), scores)
    columns = like(upsampling_matrix(width, size[1], smoothing), scores).T
    if inside is None:
        return rows @ scores @ columns
    where = module_of(scores).where
    # The product with a float32 turns bool into float32, for tensors and arrays alike.
    weights = rows @ (inside * like(np.ones(1, np.float32), scores)) @ columns
    # Pixels that the blur reaches from no patch that counts have weight 0; 0 / 0 has no gradient.
    maps = rows @ where(inside, scores, 0.0) @ columns / where(weights > 0, weights, 1.0)
    shown = inside[:, _nearest(height, size[0])][:, :, _nearest(width, size[1])]
    return where(shown, maps, math.nan)


def _nearest(patches: int, size: int) -> list[int]:
    """Index of the patch nearest to each pixel of an axis."""
    return [(2 * i + 1) * patches // (2 * size) for i in range(size)]


def image_scores(scores: Array, maps: Array, formula: str, top: int | None = None) -> Array:
    """Image scores (B,) from patch scores and maps.

    Args:
        scores: patch scores (B, h, w); NaN doesn't count.
        maps: network maps (B, H, W); NaN doesn't count.
        formula: `max` of the patch scores before any blur, `top_percent` for the mean of the
            highest 1 % of them (at least one); `map_max` and `map_top_percent` of the blurred map's
            values; `map_top_relative` for the latter over the median of the patch scores.
        top: number of values in the highest 1 %; None to count the values first.

    Returns:
        (B,) float32.
    """
    if formula == "map_top_relative":
        best = image_scores(scores, maps, "map_top_percent", top)
        return best / _medians(scores).clip(float(np.finfo(np.float32).tiny))
    xp = module_of(scores)
    values = maps if formula.startswith("map_") else scores
    flat = values.reshape(values.shape[0], -1)
    flat = xp.where(xp.isnan(flat), -math.inf, flat)
    return _top_means(flat, top) if formula.endswith("top_percent") else xp.amax(flat, 1)


def _top_means(values: Array, top: int | None) -> Array:
    """Means (B,) of the highest 1 % of values (B, n), rounded, at least one; -inf doesn't count.

    With `top`, of the highest `top` values instead.
    """
    if top is not None:
        return _highest(values, top).mean(1)
    counts = [max(1, round(n / 100)) for n in (values > -math.inf).sum(1).tolist()]
    if len(set(counts)) == 1:  # the usual case, and one step for a GPU
        return _highest(values, counts[0]).mean(1)
    highest_values = [_highest(row, count) for row, count in zip(values, counts, strict=True)]
    return module_of(values).stack([row.mean() for row in highest_values])


def levels_of_areas(maps: Array, areas: Sequence[int]) -> Array:
    """The highest level (B,) of each map with a region of at least its area.

    It is -inf where no pixel counts.

    Args:
        maps: (B, H, W); NaN doesn't count.
        areas: least area of the region in each map, in the map's pixels; see `place_of_level`.
    """
    # NumPy finds the pixel; reading the map there keeps a tensor's gradient.
    values = as_numpy(maps.detach() if hasattr(maps, "detach") else maps)
    places = [place_of_level(v, area) for v, area in zip(values, areas, strict=True)]
    levels = maps.reshape(len(maps), -1)[list(range(len(places))), places]
    xp = module_of(maps)
    return xp.where(xp.isnan(levels), -math.inf, levels)


def place_of_level(values: NDArray[np.float32], area: int) -> int:
    """The flat index of a pixel at the highest level with a region of at least an area.

    The pixels at or above a level form 8-connected regions. The larger the area, the lower the
    highest level with such a region; for an area of 1 it is the map's highest value. It is the
    maximum of the map's area opening: smaller peaks don't count, however high.

    Args:
        values: (H, W); NaN and -inf don't count.
        area: least area in pixels; the largest region that counts if no region is so large.

    Returns:
        0 where no pixel counts.
    """
    counted = np.where(np.isnan(values), np.float32(-np.inf), values)
    levels = np.sort(counted[counted > -np.inf])[::-1]
    if not len(levels):
        return 0
    area = min(area, _largest(counted > -np.inf))
    # The level is levels[area - 1] at most, because `area` pixels have to lie at or above it. A
    # lower level's largest region is no smaller, so a binary search finds the level.
    place = bisect_left(levels, area, area - 1, key=lambda level: _largest(counted >= level))
    return int(np.flatnonzero(counted == levels[place])[0])


def _largest(mask: NDArray[np.bool_]) -> int:
    """Number of pixels of a mask's largest 8-connected region; 0 without any."""
    _, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    return int(np.bincount(np.asarray(labels).ravel())[1:].max(initial=0))


def area_on_map(area: float, layout: View) -> int:
    """An area of the photograph, in pixels of the network's map, rounded; at least 1."""
    for pieces in layout.axes:
        area *= pieces[0].resized / pieces[0].source
    return max(1, round(area))


def _medians(scores: Array) -> Array:
    """Medians (B,) of patch scores (B, h, w), for an even number the lower middle one.

    NaN doesn't count. It is 1 where no patch counts, so that it can be divided by.
    """
    xp, flat = module_of(scores), scores.reshape(scores.shape[0], -1)
    counts = (~xp.isnan(flat)).sum(1)
    flat = xp.where(xp.isnan(flat), math.inf, flat)
    ordered = flat.sort(1).values if xp is not np else np.sort(flat, 1)
    middle = (counts - 1).clip(0) // 2
    # `len` would fix the batch size of a traced graph.
    return xp.where(counts > 0, ordered[xp.arange(flat.shape[0]), middle], 1.0)


def _highest(values: Array, count: int) -> Array:
    """The highest `count` values along the last axis, in any order."""
    if isinstance(values, np.ndarray):
        first = values.shape[-1] - count
        return np.partition(values, first, axis=-1)[..., first:]
    return values.topk(count).values


def pieces_of(batch: Sequence[NetworkInput]) -> list[Piece]:
    """Layout, tile and turn of each network input."""
    return [(item.layout, item.tile, item.turn) for item in batch]


def patches_inside(
    pieces: Sequence[Piece], embeddings: Array, region: Region | None
) -> Array | None:
    """The patches that count: those inside the region, and inside the photograph of a moved part.

    Args:
        pieces: layout, tile and turn of each image.
        embeddings: (B, h, w, D), a tensor or an array; the result is of the same kind.
        region: region of each image that counts; None for the whole image.

    Returns:
        (B, h, w) bool; None if all patches count.

    Raises:
        DataError: none of an image's patches counts, or the region doesn't fit an image.
    """
    if region is None and all(layout.pose is None for layout, _, _ in pieces):
        return None
    masks = []
    for layout, (row, column), turn in pieces:
        # The grid before turning: an odd turn has exchanged its height and width.
        height, width = embeddings.shape[1:3] if turn % 2 == 0 else embeddings.shape[2:0:-1]
        top, left = row * height, column * width
        whole = patch_mask(region, layout, (height, width))
        masks.append(turned(whole[top : top + height, left : left + width], turn))
    return like(np.stack(masks), embeddings)
