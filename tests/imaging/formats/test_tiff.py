"""TIFF layouts in every order that the format allows, and what is wrong with damaged ones."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil
from tiff_files import DEFLATE, ENCODERS, LZW, PACK_BITS, H, W, file, layout, pack_bits, samples

from anomaly.errors import ImageError
from anomaly.imaging.formats import tiff
from anomaly.imaging.formats.base import read_directories
from anomaly.imaging.read import identify


def refusal(data):
    with pytest.raises(ImageError) as caught:
        tiff.decode(data)
    return caught.value.status, str(caught.value)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([np.uint8, np.uint16, np.float16, np.float32, np.float64]),
    st.sampled_from([1, 3]),
    st.sampled_from("<>"),
    st.sampled_from(list(ENCODERS)),
    st.booleans(),
)
def test_every_layout_gives_the_same_samples(dtype, count, order, compression, tiled):
    values = samples(count, dtype)
    data = layout(values, tiled=tiled, order=order, compression=compression)
    expected = values.astype(np.float32) if values.dtype.kind == "f" else values
    decoded = tiff.decode(data)
    assert decoded.dtype == expected.dtype
    np.testing.assert_array_equal(decoded, np.broadcast_to(expected, (H, W, 3)))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("tiled", [False, True])
def test_differences_are_summed_up(order, dtype, tiled):
    values = samples(3, dtype)
    data = layout(values, order=order, tiled=tiled, compression=DEFLATE, t317=2)
    np.testing.assert_array_equal(tiff.decode(data), values)


@pytest.mark.parametrize("bits", [1, 2, 4, 10, 12, 14])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("compression", ENCODERS)
@pytest.mark.parametrize("tiled", [False, True])
def test_packed_samples_and_their_declared_depth(bits, count, compression, tiled):
    values = samples(count) >> (16 - bits)
    data = layout(values, bits=bits, tiled=tiled, compression=compression)
    header = tiff.read_header(data)
    assert header.full_scale == (255 if bits < 8 else 2**bits - 1)
    np.testing.assert_allclose(
        tiff.decode(data) / header.full_scale,
        np.broadcast_to(values, (H, W, 3)) / (2**bits - 1),
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_white_is_zero(dtype):
    values = samples(1, dtype)
    top = np.iinfo(dtype).max
    np.testing.assert_array_equal(tiff.decode(layout(values, t262=0))[..., 0], top - values[..., 0])


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"t262": 8}, "unsupported"),  # CIELab
        ({"t262": 3}, "unsupported"),  # a palette
        ({"t262": 5, "t277": 4}, "unsupported"),  # CMYK
        ({"t262": 2}, "unsupported"),  # colour of one channel
        ({"t262": 2, "t277": 4}, "unsupported"),  # alpha
        ({"t262": 2, "t277": 3, "t284": 2}, "unsupported"),  # planes
        ({"t259": 7}, "unsupported"),  # JPEG inside
        ({"t266": 2}, "unsupported"),  # low bits first
        ({"t317": 9, "t259": 5}, "unsupported"),
        ({"t317": 3, "t259": 8}, "unsupported"),  # the predictor for floats
        ({"t339": 2}, "unsupported"),  # signed
        ({"t258": 32}, "unsupported"),
        ({"t258": [16, 8]}, "unsupported"),
        ({"t256": 0}, "unreadable"),
        ({"t257": 10_000}, "unreadable"),
        ({"t278": 0}, "unreadable"),
        ({"t322": 1 << 30, "t323": 1 << 30}, "unreadable"),
    ],
)
def test_layouts_that_cant_be_used(more, status):
    assert refusal(layout(samples(1), **more))[0] == status


@pytest.mark.parametrize("predictor", [2, 9])
def test_a_predictor_that_an_earlier_compression_has_left_is_ignored(predictor):
    values = samples(1)
    found = tiff.decode(layout(values, t317=predictor))
    np.testing.assert_array_equal(found, tiff.decode(layout(values)))


def test_pages():
    values = samples(1)
    tags = {256: W, 257: H, 258: 16, 262: 1, 278: H}
    page = (tags, [values.astype("<u2").tobytes()])
    thumbnail = ({**tags, 254: 1}, [bytes(values.nbytes)])
    status, message = refusal(file([page, page]))
    assert (status, "2 pages" in message) == ("unsupported", True)
    np.testing.assert_array_equal(tiff.decode(file([page, thumbnail]))[..., 0], values[..., 0])
    np.testing.assert_array_equal(tiff.decode(file([thumbnail, page]))[..., 0], values[..., 0])
    assert refusal(file([thumbnail]))[0] == "unsupported"
    assert refusal(file([]))[0] == "unreadable"


def test_directories_in_a_loop_end():
    data = bytearray(file([({256: W, 257: H, 262: 1}, [b"x"])]))
    first = struct.unpack_from("<I", data, 4)[0]
    struct.pack_into("<I", data, len(data) - 4, first)
    assert refusal(bytes(data))[0] == "unsupported"


def test_a_block_that_is_too_short_is_damage():
    values = samples(1, np.uint8)
    tags = {256: W, 257: H, 258: 8, 262: 1, 278: H}
    whole = values.tobytes()
    for compression, content in (
        (1, whole[:-1]),
        (8, zlib.compress(whole[:-1])),
        (8, zlib.compress(whole)[:-40]),
        (32773, b"\x7f" + whole[:128]),
        (32773, pack_bits(whole)[:-1]),
        (5, b"\x80\x00\x00"),
    ):
        assert refusal(file([({**tags, 259: compression}, [content])]))[0] == "unreadable"


@pytest.mark.parametrize("tiled", [False, True])
def test_deflate_with_zeros_written_into_it_is_refused(tiled):
    y, x = np.mgrid[:H, :W]
    values = np.stack([x * 7, y * 11, x + y], axis=-1).astype(np.uint8)
    data = layout(values, tiled=tiled, compression=DEFLATE)
    page = next(read_directories(data))
    tags = (324, 325) if tiled else (273, 279)
    blocks = list(zip(*(page.values(tag).tolist() for tag in tags), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(100):
        start, size = blocks[rng.integers(len(blocks))]
        first, last = sorted(rng.integers(2, size, 2).tolist())
        zeroed = data[: start + first] + bytes(last - first) + data[start + last :]
        if zeroed != data:
            assert refusal(zeroed)[0] == "unreadable"


@pytest.mark.parametrize("compression", [DEFLATE, LZW, PACK_BITS])
def test_a_last_strip_that_is_filled_up_is_no_damage(compression):
    values = samples(1, np.uint8)
    tags = {256: W, 257: H, 258: 8, 259: compression, 262: 1, 278: 16}
    filled = np.pad(values, ((0, 32 - H), (0, 0), (0, 0)))
    blocks = [ENCODERS[compression](filled[at : at + 16].tobytes()) for at in (0, 16)]
    np.testing.assert_array_equal(tiff.decode(file([(tags, blocks)]))[..., :1], values)


@pytest.mark.parametrize("width", [1_048_583, 2 * 1_048_583])
@pytest.mark.parametrize("compression", [LZW, PACK_BITS])
def test_blocks_that_dont_fold_are_refused_or_read(width, compression):
    content = b"\x7f\x09" * 20  # nowhere near as long as it should be
    tags = {256: width, 257: 1, 258: 8, 259: compression, 262: 1, 278: 1}
    assert refusal(file([(tags, [content])]))[0] in ("unreadable", "unsupported")


def test_damaged_lzw_is_refused_quietly(capfd):
    buffer = io.BytesIO()
    Pil.fromarray(samples(3, np.uint8)).save(buffer, "TIFF", compression="tiff_lzw")
    data = bytearray(buffer.getvalue())
    data[30:60] = bytes(i ^ 0x5A for i in data[30:60])
    assert refusal(bytes(data))[0] == "unreadable"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("where", [2**31, 2**32 - 1])
def test_a_position_beyond_the_file_is_damage(order, where):
    data = bytearray(layout(np.zeros((H, W, 3), np.uint8), order=order))
    (first,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, first)
    whole = bytes(data)
    for at in (4, first + 2 + 12 * count):  # of the first directory, and of the next one
        data = bytearray(whole)
        struct.pack_into(order + "I", data, at, where)
        with pytest.raises(ImageError, match="beyond its end") as found:
            tiff.read_header(bytes(data))
        assert found.value.status == "unreadable"


def test_a_big_tiff_is_refused_by_name():
    data = file([({256: W, 257: H, 258: 8, 262: 1}, [bytes(W * H)])])
    with pytest.raises(ImageError, match="a BigTIFF picture") as found:
        identify(data[:2] + b"+" + data[3:])
    assert found.value.status == "unsupported"
