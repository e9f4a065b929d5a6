"""Training patches and statistics of every position that wait in a temporary file."""

from __future__ import annotations

import tempfile
from threading import Lock
from typing import IO

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import OutputError


class PositionFile:
    """An array (rows, P, width) float32 on disk, read and written by positions, by several threads.

    The file has no name and is gone with this object, or with the process. It isn't mapped, so its
    pages never count as this program's memory.
    """

    def __init__(self, positions: int, width: int) -> None:
        self._positions = positions
        self._width = width
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
        return torch.from_numpy(values)

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
        self._count = 0

    def __len__(self) -> int:
        return self._count

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
        self._count += len(patches)
        if not self._in_file and self.nbytes + patches.nbytes <= memory_limit:
            whole = patches.is_contiguous() and patches.untyped_storage().nbytes() == patches.nbytes
            self._in_memory.append(
                patches if whole else patches.clone(memory_format=torch.contiguous_format)
            )
            return
        self._file = self._file or PositionFile(self._positions, self._dimensions)
        self._file.write(self._in_file, 0, patches)
        self._in_file += len(patches)

    def read(self, positions: slice) -> Tensor:
        """The samples (p, N, d) of a slice of positions."""
        parts = [batch[:, positions] for batch in self._in_memory]
        if self._file is not None:
            parts.append(self._file.read(self._in_file, positions).to(self._device))
        return torch.cat(parts).transpose(0, 1)

    def clear(self) -> None:
        """Forget all samples; the file's room is used again."""
        self._in_memory.clear()
        self._in_file = self._count = 0


class StatisticsStore:
    """One vector of numbers (width,) for each position, written and read by positions.

    Args:
        positions: P.
        width: numbers of one position.
        in_memory: keep them in memory, not in a file.
        device: where they are read.
    """

    def __init__(self, positions: int, width: int, in_memory: bool, device: torch.device) -> None:
        self._device = device
        self._values = (
            torch.empty(positions, width, device=device)
            if in_memory
            else PositionFile(positions, width)
        )

    def __getitem__(self, positions: slice) -> Tensor:
        if isinstance(self._values, Tensor):
            return self._values[positions]
        return self._values.read(1, positions)[0].to(self._device)

    def __setitem__(self, positions: slice, values: Tensor) -> None:
        if isinstance(self._values, Tensor):
            self._values[positions] = values
        else:
            self._values.write(0, positions.start, values)
