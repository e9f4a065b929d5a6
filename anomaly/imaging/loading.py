"""Images -> network inputs: loading, batches, tiles and turned copies. Imports no torch.

A picture is turned in one of eight ways: 0 to 3 are its quarter turns anticlockwise, 4 to 7 the
quarter turns of the picture mirrored left to right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError, ImageError
from anomaly.imaging.alignment import Reference
from anomaly.imaging.geometry import Region, Sizing, View, patch_mask, render
from anomaly.imaging.read import (
    Decoding,
    Image,
    described,
    is_out_of_memory,
    out_of_memory,
    read_header,
    read_image,
)

# Pixels of a large image's network input: none, as the pixels of its tiles are rendered later.
NO_PIXELS: NDArray[np.float32] = np.empty((0, 0, 3), np.float32)

# An incomplete batch waits until so many batches' worth of later images have been loaded.
_SPAN = 4

# A batch goes when it holds so many bytes of decoded images: arrays stay with their inputs.
_HELD_BYTES = 256 * 1024**2

# Rows of patches from one way of turning to the next: more than any image has.
_TURN_ROWS = 1 << 16

_LOOK_SIDE = 16  # areas along a side of a thumbnail
_DENSE = 256  # pixels along the shorter side from which a thumbnail is made: more change nothing

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing from files to network inputs; it travels with the model.

    Attributes:
        sizing: rule that gives each image its view.
        decoding: limits and depth of decoding.
        region: region of each image that counts; None for the whole image. An image that it
            doesn't fit is refused.
        reference: finds the part's pose in each image; None without alignment.
    """

    sizing: Sizing
    decoding: Decoding
    region: Region | None = None
    reference: Reference | None = None


@dataclass(frozen=True, eq=False)
class Look:
    """Facts by which a picture and its near copies are recognised.

    Attributes:
        picture: sha256 of the pixels in hex, equal for equal pictures in any lossless files.
        thumbnail: (256,) grey levels of 16×16 areas, white being 255, less their mean. Compression
            and noise hardly change them.
        brightest: highest value of a 16-bit image as a share of full scale; None for others.
    """

    picture: str
    thumbnail: NDArray[np.float16]
    brightest: float | None = None


@dataclass(frozen=True, eq=False)
class NetworkInput:
    """One image, ready for the network.

    Attributes:
        index: place in the list of images.
        sha256: hex digest of the file's bytes; of the pixels where there is no file.
        view: the view by which `pixels` was rendered; of all tiles, if they aren't rendered yet.
        pixels: (H, W, 3) float32 RGB in [0, 1]; empty if `view` has tiles.
        path: the file; None for pixels that came from memory.
        image: the decoded image; None if it stayed in another process.
        keep_image: hand the decoded image over to the prediction; False if only tiles need it.
        tile: row and column of this tile; (0, 0) for a whole image.
        mosaic: view of all tiles; None for an image that is no tile.
        turn: way in which the rendered pixels were turned, 0 to 7, see `turned`.
        look: look of the image; None unless it was asked for.
    """

    index: int
    sha256: str
    view: View
    pixels: NDArray[np.float32]
    path: Path | None = None
    image: Image | None = None
    keep_image: bool = True
    tile: tuple[int, int] = (0, 0)
    mosaic: View | None = None
    turn: int = 0
    look: Look | None = None

    @property
    def name(self) -> str:
        """Name of the image in messages: its path, or its index."""
        return described(self.index, self.path)

    @property
    def decoded(self) -> Image:
        """The decoded image.

        Raises:
            ValueError: another process has it.
        """
        if self.image is None:
            raise ValueError(f"image {self.index} was decoded in another process")
        return self.image

    @property
    def layout(self) -> View:
        """View of the whole image, also of a tile."""
        return self.mosaic or self.view

    def in_part(self) -> NetworkInput:
        """The same input without a pose: its decoded image is moved into the part's coordinates."""
        pose = self.view.pose
        if pose is None:
            return self
        pixels = pose.to_part(self.decoded.pixels, *map(slice, (0, 0), pose.size))
        image = replace(self.decoded, pixels=pixels)
        return replace(self, view=replace(self.view, pose=None), image=image)

    def tiles(self, batch_size: int) -> Iterator[list[NetworkInput]]:
        """Tiles of a large image, rendered a batch at a time; the image itself if it has none."""
        if self.view.whole:
            yield [self]
            return
        rows, columns = self.view.axes
        places = list(product(range(len(rows)), range(len(columns))))
        for start in range(0, len(places), batch_size):
            yield [self.tile_at(*place) for place in places[start : start + batch_size]]

    def tile_at(self, row: int, column: int) -> NetworkInput:
        """One tile of a large image, rendered."""
        view = self.view.tile_at(row, column)
        pixels = rendered(self.name, self.decoded, view)
        return replace(self, view=view, pixels=pixels, tile=(row, column), mosaic=self.view)


@dataclass(frozen=True)
class UnusableImage:
    """An image that can't be used.

    Attributes:
        index: place in the list of images.
        status: `unreadable`, `unsupported`, or `failed`: it crashed decoding processes, met a bug
            of this program, or got a score that isn't a finite number.
        reason: a sentence for a person that names the file and its fault.
    """

    index: int
    status: str
    reason: str


def size_of(path: Path) -> tuple[int, int] | None:
    """(H0, W0) of an image by its file's header; None if the file can't be used."""
    try:
        return read_header(path).size
    except ImageError:  # loading the image gives the reason
        return None


def load(
    index: int,
    source: Path | bytes | Image,
    loading: Preprocessing,
    *,
    looks: bool = False,
) -> NetworkInput | UnusableImage:
    """Decode and render one image; any error on the way makes it an unusable image.

    Args:
        index: place in the list of images.
        source: the file, its bytes, or pixels.
        loading: preprocessing to the network's input.
        looks: add the image's `Look`.
    """
    path = source if isinstance(source, Path) else None
    name = described(index, source)
    try:
        image = source if isinstance(source, Image) else read_image(source, loading.decoding)
        view = loading.sizing.view(image.size)
        if loading.region is not None:
            loading.region.inside(image.size, slice(0, 1))  # raises where it doesn't fit
        if loading.reference is not None:
            view = replace(view, pose=loading.reference.pose(image))
        pixels = rendered(name, image, view) if view.whole else NO_PIXELS
        look = look_of(image) if looks else None
        return NetworkInput(index, image.sha256, view, pixels, path, image, look=look)
    except Exception as error:  # one image mustn't end a shift
        return to_unusable(index, name, error)


def to_unusable(index: int, name: Path | str, error: Exception) -> UnusableImage:
    """The unusable image of an error; its status is `failed` for an error nobody has foreseen.

    `name` is the image's name in messages; an ImageError's message has it already.
    """
    if isinstance(error, ImageError):
        return UnusableImage(index, error.status, str(error))
    if isinstance(error, DataError):
        return UnusableImage(index, "unsupported", f"{name}: {error}")
    if is_out_of_memory(error):
        return UnusableImage(index, "unsupported", f"{name}: {out_of_memory()}")
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return UnusableImage(index, "failed", f"{name}: {reason}")


def rendered(name: Path | str, image: Image, view: View) -> NDArray[np.float32]:
    """A view of an image or a tile, rendered: (H, W, 3) float32 RGB in [0, 1].

    Raises:
        ImageError: `unsupported`: the image is too large for the memory, or for OpenCV.
    """
    try:
        return render(image.pixels, image.full_scale, view)
    except (MemoryError, cv2.error):
        height, width = image.size
        raise ImageError(
            f"{name}: its {width}×{height} pixels are too many to be brought to the network's size "
            "at once; train with image.tile, which takes large images piece by piece",
            "unsupported",
        ) from None


def inspectable(
    items: Iterable[NetworkInput | UnusableImage],
    grid: Callable[[tuple[int, int]], tuple[int, int]],
    region: Region | None,
    *,
    learned: bool = False,
) -> Iterator[NetworkInput | UnusableImage]:
    """Loaded images; an image without a patch inside the region becomes an unusable one.

    Args:
        items: the images.
        grid: (H, W) of a network input -> (h, w) of its patches.
        region: region of each image that counts; None for the whole image.
        learned: refuse images with a doubtful pose as well: nothing is learned from them.
    """
    grid = cache(grid)  # it runs the network
    for item in items:
        if isinstance(item, NetworkInput):
            pose = item.view.pose
            try:
                if learned and pose is not None and pose.reason:
                    raise DataError(pose.reason)
                if region is not None:
                    patch_mask(region, item.layout, grid(item.view.size))  # raises if none counts
            except DataError as error:
                yield to_unusable(item.index, item.name, error)
                continue
        yield item


def by_shape(
    items: Iterable[NetworkInput | UnusableImage], batch_size: int
) -> Iterator[list[NetworkInput] | UnusableImage]:
    """Batches of images of one network size; unusable images pass through.

    A batch goes when it is full, when it holds `_HELD_BYTES` of decoded images, or when its first
    image lies `_SPAN` batches' worth of places behind the last one read: that bounds what waits.
    Images share a batch whatever images of other sizes lie between them. So a resumed list, which
    lacks whole batches, is split into the remaining batches of the first run. An image in tiles
    goes alone and at once.

    Args:
        items: loaded and unusable images in order of their indices.
        batch_size: images in a full batch.
    """
    waiting: dict[tuple[int, int], list[NetworkInput]] = {}
    for item in items:
        if isinstance(item, UnusableImage):
            yield item
            continue
        for shape, group in list(waiting.items()):
            if item.index - group[0].index >= _SPAN * batch_size:
                yield waiting.pop(shape)
        if not item.view.whole:
            yield [item]
            continue
        group = waiting.setdefault(item.view.size, [])
        group.append(item)
        images = [queued.image for queued in group if queued.image is not None]
        held = sum(image.pixels.nbytes for image in images)
        if len(group) == batch_size or held > _HELD_BYTES:
            yield waiting.pop(item.view.size)
    yield from waiting.values()


def turned(picture: NDArray[_Value], turn: int) -> NDArray[_Value]:
    """A picture (H, W, …) turned in a way from 0 (none) to 7; a view of the same memory."""
    return np.rot90(picture[:, ::-1] if turn >= 4 else picture, turn % 4)


def learned_batches(
    batches: Iterable[list[NetworkInput] | UnusableImage], batch_size: int, turns: Sequence[int]
) -> Iterator[list[NetworkInput] | UnusableImage]:
    """Batches to learn from: each batch, large images tile by tile, followed by its turned copies.

    Args:
        batches: batches of images of one size, a large image alone; unusable images pass through.
        batch_size: tiles in a batch.
        turns: ways of turning, 1 to 7, one for each copy.
    """
    for batch in batches:
        if isinstance(batch, UnusableImage):
            yield batch
            continue
        # An image with tiles comes alone.
        for pieces in batch[0].tiles(batch_size) if len(batch) == 1 else [batch]:
            yield pieces
            for turn in turns:
                yield [
                    replace(item, pixels=np.ascontiguousarray(turned(item.pixels, turn)), turn=turn)
                    for item in pieces
                ]


def turned_corner(row: int, column: int, turn: int) -> tuple[int, int]:
    """Row and column of a grid's first patch, with the turn encoded in the row.

    So row and column tell a patch from all others of its image and of the image's turned copies:
    rows of a copy begin at 65,536 times its turn. `turn_of` decodes it.

    Args:
        row: row of the grid's first patch in the turned image; other than 0 only in tiles.
        column: column of that patch.
        turn: way of turning, 0 (none) to 7.
    """
    return turn * _TURN_ROWS + row, column


def turn_of(row: int) -> tuple[int, int]:
    """Turn of a patch's image, 0 to 7, and row in that image, of a row by `turned_corner`."""
    return divmod(row, _TURN_ROWS)


def upright(
    turn: int, patch: tuple[int, int], grid: tuple[int, int], tiles: tuple[int, int]
) -> tuple[int, int]:
    """Row and column, in the upright image, of a patch in a turned copy, whose tiles are turned.

    Args:
        turn: way in which the copy was turned, 0 to 7.
        patch: row and column in the turned image, or in the mosaic of turned tiles.
        grid: (h, w) of the patches of the upright image; with tiles, of their mosaic.
        tiles: rows and columns of tiles; (1, 1) for an image without tiles.
    """
    height, width = grid[0] // tiles[0], grid[1] // tiles[1]
    # The number of each patch of an upright tile, at its place in the turned tile.
    places: NDArray[np.int64] = turned(np.arange(height * width).reshape(height, width), turn)
    (down, y), (across, x) = divmod(patch[0], places.shape[0]), divmod(patch[1], places.shape[1])
    y, x = divmod(int(places[y, x]), width)
    return down * height + y, across * width + x


def look_of(image: Image) -> Look:
    """Hash, thumbnail and brightest value of an image."""
    step = max(1, min(image.size) // _DENSE)
    sparse = np.asarray(image.pixels[::step, ::step], np.float32)
    grey = cv2.resize(sparse, (_LOOK_SIDE, _LOOK_SIDE), interpolation=cv2.INTER_AREA).mean(axis=2)
    grey = (grey - grey.mean()) * np.float32(255 / image.full_scale)
    deep = image.mode.endswith("16")
    brightest = float(image.pixels.max()) / image.full_scale if deep else None
    return Look(picture_hash(image), grey.ravel().astype(np.float16), brightest)


def picture_hash(image: Image) -> str:
    """sha256 of an image's pixels in hex; 16-bit pixels that hold only 8 bits count as 8-bit."""
    pixels, full_scale = image.pixels, image.full_scale
    if pixels.dtype == np.uint16 and full_scale == 65535:
        narrow = (pixels >> 8).astype(np.uint8)
        if (narrow * np.uint16(257) == pixels).all():
            pixels, full_scale = narrow, 255.0
    digest = hashlib.sha256(f"{pixels.shape}{pixels.dtype}{full_scale}".encode())
    digest.update(pixels.data)
    return digest.hexdigest()
