"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances.

Torch tensors and numpy arrays alike, so that exported models score without torch: it is imported
only where feature maps are projected, which an exported network does itself, and to save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.errors import DataError, ModelError
from anomaly.imaging.arrays import Array, as_float32, module_of
from anomaly.methods.base import (
    Align,
    PatchScores,
    Scorer,
    axis_length,
    check_channels,
    check_tensors,
    device_of,
)
from anomaly.runtime import parallel_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Numbers that one block of positions works on. They should stay in a CPU's cache between two
# products; a GPU wants few launches.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}


def position_blocks(positions: int, dimensions: int, device: torch.device) -> list[slice]:
    """Slices of positions whose matrices (d, d) are computed with at once."""
    size = max(1, _BLOCK[device.type] // dimensions**2)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


def check_grid(found: Sequence[int], grid: tuple[int, int]) -> None:
    """Check that an image's patches have the grid (h, w) of the training images.

    Raises:
        DataError: they haven't.
    """
    if tuple(found) != grid:
        raise DataError(
            f"an image has {found[0]}×{found[1]} patches where the first training image had "
            f"{grid[0]}×{grid[1]}: PaDiM needs one shape for all images; crop them to one aspect, "
            "or use model.kind=patchcore, which takes any"
        )


def projected(projection: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """Project feature maps, then bring them to one grid.

    Neighbours are copied, not mixed, when a coarse layer is up-sampled, so this equals projecting
    PaDiM's full embeddings, which are never made: 40 times quicker at d = 100.

    Args:
        projection: (D, d) float32.
        maps: (B, C_i, h_i, w_i) each, ΣC_i = D.

    Returns:
        (B, h, w, d) float32 on the finest grid.
    """
    import torch  # absent where arrays are scored, whose network has projected them

    grid = max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])
    parts: list[Tensor] = []
    by_layer = torch.split(projection, [m.shape[1] for m in maps])
    for m, weights in zip(maps, by_layer, strict=True):
        part = m.permute(0, 2, 3, 1).float() @ weights
        if part.shape[1:3] != grid:
            resized = torch.nn.functional.interpolate(part.permute(0, 3, 1, 2), size=grid)
            part = resized.permute(0, 2, 3, 1)
        parts.append(part)
    return reduce(add, parts).contiguous()


@dataclass(frozen=True, eq=False)
class PatchGaussian(Scorer):
    """Good patches as one Gaussian for each position of the grid.

    Attributes:
        projection: (D, d) float32 with orthonormal columns, of the embeddings' D channels to d.
        grid: (h, w).
        mean: (P, d) float64.
        whitening: (P, d, d) float32, W = L⁻¹ of Σ + ε·I = L·Lᵀ, so that a distance is ‖W·r‖. As
            stable as solving with L, unlike Σ⁻¹, and scoring consists of matrix products. Its rows
            are 16-bit integers times their scale, see `anomaly.methods.padim.fitter`.
        scale: (P, d) float32.
    """

    projection: Array
    grid: tuple[int, int]
    mean: Array
    whitening: Array
    scale: Array
    unit = "Mahalanobis distance"

    @property
    def align(self) -> Align:
        """Turn feature maps into the projected embeddings that `score` takes."""
        return partial(projected, self.projection)

    @property
    def dimensions(self) -> int:
        """Number d of channels of the embeddings."""
        return int(self.mean.shape[1])

    def score(self, embeddings: Array) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, d) float32 on the grid that was learned.

        Raises:
            DataError: another grid, or another number of channels.
        """
        count, height, width, dimensions = embeddings.shape
        check_grid((height, width), self.grid)
        check_channels(dimensions, self.dimensions)
        patches, device = embeddings.reshape(count, -1, dimensions), device_of(embeddings)
        blocks = position_blocks(len(self.mean), dimensions, device)
        squared = parallel_map(partial(self.squared_distances, patches), blocks, device)
        scores = as_float32(module_of(patches).concatenate(squared) ** 0.5)
        return PatchScores(scores.T.reshape(count, height, width))

    def squared_distances(self, patches: Array, positions: slice) -> Array:
        """Squared Mahalanobis distances (p, B) of patches (B, P, d) at a slice of the positions."""
        whitened = self.whitening[positions] @ as_float32(self.residuals(patches, positions))
        return (whitened**2).sum(1)

    def residuals(self, patches: Array, positions: slice) -> Array:
        """Patches (B, P, d) less their position's mean, (p, d, B) float64."""
        # A position's Gaussian meets all images at once.
        return (patches[:, positions] - self.mean[positions]).swapaxes(0, 1).swapaxes(1, 2)

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` of projected embeddings (B, h, w, d) as operations that can be traced."""

        def scores(embeddings: Tensor) -> tuple[Tensor]:
            squared = self.squared_distances(embeddings.flatten(1, 2), slice(None))
            return (squared.sqrt().T.reshape(embeddings.shape[:3]),)

        return scores

    def to(self, target: torch.device | str) -> PatchGaussian:
        """The same Gaussians on another device."""
        names = ("projection", "mean", "whitening", "scale")
        return replace(self, **{name: getattr(self, name).to(target) for name in names})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        import torch  # only models of tensors are saved

        rows, columns = np.tril_indices(self.dimensions)
        numbers = (self.whitening / self.scale[..., None]).round()[:, rows, columns]
        return {
            "grid": torch.tensor(self.grid),
            "projection": self.projection,
            "mean": self.mean,
            "factor": numbers.to(torch.int16),
            "scale": self.scale,
        }


def scorer(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> PatchGaussian:
    """The Gaussians in saved tensors.

    Args:
        tensors: as `PatchGaussian.tensors` gave them; arrays for a scorer that takes arrays.
        settings: the config's section `model`, by key; not used.

    Raises:
        ModelError: the tensors aren't those of Gaussians.
    """
    positions, dimensions = (axis_length(tensors, "mean", axis) for axis in (0, 1))
    rows, columns = np.tril_indices(max(dimensions, 1))
    check_tensors(
        tensors,
        {
            "grid": ("int64", (2,)),
            "projection": ("float32", (-1, dimensions)),
            "mean": ("float64", (-1, -1)),
            "factor": ("int16", (positions, len(rows))),
            "scale": ("float32", (positions, dimensions)),
        },
    )
    height, width = tensors["grid"].tolist()
    if min(height, width) < 1 or height * width != positions:
        raise ModelError(f"a grid of {height}×{width} doesn't go with the scorer's other tensors")
    xp = module_of(tensors["scale"])
    whitening = xp.zeros((positions, dimensions, dimensions), dtype=xp.float32)
    whitening[:, rows, columns] = as_float32(tensors["factor"])
    whitening *= tensors["scale"][..., None]
    return PatchGaussian(
        tensors["projection"], (height, width), tensors["mean"], whitening, tensors["scale"]
    )
