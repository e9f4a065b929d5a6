"""What a decoding process takes, measured: no file, and no picture drawn of one, goes beyond it."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from picture_files import chunk, encoded, picture, png
from tiff_files import DEFLATE, file

from anomaly.imaging import pool
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import DEFAULT
from anomaly.inference.results import PictureWriter
from anomaly.maps.anomaly_map import SourceMap

pytestmark = [
    pytest.mark.usefixtures("decoding_processes"),
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="nothing says here what a process holds"
    ),
]

_LIBRARIES = 150_000_000  # files of libraries, which the limit doesn't count
_TASK = Preprocessing(Sizing(None, None, 64, 8), DEFAULT)
_LIMIT = 200_000_000
_SIDE = 10_240  # squared, more than half of the limit
_NO_MEMORY = "more than the 0.2 GB of memory that a decoding process may use"


def _peak() -> int:
    """The most bytes that the process has held."""
    child = pool._processes()[0]._child
    assert child is not None
    status = Path(f"/proc/{child.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def _tiff(side: int, strip: bytes) -> bytes:
    return file([({256: side, 257: side, 258: 8, 259: DEFLATE, 262: 1}, [strip])])


def _bombs() -> dict[str, tuple[bytes, str]]:
    """Small files that claim or hold far more than they are worth, and what is said of them."""
    stream = zlib.compress(bytes((_SIDE + 1) * _SIDE), 1)
    tags = struct.pack("<HHII", 274, 1, 4_000_000, 8) * 65_535
    exif = struct.pack("<2sHIH", b"II", 42, 8, 65_535) + tags + bytes(4)
    part = encoded(picture(), "PNG")
    bmp = struct.pack("<2sIHHIIiiHHI", b"BM", 0, 0, 0, 54, 40, 2**31 - 1, 2**31 - 1, 1, 24, 0)
    return {
        "png grey": (png(_SIDE, _SIDE, 8, 0, [stream]), _NO_MEMORY),
        "png one pixel": (png(1, 1, 8, 0, [stream]), ""),
        "png exif": (part[:33] + chunk(b"eXIf", exif) + part[33:], ""),
        "tiff": (_tiff(_SIDE, stream), _NO_MEMORY),
        "tiff pixel": (_tiff(1, stream), "doesn't end within the 1 bytes"),
        "bmp": (bmp.ljust(5000, b"\0"), "cut short"),
    }


def test_a_bomb_takes_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", str(_LIMIT // 10**6))
    decoders = Decoders(_TASK)
    for name, (data, said) in _bombs().items():
        (tmp_path / name).write_bytes(data)
        item = decoders.load(tmp_path / name)
        reason = item.reason if isinstance(item, UnusableImage) else ""
        assert (said in reason, bool(reason)) == (True, bool(said)), (name, reason)
        assert _peak() < _LIMIT + _LIBRARIES, name


def test_drawing_keeps_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 million pixels with all pictures: refused in words where they don't fit."""
    values = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.bmp"), values)
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", str(_LIMIT // 10**6))
    writer = PictureWriter(0.5, None, 0, tmp_path / "out")
    decoders = Decoders(_TASK, writer)
    (item,) = decoders.load_all([(0, tmp_path / "a.bmp")])
    assert isinstance(item, NetworkInput)
    found = SourceMap(np.ones((8, 8), np.float32), item.view, 4.0, 0.0, None)
    kinds = {"heatmap", "mask", "maps"}
    drawn = decoders.finish(0, tmp_path / "a.bmp", found, kinds, "a.bmp").result()
    assert _peak() < _LIMIT + _LIBRARIES
    assert isinstance(drawn, UnusableImage)
    assert drawn.status == "unsupported"
    assert "ANOMALY_DECODER_MEMORY" in drawn.reason
