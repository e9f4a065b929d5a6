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

from anomaly.imaging.geometry import Sizing
from anomaly.model.suspects import COUNT, Suspects
from anomaly.scorers.base import PatchBatch


@pytest.mark.parametrize("kind", ["patchcore", "padim", "subspace"])
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
