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
from anomaly.methods.base import (
    Align,
    Fitter,
    Fold,
    PatchBatch,
    PatchSet,
    Progress,
    Scorer,
    check_apart,
)
from anomaly.methods.patchcore.embedding import patchcore_concat
from anomaly.methods.subspace.residual import Subspace, check_subspace, residual_norms
from anomaly.runtime.parallel import parallel_map


@dataclass(frozen=True, eq=False)
class PatchStatistics:
    """Moments of N patches, in float64: those of two sets merge to those of both.

    Attributes:
        count: N.
        mean: (D,) float64.
        scatter: (D, D) float64, symmetric: the summed outer products of the centred patches.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, patches: Tensor) -> PatchStatistics:
        """Statistics of patches (N, D) float32, of one image.

        Around their own mean products are small, so float32 is enough for each image's.
        """
        mean = patches.double().mean(0)
        centred = patches - mean.float()
        # Not every processor's product of a matrix with itself is symmetric to the last bit.
        products = (centred.T @ centred).tril()
        return cls(len(patches), mean, (products + products.tril(-1).T).double())

    def merge(self, other: PatchStatistics) -> PatchStatistics:
        """Statistics of both sets together (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        shift = other.mean - self.mean
        between = shift * (self.count * other.count / count) ** 0.5
        scatter = torch.addr(self.scatter + other.scatter, between, between)
        return PatchStatistics(count, self.mean + shift * (other.count / count), scatter)

    def without(self, part: PatchStatistics) -> PatchStatistics:
        """Statistics of what is left when a part of the patches goes: `merge` solved for one."""
        count = self.count - part.count
        mean = self.mean + (self.mean - part.mean) * (part.count / count)
        between = (part.mean - mean) * (count * part.count / self.count) ** 0.5
        scatter = torch.addr(self.scatter - part.scatter, between, between, alpha=-1)
        return PatchStatistics(count, mean, scatter)

    def axes(self, share: float, components: int | None) -> Tensor:
        """The leading principal axes (D, k) float32, orthonormal columns.

        Args:
            share: of the variance that they keep at least, below 1; k is the least that does.
            components: k instead, below D.
        """
        variances, axes = torch.linalg.eigh(self.scatter)  # ascending
        variances = variances.flip(0).clamp_(min=0)
        if components is None:
            short = variances.cumsum(0) < share * variances.sum()
            components = min(int(short.sum()) + 1, len(variances) - 1)
        leading: Tensor = axes.flip(1)[:, :components].float().contiguous()
        return leading

    def to(self, target: torch.device | str) -> PatchStatistics:
        """The same on another device."""
        return PatchStatistics(self.count, self.mean.to(target), self.scatter.to(target))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name: of the symmetric scatter one triangle."""
        rows, columns = torch.tril_indices(*self.scatter.shape, device=self.scatter.device)
        return {
            "count": torch.tensor(self.count),
            "mean": self.mean,
            "scatter": self.scatter[rows, columns],
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> PatchStatistics:
        """The way back from `tensors`."""
        mean, packed = tensors["mean"], tensors["scatter"]
        rows, columns = torch.tril_indices(len(mean), len(mean), device=packed.device)
        scatter = packed.new_zeros(len(mean), len(mean))
        scatter[rows, columns] = packed
        scatter[columns, rows] = packed
        return cls(int(tensors["count"]), mean, scatter)


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
        return parallel_map(
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
