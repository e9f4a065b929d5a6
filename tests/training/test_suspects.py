"""A defect among the training images is found there."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import RUNS, Command, train_arguments, with_note, write_part, write_product
from patch_lists import PatchList

from anomaly.calibration.thresholds import GoodScores
from anomaly.imaging.geometry import Sizing
from anomaly.methods.base import PatchBatch, PatchScores
from anomaly.storage.models import load_model
from anomaly.training.features import COUNT, CachedFeatures, worst
from anomaly.training.fit import standing_out


@pytest.mark.parametrize("kind", RUNS)
def test_defects_among_the_training_images_are_named_and_left_out_on_request(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, command: Command
) -> None:
    """With all their copies; the model is then that of the good images alone."""
    clean: Path = request.getfixturevalue(RUNS[kind])
    product = write_product(tmp_path / "disc")
    dirty = [f"train/good/zz{i}.png" for i in range(4)]
    for i, name in enumerate(dirty[:2]):
        write_part(product / name, seed=50 + i, mark=(30, 40 + 20 * i))
    shutil.copy(product / dirty[0], product / dirty[2])
    with_note(product / dirty[0], product / dirty[3], 1)

    told, kind_of = tmp_path / "told", f"model.kind={kind}"
    code, out, _ = command("train", train_arguments(product, told, kind_of))
    assert (code, "look unlike all others: train/good/zz" in out) == (0, True)
    record = json.loads((told / "train.json").read_text())
    assert sorted(record["stand_out"]) == dirty
    listed = record["suspects"]
    assert len(listed) == COUNT
    assert {s["name"] for s in listed[:2]} <= {*dirty}
    assert [s["score"] for s in listed] == sorted((s["score"] for s in listed), reverse=True)
    for suspect in listed:
        picture = cv2.imread(str(told / suspect["heatmap"]))
        assert picture.shape == (96, 120, 3)
    # The scores are those that the thresholds come from; from 14 images, 1 % above the highest.
    learned = load_model(told, "cpu").thresholds
    assert learned is not None
    assert listed[0]["score"] * 1.01 == pytest.approx(learned.image)

    output = tmp_path / "run"
    settings = kind_of, "model.leave_out_suspects=true"
    code, out, _ = command("train", train_arguments(product, output, *settings))
    assert (code, "left out of training, because they look unlike" in out) == (0, True)
    assert "left out because they look unlike all others (model.leave_out_suspects): 4" in out
    record = json.loads((output / "train.json").read_text())
    assert sorted(record["stand_out"]) == dirty
    assert (record["left_out"], record["images"]["learned"]) == (True, 12)
    model = load_model(output, "cpu")
    assert len(model.manifest["training_images"]) == 12
    assert model.manifest["refused_images"] == {name: 12 + i for i, name in enumerate(dirty)}
    found, expected = model.thresholds, load_model(clean, "cpu").thresholds
    assert found is not None
    assert expected is not None
    assert found.good.names == expected.good.names
    assert found.good.image == pytest.approx(expected.good.image, rel=1e-3)
    assert learned.image > 2 * found.image


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
        yield PatchBatch(stacked[..., None], images, corners)


def test_the_worst_are_kept_whole_however_batches_cut_them() -> None:
    view = Sizing(None, None, 32, 32, tile=64, overlap=0).view((192, 192))
    assert [len(axis) for axis in view.axes] == [3, 3]
    scores = torch.rand(13, 6, 9, generator=torch.Generator().manual_seed(0))
    settings = SimpleNamespace(kind="patchcore", halo_damping=0, smoothing=0)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(model=settings),
        score_patches=lambda e, *_: (PatchScores(e[..., 0]), e.amax((1, 2, 3))),
    )
    patches: Any = PatchList(_batches(scores, 3, 3))
    patches.views = dict.fromkeys(range(13), view)
    found = CachedFeatures.scores(patches, model)
    order = scores.amax((1, 2)).argsort(descending=True)[:COUNT].tolist()
    assert [held.image for held in worst(found)[:COUNT]] == order
    assert [i for i in found if found[i].patches is not None] == sorted(order)
    for i in order:
        np.testing.assert_array_equal(found[i].patches, scores[i])
        assert found[i].score == scores[i].max()


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
