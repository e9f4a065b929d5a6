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
_WIDEST = 1 << 20  # columns that OpenCV takes
_BAND = 4096  # rows whose samples are unpacked at a time, which bounds the temporaries

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
    view = memoryview(data)
    blocks = [
        view[offset : offset + size]
        for offset, size in zip(samples.offsets, samples.sizes, strict=True)
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
    shape = (rows, columns, plane.shape[2])
    across = samples.grid[1]
    for i, block in enumerate(blocks):
        y, x = i // across * rows, i % across * columns
        stored = _decompress(block, samples.compression, (rows, _row_bytes(shape, samples.bits)))
        target = plane[y : y + rows, x : x + columns]
        target[...] = _values(stored, samples, shape)[: target.shape[0], : target.shape[1]]


def _read_strips(blocks: list[memoryview], samples: Samples, plane: Pixels) -> None:
    row_bytes = _row_bytes(plane.shape, samples.bits)
    stored = _decompress_strips(blocks, samples, row_bytes)
    for y in range(0, len(plane), _BAND):
        band = plane[y : y + _BAND]
        band[...] = _values(stored[y : y + _BAND], samples, band.shape)


def _row_bytes(shape: tuple[int, ...], bits: int) -> int:
    """Bytes of a row of samples (rows, columns, count); rows start on a byte."""
    return (shape[1] * shape[2] * bits + 7) // 8


def _decompress_strips(blocks: list[memoryview], samples: Samples, row_bytes: int) -> _Bytes:
    """Decompress the strips of one plane into (H, bytes a row)."""
    height, rows = samples.height, samples.block[0]
    if samples.compression == _LZW and row_bytes % 2 == 0:  # all in one go; strips can be many
        return _as_bytes(_lzw_picture(blocks, 16, (height, row_bytes // 2), rows))
    stored = np.empty((height, row_bytes), np.uint8)
    for i, block in enumerate(blocks):
        strip = stored[i * rows : (i + 1) * rows]
        strip[...] = _decompress(block, samples.compression, strip.shape)
    return stored


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
    """Undo LZW for one block of any size.

    OpenCV reports damage in 16-bit pictures but ignores it in 8-bit ones, so the block is read as
    16-bit. Of an odd number of bytes, the last ones don't fit into that and are read the other way.
    """
    rows, columns = shape
    words = rows * columns // 2
    height = max(1, -(-words // _WIDEST))
    if words:
        wide = _as_bytes(_lzw_picture([stored], 16, (height, words // height), height))
        if wide.size == rows * columns:
            return wide.reshape(shape)
    return _as_bytes(_lzw_picture([stored], 8, shape, rows))


def _as_bytes(picture: bytes) -> _Bytes:
    """Decode a grey picture into the bytes of its rows."""
    content = decode_by_opencv(picture)
    if content is None:
        raise damaged("its LZW pixel data is damaged or cut short")
    return content.view(np.uint8)


def _lzw_picture(
    strips: list[memoryview], bits: int, size: tuple[int, int], rows_a_strip: int
) -> bytes:
    """Write a little-endian grey TIFF of LZW strips (TIFF 6.0, sections 2 and 13)."""
    lengths = [len(strip) for strip in strips]
    lists_at = 8 + 2 + 12 * 9 + 4
    starts = np.cumsum([lists_at + 8 * len(strips), *lengths[:-1]]).tolist()
    inline = len(strips) == 1  # a list of one value lies in the entry itself
    offsets, counts = (starts[0], lengths[0]) if inline else (lists_at, lists_at + 4 * len(strips))
    entries = [
        (256, 1, size[1]),
        (257, 1, size[0]),
        (258, 1, bits),
        (259, 1, _LZW),
        (262, 1, 1),
        (273, len(strips), offsets),
        (277, 1, 1),
        (278, 1, rows_a_strip),
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
    if samples.predictor == _FLOAT_DIFFERENCES and samples.is_float:
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
