"""Scores of the training images under models that haven't seen them, or anything of their group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from anomaly.calibration.thresholds import GoodScores
from anomaly.config.schema import METHODS
from anomaly.datasets.samples import too_few_different
from anomaly.imaging.arrays import as_numpy
from anomaly.imaging.geometry import View
from anomaly.imaging.loading import turn_of
from anomaly.maps.anomaly_map import without_halo
from anomaly.methods.base import Fitter, Fold, PatchBatch
from anomaly.runtime import Progress
from anomaly.scoring.image_score import Piece, image_scores, network_map
from anomaly.scoring.model import Model
from anomaly.training.features import CachedFeatures, HeldOutScores, Scoring

log = logging.getLogger(__name__)

# Suspects that are shown.
COUNT = 5
# Batches that are joined where there is one grid: Gaussians are read once for each batch, and meet
# 16 images in the time that 6 take. More are hardly quicker, and take memory.
_TOGETHER = 4
# Parts into which the training images are split to be scored.
_FOLDS = 10
# Robust standard deviations of log scores by which an image stands out, and their least: images
# that are all but equal differ by less.
_FAR = 5.0
_LEAST = 0.02


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
    model: Model,
    batches: Iterable[PatchBatch],
    views: Mapping[int, View],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, HeldOutScores]:
    """The scores of images, by their numbers; only the worst ones keep those of their patches.

    Args:
        model: scores them.
        batches: the images' patches; those of turned copies aren't scored.
        views: how each image was turned into the network's input.
        progress: called with the images scored so far.
    """
    every: dict[int, HeldOutScores] = {}
    settings = model.config.model
    batches = (batch for batch in batches if not is_turned(batch))
    if METHODS[settings.kind].one_grid:
        batches = _joined(batches)
    for batch in batches:
        pieces = patch_pieces(batch, views)
        patches, scores = model.score_patches(batch.embeddings, pieces, batch.inside)
        shown = without_halo(patches.scores, settings.halo_damping)
        maps = network_map(shown, pieces[0][0].size, settings.smoothing, batch.inside)
        peaks = image_scores(patches.scores, maps, "map_max")
        height, width = patches.scores.shape[1:]
        columns = batch.images, pieces, as_numpy(patches.scores), scores.tolist(), peaks.tolist()
        for image, (view, (row, column), _), values, score, peak in zip(*columns, strict=True):
            if image not in every:
                rows, across = (len(tiles) for tiles in view.axes)
                mosaic = np.full((rows * height, across * width), np.nan, np.float32)
                every[image] = HeldOutScores(image, score, peak, mosaic)
            every[image].add(score, peak, values, row * height, column * width)
        progress(len(every))
    for held in worst(every)[COUNT:]:
        held.patches = None
    return every


def _joined(batches: Iterable[PatchBatch]) -> Iterator[PatchBatch]:
    """Batches of a few times as many images, all of one grid."""
    waiting = iter(batches)
    while held := list(islice(waiting, _TOGETHER)):
        masks = [batch.inside for batch in held if batch.inside is not None]
        yield PatchBatch(
            torch.cat([batch.embeddings for batch in held]),
            tuple(image for batch in held for image in batch.images),
            inside=torch.cat(masks) if masks else None,
        )


def worst(scores: Mapping[int, HeldOutScores]) -> list[HeldOutScores]:
    """Scores of images, the highest first."""
    return sorted(scores.values(), key=lambda held: -held.score)


def patch_pieces(batch: PatchBatch, views: Mapping[int, View]) -> list[Piece]:
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


def good_scores(names: Sequence[str], scores: Iterable[HeldOutScores], source: str) -> GoodScores:
    """Good scores for thresholds, from the result of `scores_of`.

    Args:
        names: of the images.
        scores: of each.
        source: how many they are and how they were had.
    """
    image, peak = zip(*((held.score, held.peak) for held in scores), strict=True)
    return GoodScores(tuple(names), image, peak, source)


def cross_fit(
    model: Model,
    patches: CachedFeatures,
    fitter: Fitter[Any],
    names: Mapping[int, str],
    pictures: Mapping[int, str],
    *,
    folds: int = _FOLDS,
    groups: Mapping[int, str],
    score: Scoring = scores_of,
    progress: Progress = lambda done, total: None,
) -> tuple[GoodScores, tuple[HeldOutScores, ...]]:
    """Score each training image by a model that hasn't learned from it.

    What a method leaves out and how its scorer does without is its own, see `Fitter.held_out`.

    Args:
        model: fitted on all of `patches`.
        patches: the training images'; their features are read, never computed again.
        fitter: the settings that the model was fitted with.
        names: of the images used, by index.
        pictures: what tells the picture of each from others. Copies of one are held out together
            and count once.
        folds: into how many parts to split them, at most.
        groups: the group of each image that has one; it is never parted, unless it is the only one.
            A copy belongs to the first one's group.
        score: scores some of the patches, elsewhere perhaps.
        progress: called with (images scored, all of them).

    Returns:
        The scores, and those of the images that look least like the others, the worst first.

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
    scores: dict[int, HeldOutScores] = {}
    grouped = bool(known_groups) or len(distinct) < len(indices)
    for images, scorer in fitter.held_out(model.scorer, patches, divided, grouped=grouped):
        scored = score(
            replace(model, scorer=scorer),
            patches.only(frozenset(images)),
            patches.views,
            progress=lambda done: progress(len(scores) + done, len(indices)),
        )
        scores.update(scored)
    source = f"{len(distinct)} training images, each scored by a model that hasn't seen it"
    good = good_scores([names[i] for i in distinct], [scores[i] for i in distinct], source)
    return replace(good, groups=units if groups else None), tuple(worst(scores)[:COUNT])


def is_turned(batch: PatchBatch) -> bool:
    """Whether a batch is of turned copies."""
    return batch.corners is not None and turn_of(batch.corners[0][0])[0] != 0


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
