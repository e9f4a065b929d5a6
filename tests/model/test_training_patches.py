"""Disk space for the training images' features: foreseen after the first batch."""

import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import anomaly
from anomaly.errors import OutputError

SETTINGS = {
    "backbone": {"name": "resnet18", "weights": "random", "layers": ["layer2", "layer3"]},
    "image": {"area": 64},
    "precision": "fp32",
    "batch_size": 2,
}
# Feature maps of 64 × 64 pixels: 128 channels of 8 × 8 and 256 of 4 × 4, in float32.
BYTES = 4 * (128 * 64 + 256 * 16 + 64 * 128)  # two layers, and projected patches


def _train(count: int, **model: object) -> list[str]:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64, 3), dtype=np.uint8) for _ in range(count)]
    seen: list[str] = []
    anomaly.fit(
        images,
        {**SETTINGS, "model": model},
        device="cpu",
        calibrate=False,
        progress=lambda stage, done, total: seen.append(f"{stage} {done}"),
    )
    return seen


@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_too_small_a_disk_is_refused_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int
) -> None:
    free = 6 * each * BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"features of 6 images take about .* are free"):
        _train(6, turned_copies=copies)
    assert _train(5, turned_copies=copies)


def test_tiles_are_counted_but_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six tiles of 64 pixels; other images may have fewer."""
    monkeypatch.setattr("anomaly.model.tensor_file._WORTH_SAYING", 17 * BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=BYTES))
    images = [np.full((128, 192, 3), 9 + i, np.uint8) for i in range(3)]
    settings = SETTINGS | {"image": {"area": 64, "tile": 64}}
    with caplog.at_level(logging.INFO, "anomaly"):
        anomaly.fit(images, settings, device="cpu", calibrate=False)
    assert sum("features of 3 images" in message for message in caplog.messages) == 1


def test_much_space_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("anomaly.model.tensor_file._WORTH_SAYING", 3 * BYTES)
    with caplog.at_level(logging.INFO, "anomaly"):
        _train(3)
        assert not any("features of 3 images" in message for message in caplog.messages)
        _train(4)
    assert sum("features of 4 images" in message for message in caplog.messages) == 1
