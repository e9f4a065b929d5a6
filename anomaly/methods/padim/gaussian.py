"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from anomaly.errors import ConfigError
from anomaly.methods.base import Align, PatchScores, Scorer, check_fits
from anomaly.methods.padim.layout import check_gaussians, check_grid, position_blocks
from anomaly.methods.padim.whitening import CholeskyWhitening, LowRankWhitening
from anomaly.runtime.parallel import parallel_map


@dataclass(frozen=True, eq=False)
class Projection:
    """A fixed linear map of patch embeddings from D to d channels.

    Attributes:
        weights: (d,) int64, the channels to keep, ascending; or (D, d) float32 with orthonormal
            columns.
        dim: D.
    """

    weights: Tensor
    dim: int

    @property
    def dimensions(self) -> int:
        """The d channels that are left."""
        return self.weights.shape[-1]

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Embeddings (..., D) -> (..., d)."""
        if self.weights.ndim == 2:
            return embeddings @ self.weights
        if self.dimensions == self.dim:
            return embeddings
        # On the last axis alone, index_select gathers row by row: twice as fast on a matrix.
        rows = embeddings.reshape(-1, self.dim).index_select(1, self.weights)
        return rows.view(*embeddings.shape[:-1], self.dimensions)

    def of_maps(self, maps: Sequence[Tensor]) -> Tensor:
        """Project feature maps before they are brought to one grid.

        Neighbours are copied, not mixed, when a coarse layer is up-sampled, so this equals
        projecting PaDiM's full embeddings, which are never made: 40 times quicker at d = 100.

        Args:
            maps: (B, C_i, h_i, w_i) each, ΣC_i = D.

        Returns:
            (B, h, w, d) float32 on the finest grid.
        """
        grid = max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])
        parts = []
        for m, weights in zip(maps, self._split([m.shape[1] for m in maps]), strict=True):
            if weights.numel() == 0:
                continue
            part = Projection(weights, m.shape[1])(m.permute(0, 2, 3, 1).float())
            if part.shape[1:3] != grid:
                part = F.interpolate(part.permute(0, 3, 1, 2), size=grid).permute(0, 2, 3, 1)
            parts.append(part)
        joined = torch.cat(parts, 3) if self.weights.ndim == 1 else reduce(add, parts)
        return joined.contiguous()

    def _split(self, channels: Sequence[int]) -> list[Tensor]:
        """Each layer's share of the weights: its rows, or its chosen channels."""
        if self.weights.ndim == 2:
            return list(torch.split(self.weights, list(channels)))
        firsts = np.cumsum([0, *channels])
        ends = np.searchsorted(self._chosen, firsts).tolist()
        shares = zip(ends[:-1], ends[1:], firsts.tolist(), strict=False)
        return [self.weights[start:end] - first for start, end, first in shares]

    @cached_property
    def _chosen(self) -> NDArray[np.int64]:
        """(d,) the kept channels; a graph that is traced needs to have them as plain numbers."""
        return self.weights.numpy(force=True)

    def to(self, target: torch.device | str) -> Projection:
        """The same projection on another device."""
        return Projection(self.weights.to(target), self.dim)


def channel_projection(
    kind: str, dim: int, target: int, *, generator: torch.Generator
) -> Projection:
    """Draw the projection of a PaDiM model.

    Args:
        kind: `random`, a random subset of the channels (Defard et al. 2020, section 3.2), or
            `orthogonal`, the Q factor of a Gaussian matrix, uniform over all semi-orthogonal ones
            (Kim et al. 2021, "Semi-orthogonal embedding"); more accurate at the same d, and it
            hangs less on the seed.
        dim: D, channels of the embeddings.
        target: d, channels wanted. With d = D all are kept as they are: rotating them changes no
            Mahalanobis distance.
        generator: on the CPU, so that every device gets the same projection.

    Raises:
        ConfigError: an unknown kind, or d outside 1..D.
    """
    if kind not in ("random", "orthogonal"):
        raise ConfigError(f"projection {kind!r} is unknown; use 'random' or 'orthogonal'")
    if not 1 <= target <= dim:
        raise ConfigError(
            f"model.dimensions is {target}, but the hooked layers give {dim} channels; "
            f"choose 1 to {dim}, or hook more layers"
        )
    if target == dim:
        return Projection(torch.arange(dim), dim)
    if kind == "random":
        chosen = torch.randperm(dim, generator=generator)[:target]
        return Projection(chosen.sort().values, dim)
    gaussian = torch.randn(dim, target, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    # With a positive diagonal in R the factorisation is unique, and Q uniformly distributed.
    return Projection((q * r.diagonal().sign()).float(), dim)


# Numbers that one block of positions works on. They should stay in a CPU's cache between two
# products; a GPU wants few launches.
_SCORING_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}


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
    mean: Tensor
    whitening: CholeskyWhitening | LowRankWhitening
    unit = "Mahalanobis distance"

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings that `score` takes: projected on the way."""
        return self.projection.of_maps

    @property
    def dimensions(self) -> int:
        """d, the channels of these embeddings."""
        return self.projection.dimensions

    def check_origin(self, channels: int, images: int) -> None:
        """See that the Gaussians can come from a network's embeddings.

        Args:
            channels: of all hooked layers together.
            images: training images; any number.

        Raises:
            ModelError: they can't; the message says what doesn't fit.
        """
        check_fits(channels, self.projection.dim)

    def score(self, embeddings: Tensor) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Differentiable in the embeddings.

        Args:
            embeddings: (B, h, w, D) float32 on the grid that was learned, or (B, h, w, d) that
                went through `projection` already.

        Raises:
            DataError: another grid, or another number of channels.
        """
        check_grid(embeddings, self.grid, self.projection.dim, self.projection.dimensions)
        patches = projected(embeddings, self.projection)
        block = _SCORING_BLOCK[patches.device.type]
        blocks = position_blocks(patches.shape[1], self.whitening.numbers, block)
        task = partial(self.squared_distances, patches)
        squared = torch.cat(parallel_map(task, blocks, patches.device))
        return PatchScores(squared.sqrt_().T.reshape(embeddings.shape[:3]))

    def squared_distances(self, patches: Tensor, positions: slice) -> Tensor:
        """Squared Mahalanobis distances (p, B) of patches (B, P, d) at a slice of the positions."""
        leading, trailing = self.mean[:, positions, None]
        # (p, B, d): a position's Gaussian meets all images at once.
        mine = patches[:, positions].transpose(0, 1)
        residuals = torch.sub(mine, leading).sub_(trailing)
        return self.whitening.squared_distances(residuals, positions)

    def graph(self) -> _GaussianGraph:
        """`score` as a module that can be traced."""
        return _GaussianGraph(self)

    def to(self, target: torch.device | str) -> PatchGaussian:
        """The same Gaussians on another device."""
        return PatchGaussian.from_tensors({k: v.to(target) for k, v in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        return {
            "grid": torch.tensor(self.grid),
            "channels": torch.tensor(self.projection.dim),
            "projection": self.projection.weights,
            "mean": self.mean,
            **self.whitening.tensors(),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> PatchGaussian:
        """The way back from `tensors`.

        Raises:
            ModelError: they aren't those of such Gaussians.
        """
        grid, channels = check_gaussians(tensors)
        kind = LowRankWhitening if "basis" in tensors else CholeskyWhitening
        projection = Projection(tensors["projection"], channels)
        return cls(projection, grid, tensors["mean"], kind.from_tensors(tensors))


class _GaussianGraph(nn.Module):
    def __init__(self, gaussian: PatchGaussian) -> None:
        super().__init__()
        self._gaussian = gaussian

    def forward(self, embeddings: Tensor) -> tuple[Tensor]:
        """Scores (B, h, w) float32 of projected embeddings (B, h, w, d)."""
        squared = self._gaussian.squared_distances(embeddings.flatten(1, 2), slice(None))
        return (squared.sqrt().T.reshape(embeddings.shape[:3]),)


def projected(embeddings: Tensor, projection: Projection) -> Tensor:
    """(B, h, w, D or d) -> (B, P, d)."""
    patches = embeddings.flatten(1, 2)
    return patches if patches.shape[2] == projection.dimensions else projection(patches)
