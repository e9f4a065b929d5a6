"""Which images a model is tested with, and which it has learned from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from anomaly.datasets import Dataset, Sample, open_dataset, open_test_images
from anomaly.datasets.samples import strays
from anomaly.errors import DataError
from anomaly.files.writing import sha256_of
from anomaly.scoring.model import Model
from anomaly.training.runs import trained_on

log = logging.getLogger(__name__)


def images_to_test(
    model: Model,
    folder: Path,
    *,
    good: Sequence[Path] = (),
    defects: Sequence[Path] = (),
) -> tuple[Sequence[Sample], str]:
    """The named images that the model hasn't learned from; without names the data set's.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        good: folders of good images.
        defects: folders of defects, whose subfolders name the types.

    Returns:
        The images, and the folders that they come from, for people.

    Raises:
        DataError: there are none, or nothing says where they are.
    """
    if good or defects:
        samples = not_learned(model, folder, open_test_images(good, defects))
        return samples, ", ".join(map(str, [*good, *defects]))
    dataset = dataset_of(model, folder)
    if unused := strays(dataset.unused_masks):
        log.warning("%s", unused)
    if dataset.test:
        return dataset.test, str(dataset.folder)
    layout = model.config.data.format
    raise DataError(
        f"{dataset.folder} has no test images where data.format={layout} keeps them (see Your own "
        "data in the documentation). Give --good FOLDER with other good images and --defects "
        "FOLDER with defects"
    )


def content_hash(sample: Sample) -> str:
    """sha256 of an image's file, or of its pixels; empty where it can't be read."""
    with suppress(OSError):
        return sample.image.sha256 if sample.image else sha256_of(sample.path)
    return ""


def threshold_images(model: Model) -> frozenset[str]:
    """sha256 of the images that a model's thresholds were chosen with; figures on them flatter.

    Good images, and the defects that were given where thresholds were set by hand.
    """
    limits = model.thresholds
    if limits is None:
        return frozenset()
    hashes = {*limits.good.hashes} - {""}
    if not hashes:
        hashes |= {*model.manifest["training_images"].values()}
    if limits.label != "calibrated":
        with suppress(*_EDITED_BY_HAND):
            hashes |= {*_last_change(model)["images"].get("defects", {}).values()}
    return frozenset(hashes)


def caught_defects(model: Model) -> float | None:
    """The share of the defects given to `calibrate` that its thresholds catch; None without any."""
    with suppress(*_EDITED_BY_HAND):
        return float(_last_change(model)["defects_found"]["caught"]["expected"])
    return None


# What a line of the history that somebody has written may raise.
_EDITED_BY_HAND = (ValueError, TypeError, KeyError, AttributeError, IndexError)


def recorded(model: Model, kind: str) -> set[str]:
    """sha256 of the images that a model's history names as `kind`: `defects` that were given, say.

    Args:
        model: trained.
        kind: of images.
    """
    hashes: set[str] = set()
    lines: list[Any] = [*model.history.splitlines(), *model.changes]
    for line in lines:
        with suppress(*_EDITED_BY_HAND):
            entry = json.loads(line) if isinstance(line, bytes) else line
            hashes |= {*entry["images"].get(kind, {}).values()}
    return hashes


def _last_change(model: Model) -> Mapping[str, Any]:
    """The last line of a model's history."""
    if model.changes:
        return model.changes[-1]
    return dict(json.loads(model.history.splitlines()[-1]))


def dataset_of(model: Model, folder: Path) -> Dataset:
    """The data set that a model was trained on.

    Raises:
        DataError: it isn't there, or nothing says where it is.
    """
    return open_dataset(model.config.data.format, trained_on(folder), None)


def not_learned(model: Model, name: object, named: Sequence[Sample]) -> list[Sample]:
    """The images that the model hasn't learned from.

    Unreadable files, and defects that were learned as good, stay and are reported later.

    A warning says how many it has learned from.

    Args:
        model: what learned.
        name: of the model, for the message.
        named: the images that somebody names.

    Raises:
        DataError: it has learned from all of them.
    """
    learned = frozenset(model.manifest["training_images"].values())
    samples = [s for s in named if s.is_defect or content_hash(s) not in learned]
    if len(samples) < len(named):
        out = len(named) - len(samples)
        log.warning("the model has learned from %d of %d images; left out", out, len(named))
    if named and not samples:
        raise DataError(f"{name} has learned from all of these images; give others")
    return samples


def dataset_images(model: Model, folder: Path) -> list[Sample]:
    """All images of the data set that a model was trained on, whichever split they are in.

    A split that was drawn may have been drawn anew since.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.

    Raises:
        DataError: the data set isn't there, or nothing says where it is.
    """
    splits = dataset_of(model, folder).splits
    return [sample for samples in splits.values() for sample in samples]


def training_names(manifest: Mapping[str, Any]) -> list[str]:
    """The names of the training images, each at the index that the memory bank knows it by."""
    names = list(manifest["training_images"])
    refused: dict[str, int] = manifest["refused_images"] or {}
    for name, index in sorted(refused.items(), key=lambda at: at[1]):
        names.insert(index, name)
    return names


class TrainingImages:
    """Finds training images by their names, and knows them by their content.

    Args:
        hashes: sha256 of each by name, as a model's manifest has them.
        samples: images among which they may be. Their names may be the ends of those in the
            manifest: `good/1.png` or `1.png` for `train/good/1.png`.
        renamed: those of them that may have any name; all are read to find one.
    """

    def __init__(
        self,
        hashes: Mapping[str, str],
        samples: Iterable[Sample],
        *,
        renamed: Iterable[Sample] = (),
    ) -> None:
        self._hashes = hashes
        self._renamed = list(renamed)
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def find(self, name: str) -> Sample | str:
        """A training image, or why it isn't there."""
        reason = "not found"
        parts = PurePosixPath(name).parts
        ends = [PurePosixPath(*parts[i:]).as_posix() for i in range(len(parts))]
        for sample in (sample for end in ends for sample in self._by_name.get(end, ())):
            try:
                if sha256_of(sample.path) == self._hashes[name]:
                    return sample
                reason = "changed since training"
            except FileNotFoundError:
                continue
            except OSError:
                reason = "can't be read"
        return self._by_content.get(self._hashes[name], reason)

    @cached_property
    def _by_content(self) -> dict[str, Sample]:
        return {content_hash(sample): sample for sample in reversed(self._renamed)}

    def find_all(self) -> dict[str, Sample | str]:
        """All training images by name; else why one isn't there."""
        return {name: self.find(name) for name in self._hashes}

    def numbered(self, manifest: Mapping[str, Any]) -> tuple[dict[int, Sample], dict[str, str]]:
        """All training images by their numbers (`training_names`); of those not there, why."""
        found = self.find_all()
        missing = {name: why for name, why in found.items() if isinstance(why, str)}
        names = enumerate(training_names(manifest))
        return {i: image for i, n in names if isinstance(image := found.get(n), Sample)}, missing
