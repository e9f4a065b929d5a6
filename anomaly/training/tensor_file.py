"""A temporary file of batches of tensors, each of images or tiles of images."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anomaly.errors import OutputError

log = logging.getLogger(__name__)

_WORTH_SAYING = 4e9  # bytes


class Piece(NamedTuple):
    """A training image, or one tile of it, as it is or turned (see `anomaly.imaging.loading`)."""

    image: int
    row: int
    column: int
    turn: int = 0


class TensorFile:
    """Batches of tensors in a file without a name, gone with this object or the process.

    Args:
        folder: on the disk that the file is to be on.
        shared: give it a name, and leave it in the folder: other processes that see the folder can
            read it through a pickled copy of this object.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: IO[bytes]
        if shared:
            descriptor, name = tempfile.mkstemp(dir=folder)
            self._path, self._file = Path(name), os.fdopen(descriptor, "wb")
        else:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, lives on
        self._written: list[tuple[tuple[Piece, ...], int, list[_InFile]]] = []

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet."""
        return not self._written

    def write(self, names: tuple[Piece, ...], tensors: Sequence[Tensor]) -> None:
        """Append one batch.

        Args:
            names: its pieces.
            tensors: (B, …) each, in the order of the names.

        Raises:
            OutputError: no room.
        """
        layouts = []
        offset = self._file.tell()
        try:
            for t in tensors:
                layout = _InFile.of(t)
                self._file.write(t.permute(layout.order).cpu().view(torch.uint8).numpy().data)
                layouts.append(layout)
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"no room for temporary feature maps in {self._folder} ({error.strerror}); free "
                "some disk space or write to another disk with --output"
            ) from None
        self._written.append((names, offset, layouts))

    def read(
        self, images: Container[int], *, ascending: bool = False
    ) -> Iterator[tuple[tuple[Piece, ...], list[Tensor]]]:
        """Give the batches again that hold any of some images, whole and as they were.

        Args:
            images: their numbers.
            ascending: by the number of each batch's first image, not in the order of writing.
        """
        written = self._written
        if ascending:
            written = sorted(written, key=lambda batch: batch[0][0].image)
        with nullcontext(self._file) if self._path is None else self._path.open("rb") as file:
            for names, offset, layouts in written:
                if any(name.image in images for name in names):
                    file.seek(offset)
                    yield names, [layout.read(file) for layout in layouts]

    def close(self) -> None:
        """Delete the file, unless it is shared."""
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": BytesIO()}  # a copy only reads


@dataclass(frozen=True)
class _InFile:
    """How a tensor lies in the file: in the order of its strides, so that nothing is copied."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> _InFile:
        strides = t.stride()
        order = tuple(sorted(range(t.ndim), key=strides.__getitem__, reverse=True))
        return cls(tuple(t.shape[axis] for axis in order), order, t.dtype, t.device)

    def read(self, file: IO[bytes]) -> Tensor:
        flat = np.fromfile(file, np.uint8, math.prod(self.shape) * self.dtype.itemsize)
        values = torch.from_numpy(flat).view(self.dtype).view(self.shape).to(self.device)
        return values.permute(tuple(int(i) for i in np.argsort(self.order)))


def check_room(folder: Path, images: int, each: float, shared: bool, *, sure: bool) -> None:
    """Say what disk space the features of images will take, where it is much.

    Args:
        folder: on the disk that they will be on.
        images: how many.
        each: bytes of one image.
        shared: whether all that is in the folder already are features of these images.
        sure: whether all images take about as much.

    Raises:
        OutputError: all images surely take more than is free.
    """
    needed, free = images * each, shutil.disk_usage(folder).free
    if shared:
        free += sum(file.stat().st_size for file in folder.iterdir())
    if needed > free and sure:
        raise OutputError(
            f"the features of {images} images take about {_said(needed)} in {folder} until "
            f"training ends, where {_said(free)} are free; free some disk space or write to "
            "another disk with --output"
        )
    if needed > _WORTH_SAYING:
        log.info(
            "the features of %d images take about %s of the %s that are free in %s, until "
            "training ends",
            images,
            _said(needed),
            _said(free),
            folder,
        )


def _said(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
