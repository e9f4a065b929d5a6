"""The whole walk on real photographs with real weights; skipped where they are absent."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import SHARED, run_command
from kit import table

WEIGHTS = SHARED / "weights" / "resnet50_v1_imagenet_stem_to_layer3.safetensors"
BOTTLE = SHARED / "data" / "mvtec_ad" / "bottle"
MAGNETIC_TILE = SHARED / "data" / "magnetic_tile"
OTHERS = MAGNETIC_TILE / "test" / "good"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (WEIGHTS.exists() and BOTTLE.exists() and OTHERS.exists()), reason="needs ../shared"
    ),
]


def train(data: Path, output: Path) -> dict[str, float]:
    """Train with the default settings; gives figures on the test images."""
    settings = [f"data.root={data.parent}", f"data.category={data.name}", "data.format=mvtec"]
    settings += ["backbone.name=resnet50_v1", f"backbone.weights={WEIGHTS}", "name=defaults"]
    flags = [part for one in settings for part in ("--set", one)]
    run, figures = output / "run", output / "figures"
    run_command("train", ["--config", "folder.yaml", *flags, "--output", run, "--device", "cpu"])
    run_command("evaluate", ["--model", run, "--output", figures, "--device", "cpu"])
    means: dict[str, float] = json.loads((figures / "metrics.json").read_text())["mean"]
    return means


def test_magnetic_tile(tmp_path: Path) -> None:
    figures = train(MAGNETIC_TILE, tmp_path)
    assert figures["image_auroc"] >= 0.935
    assert figures["pixel_auroc"] >= 0.83


def test_bottle_and_what_is_none(tmp_path: Path) -> None:
    """A person is given a reason to look at what is no bottle, and none at a good one."""
    figures = train(BOTTLE, tmp_path)
    assert figures["image_auroc"] >= 0.998
    assert figures["pixel_auroc"] >= 0.985
    odd = tmp_path / "odd"
    odd.mkdir()
    for file in sorted((BOTTLE / "test" / "good").iterdir())[:3]:
        part = cv2.imread(str(file))
        cv2.imwrite(str(odd / f"black_{file.name}"), np.zeros_like(part))
        cv2.imwrite(str(odd / f"white_{file.name}"), np.full_like(part, 255))
        cv2.imwrite(str(odd / f"blurred_{file.name}"), cv2.GaussianBlur(part, (0, 0), 12))
    for file in sorted(OTHERS.iterdir())[:3]:
        shutil.copy(file, odd / f"other_{file.name}")
    images = ["--input", odd, BOTTLE / "test", "--output", tmp_path / "out"]
    run_command("infer", ["--model", tmp_path / "run", *images, "--device", "cpu"])
    rows = table(tmp_path / "out")
    assert len(rows) == 12 + 83
    for row in rows:
        folder = Path(row["path"]).parent
        if folder == odd:
            assert (row["verdict"] != "good", bool(row["reason"])) == (True, True), row
        elif folder.name == "good":
            assert row["reason"] == "", row
