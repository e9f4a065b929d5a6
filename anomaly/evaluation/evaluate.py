"""A model and test images -> figures. Only measures: nothing here ever sets a threshold."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.calibration.thresholds import Thresholds
from anomaly.datasets.inputs import open_test_images
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import (
    Dataset,
    Sample,
    contradiction,
    ground_truth,
    samples_in,
    stray_masks_warning,
    turned_mask_warning,
)
from anomaly.errors import DataError, ImageError, some
from anomaly.evaluation.metrics import (
    Confusion,
    Metrics,
    PixelAccumulator,
    confusion,
    image_intervals,
    image_metrics,
    metrics_by_type,
)
from anomaly.imaging.loading import UnusableImage, picture_hash
from anomaly.imaging.pool import read_one
from anomaly.runtime import Progress
from anomaly.scoring.model import Model, Prediction, Scored
from anomaly.storage.thresholds import threshold_images
from anomaly.training.runs import trained_on

log = logging.getLogger(__name__)

Mask = NDArray[np.bool_]
# Takes a scored image's prediction and its ground truth (H0, W0); None for a defect without one.
Visit = Callable[[Prediction, Mask | None], None]


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model's scores on test images.

    Attributes:
        name: name of the model.
        scored: every test image, in the order given.
        metrics: image and pixel figures; a None has its reason.
        intervals: 95 % confidence intervals of the image figures, by name.
        by_type: figures of each type of defect against all good images.
        thresholds: the model's own; None where it has none.
        n_threshold_images: number of test images that the thresholds were chosen with.
        n_settings_images: number of test images that the settings were chosen with (tune).
    """

    name: str
    scored: tuple[Scored, ...]
    metrics: Metrics
    intervals: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    by_type: dict[str, Metrics] = field(default_factory=dict)
    thresholds: Thresholds | None = None
    n_threshold_images: int = 0
    n_settings_images: int = 0

    @property
    def usable(self) -> list[tuple[Scored, float]]:
        """Images that have a score, with it, in the order of `scored`."""
        return [(row, row.score) for row in self.scored if row.score is not None]

    @property
    def n_good(self) -> int:
        """Number of good images that have a score."""
        return len(self.usable) - self.n_defect

    @property
    def n_defect(self) -> int:
        """Number of defective images that have a score."""
        return sum(row.sample.is_defect for row, _ in self.usable)

    @property
    def verdicts(self) -> Confusion | None:
        """Verdicts of the model's own thresholds against the truth; None without thresholds."""
        if self.thresholds is None:
            return None
        return confusion(
            (row.verdict(self.thresholds), row.sample.is_defect, row.sample.defect_type)
            for row, _ in self.usable
        )


def score_test_split(
    model: Model,
    samples: Sequence[Sample],
    *,
    progress: Progress = lambda done, total: None,
    visit: Visit = lambda prediction, mask: None,
) -> Evaluation:
    """Score a test split and compare with the ground truth, pixels at the images' own resolution.

    An image that can't be read, or whose mask can't, gets no score, only the reason.

    Args:
        model: the trained model.
        samples: good and defective images; a defect without a mask, or whose mask marks nothing,
            counts for the image metrics only.
        progress: called with (done, total).
        visit: called with each scored image's prediction and mask, which aren't kept here.

    Raises:
        DataError: there are no images, a picture is good and defective at once, here or as a
            training image, or a mask contradicts its image.
    """
    if not samples:
        raise DataError("the test split is empty: there is nothing to evaluate")
    pixels = PixelAccumulator()
    scored: dict[int, Scored] = {}
    by_picture: dict[str, Sample] = {}  # the first sample that shows a picture, by its hash
    learned = {sha256: name for name, sha256 in model.manifest["training_images"].items()}
    for result in model.results([s.source for s in samples], keep_images=True):
        sample = samples[result.index]
        try:
            if isinstance(result, UnusableImage):
                raise ImageError(result.reason, result.status)
            assert result.image is not None
            first = by_picture.setdefault(picture_hash(result.image), sample)
            if conflict := contradiction(first, sample):
                raise conflict
            if sample.is_defect and (name := learned.get(result.sha256)):
                raise _learned_as_good(sample, name)
            mask = _mask(sample, result.view.source)
        except ImageError as error:
            scored[result.index] = Scored(sample, None, str(error), status=error.status)
        else:
            width = width_of(mask) if sample.is_defect and mask is not None else None
            scored[result.index] = replace(Scored.of(sample, result), width=width)
            if mask is not None:
                pixels.update(result.anomaly_map, mask)
                if doubt := turned_mask_warning(sample, result.image):
                    log.warning("%s", doubt)
            visit(result, mask)
        progress(len(scored), len(samples))
    rows = tuple(scored[i] for i in range(len(samples)))
    _warn_of_unmarked(rows)
    return _evaluation(model, rows, pixels.result())


def _warn_of_unmarked(rows: Sequence[Scored]) -> None:
    """Warn of defects that no mask marks, if masks mark others."""
    defects = [row for row in rows if row.sample.is_defect and row.score is not None]
    unmarked = [str(row.sample.path) for row in defects if row.width is None]
    if 0 < len(unmarked) < len(defects):
        log.warning(
            "%d of %d defects have no mask, or one that marks nothing (%s); they count in image "
            "figures, not in pixel figures",
            len(unmarked),
            len(defects),
            some(unmarked),
        )


def _evaluation(model: Model, rows: tuple[Scored, ...], pixel_metrics: Metrics) -> Evaluation:
    """Image figures of scored images, beside their pixel figures."""
    usable = [(row.score, row.sample) for row in rows if row.score is not None]
    scores, labels = [score for score, _ in usable], [s.is_defect for _, s in usable]
    chosen_with = threshold_images(model)
    return Evaluation(
        name=model.config.name,
        scored=rows,
        metrics=image_metrics(scores, labels) | pixel_metrics,
        intervals=image_intervals(scores, labels),
        by_type=metrics_by_type(scores, labels, [s.defect_type for _, s in usable]),
        thresholds=model.thresholds,
        n_threshold_images=sum(row.sha256 in chosen_with for row in rows),
        n_settings_images=sum(model.config.was_chosen_by(row.sha256) for row in rows),
    )


def width_of(mask: Mask) -> float:
    """Width of the widest place that a mask (H, W) marks, in its pixels; 0 if it is empty."""
    # Twice the distance from the pixel that is farthest from the defect's edge.
    return 2 * float(cv2.distanceTransform(mask.astype(np.uint8), cv2.DIST_L2, 3).max())


def _learned_as_good(sample: Sample, name: str) -> DataError:
    """The error of a defect whose file is also the training image of this name."""
    return DataError(
        f"{sample.path} is labelled as a defect ({sample.defect_type}), but the model has learned "
        f"that it is good, as {name}. If it is a defect, remove it from the training images and "
        "train again; if it is good, remove it from the defects"
    )


def _mask(sample: Sample, size: tuple[int, int]) -> Mask | None:
    """Ground truth of an image of `size` (H, W); None for a defect that no mask marks.

    Raises:
        ImageError: the mask can't be read.
        DataError: the mask contradicts the image.
    """
    if sample.mask_path is None:
        return None if sample.is_defect else ground_truth(sample, size)
    try:
        mask = read_one(ground_truth, sample, size, about=sample.mask_path)
    except ImageError as error:
        reason = f"{sample.path} is left out, because its mask can't be used: {error}"
        raise ImageError(reason, error.status) from None
    # An empty mask would make the defect count as a good image.
    return np.asarray(mask, bool) if mask.any() or not sample.is_defect else None


def images_to_test(
    model: Model, good: Sequence[Path] = (), defects: Sequence[Path] = ()
) -> tuple[Sequence[Sample], str]:
    """Test images: of given folders, without the training images; or of the model's data set.

    Args:
        model: the trained model.
        good: folders of good images.
        defects: folders of defects, whose subfolders name the types.

    Returns:
        The images, and their folders (or list) as text for people.

    Raises:
        DataError: there are no test images, or the data set isn't found or can't be used.
    """
    if good or defects:
        samples: Sequence[Sample] = not_learned(model, open_test_images(good, defects))
        return samples, ", ".join(map(str, [*good, *defects]))
    dataset = dataset_of(model)
    if samples := tested_split(dataset):
        return samples, str(dataset.folder)
    layout = model.config.data.format
    raise DataError(
        f"{dataset.folder} has no test images where data.format={layout} keeps them (see Your own "
        "data in the documentation). Give --good FOLDER with other good images and --defects "
        "FOLDER with defects"
    )


def tested_split(dataset: Dataset) -> Sequence[Sample]:
    """The test split; a warning names masks that belong to no image."""
    if unused := stray_masks_warning(dataset.unused_masks):
        log.warning("%s", unused)
    return dataset.test


def not_learned(model: Model, given: Sequence[Sample]) -> list[Sample]:
    """The given images without good ones that the model has learned from; a warning counts those.

    Unreadable files, and defects that it has learned as good, stay: the evaluation reports them.

    Raises:
        DataError: the model has learned from all images.
    """
    learned = frozenset(model.manifest["training_images"].values())
    samples = [s for s in given if s.is_defect or s.sha256 not in learned]
    if out := len(given) - len(samples):
        log.warning(
            "left out: %d of %d images, as the model has learned from them", out, len(given)
        )
    if given and not samples:
        raise DataError(f"{model.name} has learned from all of these images; give others")
    return samples


def dataset_of(model: Model) -> Dataset:
    """The data set that a model was trained on.

    Raises:
        DataError: the model isn't saved, or the data set isn't found or can't be used.
    """
    if model.folder is None:
        raise DataError("the model isn't saved, so it has no data set; give images")
    return open_dataset(model.config.data.format, trained_on(model.folder))


class TrainingImages:
    """Search for a model's training images, by content, in its data set and in folders.

    Args:
        model: the trained model.
        folders: folders that may hold training images, under any names; the first search that
            needs it hashes all their files.

    Raises:
        DataError: one of `folders` isn't a folder.
    """

    def __init__(self, model: Model, *folders: str | Path) -> None:
        for folder in folders:
            if not Path(folder).is_dir():
                raise DataError(f"{folder} isn't a folder; name the one with the training images")
        self._hashes: Mapping[str, str] = model.manifest["training_images"]
        self._in_folders = [sample for folder in folders for sample in samples_in(Path(folder))]
        self._by_name = defaultdict[str, list[Sample]](list)
        with suppress(DataError):  # an update may have learned from other folders
            for sample in dataset_of(model).samples:
                self._by_name[sample.name].append(sample)
        for sample in self._in_folders:
            self._by_name[sample.name].append(sample)

    def find(self, name: str) -> Sample | None:
        """The training image of a name in the manifest; None where no file has its content."""
        sha256, parts = self._hashes[name], PurePosixPath(name).parts
        # a/b/c.png, b/c.png, c.png: a folder given may be any part of the former one.
        ends = (PurePosixPath(*parts[i:]).as_posix() for i in range(len(parts)))
        candidates = (sample for end in ends for sample in self._by_name[end])
        same = (sample for sample in candidates if sample.sha256 == sha256)
        return next(same, None) or self._by_content.get(sha256)

    @cached_property
    def _by_content(self) -> dict[str, Sample]:
        # Reversed, so that the first of equal files wins.
        return {sample.sha256: sample for sample in reversed(self._in_folders)}
