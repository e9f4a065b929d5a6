"""TIFF of every supported kind against what was written and other readers, and what is refused."""

import io
import itertools
import struct
import zlib

import cv2
import numpy as np
import pytest
import tifffile
from picture_files import decode, refused
from tiff_files import DEFLATE, ENCODERS, LZW, NONE, H, W, file, layout, samples

DTYPES = (np.uint8, np.uint16, np.float32)


def check(data, expected):
    """Samples (H, W, count) and their type are as expected."""
    found = decode(data)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compression", ENCODERS)
def test_every_layout_gives_what_was_written(dtype, compression):
    predictors = (1, 2) if dtype != np.float32 else (1,)
    for count, order, predictor in itertools.product((1, 3), "<>", predictors):
        values = samples(count, dtype)
        data = layout(values, order=order, compression=compression, t317=predictor)
        check(data, values)
        if compression != LZW and (predictor == 1 or compression == DEFLATE):  # tifffile has no LZW
            theirs = tifffile.imread(io.BytesIO(data)).reshape(H, W, count)
            np.testing.assert_array_equal(theirs, values)


@pytest.mark.parametrize("size", [(67, 131), (1, 1), (300, 401)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_libtiff_writes(size, dtype):
    values = samples(3, dtype, size=size)
    for pixels in (values, values[..., 0]):
        for compression, predictor in itertools.product((NONE, LZW, DEFLATE), (1, 2)):
            if dtype == np.float32 and predictor == 2:
                continue
            settings = [cv2.IMWRITE_TIFF_COMPRESSION, compression]
            settings += [cv2.IMWRITE_TIFF_PREDICTOR, predictor]
            shown = pixels[..., ::-1] if pixels.ndim == 3 else pixels
            done, data = cv2.imencode(".tiff", shown, settings)
            assert done
            check(data.tobytes(), pixels.reshape(*size, -1))


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"t262": 0}, "unsupported"),  # white is zero
        ({"t262": 8}, "unsupported"),  # CIELab
        ({"t262": 3}, "unsupported"),  # a palette
        ({"t262": 5, "t277": 4}, "unsupported"),  # CMYK
        ({"t262": 2}, "unsupported"),  # colour of one channel
        ({"t262": 2, "t277": 4}, "unsupported"),  # alpha
        ({"t262": 2, "t277": 3, "t284": 2}, "unsupported"),  # planes
        ({"t259": 7}, "unsupported"),  # JPEG inside
        ({"t259": 32773}, "unsupported"),  # PackBits
        ({"t322": 16, "t323": 16}, "unsupported"),  # tiles
        ({"t266": 2}, "unsupported"),  # low bits first
        ({"t317": 9, "t259": 5}, "unsupported"),
        ({"t339": 2}, "unsupported"),  # signed
        ({"t339": 3}, "unsupported"),  # floats of 16 bits
        *(({"t258": bits}, "unsupported") for bits in (1, 4, 12, 32)),
        ({"t256": 0}, "unreadable"),
        ({"t257": 10_000}, "unreadable"),
        ({"t278": 0}, "unreadable"),
    ],
)
def test_layouts_that_cant_be_used(more, status):
    error = refused(layout(samples(1), **more))
    assert error.status == status
    if status == "unsupported":
        assert "save it as plain grey or RGB of 8 or 16 bits" in str(error)


@pytest.mark.parametrize("predictor", [2, 9])
def test_a_predictor_that_an_earlier_compression_has_left_is_ignored(predictor):
    check(layout(samples(1), t317=predictor), samples(1))


def test_pages():
    values = samples(1)
    tags = {256: W, 257: H, 258: 16, 262: 1, 278: H}
    page = (tags, [values.astype("<u2").tobytes()])
    for pages in ([page, page], []):
        error = refused(file(pages))
        assert (error.status, "save each page as a file" in str(error)) == ("unsupported", True)
    loop = bytearray(file([page]))
    loop[-4:] = loop[4:8]
    assert refused(bytes(loop)).status == "unsupported"


def test_a_block_that_is_too_short_is_damage():
    values = samples(1, np.uint8)
    whole = values.tobytes()
    for compression, content in (
        (NONE, whole[:-1]),
        (DEFLATE, zlib.compress(whole[:-1])),
        (DEFLATE, zlib.compress(whole)[:-40]),
        (LZW, b"\x80\x00\x00"),
        (LZW, ENCODERS[LZW](whole[:-1])),
    ):
        tags = {256: W, 257: H, 258: 8, 259: compression, 262: 1, 278: H}
        assert refused(file([(tags, [content])])).status == "unreadable"


@pytest.mark.parametrize("compression", [NONE, DEFLATE, LZW])
def test_a_last_strip_that_is_filled_up_is_no_damage(compression):
    values = samples(1, np.uint8)
    tags = {256: W, 257: H, 258: 8, 259: compression, 262: 1, 278: 16}
    filled = np.pad(values, ((0, 32 - H), (0, 0), (0, 0)))
    blocks = [ENCODERS[compression](filled[at : at + 16].tobytes()) for at in (0, 16)]
    check(file([(tags, blocks)]), values)


@pytest.mark.parametrize("where", [2**31, 2**32 - 1])
def test_a_position_beyond_the_file_is_damage(where):
    for order in "<>":
        data = bytearray(layout(samples(1), order=order))
        for at in (4, len(data) - 4):  # of the first directory, and of the next one
            moved = data.copy()
            struct.pack_into(order + "I", moved, at, where)
            error = refused(bytes(moved))
            assert (error.status, "beyond its end" in str(error)) == ("unreadable", True)
