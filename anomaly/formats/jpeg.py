"""JPEG: decoded by libjpeg-turbo with its warnings as errors.

Most decoders fill the missing part of a JPEG that was cut and closed again with grey, and only
whisper about it. libjpeg does notice that its bits ran out, with one exception: a progressive
file that lost whole scans is a legal, blurred picture. So the scans are counted here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import simplejpeg  # type: ignore[import-untyped]

from anomaly.errors import ImageError
from anomaly.formats import exif
from anomaly.formats.colour import cmyk_to_rgb
from anomaly.formats.header import ImageHeader, Pixels, damaged, unsupported, upright
from anomaly.formats.tiff_directory import PICTURES_LISTED, read_directories

_EOI, _SOS, _APP1, _APP2, _APP14 = 0xD9, 0xDA, 0xE1, 0xE2, 0xEE
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without content
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_DECODABLE = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, extended, progressive; arithmetic
_PROGRESSIVE = {0xC2, 0xCA}
_COMPONENTS = {1: "grey8", 3: "rgb8", 4: "cmyk8"}
# In entropy-coded data a marker is 0xFF with neither a stuffed zero nor a restart behind it.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


@dataclass
class _Segments:
    """What the segments of one file say."""

    frame: int = 0
    size: tuple[int, int] = (0, 0)
    precision: int = 8
    components: tuple[int, ...] = ()
    adobe: bool = False
    exif: bytes = b""
    pictures: int = 1
    # component -> for each of the 64 coefficients, how many low bits haven't come yet
    missing_bits: dict[int, Pixels] = field(default_factory=dict)


def read_header(data: bytes) -> ImageHeader:
    """Read the header without decoding."""
    segments = _read(data)
    if segments.frame not in _DECODABLE:
        raise unsupported("it is a lossless or hierarchical JPEG; save it as PNG")
    if segments.precision != 8:
        raise unsupported(f"it is a {segments.precision}-bit JPEG; save it as 16-bit PNG or TIFF")
    if len(segments.components) not in _COMPONENTS:
        raise unsupported(f"it is a JPEG of {len(segments.components)} channels")
    if not all(segments.size):
        raise unsupported("its JPEG header gives no height or width")
    if segments.pictures > 1:
        raise unsupported(f"it holds {segments.pictures} pictures (MPO); save one as plain JPEG")
    orientation = exif.orientation(segments.exif)
    return ImageHeader(
        format="jpeg",
        mode=_COMPONENTS[len(segments.components)],
        size=upright(segments.size, orientation),
        full_scale=255.0,
        orientation=orientation,
    )


def decode(data: bytes) -> Pixels:
    """Decode into RGB (H, W, 3) as stored, orientation not applied."""
    segments = _read(data)
    if any(bits.any() for bits in segments.missing_bits.values()):
        raise damaged("it is cut short: some scans of the JPEG are missing")
    cmyk = len(segments.components) == 4
    colours = "CMYK" if cmyk else "RGB"
    try:
        pixels = _decode_strictly(data, colours)
    except ImageError as error:
        if "extraneous" not in str(error):
            raise
        pixels = _decode_strictly(_without_padding(data), colours)
    if pixels.shape[:2] != segments.size:
        raise damaged("its pixels can't be decoded")
    if cmyk:
        # Adobe's programs, the usual source, store light instead of ink and leave their mark.
        return cmyk_to_rgb(255 - pixels if segments.adobe else pixels, 255)
    return pixels


def _decode_strictly(data: bytes, colours: str) -> Pixels:
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, colorspace=colours, strict=True))
    except (ValueError, TypeError, RuntimeError) as error:
        if "subsampling" in str(error):
            raise unsupported("its JPEG chroma subsampling isn't a common one") from None
        raise damaged(f"its JPEG data is cut short or damaged ({error})") from None


def _without_padding(data: bytes) -> bytes:
    """Drop zeros before the end marker, which some cameras pad with to a multiple of some size."""
    pixel_data = data[: data.rfind(b"\xff\xd9")].rstrip(b"\0")
    stuffing = b"\0" if pixel_data.endswith(b"\xff") else b""
    return pixel_data + stuffing + b"\xff\xd9"


def _read(data: bytes) -> _Segments:
    found = _Segments()
    for marker, content in _walk(data):
        try:
            _note(found, marker, content)
        except (struct.error, IndexError, KeyError):
            raise damaged("its JPEG headers contradict each other") from None
    if not found.frame:
        raise damaged("it is cut short: the JPEG header is missing")
    return found


def _walk(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield marker and content of each segment, up to the end marker or the end of the data."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise damaged(f"it has no JPEG marker at byte {at}, where one is due")
        marker = data[at + 1]
        if marker == _EOI:
            return
        if marker == 0xFF or marker in _ALONE:  # fill byte, or a marker without content
            at += 1 if marker == 0xFF else 2
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end > len(data):
            raise damaged("it is cut short inside a JPEG header")
        yield marker, data[at + 4 : end]
        if marker == _SOS:
            following = _MARKER.search(data, end)
            if following is None:
                return
            end = following.start()
        at = end


def _note(found: _Segments, marker: int, content: bytes) -> None:
    if marker in _FRAMES and not found.frame:
        found.frame = marker
        found.precision, height, width, count = struct.unpack_from(">BHHB", content)
        found.size = (height, width)
        found.components = tuple(content[6 + 3 * i] for i in range(count))
        found.missing_bits = {c: np.full(64, 255, np.uint8) for c in found.components}
    elif marker == _SOS:
        _note_scan(found, content)
    elif marker == _APP14 and content.startswith(b"Adobe"):
        found.adobe = True
    elif marker == _APP1 and content.startswith(b"Exif\0\0") and not found.exif:
        found.exif = content
    elif marker == _APP2 and content.startswith(b"MPF\0"):
        found.pictures = _pictures_listed(content[4:])


def _note_scan(found: _Segments, content: bytes) -> None:
    count = content[0]
    first, last, bits = struct.unpack_from(">BBB", content, 1 + 2 * count)
    for component in content[1 : 1 + 2 * count : 2]:
        if found.frame in _PROGRESSIVE:
            found.missing_bits[component][first : last + 1] = bits & 15
        else:
            found.missing_bits[component][:] = 0


def _pictures_listed(index: bytes) -> int:
    try:
        return next(iter(next(read_directories(index)).get(PICTURES_LISTED, ())), 1)
    except ImageError:
        return 1
