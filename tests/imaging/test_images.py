"""Every kind of image file: the right pixels, or a status that says why not."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from kit import most_bytes, touch
from picture_files import (
    H,
    W,
    by_opencv,
    converted,
    encoded,
    lossless_forms,
    picture,
    png,
    refused,
    written,
)
from PIL import Image as Pil
from PIL import ImageOps

from anomaly.errors import DataError
from anomaly.imaging import read as images
from anomaly.imaging.read import Decoding, list_images, read_header, read_image, read_mask


@pytest.fixture(scope="module")
def rgb():
    return picture()


def grey_of(rgb):
    return np.repeat(rgb[..., :1], 3, axis=2)


# Kinds of file


def test_8_bit_kinds(rgb):
    grey = rgb[..., 0]
    black_white = np.where(grey > 127, 255, 0).astype(np.uint8)
    jpeg = encoded(grey, "JPEG", quality=90)
    for mode, data, expected in (
        ("grey8", jpeg, np.asarray(Pil.open(io.BytesIO(jpeg)).convert("RGB"))),
        ("grey8", encoded(grey, "PNG"), grey_of(rgb)),
        ("grey1", converted(black_white, "1", "PNG"), grey_of(black_white[..., None])),
        ("rgb8", encoded(rgb, "TIFF"), rgb),
    ):
        image = read_image(data)
        assert (image.mode, image.full_scale, image.size) == (mode, 255, (H, W))
        assert image.pixels.flags.c_contiguous
        np.testing.assert_array_equal(image.pixels, expected)


def test_16_bit_ramps_keep_every_level():
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    colours = np.stack([ramp, ramp[::-1], ramp.T], axis=-1)
    for suffix in (".png", ".tiff"):
        for pixels, mode in ((ramp, "grey16"), (colours, "rgb16")):
            image = read_image(by_opencv(suffix, pixels))
            assert (image.pixels.dtype, image.full_scale, image.mode) == (np.uint16, 65535, mode)
            expected = pixels if mode == "rgb16" else np.repeat(ramp[..., None], 3, axis=2)
            np.testing.assert_array_equal(image.pixels, expected)


def test_the_same_picture_in_every_lossless_form_is_the_same(rgb):
    for form in lossless_forms(rgb):
        image = read_image(form)
        np.testing.assert_allclose(image.pixels / image.full_scale, rgb / 255, atol=1e-7)


def test_alpha_is_composited_over_black(rgb):
    alpha = np.tile(np.arange(W, dtype=np.uint8) * 4, (H, 1))
    shown = np.dstack([rgb, alpha])
    expected = np.rint(rgb * (alpha[..., None] / 255.0))
    for data in (encoded(shown, "PNG"), encoded(shown, "WEBP", lossless=True)):
        image = read_image(data)
        assert image.mode == "rgba8"
        np.testing.assert_array_equal(image.pixels, expected)
    deep = np.random.default_rng(1).integers(0, 65536, (H, W, 4)).astype(np.uint16)
    image = read_image(by_opencv(".png", deep))
    assert image.mode == "rgba16"
    expected = np.rint(deep[..., :3] * (deep[..., 3:] / 65535.0)).astype(np.uint16)
    np.testing.assert_array_equal(image.pixels, expected)


def test_orientation_is_applied(tmp_path, rgb):
    exif = Pil.Exif()
    for kind, orientation in itertools.product(("JPEG", "PNG", "WEBP", "TIFF"), range(1, 9)):
        exif[0x0112] = orientation
        options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}
        options = options.get(kind, {})
        path = written(tmp_path, encoded(rgb, kind, exif=exif, **options))
        stored = Pil.fromarray(rgb)
        if kind == "JPEG":
            stored = Pil.open(io.BytesIO(encoded(rgb, kind, **options)))
        stored.getexif()[0x0112] = orientation
        expected = np.asarray(ImageOps.exif_transpose(stored)).astype(int)
        image = read_image(path)
        assert image.pixels.shape == expected.shape
        assert np.abs(image.pixels - expected).max() <= (1 if kind == "JPEG" else 0)
        assert read_header(path).size == image.size


# What a value means


def test_declared_camera_depth(rgb):
    twelve = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    data = by_opencv(".png", twelve)
    assert read_image(data).full_scale == 65535
    image = read_image(data, Decoding(bit_depth=12))
    assert image.full_scale == 4095
    np.testing.assert_array_equal(image.pixels[..., 0], twelve)
    # Files of 8 bits and of floats have one meaning only; a value above the depth isn't clipped.
    assert read_image(encoded(rgb, "PNG"), Decoding(bit_depth=12)).full_scale == 255
    floats = by_opencv(".tiff", (rgb / 255).astype(np.float32))
    assert read_image(floats, Decoding(bit_depth=12)).full_scale == 1
    error = refused(by_opencv(".png", np.full((8, 8), 4096, np.uint16)), bit_depth=12)
    assert error.status == "unsupported"
    assert "12 bits" in str(error)
    assert "4096" in str(error)


def test_float_tiff():
    for channels, mode in ((1, "greyfloat32"), (3, "rgbfloat32")):
        floats = np.random.default_rng(0).random((H, W, channels)).astype(np.float32)
        image = read_image(by_opencv(".tiff", floats.squeeze()))
        assert (image.pixels.dtype, image.full_scale, image.mode) == (np.float32, 1, mode)
        np.testing.assert_array_equal(image.pixels, np.broadcast_to(floats, (H, W, 3)))
    for value in (np.nan, np.inf, -np.inf, -0.01, 1.01, 200.0):
        floats = np.full((9, 9), 0.5, np.float32)
        floats[4, 4] = value
        assert refused(by_opencv(".tiff", floats)).status == "unsupported", value


# Refusals


def test_pixels_are_counted_before_decoding(tmp_path):
    rows = zlib.compress(bytes(30_001) * 3_000, 1)
    idat = [rows[:-4]]  # broken on purpose: only a decoder would notice
    path = written(tmp_path, png(30_000, 30_000, 8, 0, idat))
    assert path.stat().st_size < 1_000_000
    error = refused(path)
    assert error.status == "unsupported"
    assert "max_pixels" in str(error)
    assert "900.0 million" in str(error)
    assert read_header(path).size == (30_000, 30_000)


def test_max_pixels_is_a_limit_not_a_bound_below(rgb):
    data = encoded(rgb, "PNG")
    assert read_image(data, Decoding(max_pixels=H * W)).size == (H, W)
    assert refused(data, max_pixels=H * W - 1).status == "unsupported"


def test_a_file_far_too_long_for_its_pixels_is_refused_before_it_is_read(tmp_path, rgb):
    path = written(tmp_path, encoded(rgb, "PNG"))
    os.truncate(path, 3_000_000_000)  # a hole, which takes no room on the disk
    with most_bytes(1e7):
        error = refused(path)
    assert error.status == "unsupported"
    assert "3000.0 MB" in str(error)
    assert "image.max_pixels" in str(error)
    os.truncate(path, 70_000_000)
    np.testing.assert_array_equal(read_image(path).pixels, rgb)
    assert "image.max_pixels" in str(refused(path, max_pixels=100_000))


def test_several_pictures_in_one_file(rgb):
    frames = [Pil.fromarray(rgb), Pil.fromarray(rgb[::-1].copy())]
    for kind in ("TIFF", "PNG", "WEBP"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
        assert refused(buffer.getvalue()).status == "unsupported", kind


def test_other_files_called_png(tmp_path):
    for data, status, what in (
        (b"", "unreadable", "empty"),
        (bytes(5000), "unreadable", "zeros"),
        (b"GIF89a" + bytes(60), "unsupported", "GIF"),
        (b"MM\0+\0\x08" + bytes(60), "unsupported", "BigTIFF"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "unsupported", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "unsupported", "HEIC"),
        (b"part,score\r\n1,0.5\r\n" * 9, "unsupported", "text"),
        ("検査結果\n".encode() * 40, "unsupported", "text"),
        (b"\x81\xfe\x00\x17" * 40, "unreadable", "isn't a PNG"),
    ):
        error = refused(written(tmp_path, data))
        assert (error.status, what in str(error)) == (status, True), what


def test_files_that_arent_there(tmp_path):
    assert "No such file" in str(refused(tmp_path / "missing.png"))
    (tmp_path / "folder.png").mkdir()
    assert "folder" in str(refused(tmp_path / "folder.png"))
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere.png")
    refused(tmp_path / "broken.png")
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    refused(tmp_path / "self.png")
    assert "null character" in str(refused(tmp_path / "null\0.png"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_doesnt_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert refused(tmp_path / "pipe.png").status == "unreadable"


def test_failures_of_the_disk(tmp_path, rgb, monkeypatch):
    path = written(tmp_path, encoded(rgb, "PNG"))
    for failure in (PermissionError(13, "Permission denied"), OSError(5, "I/O")):
        monkeypatch.setattr(Path, "open", Mock(side_effect=failure))
        error = refused(path)
        assert error.status == "unreadable"
        assert failure.strerror in str(error)


def test_too_little_memory_isnt_called_damage(rgb, monkeypatch):
    monkeypatch.setattr(images, "turned_upright", Mock(side_effect=MemoryError))
    assert refused(encoded(rgb, "PNG")).status == "unsupported"


def test_a_files_bytes_are_the_file(tmp_path, rgb):
    """What comes from memory is read like the file, and refused in the same words."""
    data = encoded(rgb, "PNG")
    file = written(tmp_path, data)
    ours, theirs = read_image(data), read_image(file)
    assert (ours.sha256, ours.mode) == (theirs.sha256, theirs.mode)
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    for broken, limit in ((data[:-20], 9999), (data, 15), (b"", 100), (b"no picture", 100)):
        of_file = refused(written(tmp_path, broken), max_pixels=limit)
        of_bytes = refused(broken, max_pixels=limit)
        assert str(of_file) == f"{file}: {of_bytes}"
        assert of_file.status == of_bytes.status


# Names and folders


def test_content_decides_not_the_suffix(tmp_path, rgb):
    for kind in ("PNG", "BMP", "TIFF"):
        image = read_image(written(tmp_path, encoded(rgb, kind), "part.jpg"))
        np.testing.assert_array_equal(image.pixels, rgb)


def test_names_in_any_script_and_of_any_length(tmp_path, rgb):
    folder = tmp_path / "検査部品"
    while len(str(folder)) < 600:
        folder /= "a long name for a folder, with blanks and 'quotes' " + "x" * 60
    folder.mkdir(parents=True)
    data = encoded(rgb, "PNG")
    image = read_image(written(folder, data, "不良品 №1 äöü 🔩.png"))
    np.testing.assert_array_equal(image.pixels, rgb)
    assert image.sha256 == hashlib.sha256(data).hexdigest()


def test_list_images(tmp_path):
    lot, today = tmp_path / "lot", tmp_path / "today"
    images = ["a.jpg", "b/10.tif", "b/2.PNG", "c/x.gif"]
    touch(lot, *reversed(images), "notes.txt", ".hidden.png", ".git/a.png")
    (lot / "b" / "loop").symlink_to(lot)
    (lot / "self").symlink_to(lot / "self")
    (lot / "gone.png").symlink_to(lot / "nowhere")
    names = [path.relative_to(lot).as_posix() for path in list_images(lot)]
    assert names == [*images, "gone.png"]
    today.mkdir()
    (today / "line").symlink_to(lot / "c")  # links to other folders are followed
    assert list_images(today) == [today / "line" / "x.gif"]
    (lot / "c" / "today").symlink_to(today)  # a circle of two
    assert list_images(today) == [today / "line" / "x.gif"]


def test_list_images_never_skips_a_folder_it_cant_read(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="missing"):
        list_images(tmp_path / "missing")

    refusal = PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=refusal))
    with pytest.raises(DataError, match="Permission denied"):
        list_images(tmp_path)


def test_read_mask_takes_any_value_but_zero(tmp_path):
    values = np.zeros((20, 30), np.uint8)
    values[3, 4], values[5, 6] = 1, 255
    colours = np.zeros((20, 30, 3), np.uint8)
    colours[3, 4, 2], colours[5, 6, 0] = 1, 7
    for pixels in (values, colours, values.astype(np.uint16) * 200):
        mask = read_mask(written(tmp_path, by_opencv(".png", pixels)))
        assert (mask.dtype, mask.shape) == (bool, (20, 30))
        assert np.argwhere(mask).tolist() == [[3, 4], [5, 6]]
