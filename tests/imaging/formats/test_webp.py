"""WebP: metadata around the picture, and damage to it, never changes the pixels."""

import struct

import numpy as np
import pytest
from picture_files import encoded, picture
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.formats import webp


def chunks_of(data):
    """(type, where its content starts, length) of each chunk."""
    found, at = [], 12
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        found.append((kind, at + 8, length))
        at += 8 + length + length % 2
    return found


def file(*chunks):
    body = b"WEBP"
    for kind, content in chunks:
        body += kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.fixture(scope="module", params=["lossless", "lossy", "lossy alpha", "lossless alpha"])
def whole(request):
    """A file with EXIF, a colour profile and XMP around its picture."""
    pixels = picture()
    if "alpha" in request.param:
        alpha = np.tile(np.arange(pixels.shape[1], dtype=np.uint8) * 4, (len(pixels), 1))
        pixels = np.dstack([pixels, alpha])
    exif = Pil.Exif()
    exif[0x0112] = 6
    return encoded(
        pixels,
        "WEBP",
        lossless="lossless" in request.param,
        quality=90,
        exif=exif,
        icc_profile=bytes(range(200)),
        xmp=b"<x/>" * 40,
    )


def test_metadata_doesnt_change_the_pixels(whole):
    parts = {kind: whole[at : at + length] for kind, at, length in chunks_of(whole)}
    wanted = [kind for kind in (b"VP8X", b"ALPH", b"VP8 ", b"VP8L") if kind in parts]
    extended = bytearray(parts[b"VP8X"])
    extended[0] &= 0x10
    bare = file(*((kind, bytes(extended) if kind == b"VP8X" else parts[kind]) for kind in wanted))
    np.testing.assert_array_equal(webp.decode(whole), webp.decode(bare))


def test_a_flipped_bit_outside_the_picture_never_changes_the_pixels(whole):
    expected = webp.decode(whole)
    chunks = chunks_of(whole)
    contents = {i: kind for kind, at, length in chunks for i in range(at, at + length)}
    outside = [i for i in range(len(whole)) if contents.get(i) not in (b"ALPH", b"VP8 ", b"VP8L")]
    refused = 0
    for i in outside:
        for bit in range(8) if contents.get(i) in (None, b"VP8X", b"EXIF") else (i % 8,):
            flipped = bytearray(whole)
            flipped[i] ^= 1 << bit
            try:
                orientation = webp.read_header(bytes(flipped)).orientation
                pixels = webp.decode(bytes(flipped))
            except ImageError:
                refused += 1
                continue
            np.testing.assert_array_equal(pixels, expected)
            # EXIF has no checksum, and its length may be such that what is left makes a chunk.
            assert orientation == 6 or b"EXIF" in (contents.get(i), contents.get(i + 4))
    assert refused > 100


def test_a_picture_that_is_cut_isnt_read_on_into_what_follows():
    for options in ({"lossless": True}, {"quality": 90}):
        data = encoded(picture(), "WEBP", **options)
        ((kind, at, length),) = chunks_of(data)
        canvas = b"".join((side - 1).to_bytes(3, "little") for side in picture().shape[1::-1])
        for cut in range(12, length - 1, 29):
            rest = data[at + cut : at + length]
            behind = file(
                (b"VP8X", b"\x08\0\0\0" + canvas), (kind, data[at : at + cut]), (b"EXIF", rest)
            )
            webp.read_header(behind)
            with pytest.raises(ImageError) as caught:
                webp.decode(behind)
            assert caught.value.status == "unreadable"


@pytest.mark.parametrize(
    ("flags", "sides", "what"),
    [(0x08, (53, 37), "EXIF"), (0x10, (53, 37), "alpha"), (0, (54, 37), "contradict")],
)
def test_headers_that_promise_what_isnt_there(flags, sides, what):
    data = encoded(picture(), "WEBP", quality=90)
    ((kind, at, length),) = chunks_of(data)
    extended = bytes([flags, 0, 0, 0]) + b"".join((n - 1).to_bytes(3, "little") for n in sides)
    with pytest.raises(ImageError, match=what) as caught:
        webp.read_header(file((b"VP8X", extended), (kind, data[at : at + length])))
    assert caught.value.status == "unreadable"


def test_a_picture_without_width_is_damage():
    data = bytearray(encoded(picture(), "WEBP", quality=90))
    ((_, at, _),) = chunks_of(data)
    data[at + 6 : at + 8] = b"\0\0"
    with pytest.raises(ImageError, match="no WebP picture"):
        webp.read_header(bytes(data))
