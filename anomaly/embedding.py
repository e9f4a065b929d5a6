"""Images -> patch embeddings: normalise, hook features, align. Training reads them through here."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from anomaly.aligner import Align
from anomaly.backbones import Normalisation
from anomaly.errors import DataError, OutputError
from anomaly.features import FeatureExtractor
from anomaly.lanes import side_by_side
from anomaly.loading import Loaded, Loading, Refused, by_shape, load_all
from anomaly.scorers.base import PatchBatch, Progress

_Embedded: TypeAlias = tuple[list[Loaded], list[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings."""

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Align
    device: torch.device

    def images(self, batch: Sequence[Loaded]) -> Tensor:
        """Normalised images (B, 3, H, W) of one size."""
        pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
        # (B, H, W, 3) is what torch calls channels_last.
        return self.normalise(pixels.permute(0, 3, 1, 2).to(self.device))

    def maps(self, batch: Sequence[Loaded]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return [m.values for m in self.extractor(self.images(batch))]

    def __call__(self, batch: Sequence[Loaded]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))


class TrainingPatches:
    """The patch embeddings of the training images, batch by batch, as often as wanted.

    The first reading runs the network and writes what it makes to a temporary file; further
    readings take it from there, so that each sees the same bytes. Feature maps are written before
    they are aligned, which is half the size of the embeddings (coarse layers aren't up-sampled
    yet), or, with `aligned`, as embeddings, which is less once these are projected.

    Attributes:
        seconds: time spent decoding and in the network, so far.
        refused: files that couldn't be used, after the first reading.
        hashes: sha256 of each file used, by its index, after the first reading.
        sizes: (H, W) of the network's input for each file used, likewise.
        count: how many patches all images have, after the first reading.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        loading: Loading,
        embedder: Embedder,
        *,
        batch_size: int,
        workers: int,
        scratch: Path,
        aligned: bool,
        progress: Progress,
    ) -> None:
        self._paths = paths
        self._loading = loading
        self._embedder = embedder
        self._batch_size = batch_size
        self._workers = workers
        self._scratch = scratch
        self._aligned = aligned
        self._progress = progress
        self._file: _TensorFile | None = None
        self.seconds = 0.0
        self.refused: list[Refused] = []
        self.hashes: dict[int, str] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.read(range(len(self._paths)))

    def only(self, images: Container[int]) -> Part:
        """The patches of some of the images."""
        return Part(self, images)

    def read(self, images: Container[int]) -> Iterator[PatchBatch]:
        """Read the patches of some of the images once."""
        with torch.inference_mode():
            source = self._compute() if self._file is None else self._reread(images)
            for names, embeddings in source:
                rows = [row for row, name in enumerate(names) if name in images]
                if rows:
                    kept = embeddings if len(rows) == len(names) else embeddings[rows]
                    yield PatchBatch(kept, tuple(names[row] for row in rows))

    def close(self) -> None:
        """Delete the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _compute(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        file = _TensorFile(self._scratch)
        self.refused, self.hashes, self.count = [], {}, 0
        started = time.perf_counter()
        batches = by_shape(load_all(self._paths, self._loading, self._workers), self._batch_size)
        for done in side_by_side(self._embed, batches, self._embedder.device):
            if isinstance(done, Refused):
                self.refused.append(done)
                continue
            batch, kept, embeddings = done
            names = tuple(item.index for item in batch)
            self.hashes.update((item.index, item.image.sha256) for item in batch)
            self.sizes.update((item.index, item.view.size) for item in batch)
            self.count += math.prod(embeddings.shape[:3])
            file.write(names, kept)
            self._progress(len(self.hashes) + len(self.refused), len(self._paths))
            self.seconds += time.perf_counter() - started
            yield names, embeddings
            started = time.perf_counter()
        if not self.hashes:
            reasons = "\n  ".join(item.reason for item in self.refused[:3])
            count = len(self.refused)
            raise DataError(f"none of the {count} training images can be used:\n  {reasons}")
        self._file = file

    def _embed(self, batch: list[Loaded] | Refused) -> _Embedded | Refused:
        """What is kept of a batch on disk, and its embeddings."""
        if isinstance(batch, Refused):
            return batch
        with torch.inference_mode():
            maps = self._embedder.maps(batch)
            embeddings = self._embedder.align(maps)
        return batch, [embeddings] if self._aligned else maps, embeddings

    def _reread(self, images: Container[int]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        assert self._file is not None
        for names, kept in self._file.read(images):
            yield names, kept[0] if self._aligned else self._embedder.align(kept)


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the training images' patches; re-iterable."""

    patches: TrainingPatches
    images: Container[int]

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.patches.read(self.images)


class _TensorFile:
    """Batches of tensors in a file without a name, gone with this object or the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, lives on
        self._written: list[tuple[tuple[int, ...], int, list[_Layout]]] = []

    def write(self, names: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        layouts = []
        offset = self._file.tell()
        try:
            for t in tensors:
                layout = _Layout.of(t)
                self._file.write(t.permute(layout.order).cpu().view(torch.uint8).numpy().data)
                layouts.append(layout)
        except OSError as error:
            raise OutputError(
                f"no room for temporary feature maps in {self._folder} ({error.strerror}); free "
                "some disk space or write to another disk with --output"
            ) from None
        self._written.append((names, offset, layouts))

    def read(self, images: Container[int]) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
        for names, offset, layouts in self._written:
            if any(name in images for name in names):
                self._file.seek(offset)
                yield names, [layout.read(self._file) for layout in layouts]

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Layout:
    """How a tensor lies in the file: in the order of its strides, so that nothing is copied."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> _Layout:
        strides = t.stride()
        order = tuple(sorted(range(t.ndim), key=strides.__getitem__, reverse=True))
        return cls(tuple(t.shape[axis] for axis in order), order, t.dtype, t.device)

    def read(self, file: IO[bytes]) -> Tensor:
        flat = np.fromfile(file, np.uint8, math.prod(self.shape) * self.dtype.itemsize)
        values = torch.from_numpy(flat).view(self.dtype).view(self.shape).to(self.device)
        return values.permute(tuple(int(i) for i in np.argsort(self.order)))
