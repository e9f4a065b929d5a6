"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances.

Torch tensors and numpy arrays alike, so that exported models score without torch: it is imported
only where feature maps are projected, which an exported network does itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, as_float32, as_numpy, module_of
from anomaly.errors import DataError, ModelError
from anomaly.methods.base import (
    Align,
    PatchScores,
    Scorer,
    axis_length,
    check_tensors,
    device_of,
)
from anomaly.runtime.parallel import parallel_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The lower triangles of P matrices (d, d) as bands of rows, (P, rows, width) each. They take little
# more than half of the square, and are multiplied without being unpacked.
Triangle: TypeAlias = tuple[Array, ...]
# Rows of a band: few enough to save nearly half, enough for matrix products to be quick.
_PANEL = 64
# Numbers that one block of positions works on. They should stay in a CPU's cache between two
# products; a GPU wants few launches.
_SCORING_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}


@lru_cache(maxsize=16)
def panel_rows(dimensions: int) -> tuple[slice, ...]:
    """The row ranges of a `Triangle`'s panels; a panel is as wide as its last row."""
    edges = [*range(0, dimensions, _PANEL), dimensions]
    return tuple(slice(a, b) for a, b in pairwise(edges))


def position_blocks(positions: int, numbers: int, block: int) -> list[slice]:
    """Slices of positions that need at most `block` values, with `numbers` each."""
    size = max(1, block // numbers)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


def check_grid(embeddings: Array, grid: tuple[int, int], *channels: int) -> None:
    """Check that embeddings (B, h, w, D) are of a grid (h, w) and have one of several D.

    Raises:
        DataError: they aren't, or haven't.
    """
    height, width, dimensions = embeddings.shape[1:]
    if (height, width) != grid:
        raise DataError(
            f"an image has {height}×{width} patches where the first training image had "
            f"{grid[0]}×{grid[1]}: PaDiM needs one shape for all images; crop them to one aspect, "
            "or use model.kind=patchcore, which takes any"
        )
    if dimensions not in channels:
        raise DataError(
            f"embeddings have {dimensions} channels where the training's had {channels[0]}; use "
            "the same backbone and layers"
        )


@dataclass(frozen=True, eq=False)
class Projection:
    """A fixed linear map of patch embeddings from D to d channels.

    Attributes:
        weights: (d,) int64, the channels to keep, ascending; or (D, d) float32 with orthonormal
            columns.
        dim: D.
    """

    weights: Array
    dim: int

    @property
    def dimensions(self) -> int:
        """Number d of channels after the projection."""
        return int(self.weights.shape[-1])

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Embeddings (..., D) -> (..., d)."""
        if self.weights.ndim == 2:
            mixed: Tensor = embeddings @ self.weights
            return mixed
        if self.dimensions == self.dim:
            return embeddings
        # On the last axis alone, index_select gathers row by row: twice as fast on a matrix.
        rows = embeddings.reshape(-1, self.dim).index_select(1, self.weights)
        return rows.view(*embeddings.shape[:-1], self.dimensions)

    def by_position(self, embeddings: Array) -> Array:
        """Embeddings (B, h, w, D), or (B, h, w, d) projected already -> (B, P, d)."""
        patches = embeddings.reshape(len(embeddings), -1, embeddings.shape[-1])
        return patches if patches.shape[2] == self.dimensions else self(patches)

    def of_maps(self, maps: Sequence[Tensor]) -> Tensor:
        """Project feature maps before they are brought to one grid.

        Neighbours are copied, not mixed, when a coarse layer is up-sampled, so this equals
        projecting PaDiM's full embeddings, which are never made: 40 times quicker at d = 100.

        Args:
            maps: (B, C_i, h_i, w_i) each, ΣC_i = D.

        Returns:
            (B, h, w, d) float32 on the finest grid.
        """
        import torch  # absent where arrays are scored, whose network has projected them

        grid = max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])
        parts = []
        for m, weights in zip(maps, self._split([m.shape[1] for m in maps]), strict=True):
            if weights.numel() == 0:
                continue
            part = Projection(weights, m.shape[1])(m.permute(0, 2, 3, 1).float())
            if part.shape[1:3] != grid:
                channels_first = part.permute(0, 3, 1, 2)
                resized = torch.nn.functional.interpolate(channels_first, size=grid)
                part = resized.permute(0, 2, 3, 1)
            parts.append(part)
        joined = torch.cat(parts, 3) if self.weights.ndim == 1 else reduce(add, parts)
        return joined.contiguous()

    def _split(self, channels: Sequence[int]) -> list[Tensor]:
        """The projection's weights split by layer."""
        if self.weights.ndim == 2:
            return list(self.weights.split(list(channels)))
        firsts = np.cumsum([0, *channels])
        ends = np.searchsorted(self._chosen, firsts).tolist()
        shares = zip(ends[:-1], ends[1:], firsts.tolist(), strict=False)
        return [self.weights[start:end] - first for start, end, first in shares]

    @cached_property
    def _chosen(self) -> NDArray[np.int64]:
        """(d,) the kept channels; a graph that is traced needs to have them as plain numbers."""
        return as_numpy(self.weights)

    def to(self, target: torch.device | str) -> Projection:
        """The same projection on another device."""
        return Projection(self.weights.to(target), self.dim)


class Whitening(Protocol):
    """The inverse covariances of P positions, in the form that suits the number of samples."""

    @property
    def numbers(self) -> int:
        """Number of values that one position needs in memory."""
        ...

    def squared_distances(self, residuals: Array, positions: slice) -> Array:
        """Squared Mahalanobis norms (p, B) of residuals (p, B, d) at a slice of the positions."""
        ...

    def to(self, target: torch.device | str) -> Whitening:
        """An equal whitening on another device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        ...


@dataclass(frozen=True, eq=False)
class CholeskyWhitening(Whitening):
    """W = L⁻¹ of Σ + ε·I = L·Lᵀ, for more samples than dimensions: M = ‖W·r‖.

    Inverting the triangular factor is as stable as solving with it (measured: the same 3e-6
    against float64), unlike inverting Σ, and turns scoring into matrix products.

    Attributes:
        factor: W in 16 bits, each row divided by its scale; see `covariance.rounded`.
        scale: (P, d) float32, the rows' scales.
    """

    factor: Triangle
    scale: Array

    @property
    def numbers(self) -> int:
        """Number of values that one position needs in memory."""
        return sum(panel.shape[1] * panel.shape[2] for panel in self.factor)

    def squared_distances(self, residuals: Array, positions: slice) -> Array:
        """Squared Mahalanobis norms (p, B) of residuals (p, B, d) at a slice of the positions."""
        squared = module_of(residuals).zeros_like(residuals[..., 0])
        for rows, panel in zip(panel_rows(self.scale.shape[1]), self.factor, strict=True):
            # The panel on the left: for a single image, a product by a vector at twice the speed.
            whitened = as_float32(panel[positions]) @ residuals[..., : rows.stop].swapaxes(1, 2)
            whitened **= 2
            squared = squared + (whitened * self.scale[positions, rows, None] ** 2).sum(1)
        return squared

    def to(self, target: torch.device | str) -> CholeskyWhitening:
        """An equal whitening on another device."""
        return CholeskyWhitening(tuple(p.to(target) for p in self.factor), self.scale.to(target))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        factor = {f"factor.{i}": panel for i, panel in enumerate(self.factor)}
        return {**factor, "scale": self.scale}


@dataclass(frozen=True, eq=False)
class LowRankWhitening(Whitening):
    """The same distance from the N − 1 directions in which N ≤ d samples vary.

    With Σ = U·Λ·Uᵀ the textbook form M² = (‖r‖² − ‖G·r‖²)/ε, G = Λ^½(Λ+ε)^−½·Uᵀ, loses its
    digits where r lies within the samples' span. Split into what G explains and what it doesn't,
    it is a sum of squares,

        M² = ‖r − Gᵀ·G·r‖²/ε + Σᵢ (G·r)ᵢ²/(λᵢ+ε),

    and well conditioned.

    Attributes:
        basis: (P, k, d) int16, G with each row divided by its scale; see `covariance.rounded`.
        scale: (P, k) float32, the rows' scales.
        precision: (P, k) float32, 1/(λ+ε).
        regularisation: ε.
    """

    basis: Array
    scale: Array
    precision: Array
    regularisation: float

    @property
    def numbers(self) -> int:
        """Number of values that one position needs in memory."""
        return int(self.basis.shape[1] * self.basis.shape[2])

    def squared_distances(self, residuals: Array, positions: slice) -> Array:
        """Squared Mahalanobis norms (p, B) of residuals (p, B, d) at a slice of the positions."""
        basis, scale = as_float32(self.basis[positions]), self.scale[positions, None]
        explained = residuals @ basis.swapaxes(1, 2) * scale
        inside = (explained**2 * self.precision[positions, None]).sum(2)
        if isinstance(residuals, np.ndarray):
            unexplained = residuals - explained * scale @ basis
        else:  # in one pass over the residuals
            unexplained = residuals.baddbmm(explained * scale, basis, alpha=-1)
        return inside + (unexplained**2).sum(2) / self.regularisation

    def to(self, target: torch.device | str) -> LowRankWhitening:
        """An equal whitening on another device."""
        return LowRankWhitening(
            self.basis.to(target),
            self.scale.to(target),
            self.precision.to(target),
            self.regularisation,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        import torch  # only models of tensors are saved

        regularisation = torch.tensor(self.regularisation, dtype=torch.float64)
        return {**vars(self), "regularisation": regularisation}


@dataclass(frozen=True, eq=False)
class PatchGaussian(Scorer):
    """Good patches as one Gaussian for each position of the grid.

    Attributes:
        projection: from the embeddings' D channels to d.
        grid: (h, w).
        mean: (2, P, d) float32, means as sums of a leading and a trailing part.
        whitening: the inverse covariances.
    """

    projection: Projection
    grid: tuple[int, int]
    mean: Array
    whitening: Whitening
    unit = "Mahalanobis distance"

    @property
    def align(self) -> Align:
        """Turn feature maps into the projected embeddings that `score` takes."""
        return self.projection.of_maps

    @property
    def dimensions(self) -> int:
        """Number d of channels of the embeddings."""
        return self.projection.dimensions

    def score(self, embeddings: Array) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32 on the grid that was learned, or (B, h, w, d) that
                went through `projection` already; arrays have done so.

        Raises:
            DataError: another grid, or another number of channels.
        """
        full = () if isinstance(embeddings, np.ndarray) else (self.projection.dim,)
        check_grid(embeddings, self.grid, *full, self.dimensions)
        patches, device = self.projection.by_position(embeddings), device_of(embeddings)
        block = _SCORING_BLOCK[device.type]
        blocks = position_blocks(patches.shape[1], self.whitening.numbers, block)
        squared = parallel_map(partial(self._squared_distances, patches), blocks, device)
        scores = module_of(patches).concatenate(squared) ** 0.5
        return PatchScores(scores.T.reshape(embeddings.shape[:3]))

    def _squared_distances(self, patches: Array, positions: slice) -> Array:
        """Squared Mahalanobis distances (p, B) of patches (B, P, d) at a slice of the positions."""
        leading, trailing = self.mean[:, positions, None]
        # (p, B, d): a position's Gaussian meets all images at once.
        residuals = patches[:, positions].swapaxes(0, 1) - leading
        residuals -= trailing
        return self.whitening.squared_distances(residuals, positions)

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` of projected embeddings (B, h, w, d) as operations that can be traced."""

        def scores(embeddings: Tensor) -> tuple[Tensor]:
            squared = self._squared_distances(embeddings.flatten(1, 2), slice(None))
            return (squared.sqrt().T.reshape(embeddings.shape[:3]),)

        return scores

    def to(self, target: torch.device | str) -> PatchGaussian:
        """The same Gaussians on another device."""
        projection, whitening = self.projection.to(target), self.whitening.to(target)
        return PatchGaussian(projection, self.grid, self.mean.to(target), whitening)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        import torch  # only models of tensors are saved

        return {
            "grid": torch.tensor(self.grid),
            "channels": torch.tensor(self.projection.dim),
            "projection": self.projection.weights,
            "mean": self.mean,
            **self.whitening.tensors(),
        }


def whitening_of(tensors: Mapping[str, Array]) -> Whitening:
    """The whitening stored in saved tensors."""
    if "basis" in tensors:
        regularisation = float(tensors["regularisation"])
        return LowRankWhitening(
            tensors["basis"], tensors["scale"], tensors["precision"], regularisation
        )
    count = sum(name.startswith("factor.") for name in tensors)
    return CholeskyWhitening(tuple(tensors[f"factor.{i}"] for i in range(count)), tensors["scale"])


def scorer(
    tensors: Mapping[str, Array],
    settings: Mapping[str, Any],
    *,
    device: torch.device | None = None,
    cache: Path | None = None,
) -> PatchGaussian:
    """The Gaussians in saved tensors.

    Args:
        tensors: as `PatchGaussian.tensors` gave them; arrays for a scorer that takes arrays.
        settings: the config's section `model`, by key; not used.
        device: where tensors go; None for arrays.
        cache: not used: nothing has to be derived.

    Raises:
        ModelError: the tensors aren't those of Gaussians.
    """
    grid = _check_saved(tensors)
    projection = Projection(tensors["projection"], int(tensors["channels"]))
    gaussian = PatchGaussian(projection, grid, tensors["mean"], whitening_of(tensors))
    return gaussian if device is None else gaussian.to(device)


def _check_saved(tensors: Mapping[str, Array]) -> tuple[int, int]:
    """The grid (h, w) of saved Gaussians.

    Raises:
        ModelError: the tensors aren't those of Gaussians, one for each position.
    """
    positions, dimensions = (axis_length(tensors, "mean", axis) for axis in (1, 2))
    is_choice = axis_length(tensors, "projection", 1) < 0
    whitening: dict[str, tuple[str, tuple[int, ...]]] = {}
    if "basis" in tensors:
        rank = axis_length(tensors, "basis", 1)
        whitening["basis"] = "int16", (positions, rank, dimensions)
        whitening["scale"] = whitening["precision"] = "float32", (positions, rank)
        whitening["regularisation"] = "float64", ()
    else:
        for i, rows in enumerate(panel_rows(max(dimensions, 1))):
            whitening[f"factor.{i}"] = "int16", (positions, rows.stop - rows.start, rows.stop)
        whitening["scale"] = "float32", (positions, dimensions)
    check_tensors(
        tensors,
        {
            "grid": ("int64", (2,)),
            "channels": ("int64", ()),
            "mean": ("float32", (2, -1, -1)),
            "projection": ("int64", (dimensions,)) if is_choice else ("float32", (-1, dimensions)),
            **whitening,
        },
    )
    height, width = tensors["grid"].tolist()
    weights, channels = tensors["projection"], int(tensors["channels"])
    fits = len(weights) == channels
    if is_choice:  # channels in rising order
        fits = bool((np.diff(as_numpy(weights), prepend=-1, append=channels) > 0).all())
    if not fits or min(height, width) < 1 or height * width != positions:
        raise ModelError(
            f"a grid of {height}×{width} and {channels} channels don't go with the scorer's other "
            "tensors"
        )
    variances = [tensors[name] for name in ("regularisation", "precision") if name in tensors]
    if any(float(values.min()) <= 0 for values in variances):
        raise ModelError("the scorer's tensors hold a variance that isn't above 0")
    return height, width
