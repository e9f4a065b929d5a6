"""An image that isn't our part goes to a person; a good or a defective part doesn't."""

from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from conftest import write_part
from kit import rgb, tiny

import anomaly
from anomaly.scoring.image_statistics import (
    LEAST_IMAGES,
    ImageStatistics,
    TrainingStatistics,
    measure,
    outliers_among,
)
from anomaly.scoring.model import Model
from anomaly.storage.models import load_model


def _look(
    rng: np.random.Generator, pixels: np.ndarray | None = None, shift: float = 0.0
) -> ImageStatistics:
    if pixels is None:
        noise = rng.normal(0, 0.05, (32, 48, 1)) + rng.normal(0, 0.01)
        pixels = np.clip(0.5 + noise, 0, 1).repeat(3, axis=2).astype(np.float32)
    patches = rng.normal(1, 1, (100, 16)) + shift
    return measure(pixels, patches.sum(0), float(np.square(patches).sum()), 100)


def test_figures_agree_with_numpy() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.random((20, 30, 3)).astype(np.float32)
    inside = np.zeros((4, 6), bool)
    inside[1:, 2:5] = True
    shown = np.kron(inside, np.ones((5, 5), bool))
    grey = pixels.mean(axis=2)
    padded = np.pad(grey, 1, mode="reflect")
    edges = np.abs(
        padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * grey
    )
    figures = measure(pixels, np.ones(3), 1.0, 9, inside).figures()
    assert figures["brightness"] == pytest.approx(grey[shown].mean(), rel=1e-5)
    assert figures["contrast"] == pytest.approx(grey[shown].std(), rel=1e-4)
    sharpness = edges[shown].mean() / grey[shown].std()
    assert figures["sharpness"] == pytest.approx(sharpness, rel=1e-4)


def test_one_value_is_a_blank_image() -> None:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :48]
    for value in (0.0, 1 / 3, 1.0):
        pixels = np.full((32, 48, 3), value, np.float32)
        pixels += np.float32(1e-7) * (rows + columns)[..., None]
        blank = _look(rng, pixels)
        assert "a blank image" in blank.blank
        assert "a blank image" in (blank + blank).blank
        assert (blank + _look(rng)).blank == ""
        assert outliers_among([_look(rng), blank]) == [1]
        pixels[3, 4] += 1 / 255
        assert _look(rng, pixels).blank == ""
    nothing = measure(pixels, np.ones(16), 1.0, 0, np.zeros((4, 6), bool))
    assert (nothing + _look(rng)).blank == ""


def test_of_a_handful_of_images_only_blank_ones_are_known_to_be_odd() -> None:
    rng = np.random.default_rng(0)
    dark, blank = rng.integers(0, 3, (96, 120, 3), np.uint8), np.zeros((96, 120, 3), np.uint8)
    good = [rng.integers(90, 110, (96, 120, 3), np.uint8) for _ in range(4)]
    detector = anomaly.fit([*map(rgb, good)], tiny(), device="cpu")
    first, second = detector.predict([rgb(dark), rgb(blank)])
    assert first.reason == ""
    assert (second.verdict != "good", "a blank image" in second.reason) == (True, True)


def test_tiles_add_up() -> None:
    rng = np.random.default_rng(0)
    tiles = [_look(rng) for _ in range(4)]
    whole = tiles[0] + tiles[1] + tiles[2] + tiles[3]
    means = [t.figures()["brightness"] for t in tiles]
    assert whole.figures()["brightness"] == pytest.approx(np.mean(means))
    np.testing.assert_allclose(
        whole.mean_embedding(), np.mean([t.mean_embedding() for t in tiles], axis=0)
    )


def test_what_is_usual_and_what_is_not() -> None:
    rng = np.random.default_rng(0)
    few = TrainingStatistics.of([_look(rng) for _ in range(LEAST_IMAGES - 1)])
    usual = TrainingStatistics.of([_look(rng) for _ in range(40)])
    again = TrainingStatistics.from_tensors(usual.tensors(), 40)
    assert [usual.deviation(_look(rng)) for _ in range(200)] == [""] * 200
    black, white = np.zeros((32, 48, 3), np.float32), np.ones((32, 48, 3), np.float32)
    noise = np.clip(rng.normal(0.5, 0.05, (32, 48, 1)), 0, 1).repeat(3, 2).astype(np.float32)
    odd = {
        "lens cap": _look(rng, black),
        "over-exposed": _look(rng, white),
        "nothing in view": _look(rng, np.full((32, 48, 3), 0.5, np.float32)),
        "out of focus": _look(rng, 0.5 + 6 * (cv2.GaussianBlur(noise, (0, 0), 3) - 0.5)),
        "another product": _look(rng, shift=1.0),
    }
    for says, one in odd.items():
        assert says in usual.deviation(one)
        assert again.deviation(one) == usual.deviation(one)
        assert few.deviation(one) == ""  # too few to tell, and enough once they are joined
        assert says in few.merged(few).deviation(one)


def _whole(mean: np.ndarray, spread: float = 1.0) -> ImageStatistics:
    """An image of this mean embedding, with the standard deviation of its patches around it."""
    squared = 64 * float(np.square(mean).sum() + len(mean) * spread**2)
    return ImageStatistics(1024, 500, 250, 9, 64, mean * 64, squared, 0, 1)


def _product(rng: np.random.Generator, count: int, dim: int = 64) -> np.ndarray:
    """Mean embeddings (N, D) of a product, whose channels move by very different amounts."""
    return rng.normal(0, 1, dim) + rng.normal(0, 1, (count, dim)) * np.geomspace(0.01, 0.3, dim)


@pytest.mark.parametrize("images", [LEAST_IMAGES, 50, 300])
def test_another_product_is_told_and_a_good_image_is_not(images: int) -> None:
    for scale in (1e-3, 1.0, 1e3):  # networks have their own
        rng = np.random.default_rng(images)
        every = _product(rng, images + 200)
        usual = TrainingStatistics.of([_whole(mean * scale, scale) for mean in every[:images]])
        odd = [usual.deviation(_whole(mean * scale, scale)) for mean in every[images:]]
        assert sum(map(bool, odd)) <= 2
        others = [usual.deviation(_whole(mean * scale, scale)) for mean in _product(rng, 50)]
        assert all("another product" in said for said in others)


def test_what_differs_little_is_no_other_product_however_alike_training_images_are() -> None:
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 1, 64)
    for noise in (0.0, 1e-9, 1e-3):
        usual = TrainingStatistics.of([_whole(mean + rng.normal(0, noise, 64)) for _ in range(20)])
        assert usual.deviation(_whole(mean + 0.2)) == ""  # a fifth of how patches differ
        assert "another product" in usual.deviation(_whole(mean + 0.5))


def test_where_parts_may_lie_any_way_light_alone_is_compared() -> None:
    rng = np.random.default_rng(0)
    usual = TrainingStatistics.of([_whole(mean) for mean in _product(rng, 20)])
    (other,) = map(_whole, _product(rng, 1))
    dark = replace(other, light=50)
    assert usual.deviation(other, turned=True) == ""
    assert "another product" not in usual.deviation(dark, turned=True)
    assert "lens cap" in usual.deviation(dark, turned=True)
    assert "lens cap" in usual.deviation(dark)
    assert "another product" in usual.deviation(dark)  # both are said
    for turned_copies, said in (("none", True), ("quarter_turns", False)):
        settings = SimpleNamespace(model=SimpleNamespace(turned_copies=turned_copies))
        pipeline = SimpleNamespace(config=settings, training_statistics=usual)
        view = SimpleNamespace(pose=None)
        assert bool(Model.review_reason(pipeline, view, other)) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("few", [1, 6, 20, 39])
def test_a_merged_model_is_that_of_all_images(few: int) -> None:
    rng = np.random.default_rng(few)
    looks = [
        replace(_whole(mean), light=500 + mean[0], light_squared=250 + mean[0])
        for mean in _product(rng, 40)
    ]
    first, second = TrainingStatistics.of(looks[:few]), TrainingStatistics.of(looks[few:])
    whole = TrainingStatistics.of(looks)
    for merged in (first.merged(second), second.merged(first)):
        assert (merged.seen, merged.ranges, merged.images) == (whole.seen, whole.ranges, 40)
        np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-9)
        np.testing.assert_allclose(merged.variance, whole.variance, rtol=1e-9)
        assert merged.spread == pytest.approx(whole.spread, rel=1e-9)
        assert merged.seen_distance == pytest.approx(whole.seen_distance, rel=1e-9)
    one_by_one = reduce(TrainingStatistics.merged, [TrainingStatistics.of([one]) for one in looks])
    assert one_by_one.seen_distance == pytest.approx(whole.seen_distance, rel=1e-9)


def test_odd_ones_out_are_those_that_the_others_would_not_accept() -> None:
    rng = np.random.default_rng(0)
    looks = [_look(rng) for _ in range(40)]
    assert outliers_among(looks) == []
    dark = np.full((32, 48, 3), 0.3, np.float32) + rng.normal(0, 0.02, (32, 48, 1))
    looks[7] = _look(rng, dark.astype(np.float32))
    looks[21] = _look(rng, shift=1.0)

    def without(place: int) -> TrainingStatistics:
        return TrainingStatistics.of(looks[:place] + looks[place + 1 :])

    every = [i for i, one in enumerate(looks) if without(i).deviation(one)]
    assert outliers_among(looks) == every == [7, 21]
    assert outliers_among(looks[:LEAST_IMAGES]) == []


def test_a_model_gives_odd_images_a_reason_and_defects_none(
    run_folder: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"{name}.png" for name in ("good", "spot", "blurred", "other")}
    write_part(files["good"], seed=500)
    write_part(files["spot"], seed=501, mark=(40, 50))
    part = cv2.imread(str(files["good"]))
    cv2.imwrite(str(files["blurred"]), cv2.GaussianBlur(part, (0, 0), 12))
    checks = np.kron(np.indices((12, 15)).sum(0) % 2, np.ones((8, 8)))
    cv2.imwrite(str(files["other"]), cv2.merge([(60 + 60 * checks).astype(np.uint8)] * 3))
    found = load_model(run_folder, "cpu").predict([*files.values()])
    assert [one.verdict for one in found] == ["good", "reject", "reject", "reject"]
    assert [bool(one.reason) for one in found] == [False, False, True, True]
