"""Cross-fitted scores against brute force, folds that keep groups whole, and suspects."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from conftest import RUNS, Command, train_arguments, with_note, write_part, write_product
from hypothesis import given
from hypothesis import strategies as st
from kit import bare_model
from patch_lists import PatchList

from anomaly.calibration.thresholds import GoodScores
from anomaly.datasets.samples import Sample
from anomaly.errors import DataError
from anomaly.imaging.geometry import Sizing
from anomaly.methods.base import PatchBatch, PatchScores
from anomaly.methods.padim import GaussianFitter
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from anomaly.scoring.model import Model, network_map
from anomaly.storage.models import load_model
from anomaly.training.features import SUSPECTS, CachedFeatures, worst
from anomaly.training.fit import cross_fit, split, standing_out

CPU = torch.device("cpu")
GRID = (4, 5)
SIZE = (32, 40)


class _Patches(PatchList):
    """Patches of images of one size, and how these became the network's input."""

    @property
    def views(self) -> dict[int, Any]:
        view = Sizing(None, None, 36, 8).view(SIZE)
        assert view.size == SIZE
        return {image: view for batch in self for image in batch.images}

    scores = CachedFeatures.scores


def _patches(images: int, copies: Sequence[int] = ()) -> tuple[_Patches, torch.Tensor]:
    """Three images a batch, of which some are copies of the first; and all of them (N, h, w, D)."""
    g = torch.Generator().manual_seed(0)
    base = torch.randn(1, *GRID, 8, generator=g)
    every = base + 0.4 * torch.randn(images, *GRID, 8, generator=g)
    every[list(copies)] = every[0].clone()
    numbers = torch.arange(images).split(3)
    return _Patches(PatchBatch(every[n], tuple(n.tolist())) for n in numbers), every


def _fitted(kind: str, patches: _Patches) -> tuple[Model, Any]:
    score = "max" if kind == "patchcore" else "map_max"
    model = {"kind": kind, "smoothing": 0, "halo_damping": 0}
    model["image_score"] = score
    if kind == "patchcore":
        fitter: Any = MemoryBankFitter(coreset_ratio=1.0)
        scorer = fitter.fit(patches)
    else:
        fitter = GaussianFitter(dimensions=8).prepared(8, CPU)
        scorer = fitter.fit(patches)
    return bare_model({"model": model}, scorer=scorer, device=CPU), fitter


def _cross_fit(
    kind: str,
    patches: _Patches,
    folds: int,
    groups: dict[int, str],
    hashes: dict[int, str] | None = None,
) -> tuple[GoodScores, Model]:
    """Scores of images named by their numbers, none a copy unless hashes say so."""
    detector, fitter = _fitted(kind, patches)
    samples = {i: Sample(Path(), str(i), group=groups.get(i)) for i in patches.views}
    features, told = cast(Any, patches), list[tuple[int, int]]()
    features.picture_hashes = lambda: hashes or {i: str(i) for i in samples}
    good, _ = cross_fit(
        detector, features, fitter, samples, folds=folds, progress=lambda *done: told.append(done)
    )
    assert told[-1][0] == told[-1][1]
    return good, detector


def _fold_of(images: int, folds: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {image: fold for fold in folds for image in fold}


@pytest.mark.parametrize("groups", [{}, {i: "abc"[i % 3] for i in range(11)}, {0: "p", 10: "p"}])
def test_a_bank_of_everything_scores_as_brute_force_over_the_other_folds(
    groups: dict[int, str],
) -> None:
    patches, every = _patches(11)
    good, _ = _cross_fit("patchcore", patches, 4, groups)
    assert good.names == tuple(map(str, range(11)))
    assert good.groups == (len({*groups.values()}) + 11 - len(groups) if groups else None)
    folds = _fold_of(11, split(range(11), groups, 4))
    flat = every.flatten(1, 2).double()
    for i in range(11):
        others = [j for j in range(11) if j not in folds[i]]
        assert not {groups[j] for j in others if j in groups} & {groups.get(i)}
        distances = torch.cdist(flat[i], flat[others].flatten(0, 1)).amin(1)
        assert good.image[i] == pytest.approx(float(distances.max()), rel=1e-5)
        peak = network_map(distances.float().view(1, *GRID), SIZE, 0).max()
        assert good.peak[i] == pytest.approx(float(peak), rel=1e-5)


@pytest.mark.parametrize("groups", [{}, {i: str(i // 4) for i in range(30)}])
def test_padim_scores_as_numpy_covariances_of_the_others(groups: dict[int, str]) -> None:
    patches, every = _patches(30)
    good, _ = _cross_fit("padim", patches, 5, groups)
    x = every.double().numpy()
    folds = _fold_of(30, split(range(30), groups, 5)) if groups else {i: (i,) for i in range(30)}
    for i in (0, 7, 29):
        others = np.delete(x, list(folds[i]), axis=0)
        scores = np.empty(GRID)
        for at in np.ndindex(*GRID):
            values = others[:, *at]
            covariance = np.cov(values.T) + 0.01 * np.eye(8)
            r = x[i, *at] - values.mean(0)
            scores[at] = np.sqrt(r @ np.linalg.solve(covariance, r))
        expected = float(network_map(torch.tensor(scores[None]).float(), SIZE, 0).max())
        assert good.image[i] == pytest.approx(expected, rel=1e-4)


def test_one_group_alone_is_scored_image_by_image_and_cautions() -> None:
    good, _ = _cross_fit("patchcore", _patches(11)[0], 4, dict.fromkeys(range(11), "monday"))
    assert good.groups == 1
    assert "one group" in good.cautions[0]


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_copies_are_held_out_together_and_count_once(kind: str) -> None:
    patches, _ = _patches(12, copies=(5, 11))
    hashes = {i: f"hash {i}" for i in range(12)} | dict.fromkeys([0, 5, 11], "one picture")
    good, _ = _cross_fit(kind, patches, 4, {}, hashes)
    assert good.names == ("0", "1", "2", "3", "4", "6", "7", "8", "9", "10")
    assert good.groups is None
    assert good.source.startswith("10 training images")
    assert good.image[0] > 0.5 * min(good.image[1:])
    # A copy belongs to the group of the first.
    assert _cross_fit(kind, patches, 11, {0: "a", 1: "a"}, hashes)[0].groups == 9
    with pytest.raises(DataError, match="2 different training images, not 1"):
        _cross_fit(kind, patches, 4, {}, dict.fromkeys(range(12), "one picture"))


@given(
    groups=st.lists(st.integers(0, 12) | st.none(), min_size=2, max_size=60),
    folds=st.integers(2, 20),
)
def test_folds_hold_every_image_once_and_no_group_twice(
    groups: list[int | None], folds: int
) -> None:
    known = {i: f"lot {lot}" for i, lot in enumerate(groups) if lot is not None}
    units = len(set(known.values())) + len(groups) - len(known)
    if units < 2:
        with pytest.raises(DataError, match="--no-calibrate"):
            split(range(len(groups)), known, folds)
        return
    parts = split(range(len(groups)), known, folds)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    assert 2 <= len(parts) <= folds
    for name in set(known.values()):
        assert sum(any(known.get(i) == name for i in part) for part in parts) == 1


@given(images=st.integers(2, 300), folds=st.integers(2, 30))
def test_folds_of_single_images_are_of_one_size_and_neighbours(images: int, folds: int) -> None:
    parts = split(range(images), {}, folds)
    assert len(parts) == min(images, folds)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [i for part in parts for i in part] == list(range(images))


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
    assert len(listed) == SUSPECTS
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
    order = scores.amax((1, 2)).argsort(descending=True)[:SUSPECTS].tolist()
    assert [held.image for held in worst(found)[:SUSPECTS]] == order
    assert [i for i in found if found[i].patches is not None] == sorted(order)
    for i in order:
        np.testing.assert_array_equal(found[i].patches, scores[i])
    for i in range(13):  # of tiles the worst one counts
        tiles = scores[i].view(3, 2, 3, 3).transpose(1, 2).flatten(0, 1)
        peak = float(network_map(tiles, view.size, 0).max())
        assert (found[i].score, found[i].peak) == pytest.approx((float(tiles.max()), peak))


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
