"""JPEG headers, colour and chroma layouts."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.formats import jpeg


@pytest.fixture(scope="module")
def pixels():
    y, x = np.mgrid[:45, :61]
    return np.stack([x * 4, y * 5, 255 - x * 2 - y], axis=-1).astype(np.uint8)


def encoded(pixels, **options):
    buffer = io.BytesIO()
    Pil.fromarray(pixels).save(buffer, "JPEG", quality=95, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("factor", ["411", "420", "422", "440", "444"])
def test_chroma_layouts(pixels, factor):
    option = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{factor}")
    done, data = cv2.imencode(".jpg", pixels[..., ::-1], [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, option])
    assert done
    decoded = jpeg.decode(data.tobytes())
    reference = np.asarray(Pil.open(io.BytesIO(data.tobytes())))
    assert np.abs(decoded - reference.astype(int)).max() <= 1


def test_an_uncommon_chroma_layout_says_so(pixels):
    buffer = io.BytesIO()
    Pil.fromarray(pixels).convert("CMYK").save(buffer, "JPEG", subsampling=2)
    with pytest.raises(ImageError, match="subsampling") as caught:
        jpeg.decode(buffer.getvalue())
    assert caught.value.status == "unsupported"


@pytest.mark.parametrize("padding", [b"\0" * 16, b"\xff" * 5])
def test_padding_before_the_end_is_no_damage(pixels, padding):
    data = encoded(pixels)
    padded = data[:-2] + padding + data[-2:]
    np.testing.assert_array_equal(jpeg.decode(padded), jpeg.decode(data))


def test_padding_doesnt_hide_a_cut(pixels):
    data = encoded(pixels)
    start = data.index(b"\xff\xda") + 14
    for cut in range(start, len(data) - 2, 29):
        with pytest.raises(ImageError):
            jpeg.decode(data[:cut] + bytes(5000) + b"\xff\xd9")


def test_bytes_behind_the_end_dont_matter(pixels):
    data = encoded(pixels)
    np.testing.assert_array_equal(jpeg.decode(data + b"\0" * 512), jpeg.decode(data))


def test_a_thumbnail_in_the_metadata_isnt_the_picture(pixels):
    exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + encoded(pixels[:8, :8].copy())
    data = encoded(pixels, exif=exif)
    assert jpeg.read_header(data).size == (45, 61)
    assert jpeg.decode(data).shape == (45, 61, 3)


@pytest.mark.parametrize(
    ("offset", "value", "status"),
    [
        (1, 0xC3, "unsupported"),  # lossless
        (4, 12, "unsupported"),  # bits a sample
        (5, 0, "unsupported"),  # no height yet
    ],
)
def test_frames_of_other_kinds(pixels, offset, value, status):
    data = bytearray(encoded(pixels))
    frame = data.index(b"\xff\xc0")
    data[frame + offset] = value
    if offset == 5:
        data[frame + 6] = 0
    with pytest.raises(ImageError) as caught:
        jpeg.read_header(bytes(data))
    assert caught.value.status == status


def test_a_header_that_is_cut(pixels):
    data = encoded(pixels)
    for cut in range(2, data.index(b"\xff\xda") + 12):
        with pytest.raises(ImageError) as caught:
            jpeg.decode(data[:cut] + b"\xff\xd9")
        assert caught.value.status == "unreadable"
