"""Training images' features on the disk: space foreseen after the first batch; two sizes."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from kit import rgb, tiny

import anomaly
from anomaly.errors import OutputError

# Feature maps of 64 × 64 pixels: 24 channels of 8 × 8 and 32 of 4 × 4, in float32; and patches.
BYTES = 4 * (24 * 64 + 32 * 16 + 64 * 56)


def _train(count: int, copies: str) -> None:
    images = list(map(rgb, np.random.default_rng(0).integers(0, 255, (count, 64, 64, 3), np.uint8)))
    settings = tiny(image={"area": 64}, batch_size=2, model={"turned_copies": copies})
    settings["backbone"]["layers"] = ["layer2", "layer3"]
    anomaly.fit(images, settings, device="cpu", calibrate=False)


@pytest.mark.parametrize(("copies", "each"), [("none", 1), ("quarter_turns", 4)])
def test_too_small_a_disk_is_refused_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch, copies: str, each: int
) -> None:
    free = 6 * each * BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(OutputError, match=r"features of 6 images take about .* are free"):
        _train(6, copies)
    _train(5, copies)


@pytest.mark.parametrize("copies", ["none", "quarter_turns"])
def test_images_of_two_sizes_are_learned_whole_and_held_out_whole(copies: str) -> None:
    rng = np.random.default_rng(0)
    images = [rgb(rng.integers(0, 255, (64, 64 + 96 * (i % 2), 3), np.uint8)) for i in range(7)]
    settings = tiny(image={"area": 64}, model={"turned_copies": copies, "coreset_ratio": 1.0})
    detector = anomaly.fit(images, settings, device="cpu")
    assert detector.thresholds is not None
    held_out = detector.thresholds.good.image
    found = [one.score for one in detector.predict(images)]
    assert max(found) < 0.05 * min(held_out)
