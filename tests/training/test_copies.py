"""Copies among the training images: one picture in several files."""

import logging
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import with_note, write_part
from kit import rgb, tiny

import anomaly


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_files_of_the_same_pixels_are_copies(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were held out one by one, and scored by models that had learned the same picture."""
    for i in range(6):
        write_part(tmp_path / f"{i:03}.png", seed=i)
    settings = tiny(model={"kind": kind, "dimensions": 20, "coreset_ratio": 1.0})
    expected = anomaly.fit(tmp_path, settings, device="cpu").thresholds
    assert "are copies" not in caplog.text
    for number, source in enumerate(sorted(tmp_path.iterdir())):
        with_note(source, tmp_path / f"z{source.name}", number)
    shutil.copy(tmp_path / "000.png", tmp_path / "zz.png")
    found = anomaly.fit(tmp_path, settings, device="cpu").thresholds
    said = "7 of 13 training images are copies of others, which leaves 6 different images"
    assert said in caplog.text
    assert found is not None
    assert expected is not None
    assert found.good.names == expected.good.names
    assert found.image == pytest.approx(expected.image, rel=0.1)


def test_turned_and_mirrored_pictures_are_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    noise = np.random.default_rng(0).integers(160, 240, (64, 96, 3), np.uint8)
    part = cv2.blur(noise, (5, 5))
    parts = [part, part[::-1], part[:, ::-1], part[::-1, ::-1]]
    with caplog.at_level(logging.WARNING, "anomaly"):
        anomaly.fit([rgb(one) for one in parts], tiny(), device="cpu")
    assert "are copies" not in caplog.text
