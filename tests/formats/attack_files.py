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
    """Name -> file, and the pixels (H, W) or (H, W, 3) that it may give, or None for a refusal."""
    rgb = picture()
    whole = encoded(rgb, "PNG")
    end = len(whole) - 12
    zeros = zlib.compress(bytes(200 * _MB), 9)
    rgb_jpeg = np.asarray(Pil.open(io.BytesIO(jpeg())))
    head, rest = whole[:33], whole[33:]

    yield (
        "JPEG, EXIF of 5,000 entries of 5 kB",
        jpeg((0xE1, b"Exif\0\0" + exif(5000, 5000))),
        rgb_jpeg,
    )
    yield "JPEG, 2 million segments", jpeg(*[(0xE5, b"")] * 2_000_000), None
    yield "JPEG, 1,000 segments of 64 kB", jpeg(*[(0xE5, bytes(65_000))] * 1000), rgb_jpeg
    yield "JPEG, 30 MB of fill bytes", jpeg(fill=30 * _MB), rgb_jpeg
    yield "JPEG, 10 MB of restart markers", jpeg()[:2] + b"\xff\xd0" * 5 * _MB + jpeg()[2:], None
    yield "JPEG, 883 scans", jpeg_of_scans((5000, 5000), 14), None
    yield "JPEG, 64 scans", jpeg_of_scans((5000, 5000), 1), np.full((5000, 5000), 128)

    yield (
        "PNG, EXIF of 65,535 entries of 4 MB",
        head + chunk(b"eXIf", exif(65_535, 4 * _MB)) + rest,
        rgb,
    )
    yield "PNG, text of 200 MB", head + chunk(b"zTXt", b"x\0\0" + zeros) + rest, rgb
    yield "PNG, colour profile of 200 MB", head + chunk(b"iCCP", b"x\0\0" + zeros) + rest, rgb
    yield "PNG, a million chunks", head + chunk(b"teXt", b"") * 1_000_000 + rest, None
    yield "PNG, 200,000 empty IDAT chunks", head + chunk(b"IDAT", b"") * 200_000 + rest, rgb
    yield "PNG, 1×1 of 200 MB", png(1, 1, 8, 0, [zeros]), None
    yield "PNG, 1×1 and 50 MB of stored nothing", png(1, 1, 8, 0, [_stored_nothing(50 * _MB)]), None
    yield (
        "PNG, 60 MB behind the stream",
        whole[:end] + chunk(b"IDAT", bytes(60 * _MB)) + whole[end:],
        rgb,
    )
    yield (
        "PNG, palette of 20 million",
        png(1, 1, 8, 3, [zlib.compress(b"\0\0")], chunk(b"PLTE", bytes(60_000_000))),
        None,
    )

    size = (20_000, 8)
    values = grey(*size)
    packed = b"\x00\x07" * 32_768
    yield (
        "TIFF, 1×1 of 40 MB, PackBits",
        tiff((1, 1), [(0, 40 * _MB)], compression=PACK_BITS)(b"\x81\x07" * (20 * _MB)),
        np.full((1, 1), 7),
    )
    yield (
        "TIFF, 1×1 of 40 MB, LZW",
        tiff((1, 1), [(0, 40 * _MB)], compression=LZW)(b"\x80\0\x3f\xff" + bytes(40 * _MB)),
        np.zeros((1, 1)),
    )
    yield (
        "TIFF, 1×1 of 200 MB, deflate",
        tiff((1, 1), [(0, len(zeros))], compression=DEFLATE)(zeros),
        None,
    )
    yield (
        "TIFF, 20,000 strips that share 64 kB, PackBits",
        tiff(size, [(0, len(packed))] * size[0], compression=PACK_BITS, rows=1)(packed),
        np.full(size, 7),
    )
    yield (
        "TIFF, 20,000 strips that share 64 kB, odd",
        tiff((size[0], 7), [(0, len(packed))] * size[0], compression=PACK_BITS, rows=1)(packed),
        np.full((size[0], 7), 7),
    )
    nothing = _stored_nothing(1 << 16)
    yield (
        "TIFF, 20,000 strips that share 64 kB, deflate",
        tiff(size, [(0, len(nothing))] * size[0], compression=DEFLATE, rows=1)(nothing),
        None,
    )
    yield (
        "TIFF, 20,000 strips that share 64 kB, LZW",
        tiff(size, [(0, 1 << 16)] * size[0], compression=LZW, rows=1)(
            b"\x80\0\x3f\xff" + bytes(1 << 16)
        ),
        None,
    )
    yield (
        "TIFF, 20 million runs",
        tiff((4472, 4472), [(0, 2 * 4472**2)], compression=PACK_BITS)(b"\0\7" * 4472**2),
        np.full((4472, 4472), 7),
    )
    yield (
        "TIFF, 1×1 in a tile of 2^24",
        tiff((1, 1), [(0, len(zeros))], compression=DEFLATE, tile=(4096, 4096))(zeros),
        None,
    )
    yield (
        "TIFF, 1×1 in a tile of 2^40",
        tiff((1, 1), [(0, len(zeros))], compression=DEFLATE, tile=(1 << 20, 1 << 20))(zeros),
        None,
    )
    yield "TIFF, a million strips", tiff((1_000_000, 1), [(0, 1)] * 1_000_000, rows=1)(b"\7"), None
    yield (
        "TIFF, lists of 4 billion strips",
        tiff(size, [(0, 1)], [(324, 4, 1 << 32 - 1, 8)])(values.tobytes()),
        None,
    )
    yield "TIFF, 65,535 tags of 4 MB", _many_tags(65_535, 4 * _MB), None
    yield "TIFF, 4,000 tags of 4 MB", _many_tags(4_000, 4 * _MB), None
    yield "TIFF, 40 directories of 4 MB", _many_directories(40, 4 * _MB), None
    yield "TIFF, 300,000 directories", _many_directories(300_000, 4), None
    loop = tiff(size, [(0, values.size)], [(330, 4, 1, 8 + values.size + 8)])(values.tobytes())
    yield "TIFF, SubIFD that is its own directory", loop, values

    yield "BMP, 2^31 - 1 on a side", _bmp(2**31 - 1, 2**31 - 1, 24), None
    yield "BMP, palette of 2^32 - 1", _bmp(1, 1, 8, colours=2**32 - 1), None
    webp = encoded(rgb, "WEBP", lossless=True)
    many = webp[8:] + b"junk\0\0\0\0" * 2_000_000
    yield "WebP, 2 million chunks", b"RIFF" + struct.pack("<I", len(many)) + many, None


def _stored_nothing(length):
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
