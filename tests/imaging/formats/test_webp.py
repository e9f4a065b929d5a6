"""WebP: metadata around the picture, and damage to it, never changes the pixels."""

import struct

import numpy as np
import pytest
from picture_files import encoded, picture, refused
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.formats import webp


def decode(data):
    return webp(data).decode()


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
    notes = {"exif": exif, "icc_profile": bytes(range(200)), "xmp": b"<x/>" * 40}
    return encoded(pixels, "WEBP", lossless="lossless" in request.param, quality=90, **notes)


def test_a_flipped_bit_outside_the_picture_never_changes_the_pixels(whole):
    expected = decode(whole)
    chunks = chunks_of(whole)
    contents = {i: kind for kind, at, length in chunks for i in range(at, at + length)}
    outside = [i for i in range(len(whole)) if contents.get(i) not in (b"ALPH", b"VP8 ", b"VP8L")]
    refused = 0
    for i in outside:
        for bit in range(8) if contents.get(i) in (None, b"VP8X", b"EXIF") else (i % 8,):
            flipped = bytearray(whole)
            flipped[i] ^= 1 << bit
            try:
                orientation = webp(bytes(flipped)).orientation
                pixels = decode(bytes(flipped))
            except ImageError:
                refused += 1
                continue
            np.testing.assert_array_equal(pixels, expected)
            # EXIF has no checksum, and its length may be such that what is left makes a chunk.
            assert orientation == 6 or b"EXIF" in (contents.get(i), contents.get(i + 4))
    assert refused > 100


def test_a_picture_that_is_cut_isnt_read_on_into_what_follows(whole):
    parts = [(kind, whole[at : at + length]) for kind, at, length in chunks_of(whole)]
    i = next(i for i, (kind, _) in enumerate(parts) if kind in (b"VP8 ", b"VP8L"))
    kind, content = parts[i]
    for cut in range(12, len(content) - 1, 29):
        for behind in ([], parts[i + 1 :], [(b"EXIF", content[cut:])]):
            damaged = file(*parts[:i], (kind, content[:cut]), *behind)
            assert refused(damaged).status == "unreadable"


@pytest.mark.parametrize(
    ("flags", "sides"), [(0x08, (53, 37)), (0x10, (53, 37)), (0, (54, 37)), (0, (2**24, 37))]
)
def test_headers_that_promise_what_isnt_there(flags, sides):
    data = encoded(picture(), "WEBP", quality=90)
    ((kind, at, length),) = chunks_of(data)
    extended = bytes([flags, 0, 0, 0]) + b"".join((n - 1).to_bytes(3, "little") for n in sides)
    error = refused(file((b"VP8X", extended), (kind, data[at : at + length])))
    assert error.status == "unreadable"
