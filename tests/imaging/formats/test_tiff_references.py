"""Our TIFF samples against those of tifffile and of libtiff, over what other programs write."""

from __future__ import annotations

import io
import itertools

import cv2
import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil
from tiff_files import DEFLATE, NONE, PACK_BITS, H, W, layout, samples

from anomaly.imaging.formats import tiff


def read_by_tifffile(data, size):
    """Samples (H, W, count) as tifffile reads them."""
    return tifffile.imread(io.BytesIO(data)).reshape(*size, -1)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([np.uint8, np.uint16, np.float16, np.float32, np.float64]),
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    count=st.sampled_from([1, 3]),
    tile=st.sampled_from([None, (16, 16), (32, 48), (128, 16)]),
    rows=st.integers(1, 80),
    order=st.sampled_from("<>"),
    compression=st.sampled_from([None, "zlib"]),
    predictor=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_tifffile_writes(dtype, size, count, tile, rows, order, compression, predictor, seed):
    values = samples(count, dtype, seed, size)
    stored = values[..., 0] if count == 1 else values
    options = {"photometric": "rgb" if count == 3 else "minisblack"}
    if compression and predictor and values.dtype.kind == "u":
        options["predictor"] = True
    options |= {"tile": tile} if tile else {"rowsperstrip": rows}
    buffer = io.BytesIO()
    tifffile.imwrite(
        buffer,
        stored,
        byteorder=order,
        compression=compression,
        metadata=None,
        **options,
    )
    data = buffer.getvalue()
    theirs = read_by_tifffile(data, size)
    np.testing.assert_array_equal(theirs, values)
    ours = tiff.decode(data)
    np.testing.assert_array_equal(ours, np.broadcast_to(theirs.astype(ours.dtype), ours.shape))


@pytest.mark.parametrize("bits", [1, 8, 16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("compression", [NONE, DEFLATE, PACK_BITS])
def test_what_is_written_by_hand(bits, count, tiled, order, compression):
    values = samples(count) >> (16 - bits)
    if bits <= 8:
        values = values.astype(np.uint8)
    data = layout(values, bits=bits, tiled=tiled, order=order, compression=compression)
    theirs = read_by_tifffile(data, (H, W)).astype(values.dtype)
    np.testing.assert_array_equal(
        tiff.decode(data), theirs * (255 if bits == 1 else 1) + np.zeros((1, 1, 3), values.dtype)
    )


@pytest.mark.parametrize(
    ("compression", "predictor", "mode"),
    [
        *itertools.product(["raw", "packbits"], [1], ["1", "L", "I;16", "F", "RGB"]),
        *itertools.product(["tiff_lzw", "tiff_adobe_deflate"], [1], ["1", "L", "I;16", "F", "RGB"]),
        *itertools.product(["tiff_lzw", "tiff_adobe_deflate"], [2], ["L", "I;16", "RGB"]),
    ],
)
def test_what_libtiff_writes(compression, predictor, mode):
    y, x = np.mgrid[:67, :131]
    grey = (x * 3 + y * y).astype(np.uint16)
    picture = {
        "1": Pil.fromarray((grey % 256).astype(np.uint8)).convert("1"),
        "L": Pil.fromarray((grey % 256).astype(np.uint8)),
        "I;16": Pil.fromarray(grey * 31),
        "F": Pil.fromarray((grey / 65535).astype(np.float32)),
        "RGB": Pil.fromarray(np.stack([grey, grey * 3, grey // 5], axis=-1).astype(np.uint8)),
    }[mode]
    buffer = io.BytesIO()
    picture.save(buffer, "TIFF", compression=compression, tiffinfo={317: predictor})
    expected = np.asarray(Pil.open(io.BytesIO(buffer.getvalue())))
    expected = expected * np.uint8(255) if mode == "1" else expected
    decoded = tiff.decode(buffer.getvalue())
    np.testing.assert_array_equal(
        decoded, np.broadcast_to(expected.reshape(67, 131, -1), (67, 131, 3))
    )
    if compression != "tiff_lzw":  # tifffile alone has no LZW
        theirs = tifffile.imread(io.BytesIO(buffer.getvalue()))
        np.testing.assert_array_equal(theirs * (255 if mode == "1" else 1), expected)


@pytest.mark.parametrize("size", [(41, 57), (1, 1), (300, 401)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_what_opencv_writes(size, dtype):
    values = samples(3, dtype, size=size)
    for pixels in (values, values[..., 0]):
        done, data = cv2.imencode(".tiff", pixels[..., ::-1] if pixels.ndim == 3 else pixels)
        assert done
        expected = pixels.reshape(*size, -1)
        np.testing.assert_array_equal(
            tiff.decode(data.tobytes()), np.broadcast_to(expected, (*size, 3))
        )
