"""Scores of the training images under models that haven't seen them, or anything of their group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from anomaly.calibration import GoodScores
from anomaly.errors import DataError
from anomaly.imaging.geometry import Layout
from anomaly.model.detector import AnomalyDetector
from anomaly.model.image_score import network_map
from anomaly.model.suspects import Suspects
from anomaly.model.training_patches import TrainingPatches
from anomaly.scorers.base import PatchBatch, Progress, Scorer
from anomaly.scorers.padim.gaussian import GaussianFitter, PatchGaussian
from anomaly.scorers.padim.held_out import LeaveOneOut
from anomaly.scorers.patchcore.held_out import Fold, banks_without
from anomaly.scorers.patchcore.memory_bank import MemoryBank, MemoryBankFitter


def cross_fit(
    detector: AnomalyDetector,
    patches: TrainingPatches,
    fitter: GaussianFitter | MemoryBankFitter,
    names: Mapping[int, str],
    *,
    folds: int,
    groups: Mapping[int, str],
    suspects: Suspects | None = None,
    progress: Progress = lambda done, total: None,
) -> GoodScores:
    """Score each training image by a model that hasn't learned from it.

    PatchCore leaves out one fold after another and repairs the bank (`banks_without`). PaDiM
    leaves out each image alone (`LeaveOneOut`), or, where groups are known, is fitted anew without
    each fold of groups.

    Args:
        detector: fitted on all of `patches`.
        patches: the training images'; their features are read, never computed again.
        fitter: the settings that the detector was fitted with.
        names: of the images used, by index.
        folds: into how many parts to split them, at most.
        groups: the group of each image that has one; it is never parted, unless it is the only one.
        suspects: sees all the scores.
        progress: called with (images scored, all of them).

    Raises:
        DataError: too few images, or none but those of one fold.
    """
    indices = sorted(names)
    units = len({groups.get(i, i) for i in indices})
    heeded = groups if units > 1 else {}
    divided = split(indices, heeded, folds)
    found: dict[int, tuple[float, float]] = {}
    for images, scorer in _held_out(detector.scorer, patches, fitter, divided, bool(heeded)):
        stand_in = replace(detector, scorer=scorer)
        some = patches.only(frozenset(images))
        scored = scores_of(
            stand_in,
            some,
            patches.views,
            suspects=suspects,
            progress=lambda done: progress(len(found) + done, len(indices)),
        )
        found.update(scored)
    return GoodScores(
        names=tuple(names[i] for i in indices),
        image=tuple(found[i][0] for i in indices),
        peak=tuple(found[i][1] for i in indices),
        source=f"{len(indices)} training images, each scored by a model that hasn't seen it",
        groups=units if groups else None,
    )


def scores_of(
    detector: AnomalyDetector,
    batches: Iterable[PatchBatch],
    views: Mapping[int, Layout],
    *,
    suspects: Suspects | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, tuple[float, float]]:
    """The image score and the highest value of the anomaly map, by image.

    An image in tiles has those of its worst tile.

    Args:
        detector: scores them.
        batches: the images' patches.
        views: how each image was turned into the network's input.
        suspects: sees all the scores.
        progress: called with the images scored so far.
    """
    found: dict[int, tuple[float, float]] = {}
    for batch in batches:
        size = views[batch.images[0]].size
        patches, scores = detector.score_patches(batch.embeddings, size, batch.inside)
        if suspects is not None:
            suspects.see(batch, patches.scores, scores)
        maps = network_map(patches.scores, size, detector.config.model.smoothing, batch.inside)
        peaks = maps.nan_to_num(nan=-math.inf).flatten(1).amax(1)
        for image, *pair in zip(batch.images, scores.tolist(), peaks.tolist(), strict=True):
            score, peak = found.get(image, pair)
            found[image] = (max(score, pair[0]), max(peak, pair[1]))
        progress(len(found))
    return found


def split(images: Sequence[int], groups: Mapping[int, str], folds: int) -> list[Fold]:
    """Part images into at most `folds` folds of about equal size; a group stays whole.

    Neighbours share a fold: pictures taken one after the other often show parts alike.

    Raises:
        DataError: fewer than two images, or all are of one group.
    """
    units: dict[str | int, list[int]] = {}
    for image in images:
        units.setdefault(groups.get(image, image), []).append(image)
    if len(units) < 2:
        raise DataError(
            f"calibration needs at least 2 training images, not {len(images)}; add images, or "
            "train with --no-calibrate"
        )
    parts: dict[int, list[int]] = {}
    placed = 0
    for unit in units.values():
        middle = placed + len(unit) / 2
        parts.setdefault(int(middle * folds / len(images)), []).extend(unit)
        placed += len(unit)
    return [tuple(part) for part in parts.values()]


def _held_out(
    scorer: Scorer,
    patches: TrainingPatches,
    fitter: GaussianFitter | MemoryBankFitter,
    folds: Sequence[Fold],
    by_group: bool,
) -> Iterator[tuple[Fold, Scorer]]:
    """Images, and a scorer that hasn't seen them."""
    everything = tuple(image for fold in folds for image in fold)
    if isinstance(scorer, MemoryBank) and isinstance(fitter, MemoryBankFitter):
        projection = fitter.projection(scorer.vectors.shape[1]).to(scorer.vectors.device)
        share = fitter.memory_limit / (4 * projection.shape[1] * patches.count)
        banks = banks_without(scorer, patches, folds, projection=projection, share=share)
        yield from zip(folds, banks, strict=True)
    elif isinstance(scorer, PatchGaussian) and isinstance(fitter, GaussianFitter):
        if not by_group:
            yield everything, LeaveOneOut(scorer, len(everything))
            return
        for fold in folds:
            rest = patches.only(frozenset(everything) - frozenset(fold))
            yield fold, fitter.fit(rest, projection=scorer.projection)
