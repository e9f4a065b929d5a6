"""Training patches -> means and whitening of every position, in a bounded amount of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import reduce
from threading import Lock
from typing import IO

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import OutputError
from anomaly.methods.base import Progress
from anomaly.methods.padim.covariance import (
    GaussianStatistics,
    centre,
    cholesky_whitening,
    flat_width,
    low_rank_whitening,
    samples_of,
    scatter_of,
)
from anomaly.methods.padim.gaussian import (
    CholeskyWhitening,
    LowRankWhitening,
    Whitening,
    position_blocks,
    whitening_of,
)
from anomaly.runtime.parallel import parallel_map

# Numbers that one block of positions works on, which is what each thread holds. A GPU wants few
# launches.
_FITTING_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}
_BLOCKS_A_STEP = 16


class PositionFile:
    """An array (rows, P, width) float32 on disk, read and written by positions, by several threads.

    The file has no name and is gone with this object, or with the process. It isn't mapped, so its
    pages never count as this program's memory.
    """

    def __init__(self, positions: int, width: int, device: torch.device) -> None:
        self._positions = positions
        self._width = width
        self._device = device
        self._lock = Lock()
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, lives on

    def write(self, row: int, first: int, values: Tensor) -> None:
        """Write values (..., width) from position `first` of a row on, and on into further rows.

        Raises:
            OutputError: no room on the disk.
        """
        data = values.cpu().contiguous().flatten().view(torch.uint8).numpy().data
        try:
            with self._lock:
                self._file.seek(self._offset(row, first))
                while data:  # an unbuffered write may stop short
                    data = data[self._file.write(data) :]
        except OSError as error:
            raise OutputError(
                f"no room for training patches in {tempfile.gettempdir()} ({error.strerror}); "
                "free some disk space, or set TMPDIR to a folder on another disk"
            ) from None

    def read(self, rows: int, positions: slice) -> Tensor:
        """A slice of positions of the first rows, (rows, p, width)."""
        first, last, _ = positions.indices(self._positions)
        values = np.empty((rows, last - first, self._width), np.float32)
        with self._lock:
            for row, target in enumerate(values):
                self._file.seek(self._offset(row, first))
                self._file.readinto(target)  # type: ignore[attr-defined]
        return torch.from_numpy(values).to(self._device)

    def __getitem__(self, positions: slice) -> Tensor:
        """A slice of positions of the first row, (p, width)."""
        return self.read(1, positions)[0]

    def __setitem__(self, positions: slice, values: Tensor) -> None:
        self.write(0, positions.start, values)

    def _offset(self, row: int, position: int) -> int:
        return (row * self._positions + position) * self._width * 4


class SampleStore:
    """Patches (N, P, d): appended image by image, read position by position.

    They stay in memory up to a limit, then go to a file.
    """

    def __init__(self, positions: int, dimensions: int, device: torch.device) -> None:
        self._positions = positions
        self._dimensions = dimensions
        self._device = device
        self._in_memory: list[Tensor] = []
        self._file: PositionFile | None = None
        self._in_file = 0

    def __len__(self) -> int:
        return sum(map(len, self._in_memory)) + self._in_file

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(batch.nbytes for batch in self._in_memory)

    def append(self, patches: Tensor, memory_limit: int) -> None:
        """Take the patches (B, P, d) float32 of further images.

        Args:
            patches: on the store's device. They are kept as they are where they are all of a
                tensor, and mustn't change.
            memory_limit: bytes that may be held in memory; a batch that would exceed it, and all
                that follow, go to the file.

        Raises:
            OutputError: no room on the disk.
        """
        if not self._in_file and self.nbytes + patches.nbytes <= memory_limit:
            whole = patches.is_contiguous() and patches.untyped_storage().nbytes() == patches.nbytes
            self._in_memory.append(
                patches if whole else patches.clone(memory_format=torch.contiguous_format)
            )
            return
        if self._file is None:
            self._file = PositionFile(self._positions, self._dimensions, self._device)
        self._file.write(self._in_file, 0, patches)
        self._in_file += len(patches)

    def read(self, positions: slice) -> Tensor:
        """The samples (p, N, d) of a slice of positions."""
        parts = [batch[:, positions] for batch in self._in_memory]
        if self._file is not None:
            parts.append(self._file.read(self._in_file, positions))
        return torch.cat(parts).transpose(0, 1)

    def clear(self) -> None:
        """Forget all samples; the file's room is used again."""
        self._in_memory.clear()
        self._in_file = 0


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
        self._statistics: Tensor | PositionFile | None = None
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
        if self._statistics is None:  # few images
            mean, centred = centre(self._waiting.read(block))
            return mean, low_rank_whitening(centred, regularisation)
        statistics = self._statistics_of(block)
        return statistics.mean, cholesky_whitening(statistics, regularisation)

    def _fold(
        self, more: Callable[[slice], GaussianStatistics] | None = None, images: int = 0
    ) -> None:
        """Turn waiting samples into statistics; `more` are those of further images."""
        store = self._statistics
        if store is None:
            positions, width = self._shape[0], flat_width(self._shape[1])
            if 4 * positions * width <= self._memory_limit:
                store = torch.empty(positions, width, device=self._device)
            else:
                store = PositionFile(positions, width, self._device)

        def fill(block: slice) -> None:
            parts = [self._statistics_of(block)] if self.count else []
            parts += [more(block)] if more is not None else []
            store[block] = reduce(GaussianStatistics.merge, parts).flat()

        parallel_map(fill, self._blocks, self._device)
        self._statistics, self._folded = store, self.count + images
        self._waiting.clear()

    def _statistics_of(self, block: slice) -> GaussianStatistics:
        """Statistics of all samples so far, folded and waiting."""
        if self._statistics is None:
            return GaussianStatistics.of(self._waiting.read(block))
        flat = self._statistics[block]
        folded = GaussianStatistics.from_flat(self._folded, flat, self._shape[1])
        if not len(self._waiting):
            return folded
        return folded.merge(GaussianStatistics.of(self._waiting.read(block)))
