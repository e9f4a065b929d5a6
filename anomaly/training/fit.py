"""Good images -> a model, its thresholds, and the images that stand out."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch

from anomaly.backbones.extractor import choose_precision, network_input
from anomaly.backbones.networks import backbone_of
from anomaly.calibration.thresholds import GoodScores, thresholds_from
from anomaly.config.schema import Config
from anomaly.datasets.samples import Sample, contradiction, near_copies_warning, too_few_different
from anomaly.errors import ConfigError, DataError
from anomaly.imaging.alignment import Reference, grey_picture, learn
from anomaly.imaging.geometry import patch_mask, patch_size
from anomaly.imaging.loading import NetworkInput, Preprocessing, picture_hash, size_of
from anomaly.imaging.pool import Decoders, read_all, rest
from anomaly.imaging.read import Decoding, Image, derive, unstated_bits_warning
from anomaly.methods.base import Fitter, Fold
from anomaly.runtime import Progress, StageProgress
from anomaly.scoring.build import (
    backbone,
    decoding_of,
    fitter_of,
    loading_of,
    region_of,
    smallest_area,
)
from anomaly.scoring.image_statistics import TrainingStatistics, outliers_among
from anomaly.scoring.model import Model
from anomaly.storage.models import manifest_of
from anomaly.training.features import (
    SUSPECTS,
    CachedFeatures,
    HeldOutScores,
    TrainingSetup,
    cached_features,
    worst,
)

log = logging.getLogger(__name__)

_TRIAL_IMAGES = 4  # images on which bf16 is compared with fp32
_POSE_IMAGES = 400  # images from which the pose of parts is learned, at most
_FOLDS = 10  # parts of the training images, each scored by a model of the other parts
_STANDS_OUT = 5.0  # robust standard deviations of log scores by which an image stands out
# Least standard deviation, 2 %: scores of images that are all but equal spread less, and none of
# them stands out.
_LEAST_SPREAD = 0.02


def prepare(config: Config, samples: Sequence[Sample], device: torch.device) -> TrainingSetup:
    """Load the backbone, learn the pose, choose the precision, and draw the fitter's random parts.

    Raises:
        AnomalyError: weights, layers or images can't be used as configured.
    """
    extractor, weights_sha256 = backbone(config, device)
    normalise = backbone_of(config.backbone.name).normalisation()
    region = region_of(config.image, Path())
    sizes = _image_sizes(samples) if config.one_aspect or config.model.smallest_defect else []
    # PaDiM learns each position by itself, so all images get the median aspect.
    aspect = median(h / w for h, w in sizes) if config.one_aspect and sizes else None
    reference = reference_of(config, samples)
    loading = loading_of(config, extractor, region, aspect, reference)
    precision: str = config.precision
    if precision == "auto":
        trial = _trial_images(samples, loading)
        precision = "fp32"  # also without a usable image: training is refused later
        if trial:
            precision = choose_precision(extractor, network_input(trial, normalise, device))
    extractor = extractor.to(device, precision)
    config = config.model_copy(update={"precision": precision})
    # Random parts, such as a projection, are drawn before images are read, so they depend on the
    # seed alone.
    fitter = fitter_of(config).prepared(sum(extractor.channels), device)
    setup = TrainingSetup(
        config=config,
        extractor=extractor,
        normalise=normalise,
        fitter=fitter,
        region=region,
        aspect=aspect,
        reference=reference,
        device=device,
        weights_sha256=weights_sha256,
    )
    if config.model.smallest_defect is not None:
        check_smallest_defect(setup, sizes)
    return setup


def check_smallest_defect(setup: TrainingSetup, sizes: Iterable[tuple[int, int]]) -> None:
    """Refuse a smallest defect below one patch, or above half of an image's inspected area.

    Raises:
        ConfigError: it is such a one for an image of any of the `sizes` (H0, W0).
    """
    area = smallest_area(setup.config)
    for size in sorted(set(sizes)):
        try:
            view = setup.loading.sizing.view(size)
            grid = setup.embedder.grid(view.size)
            patches = int(patch_mask(setup.region, view, grid).sum())
        except DataError:
            continue  # such an image is refused, with its reason, where it is read
        height, width = patch_size(view, grid)
        image = f"an image of {size[1]}×{size[0]}"
        if area > patches * height * width / 2:
            raise ConfigError(
                f"model.smallest_defect is {area:.0f} pixels, more than half of the inspected "
                f"area of {image} pixels; give a smaller area"
            )
        if area < height * width * (1 - 1e-6):  # an area of exactly one patch may be rounded
            raise ConfigError(
                f"model.smallest_defect: area is {area:.4g} pixels, but one patch covers "
                f"{height:.0f} × {width:.0f} pixels (height × width) of {image}, and nothing "
                f"smaller can be measured; give {math.ceil(height * width)} or more, or raise "
                "image.area"
            )


def reference_of(config: Config, samples: Sequence[Sample]) -> Reference | None:
    """The reference for poses, learned from up to 400 images; None without `image.align`.

    Raises:
        DataError: no image can be used, or the images show no part that lies in each of them.
    """
    image = config.image
    if image.align == "none":
        return None
    samples = samples[:: max(1, -(-len(samples) // _POSE_IMAGES))]
    read = partial(derive, grey_picture, decoding_of(image))
    pictures = list(read_all(read, [sample.source for sample in samples]))
    usable = [i for i, picture in enumerate(pictures) if isinstance(picture, np.ndarray)]
    reference, chosen = learn([pictures[i] for i in usable], rigid=image.align == "rigid")
    log.info(
        "all parts are brought into the pose of %s; image.region and image.ignore, if you set "
        "them, must be drawn on that image",
        samples[usable[chosen]].name,
    )
    return reference


def _image_sizes(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Sizes (H0, W0) of all readable images."""
    headers = read_all(size_of, [s.path for s in samples if s.image is None])
    sizes = [size for size in headers if isinstance(size, tuple)]
    return sizes + [s.image.size for s in samples if s.image is not None]


def _trial_images(samples: Sequence[Sample], loading: Preprocessing) -> list[NetworkInput]:
    """Up to four usable images of one size, spread over the list; a large image's first tile."""
    trial: list[NetworkInput] = []
    decoders = Decoders(loading)
    for sample in samples[:: max(1, len(samples) // _TRIAL_IMAGES)]:
        item = decoders.load(sample.source)
        if isinstance(item, NetworkInput):
            item = next(item.tiles(1))[0]
            if not trial or item.view.size == trial[0].view.size:
                trial.append(item)
    return trial[:_TRIAL_IMAGES]


@dataclass(frozen=True, eq=False)
class Training:
    """A trained model with the facts about its training.

    Attributes:
        model: the trained model, with thresholds if these were wanted.
        images: numbers of the images learned from, ascending.
        seconds: duration of each stage, by its name.
        suspects: scores of the training images that look least like the others, the worst first;
            empty if neither thresholds nor `model.leave_out_suspects` were wanted.
        stand_out: scores of the images that stand out from all others, by name, the highest first,
            every copy listed. With `model.leave_out_suspects` the model hasn't learned them.
        refused: reasons why training images can't be used, by name.
        patches: number of patches of these images, turned copies included.
        patch_pixels: median height and width of one patch in original pixels.
        outliers: names of training images whose image statistics lie so far from the others' that
            they would be `review`, had the model not learned from them.
    """

    model: Model
    images: tuple[int, ...]
    seconds: dict[str, float]
    suspects: tuple[HeldOutScores, ...] = ()
    stand_out: Mapping[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    patch_pixels: tuple[float, float] = (0.0, 0.0)
    outliers: tuple[str, ...] = ()


def _fit(
    setup: TrainingSetup,
    features: CachedFeatures,
    samples: Sequence[Sample],
    stages: Stages,
    *,
    calibrate: bool,
) -> Training:
    """Fit a scorer, find the thresholds, and look for images that stand out from all others.

    With `model.leave_out_suspects`, images that stand out are left out, and the others are fitted
    and scored again. `train` adds the facts about the images.
    """

    def fitted(images: Container[int]) -> Model:
        return setup.model(setup.fitter.fit(features.only(images), stages.progress("scorer")))

    def scored(images: Mapping[int, Sample]) -> tuple[GoodScores, tuple[HeldOutScores, ...]]:
        part, progress = features.only(images), stages.progress("calibration")
        # `model` is the one fitted last, on the same images.
        return cross_fit(model, part, setup.fitter, images, progress=progress)

    learned = {i: samples[i] for i in sorted(features.facts)}
    model = fitted(learned)
    stages.end("scorer")
    _warn_of_copies(features, samples)
    config, pictures = setup.config, features.picture_hashes()
    leave_out = config.model.leave_out_suspects
    if not (calibrate or leave_out):
        return Training(model, tuple(learned), stages.seconds)
    good, suspects = scored(learned)
    scores = standing_out(good)
    # One score of a picture stands for all copies, which are to be named as well.
    outlying = {pictures[i]: scores[s.name] for i, s in learned.items() if s.name in scores}
    copies = sorted(
        (i for i in learned if pictures[i] in outlying), key=lambda i: -outlying[pictures[i]]
    )
    stand_out = {samples[i].name: outlying[pictures[i]] for i in copies}
    if leave_out and stand_out:
        learned = {i: s for i, s in learned.items() if pictures[i] not in outlying}
        model = fitted(learned)
        good = replace(scored(learned)[0], stood_out=len(stand_out))
    if calibrate:
        rates = config.calibration
        thresholds = thresholds_from(good, rates.review_rate, rates.reject_rate)
        model = replace(model, thresholds=thresholds)
    stages.end("calibration")
    return Training(model, tuple(learned), stages.seconds, suspects, stand_out)


def standing_out(good: GoodScores) -> dict[str, float]:
    """Scores of the images that stand out from all others, by name, the highest first.

    The logarithm of such a score lies more than 5 robust standard deviations (1.4826 · the median
    absolute deviation, at least 0.02) above the median. A fifth of defects hardly moves either.

    Args:
        good: scores of images by models that haven't learned from them.
    """
    scores = np.array(good.image)
    logarithms = np.log(np.maximum(scores, np.finfo(np.float32).tiny))
    away = logarithms - np.median(logarithms)
    limit = _STANDS_OUT * max(1.4826 * float(np.median(np.abs(away))), _LEAST_SPREAD)
    order = np.argsort(-scores, kind="stable").tolist()
    return {good.names[i]: good.image[i] for i in order if away[i] > limit}


def good_scores(names: Sequence[str], scores: Iterable[HeldOutScores], source: str) -> GoodScores:
    """Good scores for thresholds, from scores of images in the order of their names.

    `source` tells their number and origin in words.
    """
    image, peak = zip(*((held.score, held.peak) for held in scores), strict=True)
    return GoodScores(tuple(names), image, peak, source)


def cross_fit(
    model: Model,
    patches: CachedFeatures,
    fitter: Fitter[Any],
    samples: Mapping[int, Sample],
    *,
    folds: int = _FOLDS,
    progress: Progress = lambda done, total: None,
) -> tuple[GoodScores, tuple[HeldOutScores, ...]]:
    """Score each training image by a model that hasn't learned from it.

    Each method has its own way to score without an image, see `Fitter.held_out`.

    Args:
        model: the model fitted on all of `patches`.
        patches: patches of the training images; features are read, never computed again.
        fitter: the fitter that the model was fitted with.
        samples: the images used, by image number. Copies of one picture are held out together and
            count once. Images of a group share a fold, unless there is one group only. A copy
            belongs to the group of the first image of its picture.
        folds: number of folds, at most.
        progress: called with (images scored, number of images).

    Returns:
        One score for each picture, and the scores of the `SUSPECTS` images that look least like the
        others, the worst first.

    Raises:
        DataError: the images show fewer than two different pictures.
    """
    indices, pictures = sorted(samples), patches.picture_hashes()
    groups = {i: group for i in indices if (group := samples[i].group)}
    first_with: dict[str, int] = {}
    # The first image of each image's picture: the image itself, unless it is a copy.
    originals = {i: first_with.setdefault(pictures[i], i) for i in indices}
    distinct = sorted(set(originals.values()))
    # Numbers of groups, in which an image without a group is one by itself.
    units = len({groups.get(i, i) for i in distinct})
    known_groups = groups if units > 1 else {}  # a single group can't be held out as a whole
    kept_together = {i: known_groups.get(first, first) for i, first in originals.items()}
    divided = split(indices, kept_together, folds)
    scores: dict[int, HeldOutScores] = {}
    grouped = bool(known_groups) or len(distinct) < len(indices)
    for images, scorer in fitter.held_out(model.scorer, patches, divided, grouped=grouped):
        part, scoring = patches.only(frozenset(images)), replace(model, scorer=scorer)
        scores.update(part.scores(scoring, lambda done: progress(len(scores) + done, len(indices))))
    source = f"{len(distinct)} training images, each scored by a model that hasn't seen it"
    good = good_scores([samples[i].name for i in distinct], [scores[i] for i in distinct], source)
    return replace(good, groups=units if groups else None), tuple(worst(scores)[:SUSPECTS])


def split(
    images: Sequence[int], groups: Mapping[int, str | int], folds: int = _FOLDS
) -> list[Fold]:
    """Image numbers in folds of about equal size; a group stays whole.

    Neighbours share a fold: pictures taken one after the other often show parts alike.

    Args:
        images: image numbers.
        groups: the group of each image that has one.
        folds: number of folds, at most.

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


def _warn_of_copies(features: CachedFeatures, samples: Sequence[Sample]) -> None:
    pictures = features.picture_hashes()
    different = len(set(pictures.values()))
    if copies := len(pictures) - different:
        log.warning(
            "%d of %d training images are copies of others, which leaves %d different images. "
            "Copies count once for the thresholds and teach nothing: photograph more parts "
            "instead",
            copies,
            len(pictures),
            different,
        )
    looks = {i: facts.look for i, facts in features.facts.items()}
    if near := near_copies_warning(dict(enumerate(samples)), looks):
        log.warning("%s", near)


def _check_labels(
    features: CachedFeatures,
    samples: Sequence[Sample],
    defects: Sequence[Sample],
    decoding: Decoding,
) -> None:
    """Refuse a good image, one of `samples`, that is the same picture as a defect.

    Raises:
        DataError: one picture is good and defective.
    """
    pictures = features.picture_hashes()
    # In descending order, so that the first of several copies stays.
    good = {pictures[i]: samples[i] for i in sorted(pictures, reverse=True)}
    read = partial(derive, picture_hash, decoding)
    hashes = read_all(read, [sample.source for sample in defects])
    for defect, picture in zip(defects, hashes, strict=True):
        # An unreadable defect has no hash; where it is scored, the reason is given.
        same = good.get(picture) if isinstance(picture, str) else None
        if same is not None and (contrary := contradiction(same, defect)):
            raise contrary


class Stages:
    """Clock of a training's stages, which follow one another, and their progress.

    Attributes:
        seconds: duration of each stage that has ended, by its name.

    Args:
        progress: called with (stage, done, total).
    """

    def __init__(self, progress: StageProgress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._last = time.perf_counter()

    def progress(self, stage: str) -> Progress:
        """A callback for the progress of a stage, called with (done, total)."""
        return partial(self._progress, stage)

    def end(self, stage: str) -> None:
        """End a stage, which began where the one before ended."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


# Computes the features of training images, as `cached_features` does.
FeaturesOf: TypeAlias = Callable[
    [TrainingSetup, Mapping[int, Path | Image], Path, Progress],
    AbstractContextManager[CachedFeatures],
]


def train(
    config: Config,
    samples: Sequence[Sample],
    *,
    defects: Sequence[Sample] = (),
    device: torch.device,
    scratch: Path,
    calibrate: bool = True,
    features_of: FeaturesOf | None = None,
    progress: StageProgress = lambda stage, done, total: None,
) -> Training:
    """Learn what good looks like.

    The thresholds come from cross-fitted scores of the same images, see `cross_fit`; the model
    itself learns from all of them.

    Args:
        config: all settings; `config.data` isn't read.
        samples: good images.
        defects: defective images of the data set; none may be among the good images.
        device: the device of the network and the scorer.
        scratch: an existing folder for temporary files.
        calibrate: find thresholds.
        features_of: called as `cached_features`, the default; a cluster's computes on its machines.
        progress: called with (stage, done, total).

    Raises:
        DataError: two images have one name (a model knows its images by name), there are too few
            for cross-fitting, or one is among the defects as well.
        AnomalyError: weights, layers or images can't be used as configured.
    """
    for name, times in Counter(sample.name for sample in samples).items():
        if times > 1:
            raise DataError(f"{times} training images have the name {name!r}; each needs its own")
    if calibrate or config.model.leave_out_suspects:  # too few images are refused at once
        split(range(len(samples)), {})
    stages = Stages(progress)
    images = {i: sample.source for i, sample in enumerate(samples)}
    setup = prepare(config, samples, device)
    stages.end("backbone")
    compute_features = features_of or cached_features
    with compute_features(setup, images, scratch, stages.progress("features")) as features:
        _check_labels(features, samples, defects, setup.loading.decoding)
        rest()  # ends the decoding processes: the scorer needs their memory
        brightest = (facts.look.brightest for facts in features.facts.values())
        if bits := setup.loading.decoding.unstated_bits(brightest):
            log.warning("%s", unstated_bits_warning(bits))
        stages.end("features")
        fit = _fit(setup, features, samples, stages, calibrate=calibrate)
    hashes = {samples[i].name: features.facts[i].sha256 for i in fit.images}
    unused = {samples[i].name: i for i in sorted({*images} - {*fit.images})}
    manifest = manifest_of(fit.model, setup.weights_sha256, hashes, unused)
    if features.shard:
        manifest["made_with"]["shard_images"] = features.shard
    statistics = features.statistics_of(fit.images)
    learned = TrainingStatistics.of(statistics)
    return replace(
        fit,
        model=replace(fit.model, training_statistics=learned, manifest=manifest),
        refused={samples[r.index].name: r.reason for r in features.refused},
        patches=features.only(frozenset(fit.images)).count,
        patch_pixels=_patch_pixels(features, min(setup.extractor.strides)),
        outliers=tuple(samples[fit.images[place]].name for place in outliers_among(statistics)),
    )


def _patch_pixels(features: CachedFeatures, stride: int) -> tuple[float, float]:
    """Median height and width of one patch in original pixels; `stride` is in network pixels."""
    axes = [[pieces[0] for pieces in view.axes] for view in features.views.values()]
    height, width = (
        median(stride * axis.source / axis.resized for axis in axes_of_images)
        for axes_of_images in zip(*axes, strict=True)
    )
    return height, width
