"""OpenCV as a decoder: its log is silent while it works, and back to its level after."""

from __future__ import annotations

import cv2
import pytest
from picture_files import encoded, picture

from anomaly.imaging.formats import base

_levels = cv2.utils.logging


def test_opencv_prints_nothing_and_keeps_its_log_level(capfd):
    before = _levels.getLogLevel()
    data = bytearray(encoded(picture(), "TIFF", compression="tiff_lzw"))
    data[30:60] = bytes(i ^ 0x5A for i in data[30:60])
    base.decode_by_opencv(bytes(data))
    assert _levels.getLogLevel() == before
    assert capfd.readouterr() == ("", "")


def test_too_little_memory_isnt_damage(monkeypatch):
    def fail(*_):
        error = cv2.error("Failed to allocate")
        error.code = cv2.Error.StsNoMem
        raise error

    monkeypatch.setattr(cv2, "imdecode", fail)
    with pytest.raises(MemoryError):
        base.decode_by_opencv(b"x")
