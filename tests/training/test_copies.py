"""Copies among the training images: one picture in several files."""

import json
import logging
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, train_arguments, with_note, write_part, write_product

import anomaly
from anomaly.storage.load import load_model

SETTINGS = {
    "backbone": {"name": "tiny", "weights": "random"},
    "image": {"area": 64},
    "precision": "fp32",
    "batch_size": 3,
}


def _parts(count: int) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(20, 30, (64, 96, 3), np.uint8) for i in range(count)]


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_files_of_the_same_pixels_are_copies(
    kind: str, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """They were held out one by one, and scored by models that had learned the same picture."""
    product = write_product(tmp_path / "disc", n_train=6)
    once = tmp_path / "once"
    settings = f"model.kind={kind}", "batch_size=4", "model.coreset_ratio=1.0"
    assert command("train", train_arguments(product, once, *settings))[0] == 0
    assert "are copies" not in caplog.text
    good = product / "train" / "good"
    for number, source in enumerate(sorted(good.iterdir())):
        with_note(source, good / f"z{source.name}", number)
    shutil.copy(good / "000.png", good / "zz.png")
    twice = tmp_path / "twice"
    assert command("train", train_arguments(product, twice, *settings))[0] == 0
    assert (
        "7 of 13 training images are copies of others, which leaves 6 different images"
        in caplog.text
    )
    found, expected = (load_model(run, "cpu").thresholds for run in (twice, once))
    assert found is not None
    assert expected is not None
    assert found.good.names == expected.good.names
    assert found.image == pytest.approx(expected.image, rel=0.1)


def test_copies_of_one_picture_give_no_thresholds(
    product: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(5):
        with_note(product / "train" / "good" / "000.png", tmp_path / f"{i}.png", i)
    with pytest.raises(anomaly.AnomalyError, match="2 different training images, not 1"):
        anomaly.fit(tmp_path, SETTINGS, device="cpu")
    assert (
        "4 of 5 training images are copies of others, which leaves 1 different images"
        in caplog.text
    )
    assert "photograph more parts" in caplog.text


@pytest.mark.parametrize("leave_out", [False, True])
def test_all_copies_of_what_stands_out_are_named(
    leave_out: bool, tmp_path: Path, command: Command
) -> None:
    product = write_product(tmp_path / "disc")
    good = product / "train" / "good"
    write_part(good / "005.png", seed=5, mark=(30, 40))
    shutil.copy(good / "005.png", good / "y.png")
    with_note(good / "005.png", good / "z.png", 1)
    setting = f"model.leave_out_suspects={leave_out}"
    code, out, _ = command("train", train_arguments(product, tmp_path / "run", setting))
    names = [f"train/good/{name}.png" for name in ("005", "y", "z")]
    message = "look unlike all " + ("other images: " if leave_out else "others: ")
    assert (code, message + ", ".join(names) in out) == (0, True)
    summary = json.loads((tmp_path / "run" / "train.json").read_text())
    stand_out = [*summary["stand_out"]]
    assert stand_out[:3] == names
    assert (f"(model.leave_out_suspects): {len(stand_out)}" in out) is leave_out
    assert summary["images"]["learned"] == 14 - leave_out * len(stand_out)


def test_turned_and_mirrored_pictures_are_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    part = cv2.blur(_parts(1)[0] * 8, (5, 5))
    parts = [part, part[::-1], part[:, ::-1], part[::-1, ::-1]]
    with caplog.at_level(logging.WARNING, "anomaly"):
        anomaly.fit(
            [np.ascontiguousarray(one) for one in parts], SETTINGS, device="cpu", channels="rgb"
        )
    assert "are copies" not in caplog.text
