"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anomaly.runtime.parallel import spread
from anomaly.scorers.base import Align, PatchScores, Scorer
from anomaly.scorers.padim.layout import check_gaussians, check_grid, position_blocks
from anomaly.scorers.padim.projection import Projection
from anomaly.scorers.padim.whitening import CholeskyWhitening, LowRankWhitening
from anomaly.scorers.saved_tensors import check_fits

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
        squared = torch.cat(spread(task, blocks, patches.device))
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
