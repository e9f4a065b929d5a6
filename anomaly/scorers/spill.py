"""Tensors put aside: in memory up to a limit, then in a temporary file without a name."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import OutputError


@dataclass(frozen=True)
class _InFile:
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Spill:
    """Puts tensors aside by key and hands each back once.

    Room in the file is used again for tensors of the same size. The file has no name and is gone
    with this object, or with the process.

    Args:
        memory_limit: bytes of tensors kept in memory; what comes on top goes to the file, in the
            folder that TMPDIR names.
    """

    def __init__(self, memory_limit: int) -> None:
        self._room = memory_limit
        self._kept: dict[Hashable, list[Tensor | _InFile]] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def file_bytes(self) -> int:
        """How large the file has become; 0 when memory was enough."""
        return self._end

    def put(self, key: Hashable, *values: Tensor) -> None:
        """Keep contiguous tensors, which mustn't change from here on."""
        self._kept[key] = [self._keep(v) for v in values]

    def take(self, key: Hashable) -> list[Tensor]:
        """Hand back what was put under `key`, once, on the device it came from."""
        return [self._recall(kept) for kept in self._kept.pop(key)]

    def _keep(self, values: Tensor) -> Tensor | _InFile:
        if values.nbytes > self._room:
            return self._write(values)
        self._room -= values.nbytes
        return values

    def _recall(self, kept: Tensor | _InFile) -> Tensor:
        if isinstance(kept, Tensor):
            self._room += kept.nbytes
            return kept
        assert self._file is not None
        flat = np.empty(kept.nbytes, np.uint8)
        self._file.seek(kept.offset)
        self._file.readinto(flat)  # type: ignore[attr-defined]
        self._free[kept.nbytes].append(kept.offset)
        return torch.from_numpy(flat).view(kept.dtype).view(kept.shape).to(kept.device)

    def _write(self, values: Tensor) -> _InFile:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, lives as long as this
        free = self._free[values.nbytes]
        offset = free.pop() if free else self._end
        try:
            self._file.seek(offset)
            data = values.cpu().flatten().view(torch.uint8).numpy().data
            while data:  # an unbuffered write may stop short
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OutputError(
                f"no room for temporary data in {tempfile.gettempdir()} ({error.strerror}); free "
                "some disk space, or set TMPDIR to a folder on another disk"
            ) from None
        self._end = max(self._end, offset + values.nbytes)
        return _InFile(offset, values.shape, values.dtype, values.device)
