"""JPEG headers, colour and chroma layouts."""

import io
import struct

import cv2
import numpy as np
import pytest
from picture_files import converted, decode, encoded, refused
from PIL import Image as Pil


@pytest.fixture(scope="module")
def pixels():
    y, x = np.mgrid[:45, :61]
    return np.stack([x * 4, y * 5, 255 - x * 2 - y], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("factor", ["411", "420", "422", "440", "444"])
def test_chroma_layouts(pixels, factor):
    option = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{factor}")
    done, data = cv2.imencode(".jpg", pixels[..., ::-1], [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, option])
    assert done
    decoded = decode(data.tobytes())
    reference = np.asarray(Pil.open(io.BytesIO(data.tobytes())))
    assert np.abs(decoded - reference.astype(int)).max() <= 1


def test_what_is_refused_in_words(pixels):
    whole = encoded(pixels, "JPEG")
    frame = whole.index(b"\xff\xc0")

    def changed(at, *values):
        return whole[: frame + at] + bytes(values) + whole[frame + at + len(values) :]

    for data, what in (
        (changed(11, 0x31), "subsampling"),  # three luma samples for one of chroma
        (converted(pixels, "CMYK", "JPEG"), "rare kind: CMYK"),
        (changed(1, 0xC3), "lossless"),
        (changed(4, 12), "of more than 8 bits"),
        (changed(5, 0, 0), "without a height"),
    ):
        error = refused(data)
        assert (error.status, what in str(error)) == ("unsupported", True)


def test_padding_before_the_end_and_bytes_behind_it_are_no_damage(pixels):
    data = encoded(pixels, "JPEG")
    padded = [data[:-2] + padding + data[-2:] for padding in (bytes(16), b"\xff" * 5)]
    for longer in (*padded, data + bytes(512)):
        np.testing.assert_array_equal(decode(longer), decode(data))


def test_padding_doesnt_hide_a_cut(pixels):
    data = encoded(pixels, "JPEG")
    start = data.index(b"\xff\xda") + 14
    for cut in range(start, len(data) - 2, 29):
        refused(data[:cut] + bytes(5000) + b"\xff\xd9")


def test_a_thumbnail_in_the_metadata_isnt_the_picture(pixels):
    exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + encoded(pixels[:8, :8].copy(), "JPEG")
    data = encoded(pixels, "JPEG", exif=exif)
    assert decode(data).shape == (45, 61, 3)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("numbers", [b"\1\1", b"\1\2", b"\0\0", b"\2\1"])
def test_a_colour_profile_that_is_anywhere_or_in_pieces_doesnt_matter(pixels, progressive, numbers):
    data = encoded(pixels, "JPEG", progressive=progressive)
    frame = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    behind = frame + 2 + int.from_bytes(data[frame + 2 : frame + 4], "big")
    places = [frame, behind, data.index(b"\xff\xda"), data.rindex(b"\xff\xc4")]
    profile = b"\xff\xe2" + struct.pack(">H", 316) + b"ICC_PROFILE\0" + numbers + bytes(300)
    for at in places:
        np.testing.assert_array_equal(decode(data[:at] + profile + data[at:]), decode(data))


def test_of_several_pictures_in_one_file_the_first_is_read(pixels):
    buffer = io.BytesIO()
    others = [Pil.fromarray(pixels[::-1].copy()), Pil.fromarray(pixels[:20, :20].copy())]
    Pil.fromarray(pixels).save(buffer, "MPO", save_all=True, append_images=others, quality=95)
    data = buffer.getvalue()
    assert Pil.open(io.BytesIO(data)).n_frames == 3
    reference = np.asarray(Pil.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode(data), reference)
    first = data[: data.index(b"\xff\xd8", 2)]
    for cut in range(data.index(b"\xff\xda") + 20, len(first) - 2, 97):
        refused(data[:cut] + data[len(first) :])


@pytest.mark.parametrize("length", [b"\0\0", b"\0\1"])
def test_a_segment_shorter_than_its_own_length_is_damage(pixels, length):
    data = encoded(pixels, "JPEG")
    assert "inside a JPEG header" in str(refused(data[:2] + b"\xff\xe5" + length + data[2:]))
