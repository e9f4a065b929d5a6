"""The compiled decoders: OpenCV's log is silent while they work, and back to its level after."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from picture_files import encoded, picture

from anomaly.imaging.formats import base

_levels = cv2.utils.logging


def test_threads_that_decode_at_once_leave_the_log_level_as_it_was(monkeypatch):
    before = _levels.getLogLevel()
    both, first_done = threading.Barrier(2), threading.Event()
    seen = []

    def slow(*_):
        both.wait(timeout=30)  # both threads have made the log silent
        if threading.current_thread().name.endswith("_1"):
            first_done.wait(timeout=30)
        seen.append(_levels.getLogLevel())
        return np.zeros((1, 1), np.uint8)

    monkeypatch.setattr(cv2, "imdecode", slow)
    with ThreadPoolExecutor(2, thread_name_prefix="t") as pool:
        decodes = [pool.submit(base.decode_by_opencv, b"x") for _ in range(2)]
        while not any(decode.done() for decode in decodes):
            pass
        first_done.set()
        for decode in decodes:
            decode.result(timeout=30)
    assert seen == [_levels.LOG_LEVEL_SILENT] * 2
    assert _levels.getLogLevel() == before


def test_many_threads_print_nothing(capfd):
    before = _levels.getLogLevel()
    data = bytearray(encoded(picture(), "TIFF", compression="tiff_lzw"))
    data[30:60] = bytes(i ^ 0x5A for i in data[30:60])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(base.decode_by_opencv, [bytes(data)] * 500))
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
