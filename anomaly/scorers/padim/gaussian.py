"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.runtime import spread
from anomaly.scorers.base import PatchBatch, PatchScores, Progress, check_tensors, leading
from anomaly.scorers.padim.covariance import GaussianStatistics, centre, flat_width
from anomaly.scorers.padim.projection import Projection, channel_projection
from anomaly.scorers.padim.sample_store import SampleStore, StatisticsStore
from anomaly.scorers.padim.whitening import CholeskyWhitening, LowRankWhitening

__all__ = ["GaussianFitter", "GaussianStatistics", "PatchGaussian", "channel_projection"]


# Numbers that one block of positions works on. Scoring's should stay in a CPU's cache between two
# products; fitting's is what each thread holds.
# A GPU wants few launches.
_SCORING_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 26}
_FITTING_BLOCK = {"cpu": 1 << 22, "cuda": 1 << 26}
_BLOCKS_A_STEP = 16


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
        blocks = _blocks(patches.shape[1], self.whitening.numbers, block)
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
        fitted: _Accumulator | None = None
        for batch in batches:
            embeddings = batch.embeddings
            if fitted is None:
                grid = (embeddings.shape[1], embeddings.shape[2])
                projection = projection or self.draw(embeddings.shape[-1])
                applied = projection.to(embeddings.device)
                fitted = _Accumulator(
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


class _Accumulator:
    """Takes training patches, gives Gaussians, within bounds that no number of images moves.

    At most d samples of a position wait; more are folded into its statistics. So products are
    large, and few images never need d × d numbers for each position.
    """

    def __init__(
        self, positions: int, dimensions: int, device: torch.device, memory_limit: int
    ) -> None:
        self._blocks = _blocks(positions, dimensions**2, _FITTING_BLOCK[device.type])
        self._shape = (positions, dimensions)
        self._device = device
        self._memory_limit = memory_limit
        self._waiting = SampleStore(positions, dimensions, device)
        self._statistics: StatisticsStore | None = None
        self._folded = 0

    @property
    def count(self) -> int:
        return self._folded + len(self._waiting)

    def add(self, patches: Tensor) -> None:
        """Take the patches (B, P, d) of further images."""
        self._waiting.append(patches, self._memory_limit)
        if len(self._waiting) > self._shape[1]:
            self._fold()

    def gaussians(
        self, regularisation: float, progress: Progress
    ) -> tuple[Tensor, CholeskyWhitening | LowRankWhitening]:
        """Means (P, d) float64 and whitening of all positions."""
        mean = torch.empty(self._shape, dtype=torch.float64, device=self._device)
        whole: CholeskyWhitening | LowRankWhitening
        if self._folded:
            whole, fill = self._cholesky(mean, regularisation)
        else:
            whole, fill = self._low_rank(mean, regularisation)
        for done in range(0, len(self._blocks), _BLOCKS_A_STEP):
            step = self._blocks[done : done + _BLOCKS_A_STEP]
            spread(fill, step, self._device)
            progress(done + len(step), len(self._blocks))
        return mean, whole

    def _cholesky(
        self, mean: Tensor, regularisation: float
    ) -> tuple[CholeskyWhitening, Callable[[slice], None]]:
        """Room for the whitening, and what fills a block of it and of the means."""
        whole = CholeskyWhitening.empty(*self._shape, self._device)

        def fill(block: slice) -> None:
            statistics = self._statistics_of(block)
            mean[block] = statistics.mean
            whole[block] = CholeskyWhitening.of(statistics, regularisation)

        return whole, fill

    def _low_rank(
        self, mean: Tensor, regularisation: float
    ) -> tuple[LowRankWhitening, Callable[[slice], None]]:
        """Like `_cholesky`."""
        whole = LowRankWhitening.empty(
            *self._shape, self.count - 1, regularisation=regularisation, device=self._device
        )

        def fill(block: slice) -> None:
            mean[block], centred = centre(self._waiting.read(block))
            whole[block] = LowRankWhitening.of(centred, regularisation)

        return whole, fill

    def _fold(self) -> None:
        if self._statistics is None:
            positions, width = self._shape[0], flat_width(self._shape[1])
            in_memory = 4 * positions * width <= self._memory_limit
            store = StatisticsStore(positions, width, in_memory, self._device)
        else:
            store = self._statistics

        def fill(block: slice) -> None:
            store[block] = self._statistics_of(block).flat()

        spread(fill, self._blocks, self._device)
        self._statistics, self._folded = store, self.count
        self._waiting.clear()

    def _statistics_of(self, block: slice) -> GaussianStatistics:
        """Of all samples so far, folded and waiting."""
        if self._statistics is None:
            return GaussianStatistics.of(self._waiting.read(block))
        flat = self._statistics[block]
        folded = GaussianStatistics.from_flat(self._folded, flat, self._shape[1])
        return folded.update(self._waiting.read(block)) if len(self._waiting) else folded


def _is_choice(chosen: Tensor, channels: int) -> bool:
    """Whether channels (d,) are some of D, in rising order."""
    edges = torch.cat([chosen.new_tensor([-1]), chosen, chosen.new_tensor([channels])])
    return bool((edges.diff() > 0).all())


def _blocks(positions: int, numbers: int, block: int) -> list[slice]:
    """Slices of the positions that work on at most `block` numbers, at `numbers` each."""
    size = max(1, block // numbers)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


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
