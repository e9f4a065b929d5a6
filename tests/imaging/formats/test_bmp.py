"""BMP layouts made by hand, and headers that can't be used."""

import io
import struct

import numpy as np
import pytest
from picture_files import decode, refused
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.formats import bmp

H, W = 7, 11


def file(rows, bits, packing=0, header=40, palette=b"", height=H, width=W):
    """`rows` are the padded rows in file order."""
    start = 14 + max(header, 40) + len(palette)
    info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, packing, 0, 0, 0, 0, 0)
    info = info.ljust(header, b"\0")
    content = np.ascontiguousarray(rows).tobytes()
    name = struct.pack("<2sIHHI", b"BM", start + len(content), 0, 0, start)
    return name + info + palette + content


def padded(rows):
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))


def noise(*shape, top=256, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, top, shape).astype(dtype)


def test_rows_may_come_from_either_end():
    rgb = noise(H, W, 3)
    rows = padded(rgb[..., ::-1].reshape(H, -1))
    np.testing.assert_array_equal(decode(file(rows[::-1], 24)), rgb)
    np.testing.assert_array_equal(decode(file(rows, 24, height=-H)), rgb)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_palettes(bits):
    indices = noise(H, W, top=2**bits)
    colours = noise(2**bits, 4)
    digits = np.unpackbits(indices[..., None], axis=-1)[..., 8 - bits :].reshape(H, -1)
    rows = padded(np.packbits(digits, axis=1))
    data = file(rows[::-1], bits, palette=colours.tobytes())
    assert bmp(data).mode == f"palette{bits}"
    np.testing.assert_array_equal(decode(data), colours[:, 2::-1][indices])


@pytest.mark.parametrize("bits", [8, 24])
def test_pixels_dont_start_inside_the_header(bits):
    palette = noise(256, 4).tobytes() if bits == 8 else b""
    data = bytearray(file(padded(noise(H, W * bits // 8)), bits, palette=palette))
    start = 54 + len(palette)
    decode(bytes(data))
    for wrong in (0, 14, 53, start - 1):
        struct.pack_into("<I", data, 10, wrong)
        error = refused(bytes(data))
        assert (error.status, "start inside the header" in str(error)) == ("unreadable", True)


def test_the_fourth_byte_means_nothing():
    bgra = noise(H, W, 4)
    np.testing.assert_array_equal(decode(file(bgra[::-1].reshape(H, -1), 32)), bgra[..., 2::-1])


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"packing": 1, "bits": 8}, "unsupported"),
        ({"packing": 3, "bits": 32}, "unsupported"),
        ({"bits": 16}, "unsupported"),
        ({"bits": 24, "header": 43}, "unsupported"),
        ({"bits": 24, "width": 0}, "unreadable"),
        ({"bits": 24, "height": 0}, "unreadable"),
        ({"bits": 24, "height": 2**31 - 1}, "unreadable"),
    ],
)
def test_headers_that_cant_be_used(options, status):
    rows = padded(noise(H, 3 * W))
    assert refused(file(rows, **options)).status == status


@pytest.mark.parametrize("bits", [8, 24, 32])
def test_a_header_with_a_wrong_byte_gives_no_other_pixels_than_pillow(bits):
    palette = noise(256, 4).tobytes() if bits == 8 else b""
    whole = file(padded(noise(H, W * bits // 8)), bits, palette=palette)
    expected = decode(whole)
    for at in range(2, 54):
        for value in (0, 1, 2, 43, 66, 128, 255):
            mutant = whole[:at] + bytes([value]) + whole[at + 1 :]
            try:
                decoded = decode(mutant)
            except ImageError:
                continue
            if not np.array_equal(decoded, expected):
                theirs = np.asarray(Pil.open(io.BytesIO(mutant)).convert("RGB"))
                np.testing.assert_array_equal(decoded, theirs, err_msg=f"byte {at} is {value}")
