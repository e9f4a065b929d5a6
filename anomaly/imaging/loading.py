"""Images -> network inputs: loading, batches, tiles and turned copies. Imports no torch.

There are eight ways to lay a picture: quarter turns anticlockwise, 0 to 3, and 4 to 7, the same of
the picture mirrored left to right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import DataError, ImageError
from anomaly.imaging.alignment import Reference
from anomaly.imaging.geometry import Region, Sizing, View, counted, render
from anomaly.imaging.read import (
    Decoding,
    Image,
    described,
    is_out_of_memory,
    out_of_memory,
    read_header,
    read_image,
)

# Pixels of a large image's network input: none, its tiles have them.
NO_PIXELS: NDArray[np.float32] = np.empty((0, 0, 3), np.float32)

# An incomplete batch waits for so many batches' worth of images.
_SPAN = 4

# A batch goes when it holds so many bytes of decoded images: arrays stay with their inputs.
_HELD_BYTES = 256 * 1024**2

# Rows of patches from one way of turning to the next: more than any image has.
_TURN_ROWS = 1 << 16

_LOOK_SIDE = 16  # areas along a side of a thumbnail
_DENSE = 256  # pixels of the shorter side that are looked at: more change nothing

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Preprocessing:
    """The way from files to network inputs; travels with the model.

    Attributes:
        sizing: the rule that gives each image its view.
        decoding: limits and depth of decoding.
        region: the original pixels that count, None for all; an image that it doesn't fit is
            refused.
        reference: finds the part's pose in each image; None where images are seen as they are.
    """

    sizing: Sizing
    decoding: Decoding
    region: Region | None = None
    reference: Reference | None = None


@dataclass(frozen=True, eq=False)
class Look:
    """Looks of a picture: enough to recognise it, and its near copies.

    Attributes:
        picture: sha256 of its pixels in hex, equal for equal pictures in any lossless files.
        thumbnail: (256,) grey levels, of 255, of 16×16 areas, less their mean. Compression and
            noise hardly change them.
        brightest: the highest value of a file of 16 bits, of full scale; None for others.
    """

    picture: str
    thumbnail: NDArray[np.float16]
    brightest: float | None = None


@dataclass(frozen=True, eq=False)
class NetworkInput:
    """One image, ready for the network.

    Attributes:
        index: its place in the list of files.
        sha256: hex digest of the file's bytes.
        view: the view by which `pixels` was made; a large image's tiles are still to be made.
        pixels: (H, W, 3) float32 RGB in [0, 1]; empty where `view` has tiles.
        render: makes one more view of it.
        path: the file; None for pixels that came from memory.
        image: the decoded file; None where another process has it.
        tile: row and column of this tile; (0, 0) for a whole image.
        whole: the view that this tile belongs to; None for a whole image.
        turn: way in which the rendered pixels were turned, 0 to 7, see `turned`.
        look: looks of the image; None where nobody asked for them.
    """

    index: int
    sha256: str
    view: View
    pixels: NDArray[np.float32]
    render: Callable[[View], NDArray[np.float32]]
    path: Path | None = None
    image: Image | None = None
    tile: tuple[int, int] = (0, 0)
    whole: View | None = None
    turn: int = 0
    look: Look | None = None

    @property
    def name(self) -> str:
        """Name of the image in messages: its path, or its number."""
        return described(self.index, self.path)

    @property
    def decoded(self) -> Image:
        """The decoded file, of an image that was loaded in this process."""
        if self.image is None:
            raise ValueError(f"image {self.index} was decoded in another process")
        return self.image

    @property
    def layout(self) -> View:
        """View of the image, not just of this tile."""
        return self.whole or self.view

    def in_part(self) -> NetworkInput:
        """The input and its decoded file in the part's coordinates, and so without a pose."""
        pose = self.view.pose
        if pose is None:
            return self
        pixels = pose.part(self.decoded.pixels, *map(slice, (0, 0), pose.size))
        image = replace(self.decoded, pixels=pixels)
        view = replace(self.view, pose=None)
        return replace(self, view=view, image=image, render=partial(paint, self.name, image))

    def tiles(self, batch_size: int) -> Iterator[list[NetworkInput]]:
        """The tiles of a large image, rendered a batch at a time; itself where it has none."""
        if self.view.whole:
            yield [self]
            return
        whole = self.view
        tiles = list(whole.tiles())
        for start in range(0, len(tiles), batch_size):
            yield [
                replace(self, view=view, pixels=self.render(view), tile=(row, column), whole=whole)
                for row, column, view in tiles[start : start + batch_size]
            ]


@dataclass(frozen=True)
class UnusableImage:
    """One file that couldn't be used.

    Attributes:
        index: its place in the list of files.
        status: `unreadable`, `unsupported`, or `failed` when it took decoding processes down,
            met a mistake of this program, or got a score that isn't a finite number.
        reason: a sentence for a person that names the file and its fault.
    """

    index: int
    status: str
    reason: str


def size_of(path: Path) -> tuple[int, int] | None:
    """(H0, W0) of an image as its file says; None where it can't be used."""
    try:
        return read_header(path).size
    except ImageError:  # loading will say so
        return None


def load(
    index: int,
    source: Path | bytes | Image,
    loading: Preprocessing,
    *,
    looks: bool = False,
) -> NetworkInput | UnusableImage:
    """Decode and render one image. Whatever happens on the way, it is this image's alone.

    Args:
        index: its place in the list of images.
        source: the file, its bytes, or pixels that needn't be decoded.
        loading: the way to the network's input.
        looks: True to add the image's `Look`.
    """
    name, path = described(index, source), source if isinstance(source, Path) else None
    try:
        image = source
        if not isinstance(image, Image):
            image = read_image(image, loading.decoding)
        view = loading.sizing.view(image.size)
        if loading.region is not None:
            loading.region.inside(image.size, slice(0, 1))  # raises where it doesn't fit
        if loading.reference is not None:
            view = replace(view, pose=loading.reference.pose(image))
        render = partial(paint, name, image)
        pixels = render(view) if view.whole else NO_PIXELS
        look = look_of(image) if looks else None
        return NetworkInput(index, image.sha256, view, pixels, render, path, image, look=look)
    except Exception as error:  # a shift mustn't end because of one image
        return to_unusable(index, name, error)


def to_unusable(index: int, name: Path | str, error: Exception) -> UnusableImage:
    """The refusal of an image that has led to an error; `failed` where nobody has foreseen it."""
    if isinstance(error, ImageError):
        return UnusableImage(index, error.status, str(error))
    if isinstance(error, DataError):
        return UnusableImage(index, "unsupported", f"{name}: {error}")
    if is_out_of_memory(error):
        return UnusableImage(index, "unsupported", f"{name}: {out_of_memory()}")
    what = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return UnusableImage(index, "failed", f"{name}: {what}")


def paint(name: Path | str, image: Image, view: View) -> NDArray[np.float32]:
    """Render a view of an image: (H, W, 3) float32 RGB in [0, 1].

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
    """Refuse images none of whose patches lie inside a region, each before it joins a batch.

    Args:
        items: loaded images; those refused already pass through.
        grid: gives (h, w) of the patches for (H, W) of a network input.
        region: the original pixels that count; None lets all images pass.
        learned: True refuses images with a doubtful pose as well: nothing is learned from them.
    """
    grids: dict[tuple[int, int], tuple[int, int]] = {}
    for item in items:
        if isinstance(item, NetworkInput):
            pose, size = item.view.pose, item.view.size
            try:
                if learned and pose is not None and pose.reason:
                    raise DataError(pose.reason)
                if region is not None:
                    grids[size] = grids.get(size) or grid(size)
                    counted(region, item.layout, grids[size])  # raises where none counts
            except DataError as error:
                yield to_unusable(item.index, item.name, error)
                continue
        yield item


def by_shape(
    items: Iterable[NetworkInput | UnusableImage], batch_size: int
) -> Iterator[list[NetworkInput] | UnusableImage]:
    """Gather images of equal network size into batches; refusals pass through.

    A batch goes when it is full, when it holds `_HELD_BYTES` of decoded images, or when its first
    image lies `_SPAN` batches' worth of places behind the last one read: that bounds what waits.
    Which images share a batch depends on the images of their size alone, so that a list from which
    whole batches are taken out is split into the others. An image in tiles goes alone and at once.

    Args:
        items: in order of their indices.
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
        held = sum(each.image.pixels.nbytes for each in group if each.image is not None)
        if len(group) == batch_size or held > _HELD_BYTES:
            yield waiting.pop(item.view.size)
    yield from waiting.values()


def turned(picture: NDArray[_Value], turn: int) -> NDArray[_Value]:
    """A view of a picture (H, W, …), laid in another way.

    Args:
        picture: the first two axes are turned.
        turn: 0 for the picture as it is, to 7.
    """
    return np.rot90(picture[:, ::-1] if turn >= 4 else picture, turn % 4)


def learned_batches(
    batches: Iterable[list[NetworkInput] | UnusableImage], batch_size: int, turns: Sequence[int]
) -> Iterator[list[NetworkInput] | UnusableImage]:
    """Batches, those of large images tile by tile, and behind each its turned copies.

    Args:
        batches: images of one size each, a large one alone; refusals pass through.
        batch_size: tiles in a batch.
        turns: ways to turn a copy, 1 to 7 each.
    """
    for batch in batches:
        if isinstance(batch, UnusableImage):
            yield batch
            continue
        for pieces in batch[0].tiles(batch_size) if len(batch) == 1 else [batch]:
            yield pieces
            for turn in turns:
                yield [
                    replace(item, pixels=np.ascontiguousarray(turned(item.pixels, turn)), turn=turn)
                    for item in pieces
                ]


def turned_corner(row: int, column: int, turn: int) -> tuple[int, int]:
    """Row and column by which a grid's first patch is known, others for each way of turning.

    A patch's row and column tell it from all others of its image and of the image's copies. Rows
    of an image as it is begin at 0, of copies at 65,536 times their turn.

    Args:
        row: row of the grid's first patch in the turned image; 0 but in tiles.
        column: column of that patch.
        turn: 0 for the image as it is, to 7.
    """
    return turn * _TURN_ROWS + row, column


def turn_of(row: int) -> tuple[int, int]:
    """Turn of a patch's image, 0 to 7, and the patch's row in the turned image.

    Args:
        row: row of a patch, counted from a `turned_corner`.
    """
    return divmod(row, _TURN_ROWS)


def upright(
    turn: int, patch: tuple[int, int], grid: tuple[int, int], tiles: tuple[int, int]
) -> tuple[int, int]:
    """Row and column, in the image, of a patch in a turned copy whose tiles are turned.

    Args:
        turn: way in which the image was turned, 0 to 7.
        patch: row and column in the turned image, or in the mosaic of turned tiles.
        grid: (h, w) of the patches of the image as it is, all tiles together.
        tiles: rows and columns of tiles; (1, 1) for an image without them.
    """
    height, width = grid[0] // tiles[0], grid[1] // tiles[1]
    places: NDArray[np.int64] = turned(np.arange(height * width).reshape(height, width), turn)
    (down, y), (across, x) = divmod(patch[0], places.shape[0]), divmod(patch[1], places.shape[1])
    y, x = divmod(int(places[y, x]), width)
    return down * height + y, across * width + x


def look_of(image: Image) -> Look:
    """Looks of an image."""
    step = max(1, min(image.size) // _DENSE)
    sparse = np.asarray(image.pixels[::step, ::step], np.float32)
    grey = cv2.resize(sparse, (_LOOK_SIDE, _LOOK_SIDE), interpolation=cv2.INTER_AREA).mean(axis=2)
    grey = (grey - grey.mean()) * np.float32(255 / image.full_scale)
    deep = image.mode.endswith("16")
    brightest = float(image.pixels.max()) / image.full_scale if deep else None
    return Look(picture_of(image), grey.ravel().astype(np.float16), brightest)


def picture_of(image: Image) -> str:
    """sha256 of an image's pixels in hex; of 8 bits where a file of 16 holds no more."""
    pixels, full_scale = image.pixels, image.full_scale
    if pixels.dtype == np.uint16 and full_scale == 65535:
        narrow = (pixels >> 8).astype(np.uint8)
        if (narrow * np.uint16(257) == pixels).all():
            pixels, full_scale = narrow, 255.0
    digest = hashlib.sha256(f"{pixels.shape}{pixels.dtype}{full_scale}".encode())
    digest.update(pixels.data)
    return digest.hexdigest()
