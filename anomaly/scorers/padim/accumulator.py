"""Training patches -> means and whitening of every position, in a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from anomaly.runtime.parallel import spread
from anomaly.scorers.base import Progress
from anomaly.scorers.padim.covariance import GaussianStatistics, centre, flat_width
from anomaly.scorers.padim.layout import position_blocks
from anomaly.scorers.padim.sample_store import SampleStore, StatisticsStore
from anomaly.scorers.padim.whitening import CholeskyWhitening, LowRankWhitening

# Numbers that one block of positions works on, which is what each thread holds. A GPU wants few
# launches.
_FITTING_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}
_BLOCKS_A_STEP = 16


class GaussianAccumulator:
    """Takes training patches, gives Gaussians, within bounds that no number of images moves.

    At most d samples of a position wait; more are folded into its statistics. So products are
    large, and few images never need d × d numbers for each position.

    Args:
        positions: P.
        dimensions: d.
        device: where the patches are.
        memory_limit: bytes of waiting patches, and of statistics, that are kept in memory.
    """

    def __init__(
        self, positions: int, dimensions: int, device: torch.device, memory_limit: int
    ) -> None:
        self._blocks = position_blocks(positions, dimensions**2, _FITTING_BLOCK[device.type])
        self._shape = (positions, dimensions)
        self._device = device
        self._memory_limit = memory_limit
        self._waiting = SampleStore(positions, dimensions, device)
        self._statistics: StatisticsStore | None = None
        self._folded = 0

    @property
    def count(self) -> int:
        """How many images it has taken."""
        return self._folded + len(self._waiting)

    def add(self, patches: Tensor) -> None:
        """Take the patches (B, P, d) of further images."""
        while len(patches):  # folded after as many, whichever of them share a batch
            room = self._shape[1] + 1 - len(self._waiting)
            self._waiting.append(patches[:room], self._memory_limit)
            patches = patches[room:]
            if len(self._waiting) > self._shape[1]:
                self._fold()

    def take(
        self,
        mean: Tensor,
        whitening: CholeskyWhitening | LowRankWhitening,
        images: int,
        regularisation: float,
    ) -> None:
        """Take what Gaussians have learned: means (P, d) float64 and whitening, from N images."""
        if isinstance(whitening, LowRankWhitening):
            samples = torch.empty(images, *self._shape, device=self._device)
            for block in self._blocks:
                samples[:, block] = whitening.samples(mean[block], block).transpose(0, 1)
            self.add(samples)
            return

        def statistics(block: slice) -> GaussianStatistics:
            scatter = whitening.scatter(images, regularisation, block)
            return GaussianStatistics(images, mean[block], scatter)

        self._fold(statistics, images)

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
        """Room for the whitening of few images, and what fills a block of it and of the means."""
        whole = LowRankWhitening.empty(
            *self._shape, self.count - 1, regularisation=regularisation, device=self._device
        )

        def fill(block: slice) -> None:
            mean[block], centred = centre(self._waiting.read(block))
            whole[block] = LowRankWhitening.of(centred, regularisation)

        return whole, fill

    def _fold(
        self, more: Callable[[slice], GaussianStatistics] | None = None, images: int = 0
    ) -> None:
        """Turn waiting samples into statistics; `more` are those of further images."""
        if self._statistics is None:
            positions, width = self._shape[0], flat_width(self._shape[1])
            in_memory = 4 * positions * width <= self._memory_limit
            store = StatisticsStore(positions, width, in_memory, self._device)
        else:
            store = self._statistics

        def fill(block: slice) -> None:
            parts = [self._statistics_of(block)] if self.count else []
            parts += [more(block)] if more is not None else []
            store[block] = reduce(GaussianStatistics.merge, parts).flat()

        spread(fill, self._blocks, self._device)
        self._statistics, self._folded = store, self.count + images
        self._waiting.clear()

    def _statistics_of(self, block: slice) -> GaussianStatistics:
        """Of all samples so far, folded and waiting."""
        if self._statistics is None:
            return GaussianStatistics.of(self._waiting.read(block))
        flat = self._statistics[block]
        folded = GaussianStatistics.from_flat(self._folded, flat, self._shape[1])
        return folded.update(self._waiting.read(block)) if len(self._waiting) else folded
