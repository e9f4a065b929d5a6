"""The features of training images: computed once, kept on disk, read as often as wanted."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.extractor import Embedder
from anomaly.config.schema import METHODS
from anomaly.datasets.samples import none_usable
from anomaly.errors import WriteError, unwritable
from anomaly.imaging.arrays import as_numpy
from anomaly.imaging.geometry import Region, View
from anomaly.imaging.loading import (
    Look,
    NetworkInput,
    UnusableImage,
    by_shape,
    inspectable,
    learned_batches,
    turn_of,
    turned_corner,
)
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import Image
from anomaly.maps.anomaly_map import without_halo
from anomaly.methods.base import Align, Fitter, PatchBatch, PatchSet, Result, Scorer
from anomaly.runtime import Progress, in_parallel, release_memory
from anomaly.scoring.build import ImageStages, fitter_of, turns_of
from anomaly.scoring.image_statistics import ImageStatistics, statistics_of
from anomaly.scoring.model import Model, Piece, image_scores, network_map, patches_inside

# Images after which memory that is free, but held by the allocator, goes back to the system.
_TRIMMED = 128
# Images that a function of `CachedFeatures.each` sees at once.
_PART = 512

SUSPECTS = 5  # images shown to the user, with the patch scores that their heatmaps need
# Batches that are joined where there is one grid: Gaussians are read once for each batch, and meet
# 16 images in the time that 6 take. More are hardly quicker, and take memory.
_TOGETHER = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingSetup(ImageStages):
    """All stages of a model except the scorer, and its fitter.

    Attributes:
        fitter: the method's fitter, prepared for D channels.
        weights_sha256: hash of the backbone's weights file; None for random weights, and where a
            trained model learns more images.
    """

    fitter: Fitter[Any]
    weights_sha256: str | None = None

    @classmethod
    def to_update(cls, model: Model) -> TrainingSetup:
        """The setup in which a trained model learns more images, on top of its own.

        Raises:
            ModelError: the model's method can't add to what it has learned.
        """
        learned = len(model.manifest["training_images"])
        fitter = fitter_of(model.config).incremental(model.scorer, learned)
        return cls(**_image_stages(model), fitter=fitter)

    @property
    def embedder(self) -> Embedder:
        """The stages from network inputs to patch embeddings."""
        return Embedder(self.extractor, self.normalise, self.fitter.align, self.device)

    def model(self, scorer: Scorer) -> Model:
        """A model with a fitted scorer, without thresholds."""
        return Model(**_image_stages(self), scorer=scorer, thresholds=None)


def _image_stages(model: ImageStages) -> dict[str, Any]:
    """The fields of `ImageStages` by name, to make a setup of a model or a model of a setup."""
    return {field.name: getattr(model, field.name) for field in fields(ImageStages)}


@contextmanager
def cached_features(
    setup: TrainingSetup,
    images: Mapping[int, Path | Image],
    scratch: Path,
    progress: Progress = lambda done, total: None,
    *,
    cluster_images: int | None = None,
) -> Iterator[CachedFeatures]:
    """Run the network on images to learn from, and store the features in temporary files.

    Feature maps are stored before they are aligned: they take half the bytes of the embeddings,
    since coarse layers aren't up-sampled yet. A method with smaller embeddings stores these. A
    method that selects by projected patches has them in a second file. Large images go tile by
    tile, and each image also in the further poses that the settings ask for. The files are deleted
    at the end of the block.

    Args:
        setup: the stages that make the embeddings, and the method's fitter.
        images: files or decoded pixels by image number, ascending.
        scratch: an existing folder for the temporary files.
        progress: called with (images done, number of images).
        cluster_images: number of images on all machines of a cluster, where other processes read
            the files and delete them; None on one machine.

    Raises:
        DataError: no image can be used; not on a cluster, where others may have usable ones.
        OutputError: no room for the features.
    """
    embedder, fitter, turns = setup.embedder, setup.fitter, turns_of(setup.config)

    def embed(batch: list[NetworkInput] | UnusableImage) -> _Embedded | UnusableImage:
        if isinstance(batch, UnusableImage):
            return batch
        with torch.inference_mode():  # which holds for one thread: `in_parallel` has several
            maps = embedder.maps(batch)
            tiles = [Tile(item.index, *item.tile, item.turn) for item in batch]
            layouts = {item.index: item.layout for item in batch}
            patches = _patch_batch(embedder.align(maps), tiles, layouts, setup.region)
            statistics = statistics_of(batch, patches.embeddings, patches.inside)
        kept = [patches.embeddings] if fitter.compact else maps
        return _Embedded(batch, tuple(tiles), kept, patches, statistics)

    size = embedder.max_batch_size(setup.config.batch_size)
    loaded = Decoders(setup.loading, looks=True).load_all(images.items())
    loaded = inspectable(loaded, embedder.grid, setup.region, learned=True)
    batches = learned_batches(by_shape(loaded, size), size, turns)
    shared = cluster_images is not None
    expected = cluster_images or len(images)
    writer = _Writer(fitter, scratch, expected, 1 + len(turns), shared=shared)
    with torch.inference_mode():
        for embedded in in_parallel(embed, batches, embedder.device):
            writer.add(embedded)
            progress(len(writer.facts) + len(writer.refused), len(images))
    release_memory()
    if not (shared or writer.facts):
        raise none_usable([item.reason for item in writer.refused])
    try:
        yield CachedFeatures(
            files=(writer.file,),
            points=() if writer.points is None else (writer.points,),
            refused=tuple(writer.refused),
            facts=writer.facts,
            channels=writer.channels,
            align=None if fitter.compact else embedder.align,
            region=setup.region,
            images=writer.facts,
        )
    finally:
        for file in filter(None, (writer.file, writer.points)):
            file.close()


@dataclass(eq=False)
class ImageFacts:
    """Facts about a training image, besides its features.

    Attributes:
        sha256: SHA-256 of the image file.
        view: the geometry from the photograph to the network's input.
        look: hash, thumbnail and brightest value of the pixels; copies are found by the first two.
        patches: number of patches, turned copies included.
        statistics: statistics of the whole image; None before its first tile.
    """

    sha256: str
    view: View
    look: Look
    patches: int = 0
    statistics: ImageStatistics | None = None

    def add(self, patches: int, tile: ImageStatistics | None) -> None:
        """Add the number of patches and the statistics of one more tile or turned copy.

        A turned copy has the statistics of its image, and adds None.
        """
        self.patches += patches
        if tile is not None:
            total = tile if self.statistics is None else self.statistics + tile
            # float32 is half the memory, which counts with thousands of images.
            self.statistics = replace(total, embedding=np.asarray(total.embedding, np.float32))


@dataclass(eq=False)
class HeldOutScores:
    """Scores of a training image by a model that hasn't learned from it.

    Attributes:
        image: the image number.
        score: the image score; with tiles, the highest of their scores.
        peak: the highest value of the anomaly map at the network's size, of all tiles.
        patches: patch scores (h, w) float32, of all tiles as a mosaic; NaN doesn't count. None for
            images of which no heatmap is drawn.
    """

    image: int
    score: float
    peak: float
    patches: NDArray[np.float32] | None

    def add(
        self, score: float, peak: float, patches: NDArray[np.float32], top: int, left: int
    ) -> None:
        """Add a tile, whose patches (h, w) begin at a row and a column of the mosaic."""
        self.score, self.peak = max(self.score, score), max(self.peak, peak)
        assert self.patches is not None
        height, width = patches.shape
        self.patches[top : top + height, left : left + width] = patches


@dataclass(frozen=True, eq=False)
class CachedFeatures(PatchSet):
    """The patch embeddings of training images, batch by batch, the same bytes each time.

    Large images come tile by tile; patches outside the region are marked as not inside.

    Attributes:
        files: feature maps, or embeddings where `align` is None.
        points: projected patches, image by image, a file for each of `files`; empty where the
            method doesn't select by projected patches.
        refused: the images that can't be used, with reasons.
        facts: facts about each usable image, by image number.
        channels: D of the embeddings; 0 without images.
        align: feature maps -> embeddings (B, h, w, D); None where `files` hold embeddings.
        region: the part of each image that counts; None for all of it.
        images: the image numbers that are read; the other attributes are those of all images.
        shard: images in a cluster's shard; 0 on one machine.
    """

    files: tuple[TensorFile, ...]
    points: tuple[TensorFile, ...]
    refused: tuple[UnusableImage, ...]
    facts: dict[int, ImageFacts]
    channels: int
    align: Align | None
    region: Region | None
    images: Container[int]
    shard: int = 0

    @property
    def hashes(self) -> dict[int, str]:
        """SHA-256 of each usable image file, by image number."""
        return {i: facts.sha256 for i, facts in self.facts.items()}

    @property
    def views(self) -> dict[int, View]:
        """The geometry from each photograph to the network's input, by image number."""
        return {i: facts.view for i, facts in self.facts.items()}

    @property
    def count(self) -> int:
        """Number of patches, also of turned copies and outside the region."""
        return sum(facts.patches for i, facts in self.facts.items() if i in self.images)

    def picture_hashes(self) -> dict[int, str]:
        """SHA-256 of each usable image's pixels, by image number; copies have equal ones."""
        return {i: facts.look.picture for i, facts in self.facts.items()}

    def only(self, images: Container[int]) -> CachedFeatures:
        """The patches of some of the images."""
        return replace(self, images=images)

    def statistics_of(self, images: Sequence[int]) -> list[ImageStatistics]:
        """Statistics of whole images, in the order given."""
        return [whole for i in images if (whole := self.facts[i].statistics) is not None]

    def __iter__(self) -> Iterator[PatchBatch]:
        views = self.views
        with torch.inference_mode():
            for file in self.files:
                for tiles, kept in file.read(self.images):
                    # A stored batch is read whole, but may hold images that aren't wanted.
                    rows = [row for row, tile in enumerate(tiles) if tile.image in self.images]
                    selected = kept if len(rows) == len(tiles) else [t[rows] for t in kept]
                    embeddings = selected[0] if self.align is None else self.align(selected)
                    yield _patch_batch(embeddings, [tiles[row] for row in rows], views, self.region)

    def projected(self, matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Image number and projected patches (n, d) float32, image by image."""
        with torch.inference_mode():
            if not self.points:
                yield from super().projected(matrix)
            for file in self.points:
                for (tile,), (points,) in file.read(self.images, ascending=True):
                    yield tile.image, points

    def each(self, function: Callable[[PatchSet], Result]) -> Iterator[Result]:
        """Results of a function applied to the patches, up to 512 images at a time."""
        yield from map(function, self._parts())

    def scores(
        self, model: Model, progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, HeldOutScores]:
        """Scores of the images by a model that hasn't learned from them, by image number.

        Turned copies aren't scored. Only the `SUSPECTS` highest scores keep their patch scores.

        Args:
            model: the model that scores.
            progress: called with the number of images scored so far.
        """
        scores: dict[int, HeldOutScores] = {}
        views, one_grid = self.views, METHODS[model.config.model.kind].one_grid
        for batch in _joined(self) if one_grid else self:
            corners = batch.corners or ((0, 0),) * len(batch.images)
            if turn_of(corners[0][0])[0]:  # a copy adds to what is learned, not to the thresholds
                continue
            height, width = batch.embeddings.shape[1:3]
            pieces: list[Piece] = [
                (views[image], (row // height, column // width), 0)
                for image, (row, column) in zip(batch.images, corners, strict=True)
            ]
            tiles = batch.images, pieces, *_score_tiles(model, batch, pieces)
            for image, (view, (row, column), _), patches, score, peak in zip(*tiles, strict=True):
                if image not in scores:
                    rows, across = map(len, view.axes)  # tiles of the whole image
                    mosaic = np.full((rows * height, across * width), np.nan, np.float32)
                    scores[image] = HeldOutScores(image, score, peak, mosaic)
                scores[image].add(score, peak, patches, row * height, column * width)
            progress(len(scores))
        for held in worst(scores)[SUSPECTS:]:
            held.patches = None
        return scores

    def _parts(self) -> Iterator[CachedFeatures]:
        """The features of 512 images at a time, in ascending order."""
        used = [i for i in sorted(self.facts) if i in self.images]
        for first in range(0, len(used), _PART):
            yield self.only(frozenset(used[first : first + _PART]))


def _score_tiles(
    model: Model, batch: PatchBatch, pieces: Sequence[Piece]
) -> tuple[NDArray[np.float32], list[float], list[float]]:
    """Patch scores (B, h, w), image scores and highest map values of whole images or tiles."""
    settings = model.config.model
    patches, scores = model.score_patches(batch.embeddings, pieces, batch.inside)
    shown = without_halo(patches.scores, settings.halo_damping)
    maps = network_map(shown, pieces[0][0].size, settings.smoothing, batch.inside)
    peaks = image_scores(patches.scores, maps, "map_max")
    return as_numpy(patches.scores), scores.tolist(), peaks.tolist()


def _joined(batches: Iterable[PatchBatch]) -> Iterator[PatchBatch]:
    """Larger batches: up to four batches of whole images on one grid are joined.

    For methods with one grid, which have neither tiles nor turned copies.
    """
    rest = iter(batches)
    while group := list(islice(rest, _TOGETHER)):
        # With a region or poses every batch has a mask, else none has.
        masks = [batch.inside for batch in group if batch.inside is not None]
        yield PatchBatch(
            torch.cat([batch.embeddings for batch in group]),
            tuple(image for batch in group for image in batch.images),
            inside=torch.cat(masks) if masks else None,
        )


def worst(scores: Mapping[int, HeldOutScores]) -> list[HeldOutScores]:
    """Scores of images, the highest first."""
    return sorted(scores.values(), key=lambda held: -held.score)


class Tile(NamedTuple):
    """A training image, or its tile in a row and column, turned in a way from 0 (none) to 7."""

    image: int
    row: int
    column: int
    turn: int = 0


class TensorFile:
    """Batches of tensors in a file without a name, gone with this object or the process.

    Args:
        folder: the folder whose disk holds the file.
        shared: give the file a name and leave it in the folder: other processes that see the folder
            read it through a pickled copy of this object.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self._folder = folder
        make: Any = partial(NamedTemporaryFile, delete=False) if shared else TemporaryFile
        self._file: IO[bytes] = make(dir=folder)
        self._path = Path(self._file.name) if shared else None
        self._written: list[tuple[Sequence[Tile], list[_StoredTensor]]] = []

    def write(self, tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> None:
        """Append one batch.

        Args:
            tiles: the batch's B images or tiles.
            tensors: tensors (B, …), in the order of the tiles.

        Raises:
            OutputError: no room.
        """
        places = []
        try:
            for t in tensors:
                dense = t.cpu().clone()  # without gaps, its axes in memory in the same order
                offset = self._file.tell()
                places.append(_StoredTensor(offset, t.shape, dense.stride(), t.dtype, t.device))
                # The bytes as they lie in memory; `flatten` would bring channels_last into order.
                flat = dense.as_strided((dense.numel(),), (1,))
                self._file.write(flat.view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            problem = "no room for temporary feature maps in {}"
            raise unwritable(self._folder, error, problem) from None
        self._written.append((tiles, places))

    def read(
        self, images: Container[int], *, ascending: bool = False
    ) -> Iterator[tuple[Sequence[Tile], list[Tensor]]]:
        """The stored batches that contain any of some images, each batch whole.

        Args:
            images: image numbers.
            ascending: order batches by the number of their first image, not as they were written.
        """
        written = self._written
        if ascending:
            written = sorted(written, key=lambda batch: batch[0][0].image)
        # A shared file is read through its name: a pickled copy has no open file.
        with nullcontext(self._file) if self._path is None else self._path.open("rb") as file:
            for tiles, places in written:
                if any(tile.image in images for tile in tiles):
                    yield tiles, [place.read(file) for place in places]

    def close(self) -> None:
        """Close the file; one that isn't shared is deleted."""
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": BytesIO()}  # a copy only reads


class _StoredTensor(NamedTuple):
    """A tensor's place in a file, in bytes, and its layout in memory, by which kernels round."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def read(self, file: IO[bytes]) -> Tensor:
        """The tensor, as it was written."""
        file.seek(self.offset)
        values = np.fromfile(file, np.uint8, math.prod(self.shape) * self.dtype.itemsize)
        tensor = torch.from_numpy(values).view(self.dtype)
        return tensor.as_strided(self.shape, self.strides).to(self.device)


class _Embedded(NamedTuple):
    """A batch of images with kept features, embeddings and image statistics."""

    images: list[NetworkInput]
    tiles: tuple[Tile, ...]
    kept: list[Tensor]
    patches: PatchBatch
    statistics: list[ImageStatistics]


class _Writer:
    """Writer of features, batch by batch, which collects facts about their images.

    Args:
        fitter: the method's fitter, which may ask for projected patches.
        scratch: the folder of the temporary files.
        images: number of images whose features the folder will hold in the end.
        copies: number of poses in which each image is learned.
        shared: other processes read the files.
    """

    def __init__(
        self, fitter: Fitter[Any], scratch: Path, images: int, copies: int, *, shared: bool
    ) -> None:
        self._scratch, self._copies = scratch, copies
        self._expected, self._shared = images, shared
        self.file = TensorFile(scratch, shared=shared)
        self._fitter = fitter
        self.points: TensorFile | None = None
        self._matrix: Tensor | None = None
        self.channels = 0
        self.refused: list[UnusableImage] = []
        self.facts: dict[int, ImageFacts] = {}

    def add(self, batch: _Embedded | UnusableImage) -> None:
        """Store a batch, or record an unusable image."""
        if isinstance(batch, UnusableImage):
            self.refused.append(batch)
            return
        images, tiles, kept, patches, statistics = batch
        *_, height, width, self.channels = patches.embeddings.shape
        size = sum(t.nbytes for t in kept) + self._write_projected(patches)
        if not self.facts:  # the first batch tells how large all will be
            self._check_room(images, size)
        for item, tile_statistics in zip(images, statistics, strict=True):
            if item.index not in self.facts:
                assert item.look is not None  # the decoders were asked for it
                self.facts[item.index] = ImageFacts(item.sha256, item.layout, item.look)
            added = None if item.turn else tile_statistics
            self.facts[item.index].add(height * width, added)
        self.file.write(tiles, kept)
        if len(self.facts) % _TRIMMED < len(images):  # this batch passed a multiple
            release_memory()

    def _write_projected(self, batch: PatchBatch) -> int:
        """Write the projected patches that count, image by image; returns their size in bytes."""
        if not self.facts:  # the first batch tells the number of channels
            self._matrix = self._fitter.selection_matrix(self.channels)
            if self._matrix is not None:
                self.points = TensorFile(self._scratch, shared=self._shared)
        if self.points is None or self._matrix is None:
            return 0
        matrix, written = self._matrix.to(batch.embeddings.device), 0
        for image, patches in zip(batch.images, batch.counted(), strict=True):
            points = patches @ matrix
            if len(points):  # of a tile outside the region none count
                self.points.write((Tile(image, 0, 0),), [points])
            written += points.nbytes
        return written

    def _check_room(self, first: Sequence[NetworkInput], size: float) -> None:
        """Refuse features without enough room on the disk, by the first batch and its bytes.

        Raises:
            OutputError: all images, with as many bytes as one of the first, need more than is free.
        """
        if not first[0].layout.whole:  # large images may differ in their number of tiles
            return
        needed = size * self._copies / len(first) * self._expected
        free: float = shutil.disk_usage(self._scratch).free
        if self._shared:  # files in the folder are features that the sum counts already
            free += sum(file.stat().st_size for file in self._scratch.iterdir())
        if needed > free:
            raise WriteError(
                f"the features of {self._expected} images take about {needed / 1e9:.2g} GB in "
                f"{self._scratch} until training ends, where {free / 1e9:.2g} GB are free; free "
                "some disk space or write to another disk with --output"
            )


def _patch_batch(
    embeddings: Tensor, tiles: Sequence[Tile], views: Mapping[int, View], region: Region | None
) -> PatchBatch:
    """Patches of images or tiles, with embeddings (B, h, w, D) and views by image number."""
    height, width = embeddings.shape[1:3]
    pieces = [(views[tile.image], (tile.row, tile.column), tile.turn) for tile in tiles]
    return PatchBatch(
        embeddings,
        tuple(tile.image for tile in tiles),
        tuple(turned_corner(t.row * height, t.column * width, t.turn) for t in tiles),
        patches_inside(pieces, embeddings, region),
    )
