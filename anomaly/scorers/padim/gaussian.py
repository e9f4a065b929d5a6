"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.runtime import spread
from anomaly.scorers.base import PatchBatch, PatchScores, Progress, check_tensors, leading
from anomaly.scorers.padim.accumulator import GaussianAccumulator, position_blocks
from anomaly.scorers.padim.covariance import GaussianStatistics
from anomaly.scorers.padim.projection import Projection, channel_projection
from anomaly.scorers.padim.whitening import CholeskyWhitening, LowRankWhitening

__all__ = ["GaussianFitter", "GaussianStatistics", "PatchGaussian", "channel_projection"]


# Numbers that one block of positions works on. They should stay in a CPU's cache between two
# products; a GPU wants few launches.
_SCORING_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}


@dataclass(frozen=True, eq=False)
class PatchGaussian:
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

    def score(self, embeddings: Tensor) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Differentiable in the embeddings.

        Args:
            embeddings: (B, h, w, D) float32 on the grid that was learned, or (B, h, w, d) that
                went through `projection` already.

        Raises:
            DataError: another grid, or another number of channels.
        """
        _check_shape(embeddings, self.grid, self.projection)
        patches = _projected(embeddings, self.projection)
        leading, trailing = self.mean[:, :, None]

        def squared_distances(positions: slice) -> Tensor:
            # (p, B, d): a position's Gaussian meets all images at once.
            mine = patches[:, positions].transpose(0, 1)
            residuals = torch.sub(mine, leading[positions]).sub_(trailing[positions])
            return self.whitening.squared_distances(residuals, positions)

        block = _SCORING_BLOCK[patches.device.type]
        blocks = position_blocks(patches.shape[1], self.whitening.numbers, block)
        squared = torch.cat(spread(squared_distances, blocks, patches.device))
        return PatchScores(squared.sqrt_().T.reshape(embeddings.shape[:3]))

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
        kind = LowRankWhitening if "basis" in tensors else CholeskyWhitening
        positions, dimensions = (leading(tensors, "mean", axis) for axis in (1, 2))
        drawn = leading(tensors, "projection", 1) < 0
        projection = (torch.int64, (dimensions,)) if drawn else (torch.float32, (-1, dimensions))
        check_tensors(
            tensors,
            {
                "grid": (torch.int64, (2,)),
                "channels": (torch.int64, ()),
                "mean": (torch.float32, (2, -1, -1)),
                "projection": projection,
                **kind.wanted(tensors, positions, dimensions),
            },
        )
        height, width = tensors["grid"].tolist()
        whitening = kind.from_tensors(tensors)
        weights, channels = tensors["projection"], int(tensors["channels"])
        fits = len(weights) == channels if weights.ndim == 2 else _is_choice(weights, channels)
        if not fits or min(height, width) < 1 or height * width != positions:
            raise ModelError(
                f"a grid of {height}×{width} and {channels} channels don't go with the scorer's "
                "other tensors"
            )
        return cls(Projection(weights, channels), (height, width), tensors["mean"], whitening)


@dataclass(frozen=True)
class GaussianFitter:
    """Settings of PaDiM.

    Attributes:
        dimensions: d, channels kept of the embeddings' D.
        projection: `random` or `orthogonal`, see `channel_projection`.
        regularisation: ε, added to the diagonal of each covariance (PaDiM, eq. 1).
        seed: of the projection.
        memory_limit: bytes of training patches, and of statistics, that are kept in memory; what
            is larger waits in temporary files, at most the patches of d images and statistics of
            the model's size.
    """

    dimensions: int
    projection: str = "orthogonal"
    regularisation: float = 0.01
    seed: int = 0
    memory_limit: int = 512 * 1024**2

    def fit(
        self,
        batches: Iterable[PatchBatch],
        progress: Progress | None = None,
        projection: Projection | None = None,
    ) -> PatchGaussian:
        """Learn a Gaussian for each position, reading the batches once.

        Args:
            batches: good patches, all on one grid.
            progress: called with (blocks of positions done, all of them) after the last batch.
            projection: what the embeddings went through already, from `draw`; without it they
                have D channels and are projected here.

        Raises:
            ConfigError: more dimensions than channels, or a regularisation that is too small.
            DataError: fewer than two images, or more than one grid.
        """
        if self.regularisation <= 0:
            raise ConfigError(
                f"model.regularisation is {self.regularisation:g}; it must be above 0"
            )
        fitted: GaussianAccumulator | None = None
        for batch in batches:
            embeddings = batch.embeddings
            if fitted is None:
                grid = (embeddings.shape[1], embeddings.shape[2])
                projection = projection or self.draw(embeddings.shape[-1])
                applied = projection.to(embeddings.device)
                fitted = GaussianAccumulator(
                    grid[0] * grid[1], applied.dimensions, embeddings.device, self.memory_limit
                )
            _check_shape(embeddings, grid, applied)
            fitted.add(_projected(embeddings, applied))
        if fitted is None or fitted.count < 2:
            raise DataError(
                f"{fitted.count if fitted else 0} training images: a covariance needs at least "
                "2, and a good one some 50; add images, or use model.kind=patchcore"
            )
        mean, whitening = fitted.gaussians(self.regularisation, progress or (lambda *_: None))
        leading = mean.float()
        split_mean = torch.stack([leading, (mean - leading).float()])
        return PatchGaussian(applied, grid, split_mean, whitening)

    def draw(self, channels: int) -> Projection:
        """The projection of embeddings with D = `channels`, by the seed alone.

        Raises:
            ConfigError: more dimensions than channels, or an unknown kind.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return channel_projection(self.projection, channels, self.dimensions, generator=generator)


def _is_choice(chosen: Tensor, channels: int) -> bool:
    """Whether channels (d,) are some of D, in rising order."""
    edges = torch.cat([chosen.new_tensor([-1]), chosen, chosen.new_tensor([channels])])
    return bool((edges.diff() > 0).all())


def _projected(embeddings: Tensor, projection: Projection) -> Tensor:
    """(B, h, w, D or d) -> (B, P, d)."""
    patches = embeddings.flatten(1, 2)
    return patches if patches.shape[2] == projection.dimensions else projection(patches)


def _check_shape(embeddings: Tensor, grid: tuple[int, int], projection: Projection) -> None:
    height, width, channels = embeddings.shape[1:]
    if (height, width) != grid:
        raise DataError(
            f"an image has {height}×{width} patches where the first training image had "
            f"{grid[0]}×{grid[1]}: PaDiM needs one shape for all images; crop them to one aspect, "
            "or use model.kind=patchcore, which takes any"
        )
    if channels not in (projection.dim, projection.dimensions):
        raise DataError(
            f"embeddings have {channels} channels where the training's had {projection.dim}; use "
            "the same backbone and layers"
        )
