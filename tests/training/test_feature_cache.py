"""Training images' features on the disk: space foreseen after the first batch; one order."""

import logging
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit import tiny

import anomaly
from anomaly.errors import OutputError

# Feature maps of 64 × 64 pixels: 24 channels of 8 × 8 and 32 of 4 × 4, in float32; and patches.
BYTES = 4 * (24 * 64 + 32 * 16 + 64 * 56)


def _train(shapes: list[tuple[int, int]], image: dict[str, Any], **model: object) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (*shape, 3), dtype=np.uint8) for shape in shapes]
    settings = tiny(image={"area": 64, **image}, batch_size=2, model=model)
    settings["backbone"]["layers"] = ["layer2", "layer3"]
    anomaly.fit(images, settings, device="cpu", calibrate=False, channels="rgb")


@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_too_small_a_disk_is_refused_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int
) -> None:
    free = 6 * each * BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"features of 6 images take about .* are free"):
        _train([(64, 64)] * 6, {}, turned_copies=copies)
    _train([(64, 64)] * 5, {}, turned_copies=copies)


def test_much_space_is_announced_and_of_tiles_not_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Six tiles of 64 pixels; other images may have fewer."""
    monkeypatch.setattr("anomaly.training.feature_cache._WORTH_SAYING", 17 * BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=BYTES))
    with caplog.at_level(logging.INFO, "anomaly"):
        for count in (2, 3):
            _train([(128, 192)] * count, {"tile": 64, "overlap": 0})
    assert [m.split(" take")[0] for m in caplog.messages if "the features of" in m] == [
        "the features of 3 images"
    ]


@pytest.mark.parametrize("copies", ["none", "quarter_turns"])
def test_images_of_two_sizes_are_learned_whole_and_held_out_whole(copies: str) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (64, 64 + 96 * (i % 2), 3), np.uint8) for i in range(7)]
    settings = tiny(image={"area": 64}, model={"turned_copies": copies, "coreset_ratio": 1.0})
    detector = anomaly.fit(images, settings, device="cpu", channels="rgb")
    assert detector.thresholds is not None
    held_out = detector.thresholds.good.image
    found = [one.score for one in detector.predict(images, channels="rgb")]
    assert max(found) < 0.05 * min(held_out)
