"""PNG against another decoder, and what only a checking decoder notices."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.formats import png

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
_PASSES.append((0, 1, 1, 2))


def chunk(kind, content):
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def file(width, height, depth, colour, rows, *before, interlace=0, after=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    chunks = [chunk(b"IHDR", header), *before, chunk(b"IDAT", zlib.compress(rows) + after)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def packed(values, depth):
    """Filter-free rows of integer samples (H, W, C)."""
    rows = values.reshape(len(values), -1)
    if depth == 16:
        rows = rows.astype(">u2").view(np.uint8)
    elif depth < 8:
        bits = np.unpackbits(rows.astype(np.uint8)[..., None], axis=-1)[..., 8 - depth :]
        rows = np.packbits(bits.reshape(len(rows), -1), axis=1)
    return np.insert(rows.astype(np.uint8), 0, 0, axis=1).tobytes()


def interlaced(values, depth):
    passes = (values[y::dy, x::dx] for x, y, dx, dy in _PASSES)
    return b"".join(packed(part, depth) for part in passes if part.size)


def samples(height, width, depth, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 2**depth, (height, width, channels))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(0, 8), (2, 8), (4, 8), (6, 8), (0, 1), (0, 2), (0, 4)]),
    st.integers(0, 2**32),
)
def test_every_row_filter_is_undone_as_pillow_does(width, height, kind, seed):
    colour, depth = kind
    row_bytes = (width * depth * _CHANNELS[colour] + 7) // 8
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (height, row_bytes + 1)).astype(np.uint8)
    rows[:, 0] %= 5
    data = file(width, height, depth, colour, rows.tobytes())
    reference = np.asarray(Pil.open(io.BytesIO(data)).convert("RGBA")).astype(float)
    expected = np.rint(reference[..., :3] * (reference[..., 3:] / 255))
    np.testing.assert_array_equal(png.decode(data), expected)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (8, 8), (17, 33), (2, 40)])
@pytest.mark.parametrize(("colour", "depth"), [(0, 1), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16)])
def test_interlaced_is_the_same_picture(height, width, colour, depth):
    values = samples(height, width, depth, _CHANNELS[colour])
    plain = file(width, height, depth, colour, packed(values, depth))
    woven = file(width, height, depth, colour, interlaced(values, depth), interlace=1)
    expected = values * (255 // (2**depth - 1) if depth < 8 else 1)
    for data in (plain, woven):
        np.testing.assert_array_equal(
            png.decode(data), np.broadcast_to(expected, (height, width, 3))
        )


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_with_and_without_transparency(depth):
    values = samples(9, 21, depth, 1)
    colours = samples(1, 2**depth, 8, 3, seed=1)[0].astype(np.uint8)
    palette = chunk(b"PLTE", colours.tobytes())
    data = file(21, 9, depth, 3, packed(values, depth), palette)
    assert png.read_header(data).mode == f"palette{depth}"
    np.testing.assert_array_equal(png.decode(data), colours[values[..., 0]])
    clear = file(21, 9, depth, 3, packed(values, depth), palette, chunk(b"tRNS", b"\0\x80"))
    alpha = np.r_[0, 128, [255] * (2**depth - 2)][:, None]
    np.testing.assert_array_equal(
        png.decode(clear), np.rint(colours * (alpha / 255.0))[values[..., 0]]
    )


@pytest.mark.parametrize("count", [257, 300])
def test_a_palette_that_is_too_long_is_damage(count):
    palette = chunk(b"PLTE", bytes(3 * count))
    data = file(4, 4, 8, 3, packed(np.full((4, 4, 1), 5), 8), palette)
    with pytest.raises(ImageError, match=f"palette of {count} colours") as found:
        png.decode(data)
    assert found.value.status == "unreadable"


def test_a_colour_beyond_the_palette_is_damage():
    palette = chunk(b"PLTE", bytes(3 * 5))
    data = file(4, 4, 8, 3, packed(np.full((4, 4, 1), 5), 8), palette)
    with pytest.raises(ImageError, match="palette of 5"):
        png.decode(data)
    with pytest.raises(ImageError, match="palette is missing"):
        png.decode(file(4, 4, 8, 3, packed(np.zeros((4, 4, 1)), 8)))


@pytest.mark.parametrize(("colour", "depth"), [(0, 2), (0, 8), (0, 16), (2, 8), (2, 16)])
def test_the_colour_declared_transparent_becomes_black(colour, depth):
    values = samples(16, 16, depth, _CHANNELS[colour])
    values[values == 0] = 1
    key = values[5, 7]
    transparency = chunk(b"tRNS", key.astype(">u2").tobytes())
    decoded = png.decode(file(16, 16, depth, colour, packed(values, depth), transparency))
    assert ((decoded == 0).all(axis=2) == (values == key).all(axis=2)).all()


def test_significant_bits_dont_change_the_scale():
    values = samples(4, 4, 16, 1)
    data = file(4, 4, 16, 0, packed(values, 16), chunk(b"sBIT", b"\x0c"))
    assert png.read_header(data).full_scale == 65535


def test_bytes_behind_the_end_dont_matter():
    values = samples(4, 4, 8, 3)
    data = file(4, 4, 8, 2, packed(values, 8), after=b"more") + b"trailing"
    np.testing.assert_array_equal(png.decode(data), values)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ((0, 4, 8, 2, 0, 0, 0), "illegal"),
        ((4, 4, 16, 3, 0, 0, 0), "illegal"),
        ((4, 4, 7, 0, 0, 0, 0), "illegal"),
        ((4, 4, 8, 2, 1, 0, 0), "illegal"),
        ((4, 4, 8, 2, 0, 0, 2), "illegal"),
        ((4, 5, 8, 2, 0, 0, 0), "ends after"),
        ((4, 3, 8, 2, 0, 0, 0), "longer than"),
    ],
)
def test_headers_that_cant_be_true(header, what):
    data = file(4, 4, 8, 2, packed(samples(4, 4, 8, 3), 8))
    lying = data[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", *header)) + data[33:]
    with pytest.raises(ImageError, match=what):
        png.decode(lying)


def test_damage_that_libpng_would_print_about_stays_quiet(capfd):
    whole = file(4, 4, 8, 2, packed(samples(4, 4, 8, 3), 8))
    odd_profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(b"not a profile"))
    with pytest.raises(ImageError):
        png.decode(whole.replace(b"IDAT", b"ID@T"))
    png.decode(whole[:33] + odd_profile + whole[33:])
    assert capfd.readouterr() == ("", "")


def test_a_row_filter_that_doesnt_exist_is_damage():
    rows = bytearray(packed(samples(4, 4, 8, 3), 8))
    rows[0] = 5
    with pytest.raises(ImageError) as found:
        png.decode(file(4, 4, 8, 2, bytes(rows)))
    assert found.value.status == "unreadable"


def test_checksums_of_metadata_count_too():
    whole = file(4, 4, 8, 2, packed(samples(4, 4, 8, 3), 8), chunk(b"tEXt", b"line\x003"))
    with pytest.raises(ImageError, match="tEXt"):
        png.read_header(whole.replace(b"line\x003", b"line\x004"))


def test_extensions_that_must_be_understood_are_refused():
    data = file(4, 4, 8, 2, packed(samples(4, 4, 8, 3), 8), chunk(b"CgBI", b"\0\0\0\0"))
    with pytest.raises(ImageError, match="CgBI") as caught:
        png.read_header(data)
    assert caught.value.status == "unsupported"


def test_an_animation_of_one_frame_is_its_picture():
    values = samples(4, 4, 8, 3)
    control = chunk(b"acTL", struct.pack(">II", 1, 0))
    frame = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 4, 4, 0, 0, 1, 10, 0, 0))
    data = file(4, 4, 8, 2, packed(values, 8), control, frame)
    assert png.read_header(data).size == (4, 4)
    np.testing.assert_array_equal(png.decode(data), values)
    hidden = chunk(b"fdAT", struct.pack(">I", 1) + zlib.compress(packed(values, 8)))
    for animated in (data[:-12] + hidden + data[-12:], data.replace(control, _frames(2))):
        with pytest.raises(ImageError, match="animated") as caught:
            png.read_header(animated)
        assert caught.value.status == "unsupported"


def _frames(count):
    return chunk(b"acTL", struct.pack(">II", count, 0))


def _pieces(colour=2, depth=8):
    """The chunks of a legal picture: header, two halves of its pixel data, end."""
    rows = packed(np.arange(4 * 4 * _CHANNELS[colour]).reshape(4, 4, -1) % 2, depth)
    stream = zlib.compress(rows)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, depth, colour, 0, 0, 0))
    half = len(stream) // 2
    return header, chunk(b"IDAT", stream[:half]), chunk(b"IDAT", stream[half:]), chunk(b"IEND", b"")


def _illegal():
    """(what is wrong, the chunks) of files that break a rule of the specification."""
    head, one, two, end = _pieces()
    note, palette, clear = chunk(b"tEXt", b"a\0b"), chunk(b"PLTE", b"abc"), chunk(b"tRNS", bytes(6))
    yield "starts with its tEXt chunk", [note, head, one, two, end]
    yield "two IHDR chunks", [head, head, one, two, end]
    yield "in several places", [head, one, note, two, end]
    yield "PLTE chunk comes too late", [head, one, two, palette, end]
    yield "two PLTE chunks", [head, palette, palette, one, two, end]
    yield "palette is missing or malformed", [head, chunk(b"PLTE", b"ab"), one, two, end]
    yield "palette is missing or malformed", [head, chunk(b"PLTE", b""), one, two, end]
    yield "palette of 257 colours", [head, chunk(b"PLTE", bytes(771)), one, two, end]
    yield "tRNS chunk comes too late", [head, one, two, clear, end]
    yield "two tRNS chunks", [head, clear, clear, one, two, end]
    yield "transparency doesn't go", [head, chunk(b"tRNS", b"abc"), one, two, end]
    yield "isn't empty", [head, one, two, chunk(b"IEND", b"x")]
    yield "isn't the name of a PNG chunk", [head, chunk(b"a1Xb", b""), one, two, end]
    yield "cut short", [head, one, two]
    yield "ends after", [head, end]
    for colour in (0, 4):
        head, one, two, end = _pieces(colour)
        yield "it is grey and has a palette", [head, palette, one, two, end]
    head, one, two, end = _pieces(6)
    yield "transparency doesn't go", [head, clear, one, two, end]
    head, one, two, end = _pieces(3)
    yield "palette is missing", [head, one, two, end]
    yield "PLTE chunk comes too late", [head, chunk(b"tRNS", b"a"), palette, one, two, end]
    clear = chunk(b"tRNS", b"abc")
    yield "transparency doesn't go", [head, chunk(b"PLTE", bytes(6)), clear, one, two, end]
    head, one, two, end = _pieces(3, 2)
    yield "palette of 5 colours", [head, chunk(b"PLTE", bytes(15)), one, two, end]
    head, one, two, end = _pieces()
    wide = chunk(b"IDAT", b"\x88\x1c" + zlib.compress(bytes(52))[2:])
    yield "pixel data is damaged", [head, wide, end]


@pytest.mark.parametrize(("what", "chunks"), list(_illegal()))
def test_illegal_files_are_damaged(what, chunks):
    with pytest.raises(ImageError, match=what) as raised:
        png.decode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert raised.value.status == "unreadable"


def test_what_cannot_change_the_picture_is_left_alone():
    head, one, two, end = _pieces()
    signature, gamma = b"\x89PNG\r\n\x1a\n", chunk(b"gAMA", bytes(4))
    expected = png.decode(signature + head + one + two + end)
    appended = signature + head + one + two + end + b"a film"
    for data in (appended, signature + head + gamma + gamma + one + two + gamma + end):
        np.testing.assert_array_equal(png.decode(data), expected)
