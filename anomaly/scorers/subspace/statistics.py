"""Means and scatters of patches: of two sets together, or of one without the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
