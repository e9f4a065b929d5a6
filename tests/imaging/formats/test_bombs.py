"""What a decoding process takes, measured: no file, and no picture drawn of one, goes beyond it."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from attack_files import NONE, PACK_BITS, attacks, jpeg_of_scans, tiff
from picture_files import chunk, png

from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage
from anomaly.imaging.read import MAX_PIXELS
from anomaly.inference.outputs import OutputOptions, PictureWriter, RenderOptions
from anomaly.maps.anomaly_map import SourceMap

pytestmark = [
    pytest.mark.usefixtures("decoding_processes"),
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="nothing says here what a process holds"
    ),
]

_LIBRARIES = 150_000_000  # files of libraries, which the limit doesn't count
_TASK = Preprocessing(Sizing(None, None, 64, 8), None, MAX_PIXELS)


def _peak(decoders: Decoders) -> int:
    """The most bytes that the process has held."""
    child = decoders._processes[0]._child
    assert child is not None
    status = Path(f"/proc/{child.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024


def _zeros(length: int) -> bytes:
    """A zlib stream of so many zeros, made without holding them."""
    stream, piece = zlib.compressobj(9), bytes(1 << 20)
    parts = [
        stream.compress(piece[: min(len(piece), length - at)]) for at in range(0, length, 1 << 20)
    ]
    return b"".join([*parts, stream.flush()])


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Small files of up to 250 million pixels, and some of far more."""
    for name, depth, colour, size in (
        ("grey", 8, 0, 1),
        ("colour", 8, 2, 3),
        ("16-bit colour", 16, 2, 6),
        ("16-bit colour and alpha", 16, 6, 8),
    ):
        side = 15_800
        yield f"PNG, {name}", png(side, side, depth, colour, [_zeros((size * side + 1) * side)])
    side = 12_000
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 1)
    stream = _zeros(3 * side * side + 15 * side // 8)  # seven passes of rows
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", stream), chunk(b"IEND", b"")]
    yield "PNG, interlaced", b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    yield "JPEG, progressive", jpeg_of_scans((15_000, 15_000), 1)
    strip = b"\x81\0" * 1_000_000
    yield "TIFF, PackBits", tiff((15_800, 15_800), [(0, len(strip))], compression=PACK_BITS)(strip)
    tile = tiff((1, 1), [(0, 1000)], compression=NONE, tile=(40_000, 40_000))(bytes(1000))
    yield "TIFF, a huge tile", tile
    info = struct.pack("<IiiHHIIiiII", 40, 15_800, 15_800, 1, 8, 1, 0, 0, 0, 0, 0)
    yield "BMP, run lengths", struct.pack("<2sIHHI", b"BM", 0, 0, 0, 54) + info + bytes(4096)


def _check(folder: Path, files: Iterable[tuple[str, bytes]], limit: int) -> list[str]:
    """Why each file was refused, once none has taken more than the limit; empty where taken."""
    reasons, beyond = [], []
    with Decoders(1, Task(_TASK)) as decoders:
        for name, data in files:
            (folder / "file").write_bytes(data)
            item = decoders.load(folder / "file")
            reasons.append(item.reason if isinstance(item, UnusableImage) else "")
            if (peak := _peak(decoders)) > limit + _LIBRARIES:
                beyond.append((name, peak))
    assert beyond == []
    return reasons


def test_a_bomb_takes_no_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", "300")
    (reason,) = _check(tmp_path, islice(_bombs(), 1), 300_000_000)
    assert "more than the 0.3 GB of memory that a decoding process may use" in reason


@pytest.mark.slow
def test_no_file_takes_more_than_the_limit(tmp_path: Path) -> None:
    files = chain(_bombs(), ((name, data) for name, data, _ in attacks()))
    assert sum(map(bool, _check(tmp_path, files, 1_000_000_000))) > 20


@pytest.mark.parametrize("limit", ["300", pytest.param("1000", marks=pytest.mark.slow)])
def test_drawing_keeps_to_the_limit(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 million pixels with all pictures: refused in words where they don't fit."""
    values = np.random.default_rng(0).integers(0, 256, (3500, 3500, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), values)
    monkeypatch.setenv("ANOMALY_DECODER_MEMORY", limit)
    options = OutputOptions(side_by_side=True, masks=True, maps="float32")
    task = Task(_TASK, PictureWriter(tmp_path / "out", options, "s"))
    with Decoders(1, task) as decoders:
        (item,) = decoders.load_all([(0, tmp_path / "a.png")])
        assert isinstance(item, NetworkInput)
        found = SourceMap(np.ones((8, 8), np.float32), item.view, 4.0, 0.0, None)
        what: Any = found, "a.png", RenderOptions(limit=0.5)
        drawn = decoders.finish(0, tmp_path / "a.png", *what).result()
        assert _peak(decoders) < int(limit) * 1_000_000 + _LIBRARIES
    if limit == "300":
        assert isinstance(drawn, UnusableImage)
        assert drawn.status == "unsupported"
        assert "ANOMALY_DECODER_MEMORY" in drawn.reason
    else:
        assert (tmp_path / "out" / "heatmaps" / "a.png").exists()
