"""Scores of the training images under models that haven't seen them, or anything of their group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.calibration.thresholds import GoodScores
from anomaly.datasets.samples import too_few_different
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import turn_of
from anomaly.maps.anomaly_map import without_halo
from anomaly.methods.base import Fitter, Fold, PatchBatch, Progress
from anomaly.scoring.build import fitter_of
from anomaly.scoring.image_score import Piece, image_scores, network_map
from anomaly.scoring.model import Model
from anomaly.training.features import CachedFeatures, Scoring

log = logging.getLogger(__name__)

# Suspects that are shown.
COUNT = 5
# Of batches that are joined: more images are hardly quicker, and take memory.
_MOST_IMAGES, _MOST_BYTES = 16, 32 * 1024**2
# Parts into which the training images are split to be scored.
_FOLDS = 10
# Robust standard deviations of log scores by which an image stands out, and their least: images
# that are all but equal differ by less.
_FAR = 5.0
_LEAST = 0.02


@dataclass(eq=False)
class Suspect:
    """A training image that differs from the others.

    Attributes:
        image: its index.
        score: its image score by a model that hasn't learned from it; with tiles, the worst one's.
        patch_scores: (h, w) float32; NaN doesn't count. With tiles, the mosaic of their patches.
    """

    image: int
    score: float
    patch_scores: NDArray[np.float32]


class Suspects:
    """Keeps the patch scores of the most suspicious images while all are scored.

    Args:
        views: how each image was turned into the network's input, by index.
    """

    def __init__(self, views: Mapping[int, AnyView]) -> None:
        self._views = views
        self._kept: dict[int, Suspect] = {}

    def see(self, batch: PatchBatch, patch_scores: Tensor, image_scores: Tensor) -> None:
        """Add a batch; the tiles of an image must follow each other.

        Args:
            batch: of n images or tiles.
            patch_scores: (n, h, w); NaN where they don't count.
            image_scores: (n,).
        """
        height, width = patch_scores.shape[1:]
        corners = batch.corners or ((0, 0),) * len(patch_scores)
        for image, (top, left), patches, score in zip(
            batch.images, corners, patch_scores.cpu().numpy(), image_scores.tolist(), strict=True
        ):
            suspect = self._kept.get(image) or self._empty(image, height, width)
            suspect.patch_scores[top : top + height, left : left + width] = patches
            suspect.score = max(suspect.score, score)
        # The last image may have more tiles to come.
        last = {image: self._kept[image] for image in batch.images[-1:]}
        self._kept = {s.image: s for s in self.worst()} | last

    def take(self, others: Iterable[Suspect]) -> None:
        """Add whole images that another process has scored."""
        self._kept |= {s.image: s for s in others}
        self._kept = {s.image: s for s in self.worst()}

    def worst(self) -> tuple[Suspect, ...]:
        """The most suspicious images, the worst first."""
        return tuple(sorted(self._kept.values(), key=lambda s: -s.score)[:COUNT])

    def _empty(self, image: int, height: int, width: int) -> Suspect:
        rows, columns = (len(pieces) for pieces in self._views[image].axes)
        mosaic = np.full((rows * height, columns * width), np.nan, np.float32)
        self._kept[image] = Suspect(image, -np.inf, mosaic)
        return self._kept[image]


def standing_out(good: GoodScores) -> dict[str, float]:
    """The images that stand out from all the others, the worst first, and their scores.

    The logarithm of each one's score lies five robust standard deviations (1.4826 · the median
    absolute deviation) above the median, both of which a fifth of defects among them hardly moves.

    Args:
        good: scores of images by models that haven't learned from them.
    """
    scores = np.array(good.image)
    logarithms = np.log(np.maximum(scores, np.finfo(np.float32).tiny))
    away = logarithms - np.median(logarithms)
    spread = 1.4826 * float(np.median(np.abs(away)))
    order = np.argsort(-scores, kind="stable").tolist()
    return {good.names[i]: good.image[i] for i in order if away[i] > _FAR * max(spread, _LEAST)}


def scores_of(
    detector: Model,
    batches: Iterable[PatchBatch],
    views: Mapping[int, AnyView],
    *,
    suspects: Suspects | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, tuple[float, float]]:
    """The image score and the highest value of the anomaly map, by image; of tiles the worst one's.

    Args:
        detector: scores them.
        batches: the images' patches; those of turned copies aren't scored.
        views: how each image was turned into the network's input.
        suspects: sees all the scores.
        progress: called with the images scored so far.
    """
    every: dict[int, tuple[float, float]] = {}
    model = detector.config.model
    batches = (batch for batch in batches if not is_turned(batch))
    if fitter_of(detector.config).compact:  # and scores of a batch take longer than its embeddings
        batches = joined(batches, views)
    for batch in batches:
        pieces = patch_pieces(batch, views)
        patches, scores = detector.score_patches(batch.embeddings, pieces, batch.inside)
        if suspects is not None:
            suspects.see(batch, patches.scores, scores)
        shown = without_halo(patches.scores, model.halo_damping)
        maps = network_map(shown, pieces[0][0].size, model.smoothing, batch.inside)
        peaks = image_scores(patches.scores, maps, "map_max")
        for image, score, peak in zip(batch.images, scores.tolist(), peaks.tolist(), strict=True):
            before = every.get(image, (score, peak))
            every[image] = max(before[0], score), max(before[1], peak)
        progress(len(every))
    return every


def patch_pieces(batch: PatchBatch, views: Mapping[int, AnyView]) -> list[Piece]:
    """Where the images or tiles of a batch come from.

    Args:
        batch: without turned copies.
        views: how each image became the network's input, by its number.
    """
    height, width = batch.embeddings.shape[1:3]
    corners = batch.corners or ((0, 0),) * len(batch.images)
    return [
        (views[image], (row // height, column // width), 0)
        for image, (row, column) in zip(batch.images, corners, strict=True)
    ]


def good_scores(
    names: Sequence[str], scores: Sequence[tuple[float, float]], source: str
) -> GoodScores:
    """Good scores for thresholds, from the result of `scores_of`.

    Args:
        names: of the images.
        scores: of each.
        source: how many they are and how they were had.
    """
    image, peak = zip(*scores, strict=True)
    return GoodScores(tuple(names), image, peak, source)


def cross_fit(
    detector: Model,
    patches: CachedFeatures,
    fitter: Fitter[Any],
    names: Mapping[int, str],
    pictures: Mapping[int, str],
    *,
    folds: int = _FOLDS,
    groups: Mapping[int, str],
    suspects: Suspects | None = None,
    score: Scoring = scores_of,
    progress: Progress = lambda done, total: None,
) -> GoodScores:
    """Score each training image by a model that hasn't learned from it.

    What a method leaves out and how its scorer does without is its own, see `Fitter.held_out`.

    Args:
        detector: fitted on all of `patches`.
        patches: the training images'; their features are read, never computed again.
        fitter: the settings that the detector was fitted with.
        names: of the images used, by index.
        pictures: what tells the picture of each from others. Copies of one are held out together
            and count once.
        folds: into how many parts to split them, at most.
        groups: the group of each image that has one; it is never parted, unless it is the only one.
            A copy belongs to the first one's group.
        suspects: sees all the scores.
        score: scores some of the patches, elsewhere perhaps.
        progress: called with (images scored, all of them).

    Raises:
        DataError: too few images, or none but those of one fold.
    """
    indices = sorted(names)
    first_of: dict[str, int] = {}
    originals = {i: first_of.setdefault(pictures[i], i) for i in indices}
    distinct = sorted(set(originals.values()))
    units = len({groups.get(i, i) for i in distinct})
    known_groups = groups if units > 1 else {}
    divided = split(
        indices, {i: known_groups.get(first, first) for i, first in originals.items()}, folds
    )
    log.debug("scoring %d images as %d held-out parts, for thresholds", len(indices), len(divided))
    pairs: dict[int, tuple[float, float]] = {}
    grouped = bool(known_groups) or len(distinct) < len(indices)
    held_out = fitter.held_out(detector.scorer, patches, divided, grouped=grouped)
    for images, scorer in held_out:
        stand_in = replace(detector, scorer=scorer)
        left_out = patches.only(frozenset(images))
        pairs.update(
            score(
                stand_in,
                left_out,
                patches.views,
                suspects=suspects,
                progress=lambda done: progress(len(pairs) + done, len(indices)),
            )
        )
    source = f"{len(distinct)} training images, each scored by a model that hasn't seen it"
    of_each = [pairs[i] for i in distinct]
    good = good_scores([names[i] for i in distinct], of_each, source)
    return replace(good, groups=units if groups else None)


def is_turned(batch: PatchBatch) -> bool:
    """Whether a batch is of turned copies."""
    return batch.corners is not None and turn_of(batch.corners[0][0])[0] != 0


def joined(batches: Iterable[PatchBatch], views: Mapping[int, AnyView]) -> Iterator[PatchBatch]:
    """Batches of more images, in the same order.

    A position's Gaussian meets 16 images in the time that it takes for 6.

    Args:
        batches: each of images of one size.
        views: how each image became the network's input, by its number.
    """
    held: list[PatchBatch] = []
    for batch in batches:
        images = sum(len(other.images) for other in [*held, batch])
        if held and (images > _most(batch) or _kind(held[0], views) != _kind(batch, views)):
            yield _in_one(held)
            held = []
        held.append(batch)
    if held:
        yield _in_one(held)


def _most(batch: PatchBatch) -> int:
    """Largest number of images to join in a batch."""
    most = _MOST_IMAGES
    while most > 1 and most * batch.embeddings.nbytes > _MOST_BYTES * len(batch.images):
        most //= 2
    return most


def _kind(batch: PatchBatch, views: Mapping[int, AnyView]) -> tuple[object, ...]:
    """The properties that images of one batch share."""
    view = views[batch.images[0]]
    return batch.embeddings.shape[1:], view.size, view.whole, batch.inside is None


def _in_one(batches: Sequence[PatchBatch]) -> PatchBatch:
    if len(batches) == 1:
        return batches[0]
    corners = [batch.corners or ((0, 0),) * len(batch.images) for batch in batches]
    masks = [batch.inside for batch in batches if batch.inside is not None]
    return PatchBatch(
        torch.cat([batch.embeddings for batch in batches]),
        tuple(image for batch in batches for image in batch.images),
        tuple(chain.from_iterable(corners)),
        torch.cat(masks) if masks else None,
    )


def split(
    images: Sequence[int], groups: Mapping[int, str | int], folds: int = _FOLDS
) -> list[Fold]:
    """Part images into at most `folds` folds of about equal size; a group stays whole.

    Neighbours share a fold: pictures taken one after the other often show parts alike.

    Raises:
        DataError: fewer than two images, or all are of one group.
    """
    units: dict[str | int, list[int]] = {}
    for image in images:
        units.setdefault(groups.get(image, image), []).append(image)
    if len(units) < 2:
        raise too_few_different(len(units))
    parts: dict[int, list[int]] = {}
    placed = 0
    for unit in units.values():
        middle = placed + len(unit) / 2
        parts.setdefault(int(middle * folds / len(images)), []).extend(unit)
        placed += len(unit)
    return [tuple(part) for part in parts.values()]
