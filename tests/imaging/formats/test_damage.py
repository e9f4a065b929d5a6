"""Damaged files of every kind: refused in words, or still the whole picture, and never a crash."""

from __future__ import annotations

import itertools
import struct
import warnings

import numpy as np
import pytest
from picture_files import chunk, encoded, jpegs, mutated, others, picture, pngs
from tiff_files import DEFLATE, layout, samples

from anomaly.errors import ImageError
from anomaly.imaging.read import Decoding, read_image

FILES = {name: data for files in (jpegs, pngs, others) for name, data in files(picture())}


def is_refused(data, whole):
    """Whether a file is refused as damaged; if not, it must have all pixels of the whole one."""
    try:
        pixels = read_image(data).pixels
    except ImageError as error:
        if error.status == "unreadable":
            return True
        raise
    np.testing.assert_array_equal(pixels, read_image(whole).pixels)
    return False


def closed(data):
    """A cut file as it is, and as a program that mends its end would leave it."""
    yield data
    if data.startswith(b"\xff\xd8"):
        yield data + b"\xff\xd9"
    elif data.startswith(b"\x89PNG"):
        yield data + chunk(b"IEND", b"")
    elif data.startswith(b"RIFF"):
        yield b"RIFF" + struct.pack("<I", len(data) - 8) + data[8:]


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_never_half_a_picture(name):
    whole = FILES[name]
    assert not is_refused(whole, whole)
    cuts = [*range(12, len(whole) - 1, 17), *range(len(whole) - 12, len(whole))]
    fates = [is_refused(mended, whole) for cut in cuts for mended in closed(whole[:cut])]
    assert sum(fates) > 0.8 * len(fates)


@pytest.mark.parametrize("kind", [b"\xff\xda", b"IDAT"])
def test_a_file_cut_between_its_parts_and_closed_again_is_refused(kind):
    whole = FILES["progressive" if kind == b"\xff\xda" else "many chunks"]
    starts = [i for i in range(len(whole)) if whole.startswith(kind, i)]
    assert len(starts) > 3
    for cut in starts[1:]:
        *_, mended = closed(whole[: cut - 4 * (kind == b"IDAT")])
        assert is_refused(mended, whole)


def test_flipped_bits_of_what_has_checksums_are_noticed():
    small = encoded(picture()[:12, :12].copy(), "PNG")
    deflated = layout(samples(1, np.uint8), compression=DEFLATE)
    for whole, end in ((small, len(small)), (deflated, 700)):  # tags lie behind
        for bit in range(8 * 8, 8 * end, 3):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            is_refused(bytes(flipped), whole)


def test_mutants_are_refused_or_read(capfd):
    rng, fates = np.random.default_rng(1), dict.fromkeys(("ok", "unreadable", "unsupported"), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for whole, _ in itertools.product(FILES.values(), range(40)):
            foreign = list(FILES.values())[rng.integers(len(FILES))]
            try:
                image = read_image(mutated(whole, rng, foreign), Decoding(1_000_000))
            except ImageError as error:
                fates[error.status] += 1
            else:
                fates["ok"] += 1
                assert image.pixels.shape[2] == 3
                assert image.pixels.max() <= image.full_scale
    assert min(fates.values()) > 0
    assert capfd.readouterr().out == ""  # where a decoding process answers
