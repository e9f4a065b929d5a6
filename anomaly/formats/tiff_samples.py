"""The samples of a TIFF picture: strips or tiles, decompressed, unpredicted and put together."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anomaly.formats.codecs import decode_by_opencv, inflate
from anomaly.formats.header import Pixels, damaged

_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE = 1, 5, 8, 32773, 32946
COMPRESSIONS = frozenset((_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE))
_DIFFERENCES, _FLOAT_DIFFERENCES = 2, 3

_Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
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
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

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
    whole = np.empty((samples.height, samples.width, samples.count), samples.dtype)
    down, across = samples.grid
    rows, columns = samples.block
    each = 1 if samples.planar else samples.count
    row_bytes = (columns * each * samples.bits + 7) // 8
    view = memoryview(data)
    for i, (offset, size) in enumerate(zip(samples.offsets, samples.sizes, strict=True)):
        plane, position = divmod(i, down * across)
        y, x = position // across * rows, position % across * columns
        height = rows if samples.tiled else min(rows, samples.height - y)
        shape = (height, row_bytes)
        stored = _decompress(view[offset : offset + size], samples.compression, shape)
        values = _values(stored, samples, (height, columns, each))
        target = whole[y : y + rows, x : x + columns, plane : plane + each]
        with np.errstate(over="ignore"):  # a double beyond float32 becomes inf, which is refused
            target[...] = values[: target.shape[0], : target.shape[1]]
    return whole


def _decompress(stored: memoryview, compression: int, shape: tuple[int, int]) -> _Bytes:
    """Decompress one block into its rows of bytes, (rows, bytes a row)."""
    expected = shape[0] * shape[1]
    content: bytes | memoryview = stored
    if compression in (_DEFLATE, _OLD_DEFLATE):
        content, _ = inflate(stored, expected)
    elif compression == _PACK_BITS:
        content = _unpack_bits(stored)
    elif compression == _LZW:
        return _decompress_lzw(stored, shape)
    if len(content) < expected:
        raise damaged(f"a block of its pixels ends after {len(content)} of {expected} bytes")
    return np.frombuffer(content, np.uint8, expected).reshape(shape)


def _unpack_bits(stored: memoryview) -> bytes:
    """Undo PackBits (TIFF 6.0, section 9): runs of literals and of repeats."""
    pieces, at = [], 0
    while at < len(stored):
        head = stored[at]
        if head < 128:
            pieces.append(bytes(stored[at + 1 : at + 2 + head]))
            at += 2 + head
        elif head == 128:
            at += 1
        else:
            pieces.append(bytes(stored[at + 1 : at + 2]) * (257 - head))
            at += 2
    return b"".join(pieces)


def _decompress_lzw(stored: memoryview, shape: tuple[int, int]) -> _Bytes:
    """Undo LZW, by showing the block to OpenCV's libtiff as an 8-bit grey picture of its own."""
    rows, columns = shape
    entries = [(256, columns), (257, rows), (258, 8), (259, _LZW), (262, 1)]
    start = 8 + 2 + 12 * (len(entries) + 4) + 4
    entries += [(273, start), (277, 1), (278, rows), (279, len(stored))]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + directory + bytes(4)
    content = decode_by_opencv(head + stored)
    if content is None or content.shape != shape:
        raise damaged("its LZW pixel data is damaged or cut short")
    return content


def _values(stored: _Bytes, samples: Samples, shape: tuple[int, int, int]) -> Pixels:
    """Turn one block's bytes (rows, bytes a row) into samples (rows, columns, count)."""
    if samples.bits < 8 or samples.bits in (10, 12, 14):
        if samples.predictor != 1:
            raise damaged(f"its samples of {samples.bits} bits can't have a predictor")
        return _unpacked(stored, samples.bits, shape)
    if samples.predictor == _FLOAT_DIFFERENCES and samples.is_float:
        return _undo_float_differences(stored, samples.bits // 8, shape)
    size = samples.bits // 8
    number = np.dtype(f"{'f' if samples.is_float else 'u'}{size}")
    if samples.predictor == _DIFFERENCES:  # differences of the bit patterns, modulo their range
        differences = stored.view(f"{samples.byte_order}u{size}").reshape(shape)
        return np.cumsum(differences, axis=1, dtype=f"u{size}").view(number)
    return stored.view(number.newbyteorder(samples.byte_order)).reshape(shape)


def _undo_float_differences(stored: _Bytes, size: int, shape: tuple[int, int, int]) -> Pixels:
    """Undo Adobe's floating-point predictor (TIFF Technical Note 3).

    Each row holds first all most significant bytes, then all next ones, and so on, and then the
    differences between bytes one pixel apart are taken.
    """
    rows, columns, count = shape
    bytes_a_row = stored.reshape(rows, -1, count)
    planes = np.cumsum(bytes_a_row, axis=1, dtype=np.uint8).reshape(rows, size, columns * count)
    numbers = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(f">f{size}")
    return numbers.reshape(shape)


def _unpacked(stored: _Bytes, bits: int, shape: tuple[int, int, int]) -> Pixels:
    """Unpack samples that aren't whole bytes; rows start on a byte, high bits come first."""
    rows, columns, count = shape
    flat = np.unpackbits(stored, axis=1, count=columns * count * bits)
    digits = flat.reshape(rows, columns, count, bits)
    values = np.zeros(shape, np.uint8 if bits <= 8 else np.uint16)
    for i in range(bits):
        values = values << 1 | digits[..., i]
    return values
