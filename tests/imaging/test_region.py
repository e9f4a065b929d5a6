"""Where to look: shapes against brute force, and what a region does to every stage."""

import itertools
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import RUNS, Command, Says, train_arguments, write_part, write_product
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from anomaly.errors import DataError
from anomaly.imaging.geometry import DrawnMask, Polygons, Region, Sizing, patch_mask
from anomaly.imaging.loading import UnusableImage
from anomaly.scoring.model import Prediction
from anomaly.storage.models import load_model

_NUMBER = st.floats(0, 30, allow_nan=False).map(lambda x: round(x, 2) + 0.003)
_POLYGON = st.lists(st.tuples(_NUMBER, _NUMBER), min_size=3, max_size=7).map(tuple)


@given(st.lists(_POLYGON, min_size=1, max_size=3).map(tuple))
@settings(max_examples=25)
def test_polygons_agree_with_opencv_point_by_point(corners: tuple) -> None:
    shares = tuple(tuple((x / 32, y / 31) for x, y in polygon) for polygon in corners)
    found = Polygons(shares).inside((31, 32), slice(None))
    expected = np.zeros((31, 32), bool)
    clear = np.ones((31, 32), bool)  # on a line itself either answer is right
    for polygon in corners:
        contour = np.array(polygon, np.float32)
        for y in range(31):
            for x in range(32):
                depth = cv2.pointPolygonTest(contour, (x + 0.5, y + 0.5), True)
                expected[y, x] |= depth >= 0
                clear[y, x] &= abs(depth) > 1e-3
    np.testing.assert_array_equal(found[clear], expected[clear])


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 59), st.integers(1, 60))
def test_strips_are_parts_of_the_whole(height: int, width: int, top: int, rows: int) -> None:
    star = ((0.1, 0.2), (0.9, 0.35), (0.2, 0.95), (0.6, 0.05), (0.7, 0.9))
    region = Region(Polygons((star,)), Polygons((star[:3],)))
    strip = slice(min(top, height), min(top + rows, height))
    whole = region.inside((height, width))
    np.testing.assert_array_equal(region.inside((height, width), strip), whole[strip])


def test_a_picture_covers_images_of_its_aspect() -> None:
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    twice = DrawnMask(mask).inside((40, 60), slice(None))
    np.testing.assert_array_equal(twice, np.kron(mask, np.ones((2, 2), bool)))
    np.testing.assert_array_equal(DrawnMask(mask).inside((10, 15), slice(None)), mask[::2, ::2])
    with pytest.raises(DataError, match="another shape than the mask of 30×20"):
        DrawnMask(mask).inside((30, 20), slice(None))


def test_a_patch_counts_when_half_of_it_does() -> None:
    rng = np.random.default_rng(0)
    mask = cv2.GaussianBlur(rng.normal(size=(160, 320)), (0, 0), 12) > 0
    # By brute force: every original pixel becomes a block of 8 × 8, and blocks are counted.
    fine = np.kron(mask, np.ones((8, 8)))
    for sizing in (Sizing(64, None, 64, 8), Sizing(80, 64, 64, 8)):
        view = sizing.view(mask.shape)
        found = patch_mask(Region(DrawnMask(mask), None), view, (8, 8))
        rows, columns = (
            np.rint(axis.to_source(np.linspace(0, axis.size, 9)) * 8).astype(int)
            for (axis,) in view.axes
        )
        for i, j in itertools.product(range(8), range(8)):
            part = fine[rows[i] : rows[i + 1], columns[j] : columns[j + 1]].mean()
            if abs(part - 0.5) > 0.01:
                assert found[i, j] == (part > 0.5)
        assert 0 < found.sum() < 64
    with pytest.raises(DataError, match="enlarge it"):
        patch_mask(Region(DrawnMask(mask), DrawnMask(mask)), view, (8, 8))


LEFT = "image.region={polygons: [[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]]}"


@pytest.mark.parametrize("kind", RUNS)
def test_what_lies_outside_counts_nowhere(
    kind: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    assert command("train", train_arguments(product, run, LEFT, f"model.kind={kind}"))[0] == 0
    detector = load_model(run, torch.device("cpu"))
    if kind == "patchcore":  # nothing outside is in the bank: the grid has 16 columns
        assert detector.scorer.tensors()["origins"][:, 2].max() <= 4
    for name, mark in (("in", (40, 30)), ("out", (40, 100)), ("none", None)):
        write_part(tmp_path / f"{name}.png", seed=200, mark=mark)
    found = list(detector.predict([tmp_path / f"{name}.png" for name in ("in", "out", "none")]))
    for result in found:
        assert isinstance(result, Prediction)
        seen = result.anomaly_map
        assert np.isnan(seen[:, 60:]).all()
        assert not np.isnan(seen[:, :60]).any()
        np.testing.assert_array_equal(np.isnan(result.source_map(slice(5, 9))), np.isnan(seen[5:9]))
    inside, outside, plain = (result.score for result in found)
    assert inside > 1.3 * plain
    assert outside - plain < (inside - plain) / 2  # neighbouring patches see some of it
    assert inside > detector.thresholds.image
    if kind == "patchcore":
        assert command("evaluate", ["--model", run, "--output", tmp_path / "figures"])[0] == 0
        figures = json.loads((tmp_path / "figures" / "metrics.json").read_text())["mean"]
        # The marks take up columns 40-50, 50-60 and 60-70.
        assert figures["lost_defect_share"] == pytest.approx(10 / 30)


def test_a_drawn_mask_travels_with_the_model(product: Path, tmp_path: Path, says: Says) -> None:
    mask = np.zeros((96, 120), np.uint8)
    mask[:, 60:] = 255
    cv2.imwrite(str(tmp_path / "mask.png"), mask)
    setting = f"image.ignore={{png: {tmp_path / 'mask.png'}}}"
    arguments = train_arguments(product, tmp_path / "run", setting)
    says(0, "train", [*arguments, "--no-calibrate"])
    (tmp_path / "mask.png").unlink()
    assert str(tmp_path / "mask.png") in says(2, "train", ["--overwrite", *arguments])
    detector = load_model(tmp_path / "run", torch.device("cpu"))
    assert detector.scorer.tensors()["origins"][:, 2].max() <= 4
    (found,) = detector.predict([product / "test" / "spot" / "000.png"])
    assert isinstance(found, Prediction)
    np.testing.assert_array_equal(np.isnan(found.anomaly_map), mask > 0)
    manifest = json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())
    assert "ignore.png" in manifest["files"]


def _resized(source: Path, target: Path, size: tuple[int, int]) -> None:
    cv2.imwrite(str(target), cv2.resize(cv2.imread(str(source)), size))


def test_an_image_that_the_region_does_not_fit_leaves_its_batch_alone(
    tmp_path: Path, command: Command
) -> None:
    """Images of two shapes that the network sees at one size, and a region drawn for one."""
    product = write_product(tmp_path / "disc", n_train=8)
    good = product / "train" / "good"
    _resized(good / "003.png", good / "0035.png", (120, 100))
    mask = np.zeros((96, 120), np.uint8)
    mask[:48, :60] = 255
    cv2.imwrite(str(tmp_path / "mask.png"), mask)
    corner = f"image.region={{png: {tmp_path / 'mask.png'}}}"
    plain, run = tmp_path / "plain", tmp_path / "run"
    learn = ["--no-calibrate", *train_arguments(product, run, corner)]
    assert command("train", learn)[0] == 3
    refused = json.loads((run / "train.json").read_text())["refused"]
    assert list(refused) == ["train/good/0035.png"]
    assert "another shape than the mask" in refused["train/good/0035.png"]
    (good / "0035.png").unlink()
    assert command("train", [*learn, "--output", plain])[0] == 0
    one, other = (
        sorted(load_file(folder / "model" / "scorer.safetensors")["vectors"].tolist())
        for folder in (run, plain)
    )
    assert one == other

    inputs = tmp_path / "inputs"
    write_part(inputs / "0.png", seed=50)
    _resized(inputs / "0.png", inputs / "1.png", (120, 100))
    write_part(inputs / "2.png", seed=51, mark=(5, 5))
    files = sorted(inputs.iterdir())
    detector = load_model(run, torch.device("cpu"))
    assert len({detector.loading.sizing.view(size).size for size in ((96, 120), (100, 120))}) == 1
    found = {result.index: result for result in detector.results(files)}
    assert isinstance(found[1], UnusableImage)
    assert (found[1].status, str(files[1]) in found[1].reason) == ("unsupported", True)
    alone = list(detector.predict([files[0], files[2]]))
    assert [found[i].score for i in (0, 2)] == [one.score for one in alone]
