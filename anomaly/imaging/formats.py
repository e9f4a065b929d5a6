"""Image files of each format -> header and RGB pixels.

A decoder returns half a picture for half a file, often without a word. So a file is checked before
it is decoded: by its length, the checksums that its format has, and the parts that it must hold.
The size that it declares is known before anything is decoded.

Alpha is composited over black. Dropping it would show the colours hidden under transparent
pixels, which encoders are free to change, so one picture saved twice would give two results.
Embedded ICC profiles and gamma are not applied: a camera's values are taken as they are. Metadata
that isn't used and bytes behind the end of a picture (previews, films) are ignored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import cv2
import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from isal import isal_zlib
from numpy.typing import NDArray

from anomaly.errors import ImageError

_ROWS = 256  # rows multiplied at a time, which bounds the wide temporaries

Pixels: TypeAlias = NDArray[Any]
"""uint8, uint16 or float32; which one depends on the file."""

Tags: TypeAlias = dict[int, NDArray[Any]]
"""The integers of a TIFF directory, or of EXIF data, which is laid out as TIFF, by their tags."""


@dataclass(frozen=True)
class ImageHeader:
    """Header of an image file.

    Attributes:
        mode: colour kind and bits a sample as stored: "grey8", "rgb16", "palette4", "rgba8",
            "greyfloat32".
        stored: (H, W) of the picture before its orientation is applied.
        decode: returns RGB pixels (H, W, 3) before orientation is applied, of another size than
            `stored` where the file is damaged; raises ImageError.
        full_scale: the pixel value that means 1.0.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
    """

    mode: str
    stored: tuple[int, int]
    decode: Callable[[], Pixels] = field(repr=False)
    full_scale: float = 255.0
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(H0, W0) of the upright picture: orientations 5 to 8 swap the sides."""
        height, width = self.stored
        return (width, height) if self.orientation >= 5 else (height, width)


class Format(NamedTuple):
    """Format of image files.

    Attributes:
        name: name in messages.
        suffixes: suffixes of the files, in lower case.
        signature: pattern of the first bytes.
        read: returns the header of a file's bytes; raises ImageError, without the file's name.
    """

    name: str
    suffixes: tuple[str, ...]
    signature: re.Pattern[bytes]
    read: Callable[[bytes], ImageHeader]


def damaged(reason: str) -> ImageError:
    """Error for a file that breaks the rules of its format."""
    return ImageError(reason, "unreadable")


def unsupported(reason: str) -> ImageError:
    """Error for a healthy file of a kind that isn't accepted."""
    return ImageError(reason, "unsupported")


def _by_opencv(file: bytes) -> Pixels:
    """Pixels (H, W) or (H, W, C) of a file by OpenCV, at the file's depth, blue first.

    Raises:
        ImageError: `unreadable`: OpenCV finds the file damaged.
    """
    try:
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from None
        pixels = None
    if pixels is None:
        raise damaged("its pixels are damaged or cut short")
    return pixels


def grey_to_rgb(grey: Pixels) -> Pixels:
    """RGB (H, W, 3) of grey (H, W) or (H, W, 1)."""
    return np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB))


def _to_rgb(pixels: Pixels) -> Pixels:
    """RGB (H, W, 3), alpha over black, of pixels decoded by OpenCV, which are overwritten.

    Args:
        pixels: (H, W), or (H, W, C) with blue first and straight alpha last.
    """
    if pixels.ndim == 2:
        return grey_to_rgb(pixels)
    if pixels.shape[2] == 3:
        return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels))
    rgba = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA, dst=pixels))
    return over_black(rgba[..., :3], rgba[..., 3])


def over_black(colours: Pixels, alpha: Pixels) -> Pixels:
    """Integer colours (H, W, C) over black by straight alpha (H, W), rounded to nearest.

    Full opacity is the highest value of the type.
    """
    full = int(np.iinfo(alpha.dtype).max)
    if alpha.min() == full:
        return np.ascontiguousarray(colours)
    product = np.empty(colours.shape, colours.dtype)
    for start in range(0, len(colours), _ROWS):
        rows = slice(start, start + _ROWS)
        wide = colours[rows].astype(np.uint32) * alpha[rows, ..., None]
        product[rows] = (wide + full // 2) // full
    return product


# TIFF field type -> numpy code: BYTE, SHORT, LONG, IFD
_INTEGERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4"}
_ORIENTATION = 274
_NOTHING = np.empty(0, np.uint8)


def _directories(data: bytes) -> Iterator[Tags]:
    """Integers of a TIFF's directories, each read when asked for; their links may form a loop.

    Raises:
        ImageError: `unreadable`: a directory or its values lie beyond the end, or it isn't TIFF.
    """
    order = ">" if data[:2] == b"MM" else "<"
    try:
        magic, at = struct.unpack_from(order + "HI", data, 2)
        if data[:2] not in (b"II", b"MM") or magic != 42:
            raise damaged("it isn't TIFF data")
        while at:
            (count,) = struct.unpack_from(order + "H", data, at)
            end = at + 2 + 12 * count
            (following,) = struct.unpack_from(order + "I", data, end)
            tags: Tags = {}
            for tag, kind, length, start in struct.iter_unpack(order + "HHII", data[at + 2 : end]):
                at += 12  # 2 bytes before this entry's end, as their number (2 bytes) comes first
                size = length * np.dtype(_INTEGERS.get(kind, "u1")).itemsize
                start = at - 2 if size <= 4 else start  # short values are the entry's last 4 bytes
                if kind in _INTEGERS:
                    if start + size > len(data):
                        raise damaged(f"it is cut short: the values of TIFF tag {tag} are missing")
                    values = np.frombuffer(data, order + _INTEGERS[kind], length, start)
                    tags.setdefault(tag, values)
            yield tags
            at = following
    except struct.error:
        raise damaged("it is cut short: a TIFF directory lies beyond its end") from None


def _first(tags: Tags, tag: int, default: int = 0) -> int:
    """First value of a tag, such as `_WIDTH`; the default if it is missing or has no integers."""
    values = tags.get(tag, _NOTHING)
    return int(values[0]) if len(values) else default


def _orientation(exif: bytes) -> int:
    """EXIF orientation, 1 to 8, of EXIF data or a TIFF; 1 if it is missing or illegal.

    It is also 1 for damaged EXIF data, as the picture may be whole.
    """
    with suppress(ImageError):
        tags = next(_directories(exif.removeprefix(b"Exif\0\0")), {})
        if 1 <= (value := _first(tags, _ORIENTATION)) <= 8:
            return value
    return 1


# sBIT doesn't change the full scale: encoders scale samples up to the full range, whatever their
# significant bits (PNG specification, 13.12).
_COLOURS = {0: "grey", 2: "rgb", 3: "palette", 4: "greya", 6: "rgba"}


def png(data: bytes) -> ImageHeader:
    """Header of a PNG, whose chunks must be whole and have the right checksums."""
    chunks = _chunks(data)
    head = data[8:26].ljust(18)  # a short file may end before
    length, kind, width, height, depth, colour = struct.unpack(">I4sIIBB", head)
    if (length, kind) != (13, b"IHDR") or not (width and height and colour in _COLOURS):
        raise damaged("its PNG header is missing or has illegal values")
    if b"acTL" in chunks:
        raise unsupported("it is an animated PNG; save the frame to inspect as a file of its own")
    if colour == 0 and b"tRNS" in chunks:  # OpenCV would show the transparent pixels
        raise unsupported("it is a grey PNG with a transparent value; save it without one")
    return ImageHeader(
        f"{_COLOURS[colour]}{depth}",
        (height, width),
        lambda: _to_rgb(_by_opencv(data)),
        65535.0 if depth == 16 else 255.0,
        _orientation(chunks.get(b"eXIf", b"")),
    )


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """Contents by kind of a PNG's chunks, the first of each, without pixels; all must be whole."""
    chunks: dict[bytes, bytes] = {}
    view, at, kind = memoryview(data), 8, b""
    while kind != b"IEND":
        if at + 12 > len(data):
            raise damaged("it is cut short: the end of the PNG is missing")
        length, kind = struct.unpack_from(">I4s", data, at)
        end, name = at + 12 + length, kind.decode("ascii", "backslashreplace")
        if end > len(data):
            raise damaged(f"it is cut short inside its {name} chunk")
        if isal_zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise damaged(f"the checksum of its {name} chunk at byte {at} is wrong")
        if kind != b"IDAT":
            chunks.setdefault(kind, data[at + 8 : end - 4])
        at = end
    return chunks


_EOI, _SOS, _APP1 = 0xD9, 0xDA, 0xE1
# Application data and comments; without Adobe's (0xEE), which tells the kind of colours.
_METADATA = {*range(_APP1, 0xEE), 0xEF, 0xFE}
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_DECODABLE = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, extended, progressive; arithmetic
_COMPONENTS = {1: "grey8", 3: "rgb8"}
# In entropy-coded data a marker is 0xFF with neither a stuffed zero nor a restart behind it.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


def jpeg(data: bytes) -> ImageHeader:
    """Header of a JPEG, or of the first picture in a file of several (MPO, from phones).

    Most decoders fill the missing part of a JPEG that was cut and closed again with grey, and only
    warn. libjpeg notices that its bits ran out, with one exception: a progressive file that lost
    whole scans is a legal, blurred picture. So the scans are counted here.
    """
    frame, precision, height, width, exif = 0, 0, 0, 0, b""
    missing: dict[int, Pixels] = {}  # low bits (64,) of each component's coefficients yet to come
    # Without metadata: libjpeg would refuse a picture for a damaged colour profile that isn't used.
    bare: list[bytes | memoryview] = [data[:2]]
    try:
        for marker, content, segment in _segments(data):
            if marker not in _METADATA:
                bare.append(segment)
            if marker in _FRAMES and not frame:
                frame = marker
                precision, height, width, count = struct.unpack_from(">BHHB", content)
                components = content[6 : 6 + 3 * count : 3]
                missing = {component: np.full(64, 255, np.uint8) for component in components}
            elif marker == _SOS:
                count = content[0]
                first, last, bits = struct.unpack_from(">BBB", content, 1 + 2 * count)
                for component in content[1 : 1 + 2 * count : 2]:
                    missing[component][first : last + 1] = bits & 15  # left for later scans
            elif marker == _APP1 and content.startswith(b"Exif\0\0"):
                exif = exif or content
    except (struct.error, IndexError, KeyError):
        raise damaged("its JPEG headers contradict each other") from None
    if not frame:
        raise damaged("it is cut short: the JPEG header is missing")
    is_common = frame in _DECODABLE and precision == 8 and len(missing) in _COMPONENTS
    if not (is_common and height and width):
        raise unsupported(
            "it is a JPEG of a rare kind: CMYK, lossless, hierarchical, of more than 8 bits, or "
            "without a height; save it as 8-bit RGB or grey, or as PNG"
        )
    if any(bits.any() for bits in missing.values()):
        raise damaged("it is cut short: some scans of the JPEG are missing")

    return ImageHeader(
        _COMPONENTS[len(missing)],
        (height, width),
        lambda: _by_libjpeg(b"".join(bare)),
        orientation=_orientation(exif),
    )


def _segments(data: bytes) -> Iterator[tuple[int, bytes, memoryview]]:
    """Marker, content and bytes of each segment; a scan's bytes include its pixels."""
    at, marker = 2, 0
    while marker != _EOI and at + 2 <= len(data):
        if data[at] != 0xFF:
            raise damaged(f"it has no JPEG marker at byte {at}, where one is due")
        marker, start, at = data[at + 1], at, at + 1
        if marker == 0xFF:  # any number of these may stand before a marker
            continue
        end = at + 1
        if marker != _EOI:
            end += int.from_bytes(data[at + 1 : at + 3], "big")
            if not at + 3 <= end <= len(data):
                raise damaged("it is cut short inside a JPEG header")
        content = data[at + 3 : end]
        if marker == _SOS:  # pixels follow, up to the next marker
            following = _MARKER.search(data, end)
            end = following.start() if following else len(data)
        at = end
        yield marker, content, memoryview(data)[start:end]


def _by_libjpeg(data: bytes, padded: bool = True) -> Pixels:
    """RGB pixels (H, W, 3) of a JPEG; if `padded`, zeros before the end marker are dropped."""
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, strict=True))  # its warnings are errors
    except (ValueError, TypeError, RuntimeError) as error:
        if "subsampling" in str(error):
            raise unsupported("its JPEG chroma subsampling isn't a common one") from None
        if "memory" in str(error).lower():
            raise MemoryError from None
        if padded and "extraneous" in str(error):
            # Some cameras pad with zeros before the end marker to a multiple of some size.
            pixel_data = data[: data.rfind(b"\xff\xd9")].rstrip(b"\0")
            stuffing = b"\0" if pixel_data.endswith(b"\xff") else b""
            return _by_libjpeg(pixel_data + stuffing + b"\xff\xd9", padded=False)
        raise damaged("its JPEG data is cut short or damaged") from None


# BMP has no checksum: in a file that is long enough, damage shows only where the header
# contradicts itself.
_HEADERS = (40, 52, 56, 108, 124)  # bytes
_MODES = {1: "palette1", 4: "palette4", 8: "palette8", 24: "rgb8", 32: "rgb8"}


def bmp(data: bytes) -> ImageHeader:
    """Header of an uncompressed BMP, which must be long enough for its pixels."""
    try:
        pixels_at, header, width, height, _, bits, packing = struct.unpack_from(
            "<IIiiHHI", data, 10
        )
        (colours,) = struct.unpack_from("<I", data, 46)
    except struct.error:
        raise damaged("it is cut short inside the BMP header") from None
    if header not in _HEADERS or bits not in _MODES or packing:
        raise unsupported("it is a compressed BMP or one of a rare kind; save it as PNG")
    if width < 1 or not height:
        raise damaged("its BMP header has illegal values")
    palette = 4 * min(colours or 256, 1 << bits) if bits <= 8 else 0
    if pixels_at < 14 + header + palette:
        raise damaged("its BMP header has its pixels start inside the header or the palette")
    available, needed = len(data) - pixels_at, (width * bits + 31) // 32 * 4 * abs(height)
    if available < needed:
        raise damaged(f"it is cut short: {max(available, 0)} of {needed} bytes of pixels are there")

    def decode() -> Pixels:
        pixels = _by_opencv(data)
        # The fourth byte of 32 bits isn't alpha, and means nothing.
        return _to_rgb(pixels if pixels.ndim == 2 else pixels[..., :3].copy())

    return ImageHeader(_MODES[bits], (abs(height), width), decode)


# This program reads a TIFF's samples itself: libraries silently disagree over big-endian files,
# reduce 16-bit colour to 8, and fill damaged strips with black. Only LZW is left to OpenCV's
# libtiff, strip by strip.
_NONE, _LZW, _DEFLATE, _OLD_DEFLATE = 1, 5, 8, 32946
_CHANNELS = {1: 1, 2: 3}  # by PhotometricInterpretation: grey, RGB
# numpy codes by SampleFormat and BitsPerSample, which have to be the same for all samples.
_NUMBERS = {((1,), (8,)): "u1", ((1,), (16,)): "u2", ((3,), (32,)): "f4"}
# A byte of 0 in LZW codes that clear the table first and last: a stream may follow as it is.
_LZW_ZERO = b"\x80\0\x20\x10\x08\x04\x02\x01\0"
_ROW_BYTES = 1024

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_FILL_ORDER, _OFFSETS, _SAMPLES, _ROWS_PER_STRIP, _LENGTHS = 266, 273, 277, 278, 279
_PLANAR, _PREDICTOR, _TILE_WIDTH, _SAMPLE_FORMAT = 284, 317, 322, 339


def tiff(data: bytes) -> ImageHeader:
    """Header of a TIFF of one page, grey or RGB of 8 or 16 bits or of floats, in strips.

    Floats run from 0 to 1: `MaxSampleValue` is for statistics only (TIFF 6.0).
    """
    pages = list(islice(_directories(data), 2))
    if len(pages) != 1:
        raise unsupported("it is a TIFF of no or several pages; save each page as a file")
    page = pages[0]
    channels, number, compression, differences = _samples(page, ">" if data[:2] == b"MM" else "<")
    size = height, width = _first(page, _HEIGHT), _first(page, _WIDTH)
    rows = min(_first(page, _ROWS_PER_STRIP, height), height)
    if not (width and rows):
        raise damaged("its TIFF header has illegal values")
    starts, lengths = (page.get(tag, _NOTHING).tolist() for tag in (_OFFSETS, _LENGTHS))
    if not len(starts) == len(lengths) == -(-height // rows):
        raise damaged(f"it lists {len(starts)} of {-(-height // rows)} strips of pixels")
    places = list(zip(starts, lengths, strict=True))
    if not all(lengths) or max(start + length for start, length in places) > len(data):
        raise damaged("it is cut short: a strip of its pixels lies beyond its end")

    def decode() -> Pixels:
        pixels = np.empty((*size, channels), number.newbyteorder("="))
        for top, (start, length) in zip(range(0, height, rows), places, strict=True):
            strip, content = pixels[top : top + rows], memoryview(data)[start : start + length]
            needed = strip.nbytes
            if compression == _LZW:
                content = _by_libtiff(content, needed)
            elif compression != _NONE:  # some programs fill up the last strip to its full rows
                content = _inflated(content, rows * pixels[0].nbytes)
            if len(content) < needed:
                raise damaged(f"a strip of its pixels ends after {len(content)} of {needed} bytes")
            strip[...] = np.frombuffer(content[:needed], number).reshape(strip.shape)
            if differences:  # the sums wrap around at the range of the type
                np.cumsum(strip, axis=1, dtype=strip.dtype, out=strip)
        return grey_to_rgb(pixels) if channels == 1 else pixels

    is_float, bits = number.kind == "f", 8 * number.itemsize
    return ImageHeader(
        f"{'grey' if channels == 1 else 'rgb'}{'float' if is_float else ''}{bits}",
        size,
        decode,
        1.0 if is_float else 2.0**bits - 1,
        _orientation(data),
    )


def _samples(page: Tags, order: str) -> tuple[int, np.dtype[Any], int, bool]:
    """Channels, number type, compression, and True for differences from the pixel to the left.

    `order` is numpy's sign of the byte order, `<` or `>`.

    Raises:
        ImageError: `unsupported`: not plain grey or RGB in strips.
    """
    channels, compression = _first(page, _SAMPLES, 1), _first(page, _COMPRESSION, _NONE)
    kinds, bits = (
        tuple(set(page.get(tag, _NOTHING).tolist()) or {1}) for tag in (_SAMPLE_FORMAT, _BITS)
    )
    number = _NUMBERS.get((kinds, bits))
    # A program that undid the compression may have left its predictor's tag.
    predictor = 1 if compression == _NONE else _first(page, _PREDICTOR, 1)
    if (
        number is None
        or channels != _CHANNELS.get(_first(page, _PHOTOMETRIC))
        or (channels > 1 and _first(page, _PLANAR, 1) != 1)
        or _first(page, _FILL_ORDER, 1) != 1
        or compression not in (_NONE, _LZW, _DEFLATE, _OLD_DEFLATE)
        or predictor not in ((1,) if number == "f4" else (1, 2))
        or _TILE_WIDTH in page
    ):
        raise unsupported(
            "it is a TIFF of a rare kind; save it as plain grey or RGB of 8 or 16 bits, in strips "
            "with no compression, LZW or deflate, or as PNG"
        )
    return channels, np.dtype(order + number), compression, predictor == 2


def _inflated(stream: memoryview, limit: int) -> memoryview:
    """Content of a zlib stream, which must end, with its checksum, within `limit` bytes."""
    inflater = isal_zlib.decompressobj()
    try:
        content = inflater.decompress(stream, limit + 1)
    except isal_zlib.error:  # type: ignore[misc]  # the stub has an instance, not a class
        raise damaged("its pixel data is damaged") from None
    if len(content) > limit or not inflater.eof:
        raise damaged(f"its pixel data doesn't end within the {limit} bytes that it should have")
    return memoryview(content)


def _by_libtiff(strip: memoryview, expected: int) -> memoryview:
    """Content, `expected` bytes, of a strip in LZW by OpenCV.

    It becomes the only strip of a grey picture. OpenCV reports damage in 16-bit pictures but
    ignores it in 8-bit ones. So the picture has 16 bits, and zeros in front fill its rows.
    """
    rows = -(-expected // _ROW_BYTES)  # rounded up
    zeros = rows * _ROW_BYTES - expected
    content = _LZW_ZERO * zeros + strip
    tags = {
        _WIDTH: _ROW_BYTES // 2,
        _HEIGHT: rows,
        _BITS: 16,
        _COMPRESSION: _LZW,
        _PHOTOMETRIC: 1,
        _OFFSETS: 8 + 2 + 12 * 7 + 4,  # header, number of tags, 7 tags, no next page
        _LENGTHS: len(content),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    pixels = _by_opencv(header + directory + bytes(4) + content)
    return pixels.reshape(-1).view(np.uint8).data[zeros:]


def webp(data: bytes) -> ImageHeader:
    """Header of a still WebP, which must be as long as it says it is (RFC 9649)."""
    chunks: dict[bytes, slice] = {}  # contents of the first chunk of each kind
    at, end = 12, 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise damaged(f"it is cut short: {len(data)} of {end} bytes are there")
    while at < end:
        content = slice(at + 8, at + 8 + int.from_bytes(data[at + 4 : at + 8], "little"))
        if content.stop > end:
            raise damaged("it is cut short inside a WebP chunk")
        chunks.setdefault(data[at : at + 4], content)
        at = content.stop + content.stop % 2  # a chunk starts at an even byte
    if b"ANIM" in chunks:
        raise unsupported("it is an animated WebP; save the frame to inspect as a file of its own")
    try:
        if picture := chunks.get(b"VP8 "):
            width, height = struct.unpack_from("<HH", data, picture.start + 6)
            # 14 bits each; the others ask for scaling.
            size, alpha = (height & 0x3FFF, width & 0x3FFF), b"ALPH" in chunks
        else:
            picture = chunks[b"VP8L"]
            (bits,) = struct.unpack_from("<I", data, picture.start + 1)
            size, alpha = ((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1), bool(bits >> 28 & 1)
    except (struct.error, KeyError):
        raise damaged("it holds no WebP picture") from None

    if extended := data[chunks.get(b"VP8X", slice(0))]:
        # A lossless picture holds its alpha itself; the header may announce an alpha that is full.
        promised = extended[0] & 0x10 and not (b"VP8L" in chunks and not alpha)
        if bool(promised) != alpha or (extended[0] & 0x08 and b"EXIF" not in chunks):
            raise damaged("its WebP header and its alpha or EXIF data contradict each other")

    def decode() -> Pixels:
        # The file is cut behind the picture: libwebp would read on into the next chunk.
        body = data[8 : picture.stop] + bytes(picture.stop % 2)
        return _to_rgb(_by_opencv(b"RIFF" + struct.pack("<I", len(body)) + body))

    orientation = _orientation(data[chunks.get(b"EXIF", slice(0))])
    return ImageHeader("rgba8" if alpha else "rgb8", size, decode, orientation=orientation)


JPEG = Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), re.compile(rb"\xff\xd8\xff"), jpeg)
FORMATS = (
    Format("PNG", (".png",), re.compile(rb"\x89PNG\r\n\x1a\n"), png),
    JPEG,
    Format("BMP", (".bmp", ".dib"), re.compile(rb"BM"), bmp),
    Format("TIFF", (".tif", ".tiff"), re.compile(rb"II\*\0|MM\0\*"), tiff),
    Format("WebP", (".webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL), webp),
)
