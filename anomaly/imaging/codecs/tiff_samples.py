"""The samples of a TIFF picture: strips or tiles, decompressed, unpredicted and put together."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging.codecs.base import (
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
_DIFFERENCES, _FLOAT_DIFFERENCES = 2, 3
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
        predictor: 1 none, 2 differences, 3 differences of float bytes.
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
    read = _read_tiles if samples.tiled else _read_strips
    with np.errstate(over="ignore"):  # a double beyond float32 becomes inf, which is refused
        for i, plane in enumerate(planes):
            read(blocks[i * each : (i + 1) * each], samples, plane)
    return whole


def _read_tiles(blocks: list[memoryview], samples: Samples, plane: Pixels) -> None:
    rows, columns = samples.block
    across = samples.grid[1]
    row_bytes = _row_bytes(columns * plane.shape[2], samples.bits)
    size = rows * row_bytes
    for i, content in enumerate(_decompress(blocks, samples.compression, size, size)):
        y, x = i // across * rows, i % across * columns
        stored = content.reshape(rows, row_bytes)
        _fill(plane[y : y + rows, x : x + columns], stored, samples, columns)


def _read_strips(blocks: list[memoryview], samples: Samples, plane: Pixels) -> None:
    height, rows = samples.height, samples.block[0]
    row_bytes = _row_bytes(samples.width * plane.shape[2], samples.bits)
    stored = np.empty((height, row_bytes), np.uint8)
    most, whole = rows * row_bytes, height // rows  # the last one is often shorter
    for i, content in enumerate(_decompress(blocks[:whole], samples.compression, most, most)):
        stored[i * rows : (i + 1) * rows] = content.reshape(rows, row_bytes)
    rest = stored[whole * rows :]
    for content in _decompress(blocks[whole:], samples.compression, rest.size, most):
        rest[...] = content.reshape(rest.shape)
    _fill(plane, stored, samples, samples.width)


def _fill(target: Pixels, stored: _Bytes, samples: Samples, columns: int) -> None:
    """Turn the bytes of rows of some columns into the samples of a part of the picture."""
    step = max(1, _BAND_BYTES // stored.shape[1])
    for y in range(0, len(target), step):
        band = target[y : y + step]
        shape = (len(band), columns, target.shape[2])
        band[...] = _values(stored[y : y + len(band)], samples, shape)[:, : target.shape[1]]


def _row_bytes(samples_a_row: int, bits: int) -> int:
    """Bytes of a row of samples; rows start on a byte."""
    return (samples_a_row * bits + 7) // 8


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
    in 16-bit pictures but ignores it in 8-bit ones, so they are read as 16-bit. PackBits is evened
    out for that by runs of one zero. LZW has no bytes to put behind: of an odd number, the last
    byte doesn't fit into that, and the blocks are read a second time.
    """
    strips = [bytes(block[: longest_stored(expected)]) for block in blocks]
    rows, words = _folded(expected // 2)
    if compression == _PACK_BITS:
        rows = -(-expected // (2 * _WIDEST))
        words = -(-expected // (2 * rows))
        strips = [strip + b"\0\0" * (2 * rows * words - expected) for strip in strips]
    if words:
        wide = _as_bytes(_tiff_picture(strips, compression, 16, (rows, words)))
        wide = wide.reshape(len(blocks), -1)[:, :expected]
        if wide.shape[1] == expected:
            return wide
    if math.prod(_folded(expected)) != expected:
        raise unsupported(f"its LZW blocks have {expected} bytes, an odd size; save it as PNG")
    narrow = _as_bytes(_tiff_picture(strips, compression, 8, _folded(expected)))
    return narrow.reshape(len(blocks), expected)


def _folded(count: int) -> tuple[int, int]:
    """Rows and columns of a picture of `count` samples that OpenCV takes."""
    least = max(1, -(-count // _WIDEST))
    rows = next((n for n in range(least, least + 1000) if count % n == 0), least)
    return rows, count // rows


def _as_bytes(picture: bytes) -> _Bytes:
    """Decode a grey picture into the bytes of its rows."""
    content = decode_by_opencv(picture)
    if content is None:
        raise damaged("its compressed pixel data is damaged or cut short")
    return content.view(np.uint8)


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
    if samples.predictor == _FLOAT_DIFFERENCES:
        if not samples.is_float:
            raise damaged("its whole numbers can't have a predictor for floats")
        return _undo_float_differences(stored, samples.bits // 8, shape)
    size = samples.bits // 8
    number = np.dtype(f"{'f' if samples.is_float else 'u'}{size}")
    if samples.predictor == _DIFFERENCES:  # differences of the bit patterns, modulo their range
        differences = stored.view(f"{samples.byte_order}u{size}").reshape(shape)
        return np.cumsum(differences, axis=1, dtype=f"u{size}").view(number)
    return stored.view(number.newbyteorder(samples.byte_order)).reshape(shape)


def _undo_float_differences(stored: _Bytes, size: int, shape: tuple[int, ...]) -> Pixels:
    """Undo Adobe's floating-point predictor (TIFF Technical Note 3).

    Each row holds first all most significant bytes, then all next ones, and so on, and then the
    differences between bytes one pixel apart are taken.
    """
    rows, columns, count = shape
    bytes_a_row = stored.reshape(rows, -1, count)
    planes = np.cumsum(bytes_a_row, axis=1, dtype=np.uint8).reshape(rows, size, columns * count)
    numbers = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(f">f{size}")
    return numbers.reshape(shape)


def _unpacked(stored: _Bytes, bits: int, shape: tuple[int, ...]) -> Pixels:
    """Unpack samples that aren't whole bytes; rows start on a byte, high bits come first."""
    rows, columns, count = shape
    flat = np.unpackbits(stored, axis=1, count=columns * count * bits)
    digits = flat.reshape(rows, columns, count, bits)
    values = np.zeros(shape, np.uint8 if bits <= 8 else np.uint16)
    for i in range(bits):
        values = values << 1 | digits[..., i]
    return values
