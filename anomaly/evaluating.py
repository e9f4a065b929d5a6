"""Detector x test images -> figures and a report. The command is `anomaly evaluate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from anomaly.config.schema import Config
from anomaly.datasets import Dataset, Sample, open_dataset
from anomaly.datasets.masks import strays
from anomaly.detector import AnomalyDetector
from anomaly.errors import DataError
from anomaly.evaluation.splits import images_to_test, not_learned
from anomaly.methods.base import Progress
from anomaly.report.index import write_report
from anomaly.report.report import Category, evaluated

log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class EvaluationResult(Category):
    """What `anomaly.evaluate` returns: figures, every image's score, and a report."""

    def report(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write `index.html`, and the report of this model in a folder beside it.

        Returns:
            The report's HTML file.

        Raises:
            OutputError: there is one already, or it can't be written.
        """
        return write_report(self, Path(folder), overwrite=overwrite)


def evaluate(
    detector: AnomalyDetector,
    data: Dataset | Config | Iterable[Sample] | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> EvaluationResult:
    """Score test images and compare with what they show.

    Nothing is tuned here: the detector and its thresholds stay as they are.

    Args:
        detector: a trained one.
        data: what to test with: a data set's test split (`anomaly.open_dataset`), that of the data
            set which a config's `data` names, samples of your own, or None for the data set that
            the detector was trained on, where its run remembers that. Images that it has learned
            from are left out.
        progress: called with (done, total).

    Returns:
        Figures (`metrics`), every image's score (`scored`), what the thresholds did (`verdicts`),
        and `report(folder)`.

    Raises:
        DataError: there are no images, or a mask doesn't fit its image.
    """
    model = detector.model
    if data is None:
        if model.folder is None:
            raise DataError("there is nothing to test with; give a data set, or samples")
        data, place = images_to_test(model, model.folder)
        samples = list(data)
    else:
        samples, place = _test_images(data)
    samples = not_learned(model, model.config.name, samples)
    category = evaluated(
        model,
        samples,
        place,
        own_split=bool(place),  # samples have none
        progress=progress,
    )
    return EvaluationResult(**{f.name: getattr(category, f.name) for f in fields(category)})


def _test_images(data: Dataset | Config | Iterable[Sample]) -> tuple[list[Sample], str]:
    """The test images of a data set, of the data set that a config names, or the samples given.

    Args:
        data: any of these.

    Returns:
        The images; and their folder for people, empty for samples.

    Raises:
        DataError: the data set that the config names can't be opened, or something else was given.
    """
    if isinstance(data, Config):
        where = data.data
        data = open_dataset(where.format, where.root, where.category)
    if isinstance(data, Dataset):
        if unused := strays(data.unused_masks):
            log.warning("%s", unused)
        return list(data.test), str(data.folder)
    samples: list[Any] = [data] if isinstance(data, str | PathLike) else list(data)
    if not all(isinstance(sample, Sample) for sample in samples):
        raise DataError(
            "test images need labels that say which are defective: give "
            "anomaly.open_dataset(format, folder), samples, or a Config"
        )
    return samples, ""
