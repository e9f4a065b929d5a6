"""The patch embeddings of the training images, computed once and read as often as wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.errors import DataError
from anomaly.features.embedder import Embedder
from anomaly.features.inside import inside, inside_of
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.image import Image
from anomaly.imaging.preprocessing import (
    Loaded,
    UnusableImage,
    by_shape,
    refuse_missed,
    tile_by_tile,
)
from anomaly.imaging.region import Region
from anomaly.model.appearance import Appearance, appearances_of
from anomaly.model.tensor_file import Piece, TensorFile
from anomaly.runtime import in_parallel, release_memory
from anomaly.scorers.base import PatchBatch, Progress

# Images after which memory that is free but still held goes back to the system.
_TRIMMED = 128

_Embedded: TypeAlias = tuple[list[Loaded], list[Tensor], Tensor, list[Appearance]]


class TrainingPatches:
    """The patch embeddings of the training images, batch by batch, as often as wanted.

    Large images come tile by tile, and what lies outside a region to look at is marked.

    The first reading runs the network and writes what it makes to a temporary file; further
    readings take it from there, so that each sees the same bytes. Feature maps are written before
    they are aligned, which is half the size of the embeddings (coarse layers aren't up-sampled
    yet), or, with `aligned`, as embeddings, which is less once these are projected.

    Args:
        images: files, or pixels that are decoded already, by their numbers, ascending.
        decoders: set to what the model's loading is.
        embedder: the network and the alignment.
        batch_size: images at once.
        scratch: an existing folder for the temporary file.
        aligned: what is written there.
        region: what of each image counts; None for all of it.
        progress: called with images done, and how many there are, in the first reading.

    Attributes:
        seconds: time spent decoding and in the network, so far.
        refused: files that couldn't be used, after the first reading.
        hashes: sha256 of each file used, by its index, after the first reading.
        views: how each file used was turned into the network's input, after the first reading.
        looks: what each file used looks like as a whole, after the first reading.
    """

    def __init__(
        self,
        images: Mapping[int, Path | Image],
        decoders: Decoders,
        embedder: Embedder,
        *,
        batch_size: int,
        scratch: Path,
        aligned: bool,
        region: Region | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._images = images
        self._decoders = decoders
        self._embedder = embedder
        self._batch_size = batch_size
        self._scratch = scratch
        self._aligned = aligned
        self._region = region
        self._progress = progress
        self._file: TensorFile | None = None
        self.seconds = 0.0
        self.refused: list[UnusableImage] = []
        self.hashes: dict[int, str] = {}
        self.views: dict[int, AnyView] = {}
        self.looks: dict[int, Appearance] = {}
        self._counts: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many patches all images have, after the first reading."""
        return self.count_of(self._counts)

    def count_of(self, images: Container[int]) -> int:
        """How many patches some of the images have."""
        return sum(count for image, count in self._counts.items() if image in images)

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.read(self._images)

    def only(self, images: Container[int]) -> Part:
        """The patches of some of the images."""
        return Part(self, images)

    def read(self, images: Container[int]) -> Iterator[PatchBatch]:
        """Read the patches of some of the images once."""
        with torch.inference_mode():
            source = self._compute() if self._file is None else self._reread(images)
            for names, embeddings in source:
                rows = [row for row, name in enumerate(names) if name.image in images]
                if rows:
                    kept = embeddings if len(rows) == len(names) else embeddings[rows]
                    yield self._batch(kept, [names[row] for row in rows])

    def close(self) -> None:
        """Delete the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _batch(self, embeddings: Tensor, names: Sequence[Piece]) -> PatchBatch:
        height, width = embeddings.shape[1:3]
        pieces = [(self.views[name.image], (name.row, name.column)) for name in names]
        return PatchBatch(
            embeddings,
            tuple(name.image for name in names),
            tuple((name.row * height, name.column * width) for name in names),
            inside(pieces, embeddings, self._region),
        )

    def _compute(self) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
        file = TensorFile(self._scratch)
        sums: NDArray[np.float64] | None = None
        rows = {number: row for row, number in enumerate(self._images)}
        self.refused, self.hashes, self.looks, self._counts = [], {}, {}, {}
        started = time.perf_counter()
        loaded = refuse_missed(
            self._decoders.load_all(self._images.items()),
            self._embedder.grid,
            self._region,
        )
        batches = tile_by_tile(by_shape(loaded, self._batch_size), self._batch_size)
        for done in in_parallel(self._embed, batches, self._embedder.device):
            if isinstance(done, UnusableImage):
                self.refused.append(done)
                continue
            batch, kept, embeddings, looks = done
            names = tuple(Piece(item.index, *item.tile) for item in batch)
            self.hashes.update((item.index, item.sha256) for item in batch)
            self.views.update((item.index, item.layout) for item in batch)
            for item, one in zip(batch, looks, strict=True):
                known = self.looks.get(item.index)
                total = one if known is None else known + one
                # In one block: small arrays that stay among large ones that go keep the memory of
                # these from being used again.
                if sums is None:
                    sums = np.empty((len(self._images), len(one.embedding)))
                mine = sums[rows[item.index]]
                mine[:] = total.embedding
                self.looks[item.index] = replace(total, embedding=mine)
            each = math.prod(embeddings.shape[1:3])
            for item in batch:
                self._counts[item.index] = self._counts.get(item.index, 0) + each
            file.write(names, kept)
            if len(self.hashes) % _TRIMMED < len(batch):
                release_memory()
            self._progress(len(self.hashes) + len(self.refused), len(self._images))
            self.seconds += time.perf_counter() - started
            yield names, embeddings
            started = time.perf_counter()
        if not self.hashes:
            reasons = "\n  ".join(item.reason for item in self.refused[:3])
            count = len(self.refused)
            raise DataError(f"none of the {count} images can be used:\n  {reasons}")
        self._file = file

    def _embed(self, batch: list[Loaded] | UnusableImage) -> _Embedded | UnusableImage:
        """What is kept of a batch on disk, and its embeddings."""
        if isinstance(batch, UnusableImage):
            return batch
        with torch.inference_mode():
            maps = self._embedder.maps(batch)
            embeddings = self._embedder.align(maps)
            inside = inside_of(batch, embeddings, self._region)
            looks = appearances_of(batch, embeddings, inside)
        return batch, [embeddings] if self._aligned else maps, embeddings, looks

    def _reread(self, images: Container[int]) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
        assert self._file is not None
        for names, kept in self._file.read(images):
            rows = [row for row, name in enumerate(names) if name.image in images]
            some = kept if len(rows) == len(names) else [t[rows] for t in kept]
            embeddings = some[0] if self._aligned else self._embedder.align(some)
            yield tuple(names[row] for row in rows), embeddings


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the training images' patches; re-iterable.

    Attributes:
        patches: of all.
        images: the numbers of those.
    """

    patches: TrainingPatches
    images: Container[int]

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.patches.read(self.images)

    @property
    def count(self) -> int:
        """How many patches they have."""
        return self.patches.count_of(self.images)

    @property
    def views(self) -> dict[int, AnyView]:
        """See `TrainingPatches`."""
        return self.patches.views

    def only(self, images: Container[int]) -> Part:
        """The patches of some of them."""
        return self.patches.only(images)
