"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.scorers.base import PatchBatch, PatchScores
from anomaly.scorers.covariance import (
    CholeskyWhitening,
    GaussianStatistics,
    LowRankWhitening,
    centre,
)
from anomaly.scorers.projection import Projection, channel_projection
from anomaly.scorers.spill import Spill

__all__ = ["GaussianFitter", "GaussianStatistics", "PatchGaussian", "channel_projection"]

Progress = Callable[[int, int], None]

# Numbers that one block of positions works on: within a CPU's last cache; a GPU wants few launches.
_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}


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

        Args:
            embeddings: (B, h, w, D) float32 on the grid that was learned.

        Raises:
            DataError: another grid, or another number of channels.
        """
        _check_grid(embeddings, self.grid, self.projection.dim)
        # (B, P, d): a position's Gaussian meets all images at once.
        patches = self.projection(embeddings.flatten(1, 2))
        squared = patches.new_empty(patches.shape[1], patches.shape[0])
        for positions in _blocks(patches.shape[1], self.whitening.numbers, patches.device):
            leading, trailing = self.mean[:, positions, None]
            residuals = torch.sub(patches[:, positions].transpose(0, 1), leading).sub_(trailing)
            squared[positions] = self.whitening.squared_distances(residuals, positions)
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
        """The way back from `tensors`."""
        height, width = tensors["grid"].tolist()
        projection = Projection(tensors["projection"], int(tensors["channels"]))
        kind = LowRankWhitening if "basis" in tensors else CholeskyWhitening
        return cls(projection, (height, width), tensors["mean"], kind.from_tensors(tensors))


@dataclass(frozen=True)
class GaussianFitter:
    """Settings of PaDiM.

    Attributes:
        dimensions: d, channels kept of the embeddings' D.
        projection: `random` or `orthogonal`, see `channel_projection`.
        regularisation: ε, added to the diagonal of each covariance (PaDiM, eq. 1).
        seed: of the projection.
        memory_limit: bytes of training data kept in memory; the rest waits in a temporary file.
            The model and what one step works on come on top.
    """

    dimensions: int
    projection: str = "random"
    regularisation: float = 0.01
    seed: int = 0
    memory_limit: int = 512 * 1024**2

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> PatchGaussian:
        """Learn a Gaussian for each position, reading the batches once.

        Args:
            batches: good patches, all on one grid.
            progress: called with (blocks of positions done, all of them) after the last batch.

        Raises:
            ConfigError: more dimensions than channels, or a regularisation that is too small.
            DataError: fewer than two images, or more than one grid.
        """
        if self.regularisation <= 0:
            raise ConfigError(
                f"model.regularisation is {self.regularisation:g}; it must be above 0"
            )
        samples: _Samples | None = None
        for batch in batches:
            embeddings = batch.embeddings
            if samples is None:
                grid = (embeddings.shape[1], embeddings.shape[2])
                projection = self._projection(embeddings)
                samples = _Samples(grid, self.dimensions, embeddings.device, self.memory_limit)
            _check_grid(embeddings, grid, projection.dim)
            samples.add(projection(embeddings.flatten(1, 2)))
        if samples is None or samples.count < 2:
            raise DataError(
                f"{samples.count if samples else 0} training images: a covariance needs at least "
                "2, and a good one some 50; add images, or use model.kind=patchcore"
            )
        mean, whitening = samples.gaussians(self.regularisation, progress or (lambda *_: None))
        leading = mean.float()
        split_mean = torch.stack([leading, (mean - leading).float()])
        return PatchGaussian(projection, grid, split_mean, whitening)

    def _projection(self, embeddings: Tensor) -> Projection:
        generator = torch.Generator().manual_seed(self.seed)
        drawn = channel_projection(
            self.projection, embeddings.shape[-1], self.dimensions, generator=generator
        )
        return drawn.to(embeddings.device)


class _Samples:
    """Training patches of each position, put aside by blocks of positions.

    At most d samples of a position wait; more are folded into its mean and scatter matrix. So room
    doesn't grow with the number of images, products are large, and few images never need a
    d × d matrix.
    """

    def __init__(
        self, grid: tuple[int, int], dimensions: int, device: torch.device, memory_limit: int
    ) -> None:
        self._positions = grid[0] * grid[1]
        self._dimensions = dimensions
        self._blocks = _blocks(self._positions, 2 * dimensions**2, device)
        self._spill = Spill(memory_limit)
        self._batches = 0
        self._waiting = 0
        self._folded = 0

    @property
    def count(self) -> int:
        return self._folded + self._waiting

    def add(self, patches: Tensor) -> None:
        """Take the patches (B, P, d) of further images."""
        for i, positions in enumerate(self._blocks):
            part = (
                patches[:, positions].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            )
            self._spill.put((self._batches, i), part)
        self._batches += 1
        self._waiting += patches.shape[0]
        if self._waiting > self._dimensions:
            self._fold()

    def gaussians(
        self, regularisation: float, progress: Progress
    ) -> tuple[Tensor, CholeskyWhitening | LowRankWhitening]:
        """Means (P, d) float64 and whitening of all positions; leaves nothing behind here."""
        kind: type[CholeskyWhitening | LowRankWhitening]
        kind = CholeskyWhitening if self._folded else LowRankWhitening
        whole: dict[str, Tensor] = {}
        for block, positions in enumerate(self._blocks):
            mean, whitening = self._gaussian(block, regularisation)
            for name, part in {"mean": mean, **whitening.tensors()}.items():
                if part.ndim == 0:  # the same for all positions
                    whole[name] = part
                    continue
                if name not in whole:
                    whole[name] = part.new_empty(self._positions, *part.shape[1:])
                whole[name][positions] = part
            progress(block + 1, len(self._blocks))
        return whole.pop("mean"), kind.from_tensors(whole)

    def _gaussian(
        self, block: int, regularisation: float
    ) -> tuple[Tensor, CholeskyWhitening | LowRankWhitening]:
        if self._folded:
            statistics = self._statistics(block)
            return statistics.mean, CholeskyWhitening.of(statistics, regularisation)
        mean, centred = centre(self._take_waiting(block))
        return mean, LowRankWhitening.of(centred, regularisation)

    def _fold(self) -> None:
        for block in range(len(self._blocks)):
            statistics = self._statistics(block)
            self._spill.put(("statistics", block), statistics.mean, *statistics.scatter)
        self._folded, self._waiting, self._batches = self.count, 0, 0

    def _statistics(self, block: int) -> GaussianStatistics:
        """Of all samples of one block, folded and waiting."""
        if not self._folded:
            return GaussianStatistics.of(self._take_waiting(block))
        mean, *scatter = self._spill.take(("statistics", block))
        folded = GaussianStatistics(self._folded, mean, tuple(scatter))
        return folded.update(self._take_waiting(block)) if self._waiting else folded

    def _take_waiting(self, block: int) -> Tensor:
        """Samples (p, N, d)."""
        parts = [self._spill.take((batch, block))[0] for batch in range(self._batches)]
        return torch.cat(parts, dim=1)


def _blocks(positions: int, numbers: int, device: torch.device) -> list[slice]:
    """Slices of the positions whose work, `numbers` each, fits the cache."""
    size = max(1, _BLOCK[device.type] // numbers)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


def _check_grid(embeddings: Tensor, grid: tuple[int, int], channels: int) -> None:
    height, width, found = embeddings.shape[1:]
    if (height, width) != grid:
        raise DataError(
            f"an image has {height}×{width} patches where the first training image had "
            f"{grid[0]}×{grid[1]}: PaDiM needs one shape for all images; crop them to one aspect, "
            "or use model.kind=patchcore, which takes any"
        )
    if found != channels:
        raise DataError(
            f"embeddings have {found} channels where the training's had {channels}; use the same "
            "backbone and layers"
        )
