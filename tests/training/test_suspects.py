"""A defect among the training images is found there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Command, train_arguments, write_part, write_product

import anomaly
from anomaly.calibration import GoodScores
from anomaly.imaging.geometry import Sizing
from anomaly.methods.base import PatchBatch
from anomaly.storage.load import load_model
from anomaly.training.cross_fitting import COUNT, Suspects, standing_out


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
@pytest.mark.parametrize("tiles", ["null", "64"])
def test_a_planted_defect_is_among_the_three_most_suspicious(
    kind: str, tiles: str, tmp_path: Path, command: Command
) -> None:
    if (kind, tiles) == ("padim", "64"):
        pytest.skip("PaDiM has no tiles")
    product = write_product(tmp_path / "disc")
    write_part(product / "train" / "good" / "005.png", seed=5, mark=(40, 60))
    output = tmp_path / "run"
    arguments = train_arguments(product, output, f"model.kind={kind}", f"image.tile={tiles}")
    code, out, _ = command("train", arguments)
    assert code == 0
    listed = json.loads((output / "train.json").read_text())["suspects"]
    assert len(listed) == COUNT
    assert "train/good/005.png" in [s["name"] for s in listed[:3]]
    assert [s["score"] for s in listed] == sorted((s["score"] for s in listed), reverse=True)
    assert "train/good/005.png" in out
    # The scores are those that the thresholds come from; from 12 images, 1 % above the highest.
    thresholds = json.loads((output / "model" / "thresholds.json").read_text())
    assert listed[0]["score"] * 1.01 == pytest.approx(thresholds["reject"]["value"])
    for suspect in listed:
        picture = cv2.imread(str(output / suspect["heatmap"]))
        assert picture.shape == (96, 120, 3)


def _batches(scores: torch.Tensor, rows: int, columns: int) -> Iterator[Any]:
    """Batches of four tiles, as large images' tiles come; scores is (N, h, w) of mosaics."""
    tiles = [
        (i, corner, scores[i][corner[0] : corner[0] + 2, corner[1] : corner[1] + 3])
        for i in range(len(scores))
        for corner in ((2 * r, 3 * c) for r in range(rows) for c in range(columns))
    ]
    for start in range(0, len(tiles), 4):
        images, corners, some = zip(*tiles[start : start + 4], strict=True)
        stacked = torch.stack(some)
        yield PatchBatch(stacked[..., None], images, corners), stacked, stacked.amax((1, 2))


def test_the_worst_are_kept_whole_however_batches_cut_them() -> None:
    view = Sizing(None, None, 32, 32, tile=64, overlap=0).view((192, 192))
    assert [len(axis) for axis in view.axes] == [3, 3]
    scores = torch.rand(13, 6, 9, generator=torch.Generator().manual_seed(0))
    suspects = Suspects(dict.fromkeys(range(13), view))
    for batch, patches, images in _batches(scores, 3, 3):
        suspects.see(batch, patches, images)
    order = scores.amax((1, 2)).argsort(descending=True)[:COUNT].tolist()
    found = suspects.worst()
    assert [s.image for s in found] == order
    for suspect in found:
        np.testing.assert_array_equal(suspect.patch_scores, scores[suspect.image])
        assert suspect.score == scores[suspect.image].max()


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_defects_among_the_training_images_are_left_out_on_request(
    kind: str, tmp_path: Path, command: Command
) -> None:
    product = write_product(tmp_path / "disc")
    clean = tmp_path / "clean"
    assert command("train", train_arguments(product, clean, f"model.kind={kind}"))[0] == 0
    dirty = ["train/good/zz0.png", "train/good/zz1.png"]
    for i, name in enumerate(dirty):
        write_part(product / name, seed=50 + i, mark=(30, 40 + 20 * i))
    told = tmp_path / "told"
    code, out, _ = command("train", train_arguments(product, told, f"model.kind={kind}"))
    assert (code, "look unlike all others: train/good/zz" in out) == (0, True)
    output = tmp_path / "run"
    settings = f"model.kind={kind}", "model.leave_out_suspects=true"
    code, out, _ = command("train", train_arguments(product, output, *settings))
    assert (code, "left out of training, because they look unlike" in out) == (0, True)
    assert "left out because they look unlike all others (model.leave_out_suspects): 2" in out
    said = json.loads((output / "train.json").read_text())
    assert (sorted(said["stand_out"]), said["left_out"], said["images"]["learned"]) == (
        dirty,
        True,
        12,
    )
    manifest = json.loads((output / "model" / "manifest.json").read_text())
    assert len(manifest["training_images"]) == 12
    assert manifest["refused_images"] == {dirty[0]: 12, dirty[1]: 13}
    found, expected, learned = (load_model(run, "cpu").thresholds for run in (output, clean, told))
    assert found is not None
    assert expected is not None
    assert learned is not None
    assert found.good.names == expected.good.names
    assert found.good.image == pytest.approx(expected.good.image, rel=1e-3)
    assert learned.image > 2 * found.image


def test_copies_of_what_stands_out_are_left_out_with_it() -> None:
    parts = [np.random.default_rng(i).integers(20, 30, (64, 96, 3), np.uint8) for i in range(9)]
    parts[3][20:40, 30:50] = 250
    parts[7] = parts[3].copy()
    settings = {
        "backbone": {"name": "tiny", "weights": "random"},
        "image": {"area": 64},
        "model": {"leave_out_suspects": True},
        "precision": "fp32",
    }
    detector = anomaly.fit(parts, settings, device="cpu", channels="rgb")
    assert len(detector.manifest["training_images"]) == 7
    assert detector.thresholds is not None
    assert detector.thresholds.images == 7


def test_what_stands_out() -> None:
    def among(*scores: float) -> list[str]:
        names = tuple(f"{score:.3g}" for score in scores)
        return list(standing_out(GoodScores(names, scores, scores, "")))

    usual = np.exp(np.random.default_rng(0).normal(0, 0.1, 200)).tolist()
    assert among(*usual) == []
    assert among(*usual, 1.5, 2.1, 1.9) == ["2.1", "1.9"]
    # Whatever the unit.
    assert among(*(1e-4 * s for s in usual), 2e-4) == ["0.0002"]
    # Many that are alike stand out as well as one.
    assert among(*usual, *[2.2 + i / 100 for i in range(30)])[-1] == "2.2"
    assert among(*[1.0] * 20, 1.05) == []
    assert among(*[1.0] * 20, 1.2) == ["1.2"]
    assert among(1.0, 5.0) == []
    assert among(0.0, 0.0, 0.0, 0.0) == []
