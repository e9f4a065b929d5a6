"""Picture files of each kind -> what they say about their picture, and its RGB pixels.

A decoder gives half a picture for half a file, often without a word. So a file is checked before it
is decoded: by its length, the checksums that its format has, and the parts that have to be there.
The size that it declares is known before anything is decoded.

Alpha is composited over black. Dropping it would show the colours hidden under transparent
pixels, which encoders are free to change, so one picture saved twice would give two results.
Embedded ICC profiles and gamma are not applied: a camera's values are taken as they are. Notes
that aren't used and what follows the end of a picture (previews, films) are left alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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

Tags: TypeAlias = dict[int, NDArray[Any] | None]
"""The integers of a TIFF directory, or of EXIF data, which is laid out as TIFF, by their tags; None
where they lie beyond the end of the file."""


@dataclass(frozen=True)
class ImageHeader:
    """Facts of a file about its picture.

    Attributes:
        mode: colour kind and bits a sample as stored: "grey8", "rgb16", "palette4", "cmyk8",
            "rgba8", "greyfloat32".
        size: (H0, W0) of the picture once its orientation is applied.
        full_scale: the pixel value that means 1.0.
        decode: gives RGB pixels (H, W, 3) as stored, orientation not applied; raises ImageError.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
    """

    mode: str
    size: tuple[int, int]
    full_scale: float
    decode: Callable[[], Pixels] = field(repr=False)
    orientation: int = 1


class Format(NamedTuple):
    """A kind of picture file.

    Attributes:
        name: in messages.
        suffixes: the ends of such files' names.
        signature: matches the first bytes of such a file.
        read: header of a file's bytes; raises ImageError, without the file's name.
    """

    name: str
    suffixes: tuple[str, ...]
    signature: re.Pattern[bytes]
    read: Callable[[bytes], ImageHeader]


def damaged(what: str) -> ImageError:
    """Error for a file whose content breaks its format's own rules."""
    return ImageError(what, "unreadable")


def unsupported(what: str) -> ImageError:
    """Error for a healthy file of a kind that isn't accepted."""
    return ImageError(what, "unsupported")


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """A stored size (H, W) after orientation: 5 to 8 swap the sides."""
    return (size[1], size[0]) if orientation >= 5 else size


def _by_opencv(file: bytes, size: tuple[int, int]) -> Pixels:
    """Decode a file by OpenCV: (H, W) or (H, W, C) at its own depth, blue first.

    Raises:
        ImageError: `unreadable` where OpenCV finds it damaged, or of another size (H, W).
    """
    try:
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError from None
        pixels = None
    if pixels is None or pixels.shape[:2] != size:
        raise damaged("its pixels are damaged or cut short")
    return pixels


def grey_to_rgb(grey: Pixels) -> Pixels:
    """Repeat grey (H, W) or (H, W, 1) into (H, W, 3)."""
    return np.asarray(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB))


def _to_rgb(pixels: Pixels) -> Pixels:
    """Turn what OpenCV decodes into RGB (H, W, 3), colours in place and alpha over black.

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
    """Composite integer colours (H, W, C) over black by straight alpha (H, W), rounded to nearest.

    Full opacity is the highest value of their type.
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
    """Read the directories of a TIFF in file order, each when it is asked for; they may be a loop.

    Raises:
        ImageError: `unreadable` when there is none, the chain is cut, or this isn't TIFF.
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
                at += 12
                size = length * np.dtype(_INTEGERS.get(kind, "u1")).itemsize
                start = at - 2 if size <= 4 else start  # short enough to lie in the entry itself
                if kind in _INTEGERS and tag not in tags:
                    there, number = start + size <= len(data), order + _INTEGERS[kind]
                    tags[tag] = np.frombuffer(data, number, length, start) if there else None
            yield tags
            at = following
    except struct.error:
        raise damaged("it is cut short: a TIFF directory lies beyond its end") from None


def _orientation(tags: Tags) -> int:
    """EXIF orientation, 1 to 8; 1 where none is given, or no legal one."""
    value = _first(tags, _ORIENTATION, 1)
    return value if 1 <= value <= 8 else 1


def _exif_orientation(exif: bytes) -> int:
    """The same of EXIF data; 1 where it is damaged, as the picture itself may well be whole."""
    with suppress(ImageError):
        for tags in _directories(exif.removeprefix(b"Exif\0\0")):
            return _orientation(tags)
    return 1


# sBIT doesn't change the full scale: encoders scale samples up to the full range, whatever their
# significant bits (PNG specification, 13.12).
_COLOURS = {0: "grey", 2: "rgb", 3: "palette", 4: "greya", 6: "rgba"}
_PICTURE = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")  # chunks that make the pixels


def png(data: bytes) -> ImageHeader:
    """Header of a PNG, whose chunks all have to be whole; libpng checks the pixels' checksum."""
    chunks = _chunks(data)
    header = b"".join(content[8:-4] for content in chunks.get(b"IHDR", []))
    if len(header) != 13:
        raise damaged("its PNG header is missing or malformed")
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", header)
    if not (width and height and colour in _COLOURS):
        raise damaged("its PNG header has illegal values")
    if b"acTL" in chunks:
        raise unsupported("it is an animated PNG; save the frame to inspect as a file of its own")
    orientation = _exif_orientation(bytes(chunks.get(b"eXIf", [b""])[0][8:-4]))

    def decode() -> Pixels:
        parts = [chunk for kind in _PICTURE for chunk in chunks.get(kind, [])]
        pixels = _by_opencv(data[:8] + b"".join(parts), (height, width))
        rgb = _to_rgb(pixels)
        # One colour is declared transparent. OpenCV sees to it, but for greys: it spreads low bits.
        for key in chunks.get(b"tRNS", []) if colour == 0 else []:
            spread = 255 // (2**depth - 1) if depth < 8 else 1
            rgb[pixels == int.from_bytes(key[8:-4], "big") * spread] = 0
        return rgb

    full_scale = 65535.0 if depth == 16 else 255.0
    size = _turned((height, width), orientation)
    return ImageHeader(f"{_COLOURS[colour]}{depth}", size, full_scale, decode, orientation)


def _chunks(data: bytes) -> dict[bytes, list[memoryview]]:
    """Chunks of a PNG by their kind, in file order; raises unless all are whole."""
    chunks: dict[bytes, list[memoryview]] = {}
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
        if kind[0] < 0x60 and kind not in _PICTURE:
            raise unsupported(f"it needs the PNG extension {name}")
        chunks.setdefault(kind, []).append(view[at:end])
        at = end
    return chunks


_EOI, _SOS, _APP1, _APP14, _COMMENT = 0xD9, 0xDA, 0xE1, 0xEE, 0xFE
_METADATA = {*range(_APP1, 0xF0), _COMMENT} - {_APP14}  # says what the colours are
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without content
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_DECODABLE = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, extended, progressive; arithmetic
_PROGRESSIVE = {0xC2, 0xCA}
_COMPONENTS = {1: "grey8", 3: "rgb8", 4: "cmyk8"}
# In entropy-coded data a marker is 0xFF with neither a stuffed zero nor a restart behind it.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_FILL = re.compile(rb"\xff+")
_MOST_SEGMENTS = 10_000


@dataclass
class _Jpeg:
    """The picture of a JPEG, gathered from its segments.

    Attributes:
        frame: marker of the frame's header.
        size: (H, W) as stored.
        precision: bits a sample.
        missing: component -> for each of the 64 coefficients, how many low bits haven't come yet.
        adobe: whether one of Adobe's programs has left its mark.
        exif: metadata.
        bare: the file but for its metadata and what is behind the picture. libjpeg would refuse a
            picture for a damaged colour profile that nobody applies.
    """

    frame: int = 0
    size: tuple[int, int] = (0, 0)
    precision: int = 8
    missing: dict[int, Pixels] = field(default_factory=dict)
    adobe: bool = False
    exif: bytes = b""
    bare: list[memoryview] = field(default_factory=list)

    def take(self, marker: int, content: bytes) -> None:
        """Note what a segment says."""
        if marker in _FRAMES and not self.frame:
            self.frame = marker
            self.precision, height, width, count = struct.unpack_from(">BHHB", content)
            self.size = height, width
            self.missing = {content[6 + 3 * i]: np.full(64, 255, np.uint8) for i in range(count)}
        elif marker == _SOS:
            count = content[0]
            first, last, bits = struct.unpack_from(">BBB", content, 1 + 2 * count)
            for component in content[1 : 1 + 2 * count : 2]:
                if self.frame in _PROGRESSIVE:
                    self.missing[component][first : last + 1] = bits & 15
                else:
                    self.missing[component][:] = 0
        elif marker == _APP14 and content.startswith(b"Adobe"):
            self.adobe = True
        elif marker == _APP1 and content.startswith(b"Exif\0\0") and not self.exif:
            self.exif = content

    def decode(self) -> Pixels:
        """Decode by libjpeg-turbo with its warnings as errors.

        Most decoders fill the missing part of a JPEG that was cut and closed again with grey, and
        only whisper about it. libjpeg does notice that its bits ran out, with one exception: a
        progressive file that lost whole scans is a legal, blurred picture.
        """
        if any(bits.any() for bits in self.missing.values()):
            raise damaged("it is cut short: some scans of the JPEG are missing")
        cmyk = len(self.missing) == 4
        pixels = _by_libjpeg(b"".join(self.bare), "CMYK" if cmyk else "RGB")
        if pixels.shape[:2] != self.size:
            raise damaged("its pixels are damaged or cut short")
        if cmyk:
            # Adobe's programs, the usual source, store light instead of ink and leave their mark.
            light = pixels if self.adobe else 255 - pixels
            return over_black(light[..., :3], light[..., 3])  # R = (1 - C)(1 - K), and so on
        return pixels


def jpeg(data: bytes) -> ImageHeader:
    """Header of a JPEG; of several pictures in one file (MPO, from phones) the first one counts."""
    picture, view = _Jpeg(bare=[memoryview(data)[:2]]), memoryview(data)
    try:
        for marker, start, content, end in _segments(data):
            if marker not in _METADATA:
                picture.bare.append(view[start:end])
            picture.take(marker, data[start + 4 : content])
    except (struct.error, IndexError, KeyError):
        raise damaged("its JPEG headers contradict each other") from None
    if not picture.frame:
        raise damaged("it is cut short: the JPEG header is missing")
    if picture.frame not in _DECODABLE:
        raise unsupported("it is a lossless or hierarchical JPEG; save it as PNG")
    if picture.precision != 8:
        raise unsupported(f"it is a {picture.precision}-bit JPEG; save it as 16-bit PNG or TIFF")
    if (count := len(picture.missing)) not in _COMPONENTS:
        raise unsupported(f"it is a JPEG of {count} channels")
    if not all(picture.size):
        raise unsupported("its JPEG header gives no height or width")
    orientation = _exif_orientation(picture.exif)
    size = _turned(picture.size, orientation)
    return ImageHeader(_COMPONENTS[count], size, 255.0, picture.decode, orientation)


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Marker of each segment, where it starts, and where its content and its pixels end."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if fill := _FILL.match(data, at):
            at = fill.end() - 1
        if at + 4 > len(data):
            break
        if data[at] != 0xFF:
            raise damaged(f"it has no JPEG marker at byte {at}, where one is due")
        marker, start = data[at + 1], at
        if marker == _EOI or marker in _ALONE:
            at += 2
            yield marker, start, start, at
            if marker == _EOI:
                return
            continue
        content = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if not start + 4 <= content <= len(data):
            raise damaged("it is cut short inside a JPEG header")
        following = _MARKER.search(data, content) if marker == _SOS else None
        at = following.start() if following else content if marker != _SOS else len(data)
        yield marker, start, content, at
    else:
        raise damaged(f"its JPEG header has over {_MOST_SEGMENTS} segments")
    yield _EOI, at, at, len(data)


def _by_libjpeg(data: bytes, colours: str, padded: bool = True) -> Pixels:
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, colorspace=colours, strict=True))
    except (ValueError, TypeError, RuntimeError) as error:
        if "subsampling" in str(error):
            raise unsupported("its JPEG chroma subsampling isn't a common one") from None
        if "memory" in str(error).lower():
            raise MemoryError from None
        if padded and "extraneous" in str(error):
            # Some cameras pad with zeros before the end marker to a multiple of some size.
            pixel_data = data[: data.rfind(b"\xff\xd9")].rstrip(b"\0")
            stuffing = b"\0" if pixel_data.endswith(b"\xff") else b""
            return _by_libjpeg(pixel_data + stuffing + b"\xff\xd9", colours, padded=False)
        raise damaged("its JPEG data is cut short or damaged") from None


# BMP has no checksum: of a file that is long enough, only a header that contradicts itself shows.
_HEADERS = (40, 52, 56, 108, 124)  # bytes
_PLAIN, _MASKED = 0, 3  # values of biCompression
_MODES = {1: "palette1", 4: "palette4", 8: "palette8", 24: "rgb8", 32: "rgb8"}
_MASKS = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)  # of red, green and blue in 32 bits
_ALPHA = struct.pack("<I", 0xFF000000)


def bmp(data: bytes) -> ImageHeader:
    """Header of an uncompressed BMP, which must be long enough for its pixels."""
    try:
        pixels_at, header, width, height, _, bits, packing = struct.unpack_from(
            "<IIiiHHI", data, 10
        )
        (colours,) = struct.unpack_from("<I", data, 46)
    except struct.error:
        raise damaged("it is cut short inside the BMP header") from None
    mode = _MODES.get(bits)
    masked = packing == _MASKED and bits == 32 and data[54:66] == _MASKS
    if header not in _HEADERS or mode is None or not (packing == _PLAIN or masked):
        raise unsupported("it is a compressed BMP or one of a rare kind; save it as PNG")
    if width < 1 or not height:
        raise damaged("its BMP header has illegal values")
    palette = 4 * min(colours or 256, 1 << bits) if bits <= 8 else 0
    if pixels_at < 14 + header + palette:
        raise damaged("its BMP header has its pixels start inside the header or the palette")
    there, needed = len(data) - pixels_at, (width * bits + 31) // 32 * 4 * abs(height)
    if there < needed:
        raise damaged(f"it is cut short: {max(there, 0)} of {needed} bytes of pixels are there")
    size = abs(height), width
    if masked and header >= 56 and data[66:70] == _ALPHA:  # else the fourth byte means nothing
        return ImageHeader("rgba8", size, 255.0, lambda: _to_rgb(_by_opencv(data, size)))

    def decode() -> Pixels:
        pixels = _by_opencv(data, size)
        return _to_rgb(pixels if pixels.ndim == 2 else pixels[..., :3].copy())

    return ImageHeader(mode, size, 255.0, decode)


# TIFF's samples are read by this program itself: libraries differ, without a word, over big-endian
# files, reduce 16-bit colour to 8, and fill damaged blocks with black. Only LZW and PackBits are
# left to OpenCV's libtiff, block by block.
_NONE, _LZW, _DEFLATE, _PACK_BITS, _OLD_DEFLATE = 1, 5, 8, 32773, 32946
_PREDICTED = (_LZW, _DEFLATE, _OLD_DEFLATE)  # those that a predictor belongs to
_CHANNELS = {1: 1, 2: 3}  # of grey and RGB, by TIFF's number of them
# By SampleFormat and BitsPerSample, each of which has to be the same for all samples.
_NUMBERS = {((1,), (8,)): "u1", ((1,), (16,)): "u2", ((3,), (32,)): "f4"}
_REDUCED = 1  # bit of NewSubfileType: a thumbnail of another picture in the file
_MOST_PAGES = 20  # looked at
# A byte of 0 that leaves no trace in what follows: in LZW between codes that clear the table.
_ZERO = {_LZW: b"\x80\0\x20\x10\x08\x04\x02\x01\0", _PACK_BITS: b"\0\0"}
_ROW_BYTES = 1024

_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 254, 256, 257, 258, 259, 262
_FILL_ORDER, _SAMPLES, _ROWS_PER_STRIP, _PLANAR, _PREDICTOR = 266, 277, 278, 284, 317
_STRIP_OFFSETS, _STRIP_BYTES, _SAMPLE_FORMAT = 273, 279, 339
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_BYTES = 322, 323, 324, 325


def tiff(data: bytes) -> ImageHeader:
    """Header of a TIFF, whose pixels must all lie inside the file.

    It is grey or RGB of 8 or 16 bits or of floats, in strips or tiles. Floats are taken as 0 to 1:
    `MaxSampleValue` is for statistics only (TIFF 6.0).
    """
    first = islice(_directories(data), _MOST_PAGES)
    pages = [page for page in first if not _first(page, _SUBFILE, 0) & _REDUCED]
    if len(pages) != 1:
        raise unsupported("it is a TIFF of no or several pages; save each page as a file")
    page = pages[0]
    size = height, width = _first(page, _HEIGHT), _first(page, _WIDTH)
    samples = _samples(page, ">" if data[:2] == b"MM" else "<")
    blocks = _blocks(page, size, len(data))
    number, orientation = samples.number, _orientation(page)
    is_float, bits = number.kind == "f", 8 * number.itemsize
    return ImageHeader(
        f"{'grey' if samples.channels == 1 else 'rgb'}{'float' if is_float else ''}{bits}",
        _turned((height, width), orientation),
        1.0 if is_float else 2.0**bits - 1,
        partial(_decode_tiff, memoryview(data), size, samples, blocks),
        orientation,
    )


def _first(page: Tags, tag: int, default: int | None = None) -> int:
    """First value of a tag; without a default, raises where the tag is missing."""
    values = _values(page, tag)
    if len(values):
        return int(values[0])
    if default is None:
        raise damaged(f"its TIFF tag {tag} is missing")
    return default


def _values(page: Tags, tag: int) -> NDArray[Any]:
    """All values of a tag; empty without it."""
    values = page.get(tag, _NOTHING)
    if values is None:
        raise damaged(f"it is cut short: the values of its TIFF tag {tag} are missing")
    return values


class _Samples(NamedTuple):
    """Samples of a TIFF: a pixel's channels, their type and compression, and the predictor.

    With a predictor each is stored as its difference from the one on its left.
    """

    channels: int
    number: np.dtype[Any]
    compression: int
    differences: bool


def _samples(page: Tags, order: str) -> _Samples:
    """The samples of a page; refuses what isn't plain grey or RGB, of all that TIFF may hold."""
    count, compression = _first(page, _SAMPLES, 1), _first(page, _COMPRESSION, _NONE)
    kinds, bits = (
        tuple(set(_values(page, tag).tolist()) or {1}) for tag in (_SAMPLE_FORMAT, _BITS)
    )
    number = _NUMBERS.get((kinds, bits))
    # What stands beside other compressions is left of an earlier one.
    predictor = _first(page, _PREDICTOR, 1) if compression in _PREDICTED else 1
    if (
        number is None
        or count != _CHANNELS.get(_first(page, _PHOTOMETRIC))
        or (count > 1 and _first(page, _PLANAR, 1) != 1)
        or _first(page, _FILL_ORDER, 1) != 1
        or compression not in (_NONE, _PACK_BITS, *_PREDICTED)
        or predictor not in ((1,) if number == "f4" else (1, 2))
    ):
        raise unsupported(
            "it is a TIFF of a rare kind; save it as plain grey or RGB of 8 or 16 bits, with no "
            "compression, LZW, deflate or PackBits, or as PNG"
        )
    return _Samples(count, np.dtype(order + number), compression, predictor == 2)


class _Blocks(NamedTuple):
    """(rows, columns) of a block of pixels; whether blocks are tiles, all of one size, else strips,
    of which the last may be shorter; and where each starts in the file, and its bytes.
    """

    shape: tuple[int, int]
    tiled: bool
    places: list[tuple[int, int]]


def _blocks(page: Tags, size: tuple[int, int], length: int) -> _Blocks:
    """The blocks of a page of (H, W) pixels in a file of so many bytes."""
    height, width = size
    tiled = _first(page, _TILE_WIDTH, 0) > 0
    rows = _first(page, _TILE_HEIGHT if tiled else _ROWS_PER_STRIP, height)
    shape = rows if tiled else min(rows, height), _first(page, _TILE_WIDTH, width)
    if not (width and height and min(shape)):
        raise damaged("its TIFF header has illegal values")
    count = -(-height // shape[0]) * -(-width // shape[1])
    starts = _values(page, _TILE_OFFSETS if tiled else _STRIP_OFFSETS).tolist()
    sizes = _values(page, _TILE_BYTES if tiled else _STRIP_BYTES).tolist()
    if len(starts) != count or len(sizes) != count:
        raise damaged(f"it lists {len(starts)} of {count} blocks of pixels")
    places = list(zip(starts, sizes, strict=True))
    if not all(sizes) or max(start + size for start, size in places) > length:
        raise damaged("it is cut short: a block of its pixels lies beyond its end")
    return _Blocks(shape, tiled, places)


def _decode_tiff(
    view: memoryview, size: tuple[int, int], samples: _Samples, blocks: _Blocks
) -> Pixels:
    count, number, compression, differences = samples
    pixels = np.empty((*size, count), number.newbyteorder("="))
    (rows, columns), across = blocks.shape, -(-size[1] // blocks.shape[1])
    row_bytes = columns * count * number.itemsize
    for i, (start, length) in enumerate(blocks.places):
        y, x = i // across * rows, i % across * columns
        block = pixels[y : y + rows, x : x + columns]
        # The last strip is often shorter; tiles aren't. Some programs fill up the last strip.
        expected = (rows if blocks.tiled else len(block)) * row_bytes
        content = view[start : start + length]
        if compression in _ZERO:
            content = _by_libtiff(content, compression, expected)
        elif compression != _NONE:
            content = memoryview(_inflated(content, rows * row_bytes))
        if len(content) < expected:
            raise damaged(f"a block of its pixels ends after {len(content)} of {expected} bytes")
        values = np.frombuffer(content[:expected], number).reshape(-1, columns, count)
        block[...] = values[: len(block), : block.shape[1]]
        if differences:  # modulo the range of their type
            np.cumsum(block, axis=1, dtype=block.dtype, out=block)
    return grey_to_rgb(pixels) if count == 1 else pixels


def _inflated(stream: memoryview, most: int) -> bytes:
    """The content of a zlib stream, which has to end, with its checksum, within `most` bytes."""
    inflater = isal_zlib.decompressobj()
    try:
        content = inflater.decompress(stream, most + 1)
    except isal_zlib.error:  # type: ignore[misc]  # the stub has an instance, not a class
        raise damaged("its pixel data is damaged") from None
    if len(content) > most:
        raise damaged(f"its pixel data is longer than the {most} bytes that it should have")
    if not inflater.eof:
        raise damaged(f"its pixel data ends after {len(content)} of {most} bytes")
    return content


def _by_libtiff(block: memoryview, compression: int, expected: int) -> memoryview:
    """Undo LZW or PackBits by OpenCV, as the only strip of a grey picture (TIFF 6.0, section 2).

    OpenCV reports damage in 16-bit pictures but ignores it in 8-bit ones. So the picture has 16
    bits, and zeros in front fill its rows.
    """
    rows = -(-expected // _ROW_BYTES)
    zeros = rows * _ROW_BYTES - expected
    strip = _ZERO[compression] * zeros + block
    tags = {
        _WIDTH: _ROW_BYTES // 2,
        _HEIGHT: rows,
        _BITS: 16,
        _COMPRESSION: compression,
        _PHOTOMETRIC: 1,
        _STRIP_OFFSETS: 8 + 2 + 12 * 7 + 4,  # header, number of tags, 7 tags, no next page
        _STRIP_BYTES: len(strip),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    pixels = _by_opencv(header + directory + bytes(4) + strip, (rows, _ROW_BYTES // 2))
    return pixels.reshape(-1).view(np.uint8).data[zeros:]


def webp(data: bytes) -> ImageHeader:
    """Header of a still WebP, which must be as long as it says it is (RFC 9649)."""
    end, at, chunks = 8 + int.from_bytes(data[4:8], "little"), 12, dict[bytes, slice]()
    if end > len(data):
        raise damaged(f"it is cut short: {len(data)} of {end} bytes are there")
    while at < end:
        content = slice(at + 8, at + 8 + int.from_bytes(data[at + 4 : at + 8], "little"))
        if content.stop > end:
            raise damaged("it is cut short inside a WebP chunk")
        chunks.setdefault(data[at : at + 4], content)
        at = content.stop + content.stop % 2
    if b"ANIM" in chunks:
        raise unsupported("it is an animated WebP; save the frame to inspect as a file of its own")
    size, alpha, end = _webp_picture(data, chunks)
    if extended := data[chunks.get(b"VP8X", slice(0))]:
        # A lossless picture has its alpha inside, and may be promised one that it doesn't need.
        promised = extended[0] & 0x10 and not (b"VP8L" in chunks and not alpha)
        if bool(promised) != alpha or (extended[0] & 0x08 and b"EXIF" not in chunks):
            raise damaged("its WebP header and its alpha or EXIF data contradict each other")
    orientation = _exif_orientation(data[chunks.get(b"EXIF", slice(0))])

    def decode() -> Pixels:
        # A file that ends with the picture: libwebp would read on into what follows.
        body = data[8:end] + bytes(end % 2)
        return _to_rgb(_by_opencv(b"RIFF" + struct.pack("<I", len(body)) + body, size))

    mode = "rgba8" if alpha else "rgb8"
    return ImageHeader(mode, _turned(size, orientation), 255.0, decode, orientation)


def _webp_picture(data: bytes, chunks: dict[bytes, slice]) -> tuple[tuple[int, int], bool, int]:
    """Size (H, W) of the picture itself, whether it has alpha, and where it ends."""
    with suppress(struct.error):
        if lossy := chunks.get(b"VP8 "):
            width, height = struct.unpack_from("<HH", data, lossy.start + 6)
            alpha = chunks.get(b"ALPH", lossy).start < lossy.start
            return (height & 0x3FFF, width & 0x3FFF), alpha, lossy.stop
        if lossless := chunks.get(b"VP8L"):
            (bits,) = struct.unpack_from("<I", data, lossless.start + 1)
            size = (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
            return size, bool(bits >> 28 & 1), lossless.stop
    raise damaged("it holds no WebP picture")


JPEG = Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), re.compile(rb"\xff\xd8\xff"), jpeg)
FORMATS = (
    Format("PNG", (".png",), re.compile(rb"\x89PNG\r\n\x1a\n"), png),
    JPEG,
    Format("BMP", (".bmp", ".dib"), re.compile(rb"BM"), bmp),
    Format("TIFF", (".tif", ".tiff"), re.compile(rb"II\*\0|MM\0\*"), tiff),
    Format("WebP", (".webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL), webp),
)
