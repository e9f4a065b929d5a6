"""TIFF: which pictures, samples and colours a file has, checked before a pixel is decoded.

The samples are read by this program itself (see `tiff_samples`), because libraries differ, without
a word, over planar, big-endian, alpha and 10- to 14-bit files, and reduce 16-bit colour to 8.

Floats are taken as 0 to 1. `BitsPerSample` is the declared depth: a 12-bit file has full scale
4095. `MaxSampleValue` isn't used: TIFF 6.0 has it for statistics only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    cmyk_to_rgb,
    damaged,
    grey_to_rgb,
    look_up,
    over_black,
    unsupported,
    upright,
)
from anomaly.imaging.formats.tiff_directory import (
    Directory,
    Tag,
    byte_order,
    read_directories,
    valid_orientation,
)
from anomaly.imaging.formats.tiff_samples import COMPRESSIONS, PREDICTED, Samples, read_samples

NAME = "TIFF"
SUFFIXES: tuple[str, ...] = (".tif", ".tiff")
SIGNATURE = re.compile(rb"II[*+]\0|MM\0[*+]")

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _INK = 0, 1, 2, 3, 5
_KINDS = {
    _WHITE_IS_ZERO: ("grey", 1),
    _BLACK_IS_ZERO: ("grey", 1),
    _RGB: ("rgb", 3),
    _PALETTE: ("palette", 1),
    _INK: ("cmyk", 4),
}
_PREMULTIPLIED, _STRAIGHT = 1, 2
_LARGEST_TILE = 1 << 24  # pixels, where its picture is far smaller
_MOST_BLOCKS = 1 << 18
_REDUCED = 1  # bit of NewSubfileType: a thumbnail of another picture in the file
_UINT, _FLOAT = 1, 3
_BIT_DEPTHS = {_UINT: (1, 2, 4, 8, 10, 12, 14, 16), _FLOAT: (16, 32, 64)}


@dataclass(frozen=True, eq=False)
class _TiffLayout:
    samples: Samples
    photometric: int
    alpha: int  # 0 without alpha
    colour_map: NDArray[Any]
    orientation: int

    @property
    def full_scale(self) -> float:
        bits = self.samples.bits
        if self.samples.is_float:
            return 1.0
        return 255.0 if bits <= 8 else float(2**bits - 1)


def read_header(data: bytes) -> ImageHeader:
    """Read the header; all pixel data must lie inside the file."""
    layout = _layout(data)
    samples = layout.samples
    alpha = "a" if layout.alpha else ""
    number = "float" if samples.is_float else ""
    return ImageHeader(
        format="tiff",
        mode=f"{_KINDS[layout.photometric][0]}{alpha}{number}{samples.bits}",
        size=upright((samples.height, samples.width), layout.orientation),
        full_scale=layout.full_scale,
        orientation=layout.orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    layout = _layout(data)
    values = read_samples(data, layout.samples)
    bits = layout.samples.bits
    if layout.photometric == _PALETTE:
        return _look_up(layout, values[..., 0])
    if bits < 8:
        values *= 255 // (2**bits - 1)
    colours = values[..., : _KINDS[layout.photometric][1]]
    if layout.photometric == _WHITE_IS_ZERO:
        colours = values.dtype.type(layout.full_scale) - colours
    if layout.photometric == _INK:
        rgb = cmyk_to_rgb(colours, layout.full_scale)
    elif layout.photometric == _RGB:
        rgb = np.ascontiguousarray(colours)
    else:
        rgb = grey_to_rgb(np.ascontiguousarray(colours[..., 0]))
    if layout.alpha == _STRAIGHT:
        return over_black(rgb, values[..., -1], layout.full_scale)
    return rgb  # premultiplied colours are over black already


def _look_up(layout: _TiffLayout, indices: Pixels) -> Pixels:
    palette = layout.colour_map.astype(np.uint32).reshape(3, -1).T
    # TIFF palettes have 16 bits; a few programs write 8.
    if palette.max() > 255:
        palette >>= 8  # written as 256 or as 257 times the value
    return look_up(np.ascontiguousarray(indices), palette.astype(np.uint8))


def _layout(data: bytes) -> _TiffLayout:
    pages = [d for d in read_directories(data) if not d.first(Tag.NEW_SUBFILE_TYPE, 0) & _REDUCED]
    if len(pages) > 1:
        raise unsupported(f"it is a TIFF of {len(pages)} pages; save each page as a file")
    if not pages:
        raise unsupported("it is a TIFF of thumbnails only")
    page = pages[0]
    photometric = page.first(Tag.PHOTOMETRIC)
    if photometric not in _KINDS:
        raise unsupported(f"its TIFF colour model {photometric} isn't grey, RGB, palette or CMYK")
    samples = _samples(data, page)
    colour_map = page.values(Tag.COLOUR_MAP)
    if photometric == _PALETTE and (samples.bits > 8 or samples.is_float):
        raise unsupported("its palette has more than 256 colours")
    if photometric == _PALETTE and len(colour_map) != 3 << samples.bits:
        raise damaged("its palette is missing or malformed")
    if samples.is_float and photometric not in (_BLACK_IS_ZERO, _RGB):
        raise unsupported("it is a TIFF of floats that aren't grey or RGB")
    alpha = _alpha(page, photometric, samples.count - _KINDS[photometric][1])
    return _TiffLayout(samples, photometric, alpha, colour_map, valid_orientation(page))


def _alpha(page: Directory, photometric: int, extra: int) -> int:
    """Which kind of alpha the samples beyond the colours are."""
    if extra == 0:
        return 0
    if extra < 0:
        raise damaged("it has fewer samples a pixel than its colours need")
    kinds = page.values(Tag.EXTRA_SAMPLES)
    if photometric == _RGB and extra == 1 and not len(kinds):
        return _STRAIGHT  # as OpenCV means it, which writes RGBA without the tag
    if extra > 1 or len(kinds) != 1 or kinds[0] not in (_PREMULTIPLIED, _STRAIGHT):
        raise unsupported(f"it has {extra} samples a pixel that are neither colour nor alpha")
    return int(kinds[0])


def _samples(data: bytes, page: Directory) -> Samples:
    """Where and how the samples are stored; raises where they aren't all in the file."""
    count = page.first(Tag.SAMPLES, 1)
    width, height = page.first(Tag.WIDTH), page.first(Tag.HEIGHT)
    tiled = page.first(Tag.TILE_WIDTH, 0) > 0
    rows = page.first(Tag.TILE_HEIGHT if tiled else Tag.ROWS_PER_STRIP, height)
    compression = page.first(Tag.COMPRESSION, 1)
    samples = Samples(
        width=width,
        height=height,
        count=count,
        bits=page.same(Tag.BITS, 1),
        is_float=_sample_format(page) == _FLOAT,
        byte_order=byte_order(data),
        compression=compression,
        # Other compressions have none: what stands there is left of an earlier one, and ignored.
        predictor=page.first(Tag.PREDICTOR, 1) if compression in PREDICTED else 1,
        planar=page.first(Tag.PLANAR, 1) == 2 and count > 1,
        tiled=tiled,
        block=(rows if tiled else min(rows, height), page.first(Tag.TILE_WIDTH, width)),
        offsets=page.values(Tag.TILE_OFFSETS if tiled else Tag.STRIP_OFFSETS),
        sizes=page.values(Tag.TILE_BYTES if tiled else Tag.STRIP_BYTES),
    )
    # A tile may be larger than its picture, but one far larger only serves to fill the memory.
    sane = math.prod(samples.block) <= max(_LARGEST_TILE, 4 * width * height)
    if not (width and height and count and min(samples.block) and sane):
        raise damaged("its TIFF header has illegal values")
    if samples.compression not in COMPRESSIONS:
        raise unsupported(f"its TIFF compression {samples.compression} isn't none, LZW or deflate")
    if page.first(Tag.FILL_ORDER, 1) != 1 or samples.predictor not in (1, 2):
        raise unsupported(
            "its TIFF bit order or predictor isn't a common one; save it without a predictor"
        )
    _check_inside(data, samples)
    return samples


def _check_inside(data: bytes, samples: Samples) -> None:
    blocks, offsets, sizes = samples.block_count, samples.offsets, samples.sizes
    if blocks > _MOST_BLOCKS:
        raise unsupported(f"its pixels are in {blocks} strips or tiles; save it as PNG")
    if len(offsets) != blocks or len(sizes) != blocks:
        raise damaged(f"it lists {len(offsets)} of {blocks} blocks of pixels")
    last = offsets.astype(float) + sizes  # exact enough: no file has 2**53 bytes
    if not sizes.all() or last.max() > len(data):
        raise damaged("it is cut short: a block of its pixels lies beyond its end")


def _sample_format(page: Directory) -> int:
    kind, bits = page.same(Tag.SAMPLE_FORMAT, _UINT), page.same(Tag.BITS, 1)
    if bits not in _BIT_DEPTHS.get(kind, ()):
        name = {2: "signed", _FLOAT: "float"}.get(kind, "unsigned" if kind == _UINT else "unknown")
        raise unsupported(f"its samples are {bits}-bit {name} numbers")
    return kind
