"""JPEG: decoded by libjpeg-turbo with its warnings as errors.

Most decoders fill the missing part of a JPEG that was cut and closed again with grey, and only
whisper about it. libjpeg does notice that its bits ran out, with one exception: a progressive
file that lost whole scans is a legal, blurred picture. So the scans are counted here.

libjpeg is handed the picture alone, without metadata: it would refuse a picture for a damaged
colour profile that nobody applies. Of several pictures in one file (MPO, from phones) the first
is the one that was taken; what is behind its end is left alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import simplejpeg  # type: ignore[import-untyped]

from anomaly.imaging.formats.base import (
    ImageHeader,
    Pixels,
    damaged,
    exif_orientation,
    over_black,
    unsupported,
    upright,
)

NAME = "JPEG"
SUFFIXES: tuple[str, ...] = (".jpg", ".jpeg", ".jpe", ".jfif")
SIGNATURE = re.compile(rb"\xff\xd8\xff")

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
_MOST_SCANS = 100  # each goes over the whole picture; encoders make about ten


@dataclass
class _Segments:
    """What the segments of one file say."""

    frame: int = 0
    size: tuple[int, int] = (0, 0)
    precision: int = 8
    components: tuple[int, ...] = ()
    adobe: bool = False
    exif: bytes = b""
    scans: int = 0
    metadata: list[tuple[int, int]] = field(default_factory=list)  # where it starts and ends
    end: int = 0  # of the picture in the file
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
    orientation = exif_orientation(segments.exif)
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
    pixels = _decode_strictly(_bare(data, segments), colours)
    if pixels.shape[:2] != segments.size:
        raise damaged("its pixels can't be decoded")
    if cmyk:
        # Adobe's programs, the usual source, store light instead of ink and leave their mark.
        light = pixels if segments.adobe else 255 - pixels
        return over_black(light[..., :3], light[..., 3])  # R = (1 - C)(1 - K), and so on
    return pixels


def _decode_strictly(data: bytes, colours: str, padded: bool = True) -> Pixels:
    try:
        return np.asarray(simplejpeg.decode_jpeg(data, colorspace=colours, strict=True))
    except (ValueError, TypeError, RuntimeError) as error:
        if "subsampling" in str(error):
            raise unsupported("its JPEG chroma subsampling isn't a common one") from None
        if "memory" in str(error).lower():
            raise MemoryError from None
        if padded and "extraneous" in str(error):
            return _decode_strictly(_without_padding(data), colours, padded=False)
        raise damaged("its JPEG data is cut short or damaged") from None


def _bare(data: bytes, segments: _Segments) -> bytes:
    """The picture without its metadata and what is behind it."""
    starts = [0, *(end for _, end in segments.metadata)]
    ends = [*(start for start, _ in segments.metadata), segments.end]
    view = memoryview(data)
    return b"".join(view[start:end] for start, end in zip(starts, ends, strict=True))


def _without_padding(data: bytes) -> bytes:
    """Drop zeros before the end marker, which some cameras pad with to a multiple of some size."""
    pixel_data = data[: data.rfind(b"\xff\xd9")].rstrip(b"\0")
    stuffing = b"\0" if pixel_data.endswith(b"\xff") else b""
    return pixel_data + stuffing + b"\xff\xd9"


def _read(data: bytes) -> _Segments:
    segments = _Segments()
    for marker, start, end in _walk(data):
        segments.end = end
        if marker in _METADATA:
            segments.metadata.append((start, end))
        try:
            _note(segments, marker, data[start + 4 : end])
        except (struct.error, IndexError, KeyError):
            raise damaged("its JPEG headers contradict each other") from None
    if not segments.frame:
        raise damaged("it is cut short: the JPEG header is missing")
    return segments


def _walk(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment, and lastly the end of the picture."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if fill := _FILL.match(data, at):
            at = fill.end() - 1
        if at + 4 > len(data):
            break
        if data[at] != 0xFF:
            raise damaged(f"it has no JPEG marker at byte {at}, where one is due")
        marker = data[at + 1]
        if marker == _EOI:
            yield marker, at, at + 2
            return
        if marker in _ALONE:
            at += 2
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if not at + 4 <= end <= len(data):
            raise damaged("it is cut short inside a JPEG header")
        yield marker, at, end
        at = end
        if marker == _SOS:
            following = _MARKER.search(data, end)
            if following is None:
                break
            at = following.start()
    else:
        raise damaged(f"its JPEG header has over {_MOST_SEGMENTS} segments")
    yield _EOI, len(data), len(data)


def _note(segments: _Segments, marker: int, content: bytes) -> None:
    if marker in _FRAMES and not segments.frame:
        segments.frame = marker
        segments.precision, height, width, count = struct.unpack_from(">BHHB", content)
        segments.size = (height, width)
        segments.components = tuple(content[6 + 3 * i] for i in range(count))
        segments.missing_bits = {c: np.full(64, 255, np.uint8) for c in segments.components}
    elif marker == _SOS:
        _note_scan(segments, content)
    elif marker == _APP14 and content.startswith(b"Adobe"):
        segments.adobe = True
    elif marker == _APP1 and content.startswith(b"Exif\0\0") and not segments.exif:
        segments.exif = content


def _note_scan(segments: _Segments, content: bytes) -> None:
    segments.scans += 1
    if segments.scans > _MOST_SCANS:
        raise unsupported(f"it is a JPEG of over {_MOST_SCANS} scans; save it as PNG")
    count = content[0]
    first, last, bits = struct.unpack_from(">BBB", content, 1 + 2 * count)
    for component in content[1 : 1 + 2 * count : 2]:
        if segments.frame in _PROGRESSIVE:
            segments.missing_bits[component][first : last + 1] = bits & 15
        else:
            segments.missing_bits[component][:] = 0
