"""The images that a model is tested with, was set with, and has learned from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from anomaly.datasets.inputs import open_test_images
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Dataset, Sample, strays
from anomaly.errors import DataError
from anomaly.files.writing import sha256_of
from anomaly.scoring.model import Model
from anomaly.training.runs import trained_on

log = logging.getLogger(__name__)


def images_to_test(
    model: Model, folder: Path, good: Sequence[Path] = (), defects: Sequence[Path] = ()
) -> tuple[Sequence[Sample], str]:
    """Test images: of the given folders, without those learned from, or else of the data set.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        good: folders of good images.
        defects: folders of defects, whose subfolders name the types.

    Returns:
        The images, and their folders as text for people.

    Raises:
        DataError: there are no such images, or no record says where the data set is.
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
    """sha256 of an image's file, or of pixels in memory; empty where the file can't be read."""
    with suppress(OSError):
        return sample.image.sha256 if sample.image else sha256_of(sample.path)
    return ""


def threshold_images(model: Model) -> frozenset[str]:
    """sha256 of the images that a model's thresholds were chosen with; figures on them flatter.

    These are good images and, where thresholds were set by hand, the defects given with them.
    """
    limits = model.thresholds
    if limits is None:
        return frozenset()
    # Without hashes of their own the good scores are held-out scores of the training images.
    hashes = {*limits.good.hashes} - {""} or {*model.manifest["training_images"].values()}
    if limits.label != "calibrated":
        with suppress(*_MALFORMED):
            hashes |= {*_last_change(model)["images"].get("defects", {}).values()}
    return frozenset(hashes)


def caught_defects(model: Model) -> float | None:
    """The share of the defects given to `calibrate` that its thresholds catch; None without any."""
    with suppress(*_MALFORMED):
        return float(_last_change(model)["defects_found"]["caught"]["expected"])
    return None


# Errors of reading an entry of the history that somebody has edited by hand: it counts as empty.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError)


def recorded(model: Model, kind: str) -> set[str]:
    """sha256 of the images of one kind in a model's history.

    Args:
        model: trained.
        kind: name in the history's entries, such as `defects`.
    """
    hashes: set[str] = set()
    # Lines of the model folder, then the entries that aren't saved yet.
    lines: list[Any] = [*model.history.splitlines(), *model.changes]
    for line in lines:
        with suppress(*_MALFORMED):
            entry = json.loads(line) if isinstance(line, bytes) else line
            hashes |= {*entry["images"].get(kind, {}).values()}
    return hashes


def _last_change(model: Model) -> Mapping[str, Any]:
    """The latest entry of a model's history, saved or not."""
    if model.changes:
        return model.changes[-1]
    return dict(json.loads(model.history.splitlines()[-1]))


def dataset_of(model: Model, folder: Path) -> Dataset:
    """The data set that a model was trained on.

    Raises:
        DataError: the data set is missing, or no record says where it is.
    """
    return open_dataset(model.config.data.format, trained_on(folder), None)


def not_learned(model: Model, name: object, given: Sequence[Sample]) -> list[Sample]:
    """Images that a model hasn't learned from; a warning counts the others.

    Args:
        model: trained.
        name: the model's name in messages.
        given: images of the user. Unreadable files, and defects that were learned as good, stay:
            the evaluation reports them.

    Raises:
        DataError: the model has learned from all images.
    """
    learned = frozenset(model.manifest["training_images"].values())
    samples = [s for s in given if s.is_defect or content_hash(s) not in learned]
    if out := len(given) - len(samples):
        log.warning("the model has learned from %d of %d images; left out", out, len(given))
    if given and not samples:
        raise DataError(f"{name} has learned from all of these images; give others")
    return samples


def dataset_images(model: Model, folder: Path) -> list[Sample]:
    """All images of the data set that a model was trained on.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.

    Raises:
        DataError: the data set is missing, or no record says where it is.
    """
    # Of all splits: a drawn split may have been drawn anew since.
    splits = dataset_of(model, folder).splits
    return [sample for samples in splits.values() for sample in samples]


def training_names(manifest: Mapping[str, Any]) -> list[str]:
    """Names of the images given for training, at the indices that memory bank vectors carry.

    Refused images have an index, too.
    """
    names = list(manifest["training_images"])
    refused: dict[str, int] = manifest["refused_images"] or {}
    for name, index in sorted(refused.items(), key=lambda pair: pair[1]):
        names.insert(index, name)
    return names


class TrainingImages:
    """Search for training images by name, and by content.

    Args:
        hashes: sha256 of the training images by name, from a model's manifest.
        samples: candidates. A candidate's name may be the end of the name in the manifest:
            `good/1.png` or `1.png` for `train/good/1.png`.
        renamed: candidates under any name; the first search that needs them hashes all.
    """

    def __init__(
        self,
        hashes: Mapping[str, str],
        samples: Iterable[Sample],
        *,
        renamed: Sequence[Sample] = (),
    ) -> None:
        self._hashes, self._renamed = hashes, renamed
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def find(self, name: str) -> Sample | str:
        """The training image of a name in the manifest, or the reason why it isn't there."""
        reason = "not found"
        # a/b/c.png, b/c.png, c.png: a folder given may be any part of the former one.
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
        # Reversed, so that the first of equal files wins.
        return {content_hash(sample): sample for sample in reversed(self._renamed)}
