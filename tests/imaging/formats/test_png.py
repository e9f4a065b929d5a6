"""PNG of every kind against Pillow and known samples, and what only a checking decoder notices."""

import struct
import zlib

import numpy as np
import pytest
from picture_files import chunk, decode, png, refused

from anomaly.imaging.read import read_image


def file(width, height, depth, colour, rows, *before, **options):
    return png(width, height, depth, colour, [zlib.compress(rows)], *before, **options)


def packed(values, depth):
    """Filter-free rows of integer samples (H, W, C)."""
    rows = values.reshape(len(values), -1)
    if depth == 16:
        rows = rows.astype(">u2").view(np.uint8)
    elif depth < 8:
        bits = np.unpackbits(rows.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
        rows = np.packbits(bits.reshape(len(rows), -1), axis=1)
    return np.insert(rows.astype(np.uint8), 0, 0, axis=1).tobytes()


def samples(height, width, depth, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 2**depth, (height, width, channels))


def test_rows_that_are_missing_are_damage():
    """Also where a picture comes in passes, which a decoder may show half filled."""
    rows = packed(samples(17, 33, 8, 3), 8)
    decode(file(33, 17, 8, 2, rows))
    for cut in (1, 99, 100, len(rows) - 1):
        for interlace in (0, 1):
            refused(file(33, 17, 8, 2, rows[:-cut], interlace=interlace))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_with_and_without_transparency(depth):
    values = samples(9, 21, depth, 1)
    colours = samples(1, 2**depth, 8, 3, seed=1)[0].astype(np.uint8)
    palette = chunk(b"PLTE", colours.tobytes())
    data = file(21, 9, depth, 3, packed(values, depth), palette)
    assert read_image(data).mode == f"palette{depth}"
    np.testing.assert_array_equal(decode(data), colours[values[..., 0]])
    clear = file(21, 9, depth, 3, packed(values, depth), palette, chunk(b"tRNS", b"\0\x80"))
    alpha = np.r_[0, 128, [255] * (2**depth - 2)][:, None]
    np.testing.assert_array_equal(decode(clear), np.rint(colours * (alpha / 255.0))[values[..., 0]])
    refused(file(21, 9, depth, 3, packed(values, depth)))


@pytest.mark.parametrize("depth", [8, 16])
def test_the_colour_declared_transparent_becomes_black(depth):
    values = samples(16, 16, depth, 3)
    values[values == 0] = 1
    key = values[5, 7]
    transparency = chunk(b"tRNS", key.astype(">u2").tobytes())
    decoded = decode(file(16, 16, depth, 2, packed(values, depth), transparency))
    assert ((decoded == 0).all(axis=2) == (values == key).all(axis=2)).all()


def test_what_cannot_change_the_picture_is_left_alone():
    values = samples(4, 4, 16, 3)
    notes = [chunk(b"sBIT", b"\x0c" * 3), chunk(b"iCCP", b"x\0\0" + zlib.compress(b"no profile"))]
    data = png(4, 4, 16, 2, [zlib.compress(packed(values, 16)) + b"more"], *notes) + b"a film"
    assert read_image(data).full_scale == 65535
    np.testing.assert_array_equal(decode(data), values)
    assert "tEXt" in str(refused(data[:33] + chunk(b"tEXt", b"a\0b")[:-1] + b"?" + data[33:]))


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ((0, 4, 8, 2, 0, 0, 0), "illegal"),
        ((4, 4, 8, 5, 0, 0, 0), "illegal"),
        ((4, 4, 16, 3, 0, 0, 0), "damaged"),
        ((4, 4, 7, 0, 0, 0, 0), "damaged"),
        ((4, 4, 8, 2, 1, 0, 0), "damaged"),
        ((4, 4, 8, 2, 0, 0, 2), "damaged"),
        ((4, 5, 8, 2, 0, 0, 0), "damaged or cut short"),
    ],
)
def test_headers_that_cant_be_true(header, what):
    data = file(4, 4, 8, 2, packed(samples(4, 4, 8, 3), 8))
    error = refused(data[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", *header)) + data[33:])
    assert error.status == "unreadable"
    assert what in str(error)


def test_damage_inside_whole_chunks_is_noticed():
    rows = packed(samples(4, 4, 8, 3), 8)
    whole = file(4, 4, 8, 2, rows)
    head, end = whole[:33], whole[-12:]
    stream = zlib.compress(rows)
    half = len(stream) // 2
    parts = [chunk(b"IDAT", stream[:half]), chunk(b"IDAT", stream[half:])]
    decode(head + b"".join(parts) + end)
    wrong = [[], parts[:1], parts[::-1], [chunk(b"IDAT", stream[:-1] + b"?")]]
    wrong.append([chunk(b"IDAT", zlib.compress(b"\5" + rows[1:]))])  # no such row filter
    for pieces in wrong:
        assert refused(head + b"".join(pieces) + end).status == "unreadable"
    assert refused(whole[:8] + whole[33:]).status == "unreadable"


def test_what_is_refused_in_words():
    values = packed(samples(4, 4, 8, 3), 8)
    for colour, before, what in (
        (2, chunk(b"acTL", struct.pack(">II", 2, 0)), "animated PNG; save the frame"),
        (0, chunk(b"tRNS", bytes(2)), "transparent value; save it without"),
    ):
        error = refused(file(4, 4, 8, colour, values, before))
        assert (error.status, what in str(error)) == ("unsupported", True)
