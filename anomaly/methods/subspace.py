"""Subspace: good patches lie near a plane through their mean; its distance is the score.

What learns takes torch tensors. The scorer takes numpy arrays, too, so that exported models score
without torch: it is imported only where there are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.arrays import Array, module_of
from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.methods.base import (
    Align,
    Fitter,
    Fold,
    PatchBatch,
    PatchScores,
    PatchSet,
    Progress,
    Scorer,
    axis_length,
    check_tensors,
)
from anomaly.runtime.parallel import parallel_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_FOLDS_HELD = 4  # sums of so many folds are held at once: 38 MB each at D = 1,536


def fitter(settings: Mapping[str, Any], *, seed: int, memory_limit: int) -> SubspaceFitter:
    """The fitter of a config's section `model`.

    Args:
        settings: its values by key.
        seed: not used: nothing is drawn.
        memory_limit: not used: sums take the same room for any number of patches.
    """
    return SubspaceFitter(settings["variance"], settings["components"])


def scorer(
    tensors: Mapping[str, Array],
    settings: Mapping[str, Any],
    *,
    device: torch.device | None = None,
    cache: Path | None = None,
) -> PatchSubspace:
    """The subspace in saved tensors.

    Args:
        tensors: as `PatchSubspace.tensors` gave them; arrays for a scorer that takes arrays.
        settings: the config's section `model`, by key; not used.
        device: where tensors go; None for arrays.
        cache: not used: nothing has to be derived.

    Raises:
        ModelError: the tensors aren't those of a subspace.
    """
    _check_saved(tensors)
    if device is None:
        return PatchSubspace(tensors["mean"].astype(np.float32), tensors["basis"])
    statistics = PatchStatistics.from_tensors(tensors)
    return PatchSubspace(statistics.mean.float(), tensors["basis"], statistics).to(device)


def _check_saved(tensors: Mapping[str, Array]) -> None:
    channels = axis_length(tensors, "mean")
    check_tensors(
        tensors,
        {
            "count": ("int64", ()),
            "mean": ("float64", (-1,)),
            "scatter": ("float64", (channels * (channels + 1) // 2,)),
            "basis": ("float32", (channels, -1)),
        },
    )
    kept = axis_length(tensors, "basis", 1)
    if int(tensors["count"]) < 1 or kept >= channels:
        raise ModelError(
            f"the scorer's subspace has {kept} of {channels} dimensions and comes from "
            f"{int(tensors['count'])} patches, which can't be"
        )
    norms = (tensors["basis"] * tensors["basis"]).sum(0)
    if not math.isclose(float(norms.min()), 1, abs_tol=1e-3) or float(norms.max()) > 1 + 1e-3:
        raise ModelError("the scorer's tensor basis isn't made of unit vectors")


@dataclass(frozen=True, eq=False)
class PatchSubspace(Scorer):
    """The principal subspace of good patches, with its sums.

    Attributes:
        mean: (D,) float32.
        basis: (D, k) float32, orthonormal columns: the leading principal axes.
        statistics: moments of the patches learned from; None in an exported model. They aren't
            needed to score, but with them the model learns more images and is
            cross-fitted without a second reading.
    """

    mean: Array
    basis: Array
    statistics: PatchStatistics | None = None
    unit = "distance to the subspace"

    @property
    def align(self) -> Align:
        """Turn feature maps into the embeddings that `score` takes."""
        return _align()

    @property
    def dimensions(self) -> int:
        """Number D of channels that `score` takes."""
        return int(self.basis.shape[0])

    def score(self, embeddings: Array) -> PatchScores:
        """Distances ‖r − U·Uᵀr‖ of patches to the subspace, with r = x − μ.

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32.

        Raises:
            DataError: another number of channels than was learned.
        """
        if embeddings.shape[-1] != self.dimensions:
            raise DataError(
                f"embeddings have {embeddings.shape[-1]} channels where the subspace has "
                f"{self.dimensions}; use the backbone and layers it was made with"
            )
        return PatchScores(self._residual_norms(embeddings))

    def _residual_norms(self, embeddings: Array) -> Array:
        centred = embeddings - self.mean
        left = centred - (centred @ self.basis) @ self.basis.T
        return module_of(left).linalg.norm(left, None, -1)

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` as operations that can be traced."""
        return lambda embeddings: (self._residual_norms(embeddings),)

    def to(self, target: torch.device | str) -> PatchSubspace:
        """The same subspace on another device."""
        statistics = self.statistics and self.statistics.to(target)
        return PatchSubspace(self.mean.to(target), self.basis.to(target), statistics)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        return {**self.learned.tensors(), "basis": self.basis}

    @property
    def learned(self) -> PatchStatistics:
        """The statistics of a subspace."""
        assert self.statistics is not None, "an exported model doesn't learn"
        return self.statistics


def _align() -> Align:
    # The scorer of an exported model does without torch, which the alignment needs.
    from anomaly.methods.patchcore.embedding import patchcore_concat

    return patchcore_concat


@dataclass(frozen=True, eq=False)
class PatchStatistics:
    """Mean and scatter of N patches, in float64; can be merged.

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
        scatter = (self.scatter + other.scatter).addr_(between, between)
        return PatchStatistics(count, self.mean + shift * (other.count / count), scatter)

    def without(self, part: PatchStatistics) -> PatchStatistics:
        """Statistics without a part of the patches: the inverse of `merge`."""
        count = self.count - part.count
        mean = self.mean + (self.mean - part.mean) * (part.count / count)
        between = (part.mean - mean) * (count * part.count / self.count) ** 0.5
        scatter = (self.scatter - part.scatter).addr_(between, between, alpha=-1)
        return PatchStatistics(count, mean, scatter)

    def axes(self, share: float, components: int | None) -> Tensor:
        """The leading principal axes (D, k) float32, orthonormal columns.

        Args:
            share: of the variance that they keep at least, below 1; k is the least that does.
            components: k instead, below D.
        """
        variances, axes = module_of(self.scatter).linalg.eigh(self.scatter)  # ascending
        variances = variances.flip(0).clamp_(min=0)
        if components is None:
            short = variances.cumsum(0) < share * variances.sum()
            components = min(int(short.sum()) + 1, len(variances) - 1)
        leading: Tensor = axes.flip(1)[:, :components].float().contiguous()
        return leading

    def to(self, target: torch.device | str) -> PatchStatistics:
        """An equal whitening on another device."""
        return PatchStatistics(self.count, self.mean.to(target), self.scatter.to(target))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name: of the symmetric scatter one triangle."""
        import torch  # not in an exported model

        lower = torch.ones_like(self.scatter, dtype=torch.bool).tril()
        count = torch.tensor(self.count)
        return {"count": count, "mean": self.mean, "scatter": self.scatter[lower]}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PatchStatistics:
        """The object stored by `tensors`."""
        mean, packed = tensors["mean"], tensors["scatter"]
        scatter = packed.new_zeros(len(mean), len(mean))
        scatter[scatter.new_ones(scatter.shape).tril().bool()] = packed
        return cls(int(tensors["count"]), mean, scatter + scatter.tril(-1).T)


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
        """Turn feature maps into the embeddings to learn from."""
        return _align()

    def prepared(self, channels: int, device: torch.device) -> SubspaceFitter:
        """The fitter for a network; nothing has to be drawn.

        Args:
            channels: of all hooked layers together.
            device: where the embeddings will be.

        Raises:
            ConfigError: as many components as channels, or more.
        """
        if self.components is not None and self.components >= channels:
            raise ConfigError(
                f"model.components is {self.components}, but the hooked layers give {channels} "
                f"channels, and a subspace of all of them leaves no distance; choose 1 to "
                f"{channels - 1}"
            )
        return self

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

    def incremental(self, scorer: PatchSubspace, learned: int) -> SubspaceFitter:
        """A fitter whose `fit` adds images to a subspace.

        It gives what a fit on all images would.
        """
        return replace(self, base=scorer.learned)

    def held_out(
        self, scorer: PatchSubspace, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, PatchSubspace]]:
        """Subspaces without the images of each fold, by subtracting its sums."""
        for first in range(0, len(folds), _FOLDS_HELD):
            held = folds[first : first + _FOLDS_HELD]
            parts = [_sums(patches.only(frozenset(fold))) for fold in held]
            left = [scorer.learned.without(part) for part in parts]
            yield from zip(held, self._subspaces(left), strict=True)

    def _subspaces(self, statistics: Sequence[PatchStatistics]) -> list[PatchSubspace]:
        """Statistics of several subspaces.

        Each is found by one thread alone: eigenvectors take thousands of small steps.
        """
        device = statistics[0].mean.device
        self.prepared(len(statistics[0].mean), device)
        return parallel_map(
            lambda s: PatchSubspace(s.mean.float(), s.axes(self.variance, self.components), s),
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
