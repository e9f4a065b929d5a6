"""The training patches of every position, in memory up to a limit, then in a temporary file."""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import OutputError


class SampleStore:
    """Patches (N, P, d): appended image by image, read position by position.

    The file has no name and is gone with this object, or with the process. It is read and written
    without a mapping, so that its pages never count as this program's memory.
    """

    def __init__(self, positions: int, dimensions: int, device: torch.device) -> None:
        self._positions = positions
        self._dimensions = dimensions
        self._device = device
        self._in_memory: list[Tensor] = []
        self._file: IO[bytes] | None = None
        self._in_file = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(batch.nbytes for batch in self._in_memory)

    def append(self, patches: Tensor, memory_limit: int) -> None:
        """Copy the patches (B, P, d) float32 of further images.

        Args:
            patches: on the store's device.
            memory_limit: bytes that may be held in memory; a batch that would exceed it, and all
                that follow, go to the file.

        Raises:
            OutputError: no room on the disk.
        """
        self._count += len(patches)
        if not self._in_file and self.nbytes + patches.nbytes <= memory_limit:
            self._in_memory.append(patches.clone(memory_format=torch.contiguous_format))
            return
        self._write(patches.cpu().contiguous())
        self._in_file += len(patches)

    def read(self, positions: slice) -> Tensor:
        """The samples (p, N, d) of a slice of positions."""
        parts = [batch[:, positions] for batch in self._in_memory]
        if self._in_file:
            parts.append(self._read_file(positions).to(self._device))
        return torch.cat(parts).transpose(0, 1)

    def clear(self) -> None:
        """Forget all samples; the file's room is used again."""
        self._in_memory.clear()
        self._in_file = self._count = 0

    def _write(self, patches: Tensor) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, lives as long as this
        data = patches.flatten().view(torch.uint8).numpy().data
        try:
            self._file.seek(self._offset(self._in_file, 0))
            while data:  # an unbuffered write may stop short
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OutputError(
                f"no room for training patches in {tempfile.gettempdir()} ({error.strerror}); "
                "free some disk space, or set TMPDIR to a folder on another disk"
            ) from None

    def _read_file(self, positions: slice) -> Tensor:
        assert self._file is not None
        first, last, _ = positions.indices(self._positions)
        samples = np.empty((self._in_file, last - first, self._dimensions), np.float32)
        for image, patches in enumerate(samples):
            self._file.seek(self._offset(image, first))
            self._file.readinto(patches)  # type: ignore[attr-defined]
        return torch.from_numpy(samples)

    def _offset(self, image: int, position: int) -> int:
        return (image * self._positions + position) * self._dimensions * 4
