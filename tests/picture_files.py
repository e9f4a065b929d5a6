"""Pictures, the files that tests make of them, and what reading gives: pixels or a refusal."""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image as Pil

from anomaly.errors import ImageError
from anomaly.imaging.read import Decoding, read_image

H, W = 37, 53


def decode(data):
    return read_image(data).pixels


def refused(source, **options):
    """The error of an image, from a file or memory, that must be refused; it names the file."""
    with pytest.raises(ImageError) as caught:
        read_image(source, Decoding(**options))
    assert isinstance(source, bytes) or str(source) in str(caught.value)
    return caught.value


def picture():
    """A picture (H, W, 3) with smooth parts, edges and noise."""
    y, x = np.mgrid[:H, :W]
    smooth = np.stack([x * 255 // W, y * 255 // H, (x + y) * 2], axis=-1)
    noise = np.random.default_rng(0).integers(-20, 20, smooth.shape)
    smooth[10:20, 15:30] = (240, 20, 60)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


def encoded(pixels, kind, **options):
    """Encode by Pillow."""
    buffer = io.BytesIO()
    Pil.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def converted(pixels, mode, kind, **options):
    buffer = io.BytesIO()
    Pil.fromarray(pixels).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def by_opencv(suffix, pixels, *options):
    """Encode RGB, RGBA or grey pixels of any depth."""
    if pixels.ndim == 3:
        pixels = pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    done, data = cv2.imencode(suffix, np.ascontiguousarray(pixels), options)
    assert done
    return data.tobytes()


def lossless_forms(rgb):
    """Files of one picture (H, W, 3) uint8: other formats, compressions and depths."""
    wide = rgb.astype(np.uint16) * 257
    opaque = np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])
    return [
        encoded(rgb, "PNG"),
        encoded(rgb, "PNG", compress_level=0),
        by_opencv(".png", wide),
        encoded(opaque, "PNG"),
        encoded(rgb, "BMP"),
        encoded(opaque, "BMP"),
        encoded(rgb, "TIFF"),
        encoded(rgb, "TIFF", compression="tiff_lzw"),
        encoded(rgb, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}),
        encoded(rgb, "TIFF", compression="tiff_deflate"),
        encoded(rgb, "TIFF", compression="tiff_adobe_deflate", tiffinfo={317: 2}),
        by_opencv(".tiff", wide),
        by_opencv(".tiff", (rgb / 255).astype(np.float32)),
        encoded(rgb, "WEBP", lossless=True),
        encoded(opaque, "WEBP", lossless=True),
    ]


def chunk(kind, content):
    body = kind + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def png(width, height, depth, colour, idat, *before, interlace=0):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    data = [chunk(b"IDAT", part) for part in idat]
    chunks = [chunk(b"IHDR", header), *before, *data, chunk(b"IEND", b"")]
    return b"".join([b"\x89PNG\r\n\x1a\n", *chunks])


def written(folder, data, name="part.png"):
    path = folder / name
    path.unlink(missing_ok=True)  # writing over a file makes some file systems flush: slow
    path.write_bytes(data)
    return path


def mutated(data, rng, foreign):
    """One file, damaged in one of the ways that disks, networks and people have."""
    broken = bytearray(data)
    way = rng.integers(7)
    at = int(rng.integers(len(data)))
    if way == 0:
        for i in rng.integers(0, 8 * len(data), rng.integers(1, 9)):
            broken[i // 8] ^= 1 << i % 8
    elif way == 1:
        del broken[at:]
    elif way == 2:
        broken[at:] = broken[-12:]
    elif way == 3:
        broken[at : at + 64] = rng.bytes(64)
    elif way == 4:
        del broken[at : at + int(rng.integers(1, 64))]
    elif way == 5:  # the header is where a wrong number does the most
        broken[int(rng.integers(min(len(data), 160)))] = int(rng.integers(256))
    else:
        broken[at:] = foreign[at:]
    return bytes(broken)


def jpegs(rgb):
    """(name, file) of one picture in each kind of JPEG."""
    yield "baseline", encoded(rgb, "JPEG", quality=90, subsampling=0)
    yield "4:2:0", encoded(rgb, "JPEG", quality=90, subsampling=2)
    yield "optimised", encoded(rgb, "JPEG", quality=90, optimize=True)
    yield "progressive", encoded(rgb, "JPEG", quality=90, progressive=True)
    yield "progressive grey", encoded(rgb[..., 0], "JPEG", quality=90, progressive=True)
    yield "restarts", encoded(rgb, "JPEG", quality=90, restart_marker_blocks=2)
    yield "grey", encoded(rgb[..., 0], "JPEG", quality=90)


def pngs(rgb):
    """(name, file) of one picture in each kind of PNG."""
    yield "8 bits", encoded(rgb, "PNG")
    yield "16 bits", by_opencv(".png", rgb.astype(np.uint16) * 257)
    rows = np.insert(rgb.reshape(H, -1), 0, 0, axis=1).tobytes()
    stream = zlib.compress(rows)
    yield "many chunks", png(W, H, 8, 2, [stream[i : i + 64] for i in range(0, len(stream), 64)])


def others(rgb):
    """(name, file) of one picture (H, W, 3) in the other formats."""
    yield "bmp", encoded(rgb, "BMP")
    yield "webp lossless", encoded(rgb, "WEBP", lossless=True)
    yield "webp lossy", encoded(rgb, "WEBP", quality=90)
    alpha = np.tile(np.arange(W, dtype=np.uint8) * 4, (H, 1))
    yield "webp alpha", encoded(np.dstack([rgb, alpha]), "WEBP", quality=90)
    for compression in (None, "tiff_lzw", "tiff_deflate"):
        yield f"tiff {compression}", encoded(rgb, "TIFF", compression=compression)
    yield "tiff 16 bits", by_opencv(".tiff", rgb.astype(np.uint16) * 257)
