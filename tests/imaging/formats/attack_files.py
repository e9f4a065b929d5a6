"""Files made to cost a reader far more time or memory than their picture is worth."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from picture_files import chunk, encoded, picture, png
from PIL import Image as Pil

_MB = 1 << 20
NONE, LZW, DEFLATE, PACK_BITS = 1, 5, 8, 32773


def grey(height, width):
    """Pixels (H, W) that every attack on a whole picture carries."""
    return np.resize(picture()[..., 0], (height, width))


def directory(entries, following=0):
    """A little-endian TIFF directory of (tag, type, count, value)."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + body + struct.pack("<I", following)


def tiff(size, blocks, more=(), compression=NONE, rows=None, tile=None):
    """A grey 8-bit TIFF; `blocks` are (offset, size) in a file that starts with a `HEAD` of data.

    Returns a function that takes the data, which starts at byte 8, and gives the file.
    """
    where, sizes = (324, 325) if tile else (273, 279)

    def file(data):
        lists_at = 8 + len(data)
        lists = struct.pack(f"<{len(blocks)}I", *(8 + start for start, _ in blocks))
        lists += struct.pack(f"<{len(blocks)}I", *(length for _, length in blocks))
        inline = len(blocks) == 1
        values = (
            (8 + blocks[0][0], blocks[0][1]) if inline else (lists_at, lists_at + 4 * len(blocks))
        )
        entries = [(256, 4, 1, size[1]), (257, 4, 1, size[0]), (258, 3, 1, 8)]
        entries += [(259, 3, 1, compression), (262, 3, 1, 1), (277, 3, 1, 1)]
        entries += (
            [(322, 4, 1, tile[1]), (323, 4, 1, tile[0])] if tile else [(278, 4, 1, rows or size[0])]
        )
        entries += [(where, 4, len(blocks), values[0]), (sizes, 4, len(blocks), values[1]), *more]
        head = struct.pack("<2sHI", b"II", 42, lists_at + len(lists))
        return head + data + lists + directory(sorted(entries))

    return file


def exif(entries, length, tag=274):
    """EXIF data of many entries of one tag, all of `length` bytes that they share."""
    start = 8 + 2 + 12 * entries + 4
    head = struct.pack("<2sHI", b"II", 42, 8)
    return head + directory([(tag, 1, length, start)] * entries) + bytes(length)


def jpeg(*segments, fill=0):
    """A JPEG with further segments in front of its frame header."""
    data = encoded(picture(), "JPEG", quality=90)
    extra = b"".join(bytes([0xFF, m]) + struct.pack(">H", len(c) + 2) + c for m, c in segments)
    return data[:2] + extra + b"\xff" * fill + data[2:]


def jpeg_of_scans(size, bits_each):
    """A legal progressive grey JPEG: each coefficient comes alone, and all are 0."""

    def segment(marker, content):
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    def bits(text):
        text += "1" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")

    height, width = size
    blocks = -(-height // 8) * -(-width // 8)
    parts = [b"\xff\xd8", segment(0xDB, b"\0" + b"\1" * 64)]
    parts.append(segment(0xC2, struct.pack(">BHHBBBB", 8, height, width, 1, 1, 0x11, 0)))
    one_code = bytes([1] + [0] * 15)
    parts.append(segment(0xC4, b"\x00" + one_code + b"\0"))  # DC: the same as before
    parts.append(segment(0xC4, b"\x10" + one_code + b"\xe0"))  # AC: 2^14 + n blocks end here
    parts += [segment(0xDA, b"\1\1\0" + b"\0\0\0"), bits("0" * blocks)]
    nothing = bits(("0" + "1" * 14) * -(-blocks // 32767))
    for coefficient in range(1, 64):
        for low in reversed(range(bits_each)):
            high = low + 1 if low < bits_each - 1 else 0
            scan = bytes([coefficient, coefficient, high << 4 | low])
            parts += [segment(0xDA, b"\1\1\0" + scan), nothing]
    return b"".join([*parts, b"\xff\xd9"])


def attacks():
    """Yield name, file, and the pixels (H, W) or (H, W, 3) that it may give; None is a refusal."""
    yield from jpeg_attacks()
    yield from png_attacks()
    yield from tiff_attacks()
    yield from strip_attacks()
    webp = encoded(picture(), "WEBP", lossless=True)
    many = webp[8:] + b"junk\0\0\0\0" * 500_000
    yield "WebP, many chunks", b"RIFF" + struct.pack("<I", len(many)) + many, None
    long = bytes(60 * _MB)
    long = webp[8:] + b"EXIF" + struct.pack("<I", len(long)) + long
    yield "WebP, EXIF of 60 MB", b"RIFF" + struct.pack("<I", len(long)) + long, picture()
    yield "BMP, 2^31 - 1 on a side", _bmp(2**31 - 1, 2**31 - 1, 24), None
    yield "BMP, palette of 2^32 - 1", _bmp(1, 1, 8, colours=2**32 - 1), None


def jpeg_attacks():
    """Metadata, markers and scans without end."""
    plain = jpeg()
    rgb = np.asarray(Pil.open(io.BytesIO(plain)))
    entries = b"Exif\0\0" + exif(5000, 5000)
    yield "JPEG, EXIF of 5,000 entries of 5 kB", jpeg((0xE1, entries)), rgb
    yield "JPEG, many segments", jpeg(*[(0xE5, b"")] * 500_000), None
    yield "JPEG, 1,000 segments of 64 kB", jpeg(*[(0xE5, bytes(65_000))] * 1000), rgb
    yield "JPEG, fill bytes", jpeg(fill=30 * _MB), rgb
    yield "JPEG, restart markers", plain[:2] + b"\xff\xd0" * 5 * _MB + plain[2:], None
    yield "JPEG, 883 scans", jpeg_of_scans((5000, 5000), 14), None
    yield "JPEG, 64 scans", jpeg_of_scans((5000, 5000), 1), np.full((5000, 5000), 128)


def png_attacks():
    """Chunks and streams that are far longer than their picture."""
    rgb = picture()
    whole = encoded(rgb, "PNG")
    head, rest, end = whole[:33], whole[33:], whole[-12:]
    zeros = zlib.compress(bytes(200 * _MB))
    tags = chunk(b"eXIf", exif(65_535, 4 * _MB))
    yield "PNG, EXIF of 65,535 entries of 4 MB", head + tags + rest, rgb
    for kind in (b"zTXt", b"iCCP"):
        yield f"PNG, {kind} of 200 MB", head + chunk(kind, b"x\0\0" + zeros) + rest, rgb
    yield "PNG, many chunks", head + chunk(b"teXt", b"") * 500_000 + rest, None
    yield "PNG, 200,000 empty IDAT chunks", head + chunk(b"IDAT", b"") * 200_000 + rest, rgb
    yield "PNG, 1×1 of 200 MB", png(1, 1, 8, 0, [zeros]), None
    yield "PNG, 1×1 of 50 MB of nothing", png(1, 1, 8, 0, [_nothing(50 * _MB)]), None
    surplus = chunk(b"IDAT", bytes(60 * _MB))
    yield "PNG, 60 MB behind the stream", whole[:-12] + surplus + end, rgb
    palette = chunk(b"PLTE", bytes(60_000_000))
    yield "PNG, huge palette", png(1, 1, 8, 3, [zlib.compress(b"\0\0")], palette), None


def tiff_attacks():
    """Tags and directories without end, and tiles far larger than their picture."""
    yield "TIFF, 65,535 tags of 4 MB", _many_tags(65_535, 4 * _MB), None
    yield "TIFF, 4,000 tags of 4 MB", _many_tags(4_000, 4 * _MB), None
    yield "TIFF, 40 directories of 4 MB", _many_directories(40, 4 * _MB), None
    yield "TIFF, 100,000 directories", _many_directories(100_000, 4), None
    size = (200, 80)
    values = grey(*size)
    itself = (330, 4, 1, 8 + values.size + 8)
    yield "TIFF, its own SubIFD", tiff(size, [(0, values.size)], [itself])(values.tobytes()), values
    lists = [(273, 4, 2**31, 8), (279, 4, 2**31, 8)]
    tags = [(256, 4, 1, 1), (257, 4, 1, 2**31), (262, 4, 1, 1), *lists, (278, 4, 1, 1)]
    lying = struct.pack("<2sHI", b"II", 42, 8) + directory(tags)
    yield "TIFF, 2 billion strips", lying, None
    zeros = zlib.compress(bytes(200 * _MB))
    for side in (4096, 1 << 20):
        tile = tiff((1, 1), [(0, len(zeros))], compression=DEFLATE, tile=(side, side))
        yield f"TIFF, 1×1 in a tile of {side}", tile(zeros), None


def strip_attacks():
    """Strips that are far longer than what they hold, or share their bytes with many others."""
    long = {
        PACK_BITS: (b"\x81\x07" * (20 * _MB), np.full((1, 1), 7)),
        LZW: (b"\x80\0\x3f\xff" + bytes(40 * _MB), np.zeros((1, 1))),
        DEFLATE: (zlib.compress(bytes(200 * _MB)), None),
    }
    for compression, (data, expected) in long.items():
        name = f"TIFF, 1×1 of far more, compression {compression}"
        yield name, tiff((1, 1), [(0, len(data))], compression=compression)(data), expected
    shared = {
        PACK_BITS: (b"\x00\x07" * 32_768, 7),
        LZW: (b"\x80\0\x3f\xff" + bytes(1 << 16), None),
        DEFLATE: (_nothing(1 << 16), None),
    }
    for compression, (data, value) in shared.items():
        for width in (8, 7):
            size, blocks = (20_000, width), [(0, len(data))] * 20_000
            name = f"TIFF, 20,000 strips that share 64 kB, {width}, compression {compression}"
            expected = None if value is None else np.full(size, value)
            yield name, tiff(size, blocks, compression=compression, rows=1)(data), expected
    for compression, data in ((PACK_BITS, b"\0\7"), (DEFLATE, zlib.compress(b"\7"))):
        size, blocks = (1 << 18, 1), [(0, 8192)] * (1 << 18)
        file = tiff(size, blocks, compression=compression, rows=1)(data.ljust(8192, b"\0"))
        yield f"TIFF, 262,144 strips, compression {compression}", file, np.full(size, 7)
    yield "TIFF, a million strips", tiff((10**6, 1), [(0, 1)] * 10**6, rows=1)(b"\7"), None
    size, runs = (3000, 3000), b"\0\7" * 3000**2
    file = tiff(size, [(0, len(runs))], compression=PACK_BITS)(runs)
    yield "TIFF, a run for each pixel", file, np.full(size, 7)


def _nothing(length):
    """A zlib stream of empty stored blocks."""
    return b"\x78\x01" + b"\x00\x00\x00\xff\xff" * (length // 5)


def _many_tags(count, length):
    values_at = 8 + 2 + 12 * count + 4
    tags = [(273 + i % 2 * 6, 1, length, values_at) for i in range(count)]
    return struct.pack("<2sHI", b"II", 42, 8) + directory(tags) + bytes(length)


def _many_directories(count, length):
    size = 2 + 2 * 12 + 4
    values_at = 8 + count * size
    parts = [struct.pack("<2sHI", b"II", 42, 8)]
    for i in range(count):
        following = 8 + (i + 1) * size if i + 1 < count else 0
        tags = [(254, 4, 1, 1), (273, 1, length, values_at)]
        parts.append(directory(tags, following))
    return b"".join([*parts, bytes(length)])


def _bmp(width, height, bits, colours=0):
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, colours, 0)
    return struct.pack("<2sIHHI", b"BM", 0, 0, 0, 54) + info + bytes(4096)
