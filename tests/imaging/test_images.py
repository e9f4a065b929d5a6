"""Every kind of image file: the right pixels, or a status that says why not."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from picture_files import H, W, by_opencv, converted, encoded, lossless_forms, picture, png, written
from PIL import Image as Pil
from PIL import ImageOps

from anomaly.errors import DataError, ImageError
from anomaly.imaging import read as images
from anomaly.imaging.listing import list_images
from anomaly.imaging.read import read_header, read_image, read_mask


@pytest.fixture(scope="module")
def rgb():
    return picture()


def refused(path, **options):
    """The error of an image that must be refused; it names the file."""
    with pytest.raises(ImageError) as caught:
        read_image(path, **options)
    assert str(path) in str(caught.value)
    return caught.value


def grey_of(rgb):
    return np.repeat(rgb[..., :1], 3, axis=2)


# Kinds of file


def test_8_bit_kinds(tmp_path, rgb):
    grey = rgb[..., 0]
    black_white = np.where(grey > 127, 255, 0).astype(np.uint8)
    palette_image = Pil.fromarray(rgb).quantize(60)
    palette_rgb = np.asarray(palette_image.convert("RGB"))
    palette_file = io.BytesIO()
    palette_image.save(palette_file, "PNG")
    cases = {
        "png rgb8": (encoded(rgb, "PNG"), rgb),
        "png grey8": (encoded(grey, "PNG"), grey_of(rgb)),
        "png grey1": (converted(black_white, "1", "PNG"), grey_of(black_white[..., None])),
        "png palette8": (palette_file.getvalue(), palette_rgb),
        "bmp rgb8": (encoded(rgb, "BMP"), rgb),
        "bmp palette8": (encoded(grey, "BMP"), grey_of(rgb)),
        "bmp palette1": (converted(black_white, "1", "BMP"), grey_of(black_white[..., None])),
        "tiff rgb8": (encoded(rgb, "TIFF"), rgb),
        "tiff grey8": (encoded(grey, "TIFF"), grey_of(rgb)),
        "webp rgb8": (encoded(rgb, "WEBP", lossless=True), rgb),
    }
    for name, (data, expected) in cases.items():
        image = read_image(written(tmp_path, data))
        assert f"{image.format} {image.mode}" == name
        assert image.pixels.dtype == np.uint8
        assert image.full_scale == 255
        assert image.pixels.flags.c_contiguous
        assert image.size == (H, W)
        np.testing.assert_array_equal(image.pixels, expected, err_msg=name)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_ramps_keep_every_level(tmp_path, suffix, channels):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels = ramp if channels == 1 else np.stack([ramp, ramp[::-1], ramp.T], axis=-1)
    image = read_image(written(tmp_path, by_opencv(suffix, pixels)))
    assert image.pixels.dtype == np.uint16
    assert image.full_scale == 65535
    assert image.mode == ("grey16" if channels == 1 else "rgb16")
    expected = pixels if channels == 3 else np.repeat(ramp[..., None], 3, axis=2)
    np.testing.assert_array_equal(image.pixels, expected)
    assert all(len(np.unique(image.pixels[..., c])) == 65536 for c in range(3))


def test_the_same_picture_in_every_lossless_form_is_the_same(tmp_path, rgb):
    for form in lossless_forms(rgb):
        image = read_image(written(tmp_path, form))
        np.testing.assert_allclose(image.pixels / image.full_scale, rgb / 255, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 90, "subsampling": 0},
        {"quality": 90, "subsampling": 2},
        {"quality": 75, "progressive": True},
        {"quality": 75, "restart_marker_blocks": 3},
    ],
)
def test_jpeg_is_what_another_libjpeg_makes_of_it(tmp_path, rgb, options):
    for pixels, mode in ((rgb, "rgb8"), (rgb[..., 0], "grey8")):
        data = encoded(pixels, "JPEG", **options)
        image = read_image(written(tmp_path, data, "part.jpg"))
        reference = np.asarray(Pil.open(io.BytesIO(data)).convert("RGB")).astype(int)
        assert (image.format, image.mode, image.full_scale) == ("jpeg", mode, 255)
        assert np.abs(image.pixels - reference).max() <= 1


def test_cmyk_becomes_light(tmp_path):
    ink = np.zeros((16, 48, 4), np.uint8)
    ink[:, 16:32] = (255, 0, 0, 0)
    ink[:, 32:] = (0, 0, 0, 255)
    image = read_image(written(tmp_path, encoded(ink, "JPEG", mode="CMYK", quality=100)))
    assert image.mode == "cmyk8"
    white, cyan, black = image.pixels[8, [8, 24, 40]].astype(int)
    for colour, expected in ((white, (255,) * 3), (cyan, (0, 255, 255)), (black, (0,) * 3)):
        assert np.abs(colour - expected).max() <= 2


def test_cmyk_jpeg_without_adobes_mark_isnt_inverted(tmp_path):
    ink = np.full((16, 16, 4), (255, 255, 255, 200), np.uint8)
    data = encoded(ink, "JPEG", mode="CMYK", quality=100)
    at = data.index(b"\xff\xee")  # Pillow stores inverted ink behind Adobe's mark
    plain = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    assert abs(int(read_image(written(tmp_path, data)).pixels[8, 8, 0]) - 0) <= 2
    assert abs(int(read_image(written(tmp_path, plain)).pixels[8, 8, 0]) - 200) <= 2


def test_alpha_is_composited_over_black(tmp_path, rgb):
    alpha = np.tile(np.arange(W, dtype=np.uint8) * 4, (H, 1))
    expected = np.rint(rgb * (alpha[..., None] / 255.0))
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(np.dstack([rgb, alpha]), kind, **options)
        image = read_image(written(tmp_path, data))
        assert image.mode == "rgba8"
        np.testing.assert_array_equal(image.pixels, expected, err_msg=kind)


def test_16_bit_alpha_keeps_its_depth(tmp_path):
    rng = np.random.default_rng(1)
    rgba = rng.integers(0, 65536, (H, W, 4)).astype(np.uint16)
    image = read_image(written(tmp_path, by_opencv(".png", rgba)))
    assert image.mode == "rgba16"
    np.testing.assert_array_equal(
        image.pixels, np.rint(rgba[..., :3] * (rgba[..., 3:] / 65535.0)).astype(np.uint16)
    )


def test_hidden_colours_dont_matter(tmp_path, rgb):
    alpha = np.where(np.arange(W) < 20, 0, 255) * np.ones((H, 1))
    shown = np.dstack([rgb, alpha.astype(np.uint8)])
    other = shown.copy()
    other[:, :20, :3] = 99
    first = read_image(written(tmp_path, encoded(shown, "PNG")))
    second = read_image(written(tmp_path, encoded(other, "PNG")))
    np.testing.assert_array_equal(first.pixels, second.pixels)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path, rgb, kind, orientation):
    exif = Pil.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
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


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"junk" * 9])
def test_damaged_exif_doesnt_cost_the_picture(tmp_path, rgb, exif):
    image = read_image(written(tmp_path, encoded(rgb, "WEBP", lossless=True, exif=exif)))
    np.testing.assert_array_equal(image.pixels, rgb)


# What a value means


def test_declared_camera_depth(tmp_path):
    twelve = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    path = written(tmp_path, by_opencv(".png", twelve))
    assert read_image(path).full_scale == 65535
    image = read_image(path, bit_depth=12)
    assert image.full_scale == 4095
    np.testing.assert_array_equal(image.pixels[..., 0], twelve)


def test_a_value_above_the_declared_depth_is_never_clipped(tmp_path):
    pixels = np.full((8, 8), 4096, np.uint16)
    error = refused(written(tmp_path, by_opencv(".png", pixels)), bit_depth=12)
    assert error.status == "unsupported"
    assert "12 bits" in str(error)
    assert "4096" in str(error)


def test_camera_depth_leaves_8_bit_and_float_files_alone(tmp_path, rgb):
    assert read_image(written(tmp_path, encoded(rgb, "PNG")), bit_depth=12).full_scale == 255
    floats = by_opencv(".tiff", (rgb / 255).astype(np.float32))
    assert read_image(written(tmp_path, floats), bit_depth=12).full_scale == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_float_tiff(tmp_path, channels):
    floats = np.random.default_rng(0).random((H, W, channels)).astype(np.float32)
    image = read_image(written(tmp_path, by_opencv(".tiff", floats.squeeze())))
    assert image.pixels.dtype == np.float32
    assert image.full_scale == 1
    assert image.mode == ("greyfloat32" if channels == 1 else "rgbfloat32")
    np.testing.assert_array_equal(image.pixels, np.broadcast_to(floats, (H, W, 3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.01, 1.01, 200.0])
def test_a_float_that_isnt_0_to_1_is_refused(tmp_path, value):
    floats = np.full((9, 9), 0.5, np.float32)
    floats[4, 4] = value
    assert refused(written(tmp_path, by_opencv(".tiff", floats))).status == "unsupported"


# Refusals


def test_pixels_are_counted_before_decoding(tmp_path, monkeypatch):
    rows = zlib.compress(bytes(30_001) * 3_000, 1)
    idat = [rows[:-4]]  # broken on purpose: only a decoder would notice
    path = written(tmp_path, png(30_000, 30_000, 8, 0, idat))
    assert path.stat().st_size < 1_000_000
    error = refused(path)
    assert error.status == "unsupported"
    assert "max_pixels" in str(error)
    assert "900.0 million" in str(error)
    assert read_header(path).size == (30_000, 30_000)


def test_max_pixels_is_a_limit_not_a_bound_below(tmp_path, rgb):
    path = written(tmp_path, encoded(rgb, "PNG"))
    assert read_image(path, max_pixels=H * W).size == (H, W)
    assert refused(path, max_pixels=H * W - 1).status == "unsupported"


def test_a_stream_longer_than_its_picture_isnt_inflated(tmp_path):
    bomb = zlib.compress(bytes(50_000_000), 1)
    assert refused(written(tmp_path, png(10, 10, 8, 0, [bomb]))).status == "unreadable"


def test_a_file_far_too_long_for_its_pixels_is_refused_before_it_is_read(tmp_path, rgb):
    path = written(tmp_path, encoded(rgb, "PNG"))
    os.truncate(path, 3_000_000_000)  # a hole, which takes no room on the disk
    tracemalloc.start()
    error = refused(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert error.status == "unsupported"
    assert "3000.0 MB" in str(error)
    assert "image.max_pixels" in str(error)
    os.truncate(path, 70_000_000)
    np.testing.assert_array_equal(read_image(path).pixels, rgb)
    assert "image.max_pixels" in str(refused(path, max_pixels=100_000))


def test_a_file_is_read_once(tmp_path, rgb):
    path = written(tmp_path, encoded(rgb, "PNG"))
    os.truncate(path, 50_000_000)
    tracemalloc.start()
    read_image(path)
    assert tracemalloc.get_traced_memory()[1] < 60_000_000
    tracemalloc.stop()


def test_several_pictures_in_one_file(tmp_path, rgb):
    frames = [Pil.fromarray(rgb), Pil.fromarray(rgb[::-1].copy())]
    for kind in ("TIFF", "PNG", "WEBP"):
        buffer = io.BytesIO()
        frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
        error = refused(written(tmp_path, buffer.getvalue()))
        assert error.status == "unsupported", kind


@pytest.mark.parametrize(
    ("data", "status", "what"),
    [
        (b"", "unreadable", "empty"),
        (bytes(5000), "unreadable", "zeros"),
        (b"GIF89a" + bytes(60), "unsupported", "GIF"),
        (b"MM\0+\0\x08" + bytes(60), "unsupported", "BigTIFF"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "unsupported", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "unsupported", "HEIC"),
        (b"part,score\r\n1,0.5\r\n" * 9, "unsupported", "text"),
        ("検査結果\n".encode() * 40, "unsupported", "text"),
        (b"\x81\xfe\x00\x17" * 40, "unreadable", "isn't a PNG"),
    ],
)
def test_other_files_called_png(tmp_path, data, status, what):
    error = refused(written(tmp_path, data))
    assert error.status == status
    assert what in str(error)


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


@pytest.mark.parametrize("failure", [PermissionError(13, "Permission denied"), OSError(5, "I/O")])
def test_failures_of_the_disk(tmp_path, rgb, monkeypatch, failure):
    path = written(tmp_path, encoded(rgb, "PNG"))

    def fail(*_):
        raise failure

    monkeypatch.setattr(Path, "open", fail)
    error = refused(path)
    assert error.status == "unreadable"
    assert failure.strerror in str(error)


def test_too_little_memory_isnt_called_damage(tmp_path, rgb, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(images, "turned_upright", fail)
    assert refused(written(tmp_path, encoded(rgb, "PNG"))).status == "unsupported"


def test_a_files_bytes_are_the_file(tmp_path, rgb):
    """What comes from memory is read like the file, and refused in the same words."""
    data = encoded(rgb, "PNG")
    file = written(tmp_path, data)
    ours, theirs = read_image(data), read_image(file)
    assert (ours.sha256, ours.mode) == (theirs.sha256, theirs.mode)
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    for broken, limit in ((data[:-20], 9999), (data, 15), (b"", 100), (b"no picture", 100)):
        of_file = refused(written(tmp_path, broken), max_pixels=limit)
        with pytest.raises(ImageError) as of_bytes:
            read_image(broken, max_pixels=limit)
        assert str(of_file) == f"{file}: {of_bytes.value}"
        assert of_file.status == of_bytes.value.status


# Names and folders


def test_content_decides_not_the_suffix(tmp_path, rgb):
    for kind, expected in (("PNG", "png"), ("BMP", "bmp"), ("TIFF", "tiff")):
        image = read_image(written(tmp_path, encoded(rgb, kind), "part.jpg"))
        assert image.format == expected
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
    for name in (
        "b/2.PNG",
        "b/10.tif",
        "a.jpg",
        "c/x.gif",
        "notes.txt",
        ".hidden.png",
        ".git/a.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    names = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert names == ["a.jpg", "b/10.tif", "b/2.PNG", "c/x.gif", "gone.png"]


def test_list_images_follows_links_to_other_folders(tmp_path):
    (tmp_path / "lot").mkdir()
    (tmp_path / "lot" / "1.png").touch()
    (tmp_path / "today").mkdir()
    (tmp_path / "today" / "line").symlink_to(tmp_path / "lot")
    assert list_images(tmp_path / "today") == [tmp_path / "today" / "line" / "1.png"]


def test_list_images_never_skips_a_folder_it_cant_read(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="missing"):
        list_images(tmp_path / "missing")

    def fail(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(DataError, match="Permission denied"):
        list_images(tmp_path)


def test_read_mask_takes_any_value_but_zero(tmp_path):
    values = np.zeros((20, 30), np.uint8)
    values[3, 4], values[5, 6] = 1, 255
    colours = np.zeros((20, 30, 3), np.uint8)
    colours[3, 4, 2], colours[5, 6, 0] = 1, 7
    for pixels in (values, colours, values.astype(np.uint16) * 200):
        mask = read_mask(written(tmp_path, by_opencv(".png", pixels)))
        assert mask.dtype == bool
        assert mask.shape == (20, 30)
        assert np.argwhere(mask).tolist() == [[3, 4], [5, 6]]


# The wall


def test_reading_images_needs_no_torch(tmp_path, rgb):
    path = written(tmp_path, encoded(rgb, "PNG"))
    program = (
        "import sys; from pathlib import Path; from anomaly.imaging.read import read_image;"
        f"read_image(Path({str(path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
