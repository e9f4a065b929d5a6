"""The scene changed, not the part: said soon, of nothing else, and over once it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anomaly.calibration.cusum import HORIZON
from anomaly.scoring.image_statistics import StatisticsSums, TrainingStatistics, measure
from anomaly.scoring.scene import PICTURES, SIDE, Scene, SceneWatch, evenly, picture_of

# A bright board with a darker part of many details, as (SIDE, SIDE, 4).
BOARD = np.full((SIDE, SIDE, 4), 0.7, np.float32)
BOARD[4:28, 6:26, :3] = np.random.default_rng(1).uniform(0.2, 0.6, (24, 20, 1))
BOARD[..., 3] = 0.05


def shots(count: int, seed: int = 0) -> np.ndarray:
    """Pictures of one scene: brightness differs by 1 %, each cell by 2 %."""
    rng = np.random.default_rng(seed)
    light = np.exp(rng.normal(0, 0.01, (count, 1, 1, 1)))
    return (BOARD * light * np.exp(rng.normal(0, 0.02, (count, SIDE, SIDE, 4)))).astype(np.float16)


SCENE = Scene(shots(40, 9), turned=False)


def watching(scene: Scene = SCENE) -> SceneWatch:
    models: Any = {"": SimpleNamespace(scene=scene)}
    return SceneWatch(models)


def feed(watch: SceneWatch, pictures: np.ndarray, odd: Sequence[bool] = ()) -> list[str]:
    """What is said after each part."""
    said = []
    for i, picture in enumerate(pictures):
        watch.add("", (*SCENE.figures(picture), bool(odd and odd[i])))
        said.append(watch.changed.get("", ""))
    return said


def _shifted(pictures: np.ndarray) -> np.ndarray:
    return np.roll(pictures, (-1, 3), axis=(1, 2))


CHANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "dark": (lambda p: p * np.float16([0.8, 0.8, 0.8, 0.8]), "brightness is (19|20|21) % lower"),
    "light": (lambda p: p * np.float16([1.15, 1.15, 1.15, 1.15]), "brightness is 1[456] % higher"),
    "warm": (lambda p: p * np.float16([1.1, 1, 0.9, 1]), "red against blue is 2[123] % higher"),
    "blurred": (lambda p: p * np.float16([1, 1, 1, 0.5]), "sharpness is (49|50|51) % lower"),
    "moved": (_shifted, r"shifted right by \w+ px \((9|9\.\d) %\), .* shifted up"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_said_within_ten_parts_and_ends_by_itself(name: str) -> None:
    change, text = CHANGES[name]
    watch = watching()
    assert not any(feed(watch, shots(50)))
    said = feed(watch, change(shots(12)))
    assert said[3] == ""  # four parts may be a coincidence
    assert all(said[9:])
    assert "(the last 12 parts)" in said[-1]
    assert re.search(text, said[-1]), said[-1]
    after = feed(watch, shots(12))
    assert after[0]
    assert not any(after[9:])


def test_usual_parts_never_change_the_scene() -> None:
    for seed in range(3):
        assert not any(feed(watching(), shots(HORIZON, seed)))


def test_a_lamp_that_dims_is_said_once_it_matters() -> None:
    dims = np.linspace(1, 0.7, 200)[:, None, None, None]
    said = feed(watching(), shots(200) * dims.astype(np.float16))
    first = next(i for i, text in enumerate(said) if text)
    assert 1 - dims[first].item() == pytest.approx(0.1, abs=0.04)
    assert "brightness is 2" in said[-1]


def test_defects_in_a_row_are_no_change() -> None:
    """Each a seventh of the picture, black, and at another place or at the same."""
    for places in (np.random.default_rng(2).integers(4, 16, (20, 2)), np.full((20, 2), 10)):
        pictures = shots(20)
        for picture, (row, column) in zip(pictures, places, strict=True):
            picture[row : row + 12, column : column + 12] = 0.02
        assert not any(feed(watching(), pictures))


def test_parts_off_to_either_side_are_no_change() -> None:
    lights = np.where(np.arange(40) % 2, 0.8, 1.2)[:, None, None, None]
    assert not any(feed(watching(), shots(40) * lights.astype(np.float16)))


def test_parts_that_are_unlike_the_training_images() -> None:
    said = feed(watching(), shots(20), [True] * 10 + [False] * 10)
    assert said[9] == "parts are unlike the training images as a whole (the last 10 parts)"
    assert said[-1] == ""
    assert not any(feed(watching(), shots(40), [True, False] * 20))


def test_figures_are_those_of_the_definition() -> None:
    """By numpy alone: the median over ranks, of cells that more light would change."""
    pictures = shots(40, 5)
    scene = Scene(pictures, turned=True)

    def logs(picture: np.ndarray) -> np.ndarray:
        light = picture[..., :3].astype(np.float64).mean(axis=2)
        return np.log(np.quantile(light, np.linspace(0.05, 0.95, 19)) + 0.01)

    usual = np.mean([logs(picture) for picture in pictures], axis=0)
    brightness = np.array([np.median(logs(picture) - usual) for picture in pictures])
    dark = pictures[0] * np.float16(0.9)
    expected = np.median(logs(dark) - usual) - brightness.mean()
    assert scene.figures(dark)[0] == pytest.approx(expected, abs=1e-3)
    assert scene.levels[3:].tolist() == [np.inf, np.inf]  # turned parts lie anywhere
    assert scene.levels[0] == pytest.approx(0.09)  # no smaller change is worth an alarm
    light = np.exp(np.random.default_rng(3).normal(0, 0.2, (40, 1, 1, 1)))
    wide = Scene((pictures * light).astype(np.float16), turned=False)
    assert 0.4 < wide.levels[0] < 0.8  # where the training images differ, more is usual


def test_tiles_and_regions_make_the_picture_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    pixels, edges = (rng.random(s).astype(np.float32) for s in ((128, 64, 3), (128, 64)))
    whole = picture_of(pixels, edges, None)
    halves = [np.s_[:64], np.s_[64:]]
    tiles = [picture_of(pixels[h], edges[h], None, (i, 0), (2, 1)) for i, h in enumerate(halves)]
    np.testing.assert_allclose(tiles[0] + tiles[1], whole, atol=2e-3)
    np.testing.assert_allclose(whole[5, 7, :3], pixels[20:24, 14:16].mean((0, 1)), atol=2e-3)
    inside = np.zeros((8, 4), bool)
    inside[:4] = True
    shown = picture_of(pixels, edges, inside)
    assert (shown[SIDE // 2 :] == -1).all()
    figures = Scene(np.repeat(shots(9), 2, axis=0), turned=False).figures(shown)
    assert np.isfinite(figures).all()


def test_a_model_keeps_few_pictures_evenly_spread() -> None:
    assert evenly(5) == [0, 1, 2, 3, 4]
    sums = StatisticsSums(range(200))
    for i in range(200):
        pixels = np.full((32, 32, 3), (i + 1) / 400, np.float32)
        sums.add(i, measure(pixels, np.ones(4), 4.0, 1))
    statistics = [sums.of_image[i] for i in range(200)]
    known = TrainingStatistics.of(statistics)
    assert known.pictures.shape == (PICTURES, SIDE, SIDE, 4)
    assert known.pictures[[0, -1], 0, 0, 0].tolist() == pytest.approx([1 / 400, 0.5], rel=1e-3)
    both = known.merged(TrainingStatistics.of(statistics[100:]))
    assert len(both.pictures) == PICTURES
    assert (both.pictures[:, 0, 0, 0] > 0.25).sum() > PICTURES // 2
