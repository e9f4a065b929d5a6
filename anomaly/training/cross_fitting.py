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
from anomaly.scoring.model import Model, Piece, image_scores, network_map
from anomaly.training.features import CachedFeatures, HeldOutScores, Scoring

log = logging.getLogger(__name__)

COUNT = 5  # suspects shown to the user, with the patch scores that their heatmaps need
# Batches that are joined where there is one grid: Gaussians are read once for each batch, and meet
# 16 images in the time that 6 take. More are hardly quicker, and take memory.
_TOGETHER = 4
_FOLDS = 10  # parts of the training images, each scored by a model of the other parts
# Robust standard deviations of log scores by which an image stands out. They count as 2 % at least:
# scores of images that are all but equal spread less, and none of them stands out.
_FAR = 5.0
_LEAST = 0.02


def standing_out(good: GoodScores) -> dict[str, float]:
    """Scores of the images that stand out from all others, by name, the highest first.

    The logarithm of such a score lies five robust standard deviations (1.4826 · the median absolute
    deviation) above the median. A fifth of defects among the images hardly moves either.

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
    """Scores of images, by image number; only the `COUNT` highest keep their patch scores.

    Args:
        model: the model that scores.
        batches: the images' patches; turned copies aren't scored.
        views: the geometry of each network input, by image number.
        progress: called with the number of images scored so far.
    """
    by_image: dict[int, HeldOutScores] = {}
    settings = model.config.model
    if METHODS[settings.kind].one_grid:  # such a method has neither tiles nor turned copies
        batches = _joined(batches)
    for batch in batches:
        corners = batch.corners or ((0, 0),) * len(batch.images)
        if turn_of(corners[0][0])[0]:  # a copy adds to what is learned, not to the thresholds
            continue
        height, width = batch.embeddings.shape[1:3]
        pieces: list[Piece] = [
            (views[image], (row // height, column // width), 0)
            for image, (row, column) in zip(batch.images, corners, strict=True)
        ]
        patches, scores = model.score_patches(batch.embeddings, pieces, batch.inside)
        shown = without_halo(patches.scores, settings.halo_damping)
        maps = network_map(shown, pieces[0][0].size, settings.smoothing, batch.inside)
        peaks = image_scores(patches.scores, maps, "map_max")
        columns = batch.images, pieces, as_numpy(patches.scores), scores.tolist(), peaks.tolist()
        for image, (view, (row, column), _), values, score, peak in zip(*columns, strict=True):
            if image not in by_image:
                rows, across = (len(tiles) for tiles in view.axes)
                mosaic = np.full((rows * height, across * width), np.nan, np.float32)
                by_image[image] = HeldOutScores(image, score, peak, mosaic)
            by_image[image].add(score, peak, values, row * height, column * width)
        progress(len(by_image))
    for held in worst(by_image)[COUNT:]:
        held.patches = None
    return by_image


def _joined(batches: Iterable[PatchBatch]) -> Iterator[PatchBatch]:
    """Larger batches, each of `_TOGETHER` batches of whole images on one grid."""
    rest = iter(batches)
    while group := list(islice(rest, _TOGETHER)):
        masks = [batch.inside for batch in group if batch.inside is not None]
        yield PatchBatch(
            torch.cat([batch.embeddings for batch in group]),
            tuple(image for batch in group for image in batch.images),
            inside=torch.cat(masks) if masks else None,
        )


def worst(scores: Mapping[int, HeldOutScores]) -> list[HeldOutScores]:
    """Scores of images, the highest first."""
    return sorted(scores.values(), key=lambda held: -held.score)


def good_scores(names: Sequence[str], scores: Iterable[HeldOutScores], source: str) -> GoodScores:
    """Good scores for thresholds, from the result of `scores_of`.

    Args:
        names: image names.
        scores: the images' scores, in the order of the names.
        source: the number of scores and their origin, in words.
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

    Each method has its own way to score without an image, see `Fitter.held_out`.

    Args:
        model: the model fitted on all of `patches`.
        patches: patches of the training images; features are read, never computed again.
        fitter: the fitter that the model was fitted with.
        names: names of the images used, by image number.
        pictures: a hash of each image's pixels, by image number. Copies of one picture are held
            out together and count once.
        folds: number of parts, at most.
        groups: the group of each image that has one. Images of a group stay in one part, unless
            there is one group only. A copy belongs to the group of the first image of its picture.
        score: called as `scores_of`; a cluster's scores elsewhere.
        progress: called with (images scored, number of images).

    Returns:
        One score for each picture, and the scores of the `COUNT` images that look least like the
        others, the worst first.

    Raises:
        DataError: too few images, or none but those of one fold.
    """
    indices = sorted(names)
    first_of: dict[str, int] = {}
    originals = {i: first_of.setdefault(pictures[i], i) for i in indices}
    distinct = sorted(set(originals.values()))
    units = len({groups.get(i, i) for i in distinct})
    known_groups = groups if units > 1 else {}  # a single group can't be held out as a whole
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
        # The fold in which the unit's middle lies, had all images their place in one long row.
        middle = placed + len(unit) / 2
        parts.setdefault(int(middle * folds / len(images)), []).extend(unit)
        placed += len(unit)
    return [tuple(part) for part in parts.values()]
