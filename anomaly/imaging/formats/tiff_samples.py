"""The samples of a TIFF picture: strips or tiles, decompressed, unpredicted and put together."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.formats.base import (
    Pixels,
    damaged,
    decode_by_opencv,
    inflate,
    longest_stored,
    unsupported,
)

_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE = 1, 5, 8, 32773, 32946
COMPRESSIONS = frozenset((_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE))
PREDICTED = frozenset((_LZW, _DEFLATE, _OLD_DEFLATE))  # those that a predictor belongs to
_BY_LIBTIFF, _BY_ZLIB = (_LZW, _PACK_BITS), (_DEFLATE, _OLD_DEFLATE)
_DIFFERENCES = 2
_WIDEST = 1 << 20  # columns that OpenCV takes
_BAND_BYTES = 1 << 24  # unpacked at a time, which bounds the temporaries

_Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Samples:
    """How the samples of one picture are stored.

    Attributes:
        width: columns of the picture.
        height: rows of the picture.
        count: samples a pixel.
        bits: bits a sample.
        is_float: floats, not unsigned integers.
        byte_order: "<" or ">".
        compression: TIFF's number for it, one of `COMPRESSIONS`.
        predictor: 1 none, 2 differences.
        planar: each sample has blocks of its own, one plane after the other.
        tiled: blocks are tiles, all of one size; else strips, of which the last may be shorter.
        block: (rows, columns) of a block.
        offsets: where each block starts in the file.
        sizes: bytes of each block in the file.
    """

    width: int
    height: int
    count: int
    bits: int
    is_float: bool
    byte_order: Literal["<", ">"]
    compression: int
    predictor: int
    planar: bool
    tiled: bool
    block: tuple[int, int]
    offsets: NDArray[Any]
    sizes: NDArray[Any]

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of one plane, down and across."""
        return -(-self.height // self.block[0]), -(-self.width // self.block[1])

    @property
    def block_count(self) -> int:
        """Blocks of the whole picture."""
        return self.grid[0] * self.grid[1] * (self.count if self.planar else 1)

    @property
    def dtype(self) -> type[np.generic]:
        """Smallest type that is handed on and holds a sample."""
        return np.float32 if self.is_float else np.uint8 if self.bits <= 8 else np.uint16


def read_samples(data: bytes, samples: Samples) -> Pixels:
    """Read all samples (H, W, count); integers as they are stored, floats as float32.

    Raises:
        ImageError: `unreadable` where a block is damaged or shorter than its size asks for.
    """
    view = memoryview(data)
    blocks = [
        view[offset : offset + size]
        for offset, size in zip(samples.offsets.tolist(), samples.sizes.tolist(), strict=True)
    ]
    whole = np.empty((samples.height, samples.width, samples.count), samples.dtype)
    planes = [whole[..., c : c + 1] for c in range(samples.count)] if samples.planar else [whole]
    each = len(blocks) // len(planes)
    with np.errstate(over="ignore"):  # a double beyond float32 becomes inf, which is refused
        for i, plane in enumerate(planes):
            _read_plane(blocks[i * each : (i + 1) * each], samples, plane)
    return whole


def _read_plane(blocks: list[memoryview], samples: Samples, plane: Pixels) -> None:
    """Read strips or tiles into a plane (H, W, count)."""
    rows, columns = samples.block
    count, across = plane.shape[2], samples.grid[1]
    row_bytes = (columns * count * samples.bits + 7) // 8  # rows start on a byte
    most = rows * row_bytes
    # The last strip is often shorter; tiles aren't.
    whole = len(blocks) if samples.tiled else samples.height // rows
    rest = samples.height % rows * row_bytes
    step = max(1, _BAND_BYTES // row_bytes)
    contents = chain(
        _decompress(blocks[:whole], samples.compression, most, most),
        _decompress(blocks[whole:], samples.compression, rest, most),
    )
    for i, block_bytes in enumerate(contents):
        y, x = i // across * rows, i % across * columns
        block, stored = plane[y : y + rows, x : x + columns], block_bytes.reshape(-1, row_bytes)
        for start in range(0, len(block), step):
            band, content = block[start : start + step], stored[start : start + step]
            shape = (len(band), columns, count)
            band[...] = _values(content[: len(band)], samples, shape)[:, : band.shape[1]]


def _decompress(
    blocks: list[memoryview], compression: int, expected: int, most: int
) -> Iterator[_Bytes]:
    """Decompress blocks into `expected` bytes each.

    Some programs fill up the last strip: a block may hold `most` bytes.
    """
    if compression in _BY_LIBTIFF:
        batch = 1 + _BAND_BYTES // longest_stored(expected)
        for start in range(0, len(blocks), batch):
            yield from _by_libtiff(blocks[start : start + batch], compression, expected)
        return
    for block in blocks:
        content = inflate(block, most) if compression in _BY_ZLIB else block
        if len(content) < expected:
            raise damaged(f"a block of its pixels ends after {len(content)} of {expected} bytes")
        yield np.frombuffer(content, np.uint8, expected)


def _by_libtiff(blocks: list[memoryview], compression: int, expected: int) -> _Bytes:
    """Undo LZW or PackBits for blocks of equal size, into (blocks, `expected` bytes).

    All go as the strips of one picture, which is far quicker than one by one. OpenCV reports damage
    in 16-bit pictures but ignores it in 8-bit ones, so they are read as 16-bit. An odd number of
    bytes is evened out by a zero for PackBits; of LZW, such blocks are read a second time.
    """
    zeros = expected % 2 if compression == _PACK_BITS else 0
    strips = [bytes(block[: longest_stored(expected)]) + b"\0\0" * zeros for block in blocks]
    content = np.empty((len(blocks), 0), np.uint8)
    for bits in (16, 8):
        count = (expected + zeros) * 8 // bits
        if count and content.shape[1] < expected:
            picture = _tiff_picture(strips, compression, bits, _folded(count))
            decoded = decode_by_opencv(picture)
            if decoded is None:
                raise damaged("its compressed pixel data is damaged or cut short")
            content = decoded.view(np.uint8).reshape(len(blocks), -1)
    return content[:, :expected]


def _folded(count: int) -> tuple[int, int]:
    """Rows and columns of a picture of `count` samples that OpenCV takes."""
    least = max(1, -(-count // _WIDEST))
    for rows in range(least, least + 1000):
        if count % rows == 0:
            return rows, count // rows
    raise unsupported(f"the size of its LZW or PackBits blocks ({count}) is odd; save it as PNG")


def _tiff_picture(
    strips: list[bytes], compression: int, bits: int, strip_size: tuple[int, int]
) -> bytes:
    """Write a little-endian grey TIFF of compressed strips of equal size (TIFF 6.0, section 2)."""
    lengths = [len(strip) for strip in strips]
    rows, columns = strip_size
    lists_at = 8 + 2 + 12 * 9 + 4
    starts = np.cumsum([lists_at + 8 * len(strips), *lengths[:-1]]).tolist()
    inline = len(strips) == 1  # a list of one value lies in the entry itself
    offsets, counts = (starts[0], lengths[0]) if inline else (lists_at, lists_at + 4 * len(strips))
    entries = [
        (256, 1, columns),
        (257, 1, rows * len(strips)),
        (258, 1, bits),
        (259, 1, compression),
        (262, 1, 1),
        (273, len(strips), offsets),
        (277, 1, 1),
        (278, 1, rows),
        (279, len(strips), counts),
    ]
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    directory = b"".join(struct.pack("<HHII", tag, 4, n, value) for tag, n, value in entries)
    lists = struct.pack(f"<{2 * len(strips)}I", *starts, *lengths)
    return b"".join([head, directory, bytes(4), lists, *strips])


def _values(stored: _Bytes, samples: Samples, shape: tuple[int, ...]) -> Pixels:
    """Turn one block's bytes (rows, bytes a row) into samples (rows, columns, count)."""
    if samples.bits < 8 or samples.bits in (10, 12, 14):
        if samples.predictor != 1:
            raise damaged(f"its samples of {samples.bits} bits can't have a predictor")
        return _unpacked(stored, samples.bits, shape)
    size = samples.bits // 8
    number = np.dtype(f"{'f' if samples.is_float else 'u'}{size}")
    if samples.predictor == _DIFFERENCES:  # differences of the bit patterns, modulo their range
        differences = stored.view(f"{samples.byte_order}u{size}").reshape(shape)
        return np.cumsum(differences, axis=1, dtype=f"u{size}").view(number)
    return stored.view(number.newbyteorder(samples.byte_order)).reshape(shape)


def _unpacked(stored: _Bytes, bits: int, shape: tuple[int, ...]) -> Pixels:
    """Unpack samples that aren't whole bytes; rows start on a byte, high bits come first."""
    rows, columns, count = shape
    flat = np.unpackbits(stored, axis=1, count=columns * count * bits)
    digits = flat.reshape(rows, columns, count, bits)
    values = np.zeros(shape, np.uint8 if bits <= 8 else np.uint16)
    for i in range(bits):
        values = values << 1 | digits[..., i]
    return values
