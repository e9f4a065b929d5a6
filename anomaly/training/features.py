"""The features of training images: computed once, kept on disk, read as often as wanted."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from anomaly.backbones.extractor import Embedder, FeatureExtractor
from anomaly.backbones.networks import Normalisation
from anomaly.config.schema import Config
from anomaly.datasets.samples import none_usable
from anomaly.errors import WriteError, unwritable
from anomaly.imaging.alignment import Reference
from anomaly.imaging.geometry import AnyView, Region
from anomaly.imaging.loading import (
    Look,
    NetworkInput,
    Preprocessing,
    UnusableImage,
    by_shape,
    inspectable,
    tile_by_tile,
    turned_corner,
    with_turned,
)
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.methods.base import (
    Align,
    Fitter,
    PatchBatch,
    PatchSet,
    Progress,
    Result,
    Scorer,
)
from anomaly.runtime import in_parallel, release_memory
from anomaly.scoring.build import loading_of, turns_of
from anomaly.scoring.image_score import patches_inside, pieces_of
from anomaly.scoring.image_statistics import (
    ImageStatistics,
    StatisticsSums,
    statistics_of,
)
from anomaly.scoring.model import Model

log = logging.getLogger(__name__)

_WORTH_SAYING = 4e9  # bytes
# Images after which memory that is free but still held goes back to the system.
_TRIMMED = 128
# Images that a function of `CachedFeatures.each` sees at once.
_PART = 512

# What `CachedFeatures.each` gives for some of the images and a function of their patches.
RunEach: TypeAlias = "Callable[[Container[int], Callable[[PatchSet], Any]], Iterator[Any]]"


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """All stages of a model except the scorer, and its fitter.

    Attributes:
        config: all settings, the precision chosen.
        extractor: the backbone on its device, in that precision.
        normalise: what the backbone expects of its input.
        fitter: of the method, prepared.
        region: what of each image counts; None for all of it.
        aspect: H/W that images have to have; None for any.
        reference: says where the part lies in each image; None where images are seen as they are.
        device: where the network and the scorer run.
        weights_sha256: of the weights file; None for random ones.
    """

    config: Config
    extractor: FeatureExtractor
    normalise: Normalisation
    fitter: Fitter[Any]
    region: Region | None
    aspect: float | None
    reference: Reference | None
    device: torch.device
    weights_sha256: str | None

    @property
    def loading(self) -> Preprocessing:
        """Preprocessing that makes network inputs of files."""
        stride, patch = self.extractor.coarsest_stride, self.extractor.patch
        return loading_of(self.config, stride, self.region, self.aspect, patch, self.reference)

    @property
    def embedder(self) -> Embedder:
        """How network inputs become patch embeddings."""
        return Embedder(self.extractor, self.normalise, self.fitter.align, self.device)

    def detector(self, scorer: Scorer) -> Model:
        """A model with a fitted scorer, without thresholds."""
        return Model(
            config=self.config,
            extractor=self.extractor,
            normalise=self.normalise,
            scorer=scorer,
            thresholds=None,
            device=self.device,
            region=self.region,
            aspect=self.aspect,
            reference=self.reference,
        )


def cached_features(
    model: TrainingSetup | Model,
    fitter: Fitter[Any],
    images: Mapping[int, Path | Image],
    scratch: Path,
    progress: Progress = lambda done, total: None,
    *,
    among: int | None = None,
) -> CachedFeatures:
    """Run the network on images to learn from, and store the features in temporary files.

    Feature maps are written before they are aligned, which is half the size of the embeddings
    (coarse layers aren't up-sampled yet), or as embeddings, where the method makes these smaller.
    Where it selects by projected patches, these are kept in a second file. Large images go tile by
    tile, and images in the further poses that the settings ask for.

    Args:
        model: whose network and alignment make the embeddings, by its settings.
        fitter: what is to learn from them.
        images: files, or pixels that are decoded already, by their numbers, ascending.
        scratch: an existing folder for the temporary files.
        progress: called with images done, and how many there are.
        among: how many images there will be features of in the folder; given where other
            processes are to read them.

    Raises:
        OutputError: no room for the features.
    """
    embedder, turns = model.embedder, turns_of(model.config)

    def embed(batch: list[NetworkInput] | UnusableImage) -> _Embedded | UnusableImage:
        if isinstance(batch, UnusableImage):
            return batch
        with torch.inference_mode():
            maps = embedder.maps(batch)
            embeddings = embedder.align(maps)
            inside = patches_inside(pieces_of(batch), embeddings, model.region)
            # A turned copy has the statistics of its image.
            statistics = [] if batch[0].turn else statistics_of(batch, embeddings, inside)
        return _Embedded(batch, [embeddings] if fitter.compact else maps, embeddings, statistics)

    size = embedder.max_batch_size(model.config.batch_size)
    loaded = Decoders(model.loading, looks=True).load_all(images.items())
    loaded = inspectable(loaded, embedder.grid, model.region, learned=True)
    batches = with_turned(tile_by_tile(by_shape(loaded, size), size), turns)
    with torch.inference_mode():
        writer = _Writer(model, fitter, scratch, images, 1 + len(turns), among)
        for done in in_parallel(embed, batches, embedder.device):
            writer.add(done)
            progress(len(writer.hashes) + len(writer.refused), len(images))
    release_memory()
    return writer.features()


@dataclass(frozen=True, eq=False)
class CachedFeatures(PatchSet):
    """The patch embeddings of training images, batch by batch, the same bytes each time.

    Large images come tile by tile, and what lies outside a region to look at is marked.

    Attributes:
        files: of feature maps, or of embeddings.
        points: of `projected`, image by image, in as many files; none where the method asks for
            none.
        refused: files that couldn't be used.
        hashes: sha256 of each file used, by its number.
        views: how each was turned into the network's input.
        statistics: of each as a whole.
        looks: what each looks like.
        counts: how many patches each has.
        channels: D of the embeddings; 0 without images.
        align: how maps become embeddings; None where these are kept.
        region: what of each image counts; None for all of it.
        images: the numbers of those that are read; the attributes above are of all.
        run_each: does what `each` does, where features lie elsewhere.
    """

    files: tuple[TensorFile, ...]
    points: tuple[TensorFile, ...]
    refused: tuple[UnusableImage, ...]
    hashes: dict[int, str]
    views: dict[int, AnyView]
    statistics: dict[int, ImageStatistics]
    looks: dict[int, Look]
    counts: dict[int, int]
    channels: int
    align: Align | None
    region: Region | None
    images: Container[int]
    run_each: RunEach | None = None

    @property
    def count(self) -> int:
        """Number of patches of the images."""
        return sum(count for image, count in self.counts.items() if image in self.images)

    def pictures(self) -> dict[int, str]:
        """Hashes of the pictures, by image number."""
        return {i: look.picture for i, look in self.looks.items()}

    def checked(self) -> CachedFeatures:
        """The same.

        Raises:
            DataError: no image can be used.
        """
        if not self.hashes:
            raise none_usable([item.reason for item in self.refused])
        return self

    def close(self) -> None:
        """Delete the temporary files, except those that other processes read."""
        for file in (*self.files, *self.points):
            file.close()

    def only(self, images: Container[int]) -> CachedFeatures:
        """The patches of some of the images."""
        return replace(self, images=images)

    def __iter__(self) -> Iterator[PatchBatch]:
        with torch.inference_mode():
            for file in self.files:
                for names, kept in file.read(self.images):
                    rows = [row for row, name in enumerate(names) if name.image in self.images]
                    selected = kept if len(rows) == len(names) else [t[rows] for t in kept]
                    embeddings = selected[0] if self.align is None else self.align(selected)
                    read = [names[row] for row in rows]
                    yield _patch_batch(embeddings, read, self.views, self.region)

    def projected(self, matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Image number and projected patches (n, d) float32, image by image."""
        with torch.inference_mode():
            if not self.points:
                for part in self._parts():  # in the order that `each` has
                    yield from PatchSet.projected(part, matrix)
                return
            for kept in self.points:
                for (piece,), (points,) in kept.read(self.images, ascending=True):
                    yield piece.image, points

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """Results of a function applied to the patches, several images at a time."""
        if self.run_each is not None:
            yield from self.run_each(self.images, function)
        else:
            yield from map(function, self._parts())

    def _parts(self) -> Iterator[CachedFeatures]:
        used = [i for i in sorted(self.hashes) if i in self.images]
        for first in range(0, len(used), _PART):
            yield self.only(frozenset(used[first : first + _PART]))


def joined_features(shards: Sequence[CachedFeatures]) -> CachedFeatures:
    """The joined features of several shards."""
    hashes = {i: sha256 for shard in shards for i, sha256 in shard.hashes.items()}
    return replace(
        shards[0],
        files=tuple(file for shard in shards for file in shard.files),
        points=tuple(points for shard in shards for points in shard.points),
        refused=tuple(item for shard in shards for item in shard.refused),
        hashes=hashes,
        views={i: view for shard in shards for i, view in shard.views.items()},
        statistics={i: image for shard in shards for i, image in shard.statistics.items()},
        looks={i: look for shard in shards for i, look in shard.looks.items()},
        counts={i: count for shard in shards for i, count in shard.counts.items()},
        channels=max(shard.channels for shard in shards),
        images=hashes,
    )


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
        """Whether the file is still empty."""
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
            what = "no room for temporary feature maps in {}"
            raise unwritable(self._folder, error, what) from None
        self._written.append((names, offset, layouts))

    def read(
        self, images: Container[int], *, ascending: bool = False
    ) -> Iterator[tuple[tuple[Piece, ...], list[Tensor]]]:
        """The stored batches that contain any of some images, unchanged.

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
    """The layout of a tensor in the file, in the order of its strides."""

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
        values = np.fromfile(file, np.uint8, math.prod(self.shape) * self.dtype.itemsize)
        tensor = torch.from_numpy(values).view(self.dtype).view(self.shape).to(self.device)
        return tensor.permute(tuple(int(i) for i in np.argsort(self.order)))


class _Embedded(NamedTuple):
    """A batch of images with kept features, embeddings and image statistics."""

    images: list[NetworkInput]
    kept: list[Tensor]
    embeddings: Tensor
    statistics: list[ImageStatistics]


class _Writer:
    """Writes batches of features and records facts about their images.

    Args:
        model: makes the embeddings.
        fitter: is to learn from them.
        scratch: folder of the temporary files.
        images: all of them.
        copies: of each image, itself included.
        among: images with features in the folder; None where no other process reads them.
    """

    def __init__(
        self,
        model: TrainingSetup | Model,
        fitter: Fitter[Any],
        scratch: Path,
        images: Mapping[int, Path | Image],
        copies: int,
        among: int | None,
    ) -> None:
        self._model, self._fitter, self._scratch = model, fitter, scratch
        self._copies = copies
        self._shared = among is not None
        self._expected = among or len(images)
        self._file = TensorFile(scratch, shared=self._shared)
        self._matrix_of = fitter.projected_by
        self._points = self._matrix_of and TensorFile(scratch, shared=self._shared)
        self._matrix: Tensor | None = None
        self._channels = 0
        self._statistics = StatisticsSums(images)
        self.refused: list[UnusableImage] = []
        self.hashes: dict[int, str] = {}
        self._views: dict[int, AnyView] = {}
        self._looks: dict[int, Look] = {}
        self._counts: dict[int, int] = {}

    def add(self, done: _Embedded | UnusableImage) -> None:
        """Store a batch, or record an unusable image."""
        if isinstance(done, UnusableImage):
            self.refused.append(done)
            return
        images, kept, embeddings, statistics = done
        self._channels = embeddings.shape[3]
        for item in images:
            self.hashes[item.index] = item.sha256
            self._views[item.index] = item.layout
            if item.look is not None:
                self._looks[item.index] = item.look
            count = self._counts.get(item.index, 0)
            self._counts[item.index] = count + math.prod(embeddings.shape[1:3])
        for item, tile in zip(images, statistics, strict=False):
            self._statistics.add(item.index, tile)
        names = tuple(Piece(item.index, *item.tile, item.turn) for item in images)
        room = float(sum(t.nbytes for t in kept))
        room += self._project(_patch_batch(embeddings, names, self._views, self._model.region))
        if self._file.empty:
            self._check_room(images, room)
        self._file.write(names, kept)
        if len(self.hashes) % _TRIMMED < len(images):
            release_memory()

    def _project(self, batch: PatchBatch) -> int:
        """Keep the projected patches that count, image by image; the bytes that they take."""
        if self._points is None or self._matrix_of is None:
            return 0
        if self._matrix is None:
            self._matrix = self._matrix_of(self._channels).to(batch.embeddings.device)
        written = 0
        for image, patches in zip(batch.images, batch.counted(), strict=True):
            points = patches @ self._matrix
            if len(points):  # of a tile outside the region none count
                self._points.write((Piece(image, 0, 0),), [points])
            written += points.nbytes
        return written

    def _check_room(self, first: Sequence[NetworkInput], room: float) -> None:
        """Report the disk space for all features, if it is large; refuse if it is missing.

        Raises:
            OutputError: all images, each of which takes as much as the first, need more than is
                free.
        """
        folder, layout = self._scratch, first[0].layout
        tiles = math.prod(map(len, layout.axes))
        needed = room * tiles * self._copies / len(first) * self._expected
        free: float = shutil.disk_usage(folder).free
        if self._shared:  # all that is in the folder already are features of these images
            free += sum(file.stat().st_size for file in folder.iterdir())
        if needed > free and layout.whole:  # large images may differ in their tiles
            raise WriteError(
                f"the features of {self._expected} images take about {_gigabytes(needed)} in "
                f"{folder} until training ends, where {_gigabytes(free)} are free; free some disk "
                "space or write to another disk with --output"
            )
        if needed > _WORTH_SAYING:
            log.info(
                "the features of %d images take about %s of the %s that are free in %s, until "
                "training ends",
                self._expected,
                _gigabytes(needed),
                _gigabytes(free),
                folder,
            )

    def features(self) -> CachedFeatures:
        """The stored features."""
        return CachedFeatures(
            files=(self._file,),
            points=() if self._points is None else (self._points,),
            refused=tuple(self.refused),
            hashes=self.hashes,
            views=self._views,
            statistics=self._statistics.of_image,
            looks=self._looks,
            counts=self._counts,
            channels=self._channels,
            align=None if self._fitter.compact else self._model.embedder.align,
            region=self._model.region,
            images=self.hashes,
        )


def _patch_batch(
    embeddings: Tensor,
    names: Sequence[Piece],
    views: Mapping[int, AnyView],
    region: Region | None,
) -> PatchBatch:
    height, width = embeddings.shape[1:3]
    pieces = [(views[n.image], (n.row, n.column), n.turn) for n in names]
    return PatchBatch(
        embeddings,
        tuple(name.image for name in names),
        tuple(turned_corner(n.row * height, n.column * width, n.turn) for n in names),
        patches_inside(pieces, embeddings, region),
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
