"""Damaged files: a cut one is refused, and no mutation gets past ImageError."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
from picture_files import (
    chunk,
    encoded,
    jpegs,
    mutated,
    others,
    picture,
    pngs,
    written,
)
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.read import Image, read_image


@pytest.fixture(scope="module")
def rgb():
    return picture()


def refused(path, **options):
    """The error of an image that must be refused; it names the file."""
    with pytest.raises(ImageError) as caught:
        read_image(path, **options)
    assert str(path) in str(caught.value)
    return caught.value


def test_a_cut_jpeg_is_never_half_a_picture(tmp_path, rgb):
    for name, data in jpegs(rgb):
        read_image(written(tmp_path, data))
        first = data.index(b"\xff\xda")
        for cut in [*range(first, len(data) - 2, 17), *range(len(data) - 8, len(data) - 2)]:
            for end in (b"", b"\xff\xd9"):
                error = refused(written(tmp_path, data[:cut] + end))
                assert error.status == "unreadable", (name, cut, end)


def test_a_progressive_jpeg_cut_between_scans_is_refused(tmp_path, rgb):
    data = encoded(rgb, "JPEG", quality=90, progressive=True)
    scans = [i for i in range(len(data)) if data[i : i + 2] == b"\xff\xda"]
    assert len(scans) > 3
    for cut in scans[1:]:
        assert "scans" in str(refused(written(tmp_path, data[:cut] + b"\xff\xd9")))


def test_a_cut_png_is_never_half_a_picture(tmp_path, rgb):
    end = chunk(b"IEND", b"")
    for name, data in pngs(rgb):
        read_image(written(tmp_path, data))
        inside = len(data) - len(end)  # a cut from here on loses the end marker only
        for cut in [*range(data.index(b"IDAT") - 4, inside, 13), *range(inside - 9, len(data))]:
            for ending in (b"", end) if cut < inside else (b"",):
                error = refused(written(tmp_path, data[:cut] + ending))
                assert error.status == "unreadable", (name, cut)


def test_a_png_cut_between_chunks_and_closed_again_is_refused(tmp_path, rgb):
    data = dict(pngs(rgb))["many chunks"]
    starts = [i - 4 for i in range(len(data)) if data[i : i + 4] == b"IDAT"]
    assert len(starts) > 20
    for cut in starts:
        assert refused(written(tmp_path, data[:cut] + chunk(b"IEND", b""))).status == "unreadable"


def test_every_cut_of_the_other_formats_is_refused(tmp_path, rgb):
    for name, data in others(rgb):
        read_image(written(tmp_path, data))
        for cut in [*range(16, len(data) - 1, 19), *range(len(data) - 12, len(data))]:
            if name.startswith("tiff") and _is_whole_tiff(data, cut):
                continue
            error = refused(written(tmp_path, data[:cut]))
            assert error.status == "unreadable", (name, cut)


def _is_whole_tiff(data, cut):
    """Whether only padding or metadata behind the pixels is cut off; judged by Pillow."""
    tags = Pil.open(io.BytesIO(data)).tag_v2
    pixels_end = max(a + b for a, b in zip(tags[273], tags[279], strict=True))
    directory_at = struct.unpack_from("<I", data, 4)[0]
    return cut >= pixels_end > directory_at


def test_a_webp_cut_with_its_size_mended_is_refused(tmp_path, rgb):
    for kind in ({"lossless": True}, {"quality": 90}):
        data = encoded(rgb, "WEBP", **kind)
        for cut in range(40, len(data) - 1, 9):
            sized = struct.pack("<4sI", b"RIFF", cut - 8) + data[8:16]
            mended = sized + struct.pack("<I", cut - 20) + data[20:cut]
            assert refused(written(tmp_path, mended)).status == "unreadable"


def test_every_flipped_bit_of_a_png_is_noticed(tmp_path, rgb):
    data = encoded(rgb[:12, :12].copy(), "PNG")
    for i in range(8 * 8, 8 * len(data)):
        flipped = bytearray(data)
        flipped[i // 8] ^= 1 << i % 8
        refused(written(tmp_path, bytes(flipped)))
    flipped = bytearray(data)
    flipped[data.index(b"IDAT") + 20] ^= 4
    error = refused(written(tmp_path, bytes(flipped)))
    assert error.status == "unreadable"
    assert "checksum" in str(error)


def survive(folder, rgb, count, seed):
    rng = np.random.default_rng(seed)
    whole = [data for group in (jpegs, pngs, others) for _, data in group(rgb)]
    fates = {"ok": 0, "unreadable": 0, "unsupported": 0}
    for _ in range(count):
        data, foreign = (whole[i] for i in rng.integers(0, len(whole), 2))
        suffix = rng.choice([".png", ".jpg", ".tif", ".bmp", ".webp", ""])
        path = written(folder, mutated(data, rng, foreign), f"mutant{suffix}")
        try:
            image = read_image(path, max_pixels=1_000_000)
        except ImageError as error:
            fates[error.status] += 1
        else:
            fates["ok"] += 1
            assert isinstance(image, Image)
            assert image.pixels.shape[2] == 3
            assert image.pixels.max() <= image.full_scale
    return fates


def test_mutated_files_get_a_row_each_without_noise(tmp_path, rgb, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fates = survive(tmp_path, rgb, 400, seed=1)
    assert sum(fates.values()) == 400
    assert min(fates.values()) > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_mutated_files(tmp_path, rgb, seed, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(survive(tmp_path, rgb, 2000, seed).values()) == 2000
    assert capfd.readouterr() == ("", "")


def test_a_files_bytes_are_the_file(tmp_path: Path) -> None:
    """What comes from memory is read like the file, and refused in the same words."""
    file = tmp_path / "part.png"
    assert cv2.imwrite(str(file), np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    data = file.read_bytes()
    ours, theirs = read_image(data), read_image(file)
    assert (ours.sha256, ours.mode) == (theirs.sha256, theirs.mode)
    assert (ours.pixels == theirs.pixels).all()
    file.write_bytes(data[:-20])
    for broken, limit in ((data[:-20], 100), (data, 15), (b"", 100), (b"no picture", 100)):
        file.write_bytes(broken)
        with pytest.raises(ImageError) as of_file:
            read_image(file, max_pixels=limit)
        with pytest.raises(ImageError) as of_bytes:
            read_image(broken, max_pixels=limit)
        assert str(of_file.value) == f"{file}: {of_bytes.value}"
        assert of_file.value.status == of_bytes.value.status
