"""Training patches -> means and whitening of every position, in a bounded amount of memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import unwritable
from anomaly.methods.base import Progress
from anomaly.methods.padim.covariance import (
    GaussianStatistics,
    centre,
    cholesky_whitening,
    low_rank_whitening,
    samples_of,
    scatter_of,
)
from anomaly.methods.padim.gaussian import (
    CholeskyWhitening,
    LowRankWhitening,
    Whitening,
    panel_rows,
    position_blocks,
    whitening_of,
)
from anomaly.runtime.parallel import parallel_map

# Numbers that one block of positions works on, which is what each thread holds. A GPU wants few
# launches.
_FITTING_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}
_BLOCKS_A_STEP = 16


def allocate(shape: tuple[int, ...], in_memory: bool, device: torch.device) -> Tensor:
    """A float32 tensor, in memory or in a temporary file without a name, gone with the process.

    Args:
        shape: of the tensor.
        in_memory: whether it stays in memory.
        device: where it is in memory; a file is mapped on the CPU.

    Raises:
        OutputError: no room on the disk.
    """
    if in_memory:
        return torch.empty(shape, device=device)
    size = 4 * math.prod(shape)
    with tempfile.TemporaryFile() as file:
        try:
            # Writing to a mapped page that the disk has no room for would end the process.
            reserve = getattr(os, "posix_fallocate", None)
            if reserve is not None:
                reserve(file.fileno(), 0, size)
            file.truncate(size)
        except OSError as error:
            what = "no room for training patches in {}, which TMPDIR sets"
            raise unwritable(tempfile.gettempdir(), error, what) from None
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


class SampleStore:
    """Patches (N, P, d): appended image by image, read position by position.

    They stay in memory up to a limit, then go to a file.

    Args:
        shape: N at most, P and d.
        device: where the patches are.
        memory_limit: bytes that may be held in memory; a batch that would exceed it, and all that
            follow, go to the file.
    """

    def __init__(
        self, shape: tuple[int, int, int], device: torch.device, memory_limit: int
    ) -> None:
        self._shape = shape
        self._device = device
        self._memory_limit = memory_limit
        self._in_memory: list[Tensor] = []
        self._file: Tensor | None = None
        self._in_file = 0

    def __len__(self) -> int:
        return sum(map(len, self._in_memory)) + self._in_file

    @property
    def nbytes(self) -> int:
        """Number of bytes held in memory."""
        return sum(batch.nbytes for batch in self._in_memory)

    def append(self, patches: Tensor) -> None:
        """Take the patches (B, P, d) float32 of further images.

        Args:
            patches: copied, as they may be a part of a larger tensor.

        Raises:
            OutputError: no room on the disk.
        """
        if not self._in_file and self.nbytes + patches.nbytes <= self._memory_limit:
            self._in_memory.append(patches.clone(memory_format=torch.contiguous_format))
            return
        if self._file is None:
            self._file = allocate(self._shape, in_memory=False, device=self._device)
        last = self._in_file + len(patches)
        self._file[self._in_file : last] = patches
        self._in_file = last

    def read(self, positions: slice) -> Tensor:
        """The samples (p, N, d) of a slice of positions."""
        parts = [batch[:, positions] for batch in self._in_memory]
        if self._file is not None:
            parts.append(self._file[: self._in_file, positions].to(self._device))
        return torch.cat(parts).transpose(0, 1)

    def clear(self) -> None:
        """Delete all samples; their file space is reused."""
        self._in_memory.clear()
        self._in_file = 0


class GaussianAccumulator:
    """Computes Gaussians from training patches in bounded memory.

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
        self._waiting = SampleStore((dimensions + 1, *self._shape), device, memory_limit)
        self._folded: GaussianStatistics | None = None

    @property
    def count(self) -> int:
        """Number of images added."""
        return (self._folded.count if self._folded else 0) + len(self._waiting)

    def add(self, patches: Tensor) -> None:
        """Take the patches (B, P, d) of further images."""
        while len(patches):  # folded after as many, whichever of them share a batch
            room = self._shape[1] + 1 - len(self._waiting)
            self._waiting.append(patches[:room])
            patches = patches[room:]
            if len(self._waiting) > self._shape[1]:
                self._fold()

    def take(self, mean: Tensor, whitening: Whitening, images: int, regularisation: float) -> None:
        """Take what Gaussians have learned: means (P, d) float64 and whitening, from N images."""
        if isinstance(whitening, LowRankWhitening):
            samples = torch.empty(images, *self._shape, device=self._device)
            for block in self._blocks:
                samples[:, block] = samples_of(whitening, mean[block], block).transpose(0, 1)
            self.add(samples)
            return
        assert isinstance(whitening, CholeskyWhitening)
        cholesky = whitening

        def statistics(block: slice) -> GaussianStatistics:
            scatter = scatter_of(cholesky, images, regularisation, block)
            return GaussianStatistics(images, mean[block], scatter)

        self._fold(statistics, images)

    def gaussians(self, regularisation: float, progress: Progress) -> tuple[Tensor, Whitening]:
        """Means (P, d) float64 and whitening of all positions."""
        whole: dict[str, Tensor] = {}

        def fill(block: slice) -> None:
            mean, whitening = self._gaussian(block, regularisation)
            for name, part in {**whitening.tensors(), "mean": mean}.items():
                if part.ndim:  # one regularisation serves all positions
                    whole[name][block] = part

        # The first position tells how much room all of them take.
        mean, first = self._gaussian(slice(0, 1), regularisation)
        for name, part in {**first.tensors(), "mean": mean}.items():
            room = (self._shape[0], *part.shape[1:])
            whole[name] = part.new_empty(room) if part.ndim else part
        for done in range(0, len(self._blocks), _BLOCKS_A_STEP):
            step = self._blocks[done : done + _BLOCKS_A_STEP]
            parallel_map(fill, step, self._device)
            progress(done + len(step), len(self._blocks))
        return whole["mean"], whitening_of(whole)

    def _gaussian(self, block: slice, regularisation: float) -> tuple[Tensor, Whitening]:
        """Means (p, d) float64 and whitening of a block of positions."""
        if self._folded is None:  # few images
            mean, centred = centre(self._waiting.read(block))
            return mean, low_rank_whitening(centred, regularisation)
        statistics = self._statistics_of(block)
        return statistics.mean, cholesky_whitening(statistics, regularisation)

    def _fold(
        self, more: Callable[[slice], GaussianStatistics] | None = None, images: int = 0
    ) -> None:
        """Add waiting samples (and `more`) to the statistics."""
        count, store = self.count + images, self._folded
        if store is None:
            positions, dimensions = self._shape
            panels = [(positions, r.stop - r.start, r.stop) for r in panel_rows(dimensions)]
            in_memory = 4 * sum(map(math.prod, panels)) <= self._memory_limit
            scatter = tuple(allocate(panel, in_memory, self._device) for panel in panels)
            mean = torch.empty(self._shape, dtype=torch.float64, device=self._device)
            store = GaussianStatistics(0, mean, scatter)

        def fill(block: slice) -> None:
            parts = [self._statistics_of(block)] if self.count else []
            parts += [more(block)] if more is not None else []
            merged = reduce(GaussianStatistics.merge, parts)
            store.mean[block] = merged.mean
            for whole, panel in zip(store.scatter, merged.scatter, strict=True):
                whole[block] = panel

        parallel_map(fill, self._blocks, self._device)
        self._folded = GaussianStatistics(count, store.mean, store.scatter)
        self._waiting.clear()

    def _statistics_of(self, block: slice) -> GaussianStatistics:
        """Statistics of all samples, folded and waiting."""
        parts = [self._folded.at(block, self._device)] if self._folded else []
        if len(self._waiting):
            parts.append(GaussianStatistics.of(self._waiting.read(block)))
        return reduce(GaussianStatistics.merge, parts)
