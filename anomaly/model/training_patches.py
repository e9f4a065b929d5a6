"""The patch embeddings of the training images, computed once and read as often as wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.features.inside import inside, inside_of
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import (
    NetworkInput,
    UnusableImage,
    by_shape,
    drop_outside_region,
    tile_by_tile,
    turned_corner,
    with_turned,
)
from anomaly.imaging.read import Image
from anomaly.model.appearance import Appearance, AppearanceSums, appearances_of, same_pictures
from anomaly.model.build import fitter_of
from anomaly.model.first_reading import FirstReading, KeptPoints, matrix_hash
from anomaly.model.joined_batches import joined
from anomaly.model.part import Part
from anomaly.model.settings import turns_of
from anomaly.model.tensor_file import Piece, TensorFile, check_room
from anomaly.runtime.memory import release_memory
from anomaly.runtime.parallel import in_parallel
from anomaly.scorers.base import Progress
from anomaly.scorers.patches import MatrixOf, PatchBatch, PatchSet, Result

if TYPE_CHECKING:
    from anomaly.model.detector import AnomalyDetector
    from anomaly.model.untrained import Untrained

# Images after which memory that is free but still held goes back to the system.
_TRIMMED = 128
# Images that a function of `TrainingPatches.each` sees at once.
_PART = 512

_Embedded: TypeAlias = tuple[
    list[NetworkInput], list[Tensor], Tensor, list[tuple[NetworkInput, Appearance]]
]


class TrainingPatches(PatchSet):
    """The patch embeddings of the training images, batch by batch, as often as wanted.

    Large images come tile by tile, and what lies outside a region to look at is marked.

    The first reading runs the network and writes what it makes to a temporary file; further
    readings take it from there, so that each sees the same bytes. Feature maps are written before
    they are aligned, which is half the size of the embeddings (coarse layers aren't up-sampled
    yet), or, with `aligned`, as embeddings, which is less once these are projected. Where patches
    are read by `projected` first, a second file keeps what that gives.

    Args:
        images: files, or pixels that are decoded already, by their numbers, ascending.
        decoders: set to what the model's loading is.
        model: whose network and alignment make the embeddings, by its settings.
        scratch: an existing folder for the temporary file.
        aligned: what is written there; by default what suits the method.
        turned: whether images are learned as the settings turn them, too.
        shared: whether another process is to go on with what the first reading finds.
        expected: how many images there will be features of in the folder; None for these alone.
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
        model: Untrained | AnomalyDetector,
        scratch: Path,
        *,
        aligned: bool | None = None,
        turned: bool = True,
        shared: bool = False,
        expected: int | None = None,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self._images = images
        self._decoders = decoders
        self._embedder = model.embedder
        self._batch_size = self._embedder.at_once(model.config.batch_size)
        self._scratch = scratch
        self._aligned = fitter_of(model.config).compact if aligned is None else aligned
        self._region = model.region
        self._turns = turns_of(model.config) if turned else ()
        self._progress = progress
        self._shared = shared
        self._expected = expected or len(images)
        self._files: list[TensorFile] = []
        self._points: list[KeptPoints] = []
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

    def pictures(self) -> dict[int, str]:
        """sha256 of the first file that shows what each one shows, by the images' numbers."""
        first = same_pictures(self.looks)
        return {i: self.hashes[first[i]] for i in self.hashes}

    def __iter__(self) -> Iterator[PatchBatch]:
        return self.read(self._images)

    def only(self, images: Container[int]) -> Part:
        """The patches of some of the images."""
        return Part(self, images)

    def read(self, images: Container[int]) -> Iterator[PatchBatch]:
        """Read the patches of some of the images once."""
        with torch.inference_mode():
            source = self._reread(images) if self._files else self._compute()
            if self._files and self._aligned:
                source = joined(source, self.views)
            for names, embeddings in source:
                rows = [row for row, name in enumerate(names) if name.image in images]
                if rows:
                    kept = embeddings if len(rows) == len(names) else embeddings[rows]
                    yield self._batch(kept, [names[row] for row in rows])

    def projected(self, matrix_of: MatrixOf) -> Iterator[tuple[int, Tensor]]:
        """An image's index and its points (n, d) float32, image by image."""
        return self.read_projected(self._images, matrix_of)

    def read_projected(
        self, images: Container[int], matrix_of: MatrixOf
    ) -> Iterator[tuple[int, Tensor]]:
        """Read the projected patches of some of the images once."""
        with torch.inference_mode():
            if not self._files:
                self.read_first(matrix_of)
            # All are of one matrix; none are of a shard in which no image can be used.
            any_of = next((kept for kept in self._points if kept.channels), None)
            if any_of and any_of.made_with == matrix_hash(matrix_of(any_of.channels)):
                for kept in self._points:
                    yield from kept.read(images)
            else:
                for part in self._parts(images):  # in the order that `each` has
                    yield from PatchSet.projected(part, matrix_of)

    def read_first(self, matrix_of: MatrixOf | None) -> None:
        """Compute and keep all features, and what `projected` gives of a matrix."""
        with torch.inference_mode():
            for _ in self._compute(matrix_of):
                pass

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """What a function makes of the patches, so many images at a time."""
        return self.each_of(self._images, function)

    def each_of(
        self, images: Container[int], function: Callable[[PatchSet], Result]
    ) -> Iterator[Result]:
        """What a function makes of some of the images, so many at a time."""
        yield from map(function, self._parts(images))

    def _parts(self, images: Container[int]) -> Iterator[Part]:
        used = [i for i in sorted(self.hashes) if i in images]
        for first in range(0, len(used), _PART):
            yield self.only(frozenset(used[first : first + _PART]))

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._files:
            file.close()
        for kept in self._points:
            kept.close()
        self._files, self._points = [], []

    def found(self) -> FirstReading:
        """What the first reading has found, for `take` in another process."""
        points = self._points[0] if self._points else None
        here = self.refused, self.hashes, self.views, self.looks, self._counts
        return FirstReading(self._files[0], points, *here)

    def take(self, readings: Iterable[FirstReading]) -> None:
        """Go on with what other processes have found in some of the images each.

        Raises:
            DataError: no image can be used.
        """
        for one in readings:
            self._files.append(one.file)
            self._points += [one.points] if one.points is not None else []
            self.refused += one.refused
            self.hashes |= one.hashes
            self.views |= one.views
            self.looks |= one.looks
            self._counts |= one.counts
        self._check_usable()

    def _batch(self, embeddings: Tensor, names: Sequence[Piece]) -> PatchBatch:
        height, width = embeddings.shape[1:3]
        pieces = [(self.views[n.image], (n.row, n.column), n.turn) for n in names]
        return PatchBatch(
            embeddings,
            tuple(name.image for name in names),
            tuple(turned_corner(n.row * height, n.column * width, n.turn) for n in names),
            inside(pieces, embeddings, self._region),
        )

    def _compute(
        self, matrix_of: MatrixOf | None = None
    ) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
        file = TensorFile(self._scratch, shared=self._shared)
        points = None if matrix_of is None else KeptPoints(self._scratch, shared=self._shared)
        looks = AppearanceSums(self._images)
        self.refused, self.hashes, self.looks, self._counts = [], {}, looks.of_image, {}
        started = time.perf_counter()
        loaded = drop_outside_region(
            self._decoders.load_all(self._images.items()),
            self._embedder.grid,
            self._region,
        )
        batches = tile_by_tile(by_shape(loaded, self._batch_size), self._batch_size)
        every = with_turned(batches, self._turns)
        for done in in_parallel(self._embed, every, self._embedder.device):
            if isinstance(done, UnusableImage):
                self.refused.append(done)
                continue
            batch, kept, embeddings, appearances = done
            names = tuple(Piece(item.index, *item.tile, item.turn) for item in batch)
            self.hashes.update((item.index, item.sha256) for item in batch)
            self.views.update((item.index, item.layout) for item in batch)
            for item, look in appearances:
                looks.add(item.index, look)
            for item in batch:
                count = self._counts.get(item.index, 0)
                self._counts[item.index] = count + math.prod(embeddings.shape[1:3])
            room = float(sum(t.nbytes for t in kept))
            if points is not None and matrix_of is not None:
                room += points.add(self._batch(embeddings, names), matrix_of)
            if file.empty:
                tiles = math.prod(map(len, batch[0].layout.axes)) * (1 + len(self._turns))
                room *= tiles / len(batch)
                check_room(
                    self._scratch, self._expected, room, self._shared, sure=batch[0].layout.whole
                )
            file.write(names, kept)
            if len(self.hashes) % _TRIMMED < len(batch):
                release_memory()
            self._progress(len(self.hashes) + len(self.refused), len(self._images))
            self.seconds += time.perf_counter() - started
            yield names, embeddings
            started = time.perf_counter()
        release_memory()
        if not self._shared:
            self._check_usable()
        self._files, self._points = [file], [] if points is None else [points]

    def _check_usable(self) -> None:
        if not self.hashes:
            reasons = "\n  ".join(item.reason for item in self.refused[:3])
            raise DataError(f"none of the {len(self.refused)} images can be used:\n  {reasons}")

    def _embed(self, batch: list[NetworkInput] | UnusableImage) -> _Embedded | UnusableImage:
        """What is kept of a batch on disk, and its embeddings."""
        if isinstance(batch, UnusableImage):
            return batch
        with torch.inference_mode():
            maps = self._embedder.maps(batch)
            embeddings = self._embedder.align(maps)
            inside = inside_of(batch, embeddings, self._region)
            looks: list[tuple[NetworkInput, Appearance]] = []
            if not batch[0].turn:  # a copy looks like its image
                looks.extend(zip(batch, appearances_of(batch, embeddings, inside), strict=True))
        return batch, [embeddings] if self._aligned else maps, embeddings, looks

    def _reread(self, images: Container[int]) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
        for names, kept in chain.from_iterable(file.read(images) for file in self._files):
            rows = [row for row, name in enumerate(names) if name.image in images]
            some = kept if len(rows) == len(names) else [t[rows] for t in kept]
            embeddings = some[0] if self._aligned else self._embedder.align(some)
            yield tuple(names[row] for row in rows), embeddings
