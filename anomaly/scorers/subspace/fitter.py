"""Good patches -> the subspace that they lie near, and what a config says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anomaly.errors import ConfigError, DataError
from anomaly.runtime.parallel import spread
from anomaly.scorers.base import Align, Fitter, Fold, Progress, Scorer
from anomaly.scorers.patchcore.embedding import patchcore_concat
from anomaly.scorers.patches import PatchBatch, PatchSet
from anomaly.scorers.saved_tensors import check_apart
from anomaly.scorers.subspace.residual import Subspace, check_subspace, residual_norms
from anomaly.scorers.subspace.statistics import PatchStatistics

_AT_ONCE = 4  # folds whose sums are held: 38 MB each at D = 1,536


def fitter(settings: Mapping[str, Any], *, seed: int, memory_limit: int) -> SubspaceFitter:
    """What a config's section `model` learns with.

    Args:
        settings: its values by key.
        seed: isn't used: nothing is drawn.
        memory_limit: isn't used: sums take the same room for any number of patches.
    """
    return SubspaceFitter(settings["variance"], settings["components"])


def scorer(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], *, device: torch.device, cache: Path
) -> PatchSubspace:
    """The subspace that was saved.

    Args:
        tensors: as `PatchSubspace.tensors` gave them.
        settings: the config's section `model`, by key; not used.
        device: where it goes.
        cache: not used: nothing has to be derived from it.

    Raises:
        ModelError: they aren't those of a subspace.
    """
    return PatchSubspace.from_tensors(tensors).to(device)


@dataclass(frozen=True, eq=False)
class PatchSubspace(Subspace, Scorer):
    """The principal subspace of good patches, and the sums that it comes from.

    Attributes:
        statistics: of the patches learned from. They aren't needed to score, but with them the
            model learns more images, is merged, and is cross-fitted without a second reading.
        basis: (D, k) float32, orthonormal columns.
    """

    statistics: PatchStatistics
    basis: Tensor

    @property
    def mean(self) -> Tensor:
        """(D,) float32."""
        return self.statistics.mean.float()

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings that `score` takes."""
        return patchcore_concat

    def graph(self) -> _SubspaceGraph:
        """`score` as a module that can be traced."""
        return _SubspaceGraph(self.mean, self.basis)

    def to(self, target: torch.device | str) -> PatchSubspace:
        """The same subspace on another device."""
        return PatchSubspace(self.statistics.to(target), self.basis.to(target))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        return {**self.statistics.tensors(), "basis": self.basis}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> PatchSubspace:
        """The way back from `tensors`.

        Raises:
            ModelError: they aren't those of a subspace.
        """
        check_subspace(tensors)
        return cls(PatchStatistics.from_tensors(tensors), tensors["basis"])


class _SubspaceGraph(nn.Module):
    mean: Tensor
    basis: Tensor

    def __init__(self, mean: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)

    def forward(self, embeddings: Tensor) -> tuple[Tensor]:
        """Scores (B, h, w) float32 of embeddings (B, h, w, D)."""
        return (residual_norms(embeddings, self.mean, self.basis),)


@dataclass(frozen=True)
class SubspaceFitter(Fitter[PatchSubspace]):
    """Settings of the subspace.

    Attributes:
        variance: share of the patches' variance that the subspace keeps at least.
        components: k, how many principal axes it has; wins over the share.
        base: the sums that `fit` adds to; None where it makes new ones.
    """

    variance: float = 0.95
    components: int | None = None
    base: PatchStatistics | None = None

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings to learn from."""
        return patchcore_concat

    def prepared(self, channels: int, device: torch.device) -> SubspaceFitter:
        """The fitter for a network; nothing has to be drawn.

        Args:
            channels: of all hooked layers together.
            device: where the embeddings will be.

        Raises:
            ConfigError: as many components as channels, or more.
        """
        self._check(channels)
        return self

    def _check(self, channels: int) -> None:
        if self.components is not None and self.components >= channels:
            raise ConfigError(
                f"model.components is {self.components}, but the hooked layers give {channels} "
                f"channels, and a subspace of all of them leaves no distance; choose 1 to "
                f"{channels - 1}"
            )

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> PatchSubspace:
        """Learn the subspace, reading the batches once.

        Args:
            batches: good patches, of any grids.
            progress: not called: the axes are found in a moment.

        Raises:
            ConfigError: as many components as channels, or more.
            DataError: no patches, or some that hold NaN or infinite values.
        """
        return self._subspaces([_sums(batches, self.base)])[0]

    def continuing(self, scorer: PatchSubspace, learned: int) -> SubspaceFitter:
        """A fitter whose `fit` adds to the sums that a subspace comes from.

        It gives what a fit on all images would.
        """
        return replace(self, base=scorer.statistics)

    def merged(
        self, scorers: Sequence[PatchSubspace], numbers: Sequence[Mapping[int, int]]
    ) -> PatchSubspace:
        """The subspace of all images together.

        Raises:
            ModelError: an image was learned from more than once.
        """
        check_apart(numbers)
        return self._subspaces([reduce(PatchStatistics.merge, (s.statistics for s in scorers))])[0]

    def held_out(
        self, scorer: PatchSubspace, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, PatchSubspace]]:
        """Subspaces without the images of one fold after another: its sums are taken off."""
        for first in range(0, len(folds), _AT_ONCE):
            some = folds[first : first + _AT_ONCE]
            parts = [_sums(patches.only(frozenset(fold))) for fold in some]
            left = [scorer.statistics.without(part) for part in parts]
            yield from zip(some, self._subspaces(left), strict=True)

    def _subspaces(self, statistics: Sequence[PatchStatistics]) -> list[PatchSubspace]:
        """Each found by one thread alone: eigenvectors take thousands of small steps."""
        device = statistics[0].mean.device
        self._check(len(statistics[0].mean))
        return spread(
            lambda one: PatchSubspace(one, one.axes(self.variance, self.components)),
            statistics,
            device,
        )


def _sums(batches: Iterable[PatchBatch], total: PatchStatistics | None = None) -> PatchStatistics:
    """Statistics of the patches that count, image by image, in the order of the batches.

    Args:
        batches: the patches.
        total: statistics that these are added to.
    """
    for batch in batches:
        for patches in batch.counted():
            if len(patches):
                part = PatchStatistics.of(patches)
                total = part if total is None else total.merge(part)
    if total is None:
        raise DataError("no training patches; check the training images")
    if not bool(total.scatter.isfinite().all()):
        raise DataError("training patches hold NaN or infinite values; check the backbone")
    return total
