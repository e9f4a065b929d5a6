"""The images that a model was learned from, as far as they are still to be found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath

from anomaly.datasets import Sample
from anomaly.evaluation.test_split import dataset_of
from anomaly.files.writing import sha256_of
from anomaly.model.scoring import Model


def dataset_images(model: Model, folder: Path, data_root: Path | None) -> list[Sample]:
    """All images of the data set that a model was trained on, whichever split they are in.

    A split that was drawn may have been drawn anew since.

    Args:
        model: trained.
        folder: the run, or the model folder, that it was loaded from.
        data_root: where the data sets are, if they have moved since training.

    Raises:
        DataError: the data set isn't there, or nothing says where it is.
    """
    splits = dataset_of(model, folder, data_root).splits
    return [sample for samples in splits.values() for sample in samples]


class TrainingImages:
    """Finds training images by their names, and knows them by their content.

    Args:
        hashes: sha256 of each by name, as a model's manifest has them.
        there: images among which they may be. Their names may be the ends of those in the
            manifest: `good/1.png` or `1.png` for `train/good/1.png`.
        renamed: those of them that may have any name; all are read to find one.
    """

    def __init__(
        self,
        hashes: Mapping[str, str],
        there: Iterable[Sample],
        *,
        renamed: Iterable[Sample] = (),
    ) -> None:
        self._hashes = hashes
        self._renamed = list(renamed)
        self._there: dict[str, list[Sample]] = {}
        for sample in there:
            self._there.setdefault(sample.name, []).append(sample)

    def find(self, name: str) -> Sample | str:
        """A training image, or why it isn't there."""
        reason = "not found"
        parts = PurePosixPath(name).parts
        ends = [PurePosixPath(*parts[i:]).as_posix() for i in range(len(parts))]
        for sample in (one for end in ends for one in self._there.get(end, ())):
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
        found: dict[str, Sample] = {}
        for sample in self._renamed:
            with suppress(OSError):
                found.setdefault(sha256_of(sample.path), sample)
        return found

    def find_all(self) -> dict[str, Sample | str]:
        """All training images by name; else why one isn't there."""
        return {name: self.find(name) for name in self._hashes}
