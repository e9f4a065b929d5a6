"""A model's thresholds: verdicts, pixels, words, changes, and the way to JSON and back."""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from anomaly.calibration.thresholds import (
    GoodScores,
    ThresholdChange,
    Thresholds,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.errors import DataError
from anomaly.storage.thresholds import read_thresholds, write_thresholds

finite = st.floats(0, 1e6, allow_nan=False, width=32)


def _good(image: list[float], peak: list[float] | None = None, groups: int | None = None):
    names = tuple(f"{i}.png" for i in range(len(image)))
    return GoodScores(names, tuple(image), tuple(peak or image), "some images", groups)


@settings(max_examples=40)
@given(
    image=st.lists(finite, min_size=1, max_size=80),
    rates=st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 0.9)).map(sorted),
    score=finite,
)
def test_verdicts_follow_the_thresholds_and_survive_json(
    image: list[float], rates: list[float], score: float
) -> None:
    reject, review = rates
    thresholds = thresholds_from(_good(image), review, reject)
    assert thresholds.review <= thresholds.image <= max(max(image) * 1.0101, 1e-30)
    assert thresholds.images == len(image)
    # Where the image score is the map's peak, what is outlined is what the verdict is of.
    assert thresholds.review_pixel <= thresholds.pixel
    assert thresholds.review_pixel == pytest.approx(thresholds.review, rel=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        write_thresholds(Path(folder), thresholds)
        again = read_thresholds(Path(folder))
    assert again == thresholds
    for one in (score, *image):
        expected = (
            "good"
            if one <= thresholds.review
            else "review" if one <= thresholds.image else "reject"
        )  # fmt: skip
        assert again.verdict(one) == expected
        assert again.calibrated(one) == thresholds.calibrated(one)
    assert thresholds.verdict(float("nan")) == "reject"


@settings(max_examples=30)
@given(image=st.lists(finite, min_size=1, max_size=80), factor=st.floats(0.1, 10))
def test_the_pixel_threshold_is_as_rare_among_good_images(
    image: list[float], factor: float
) -> None:
    """Maps whose peak is a multiple of the image score: so is the threshold, anywhere."""
    good = _good(image, [factor * score for score in image])
    for reject in (*image, max(image) * 2, min(image) / 2):
        thresholds = thresholds_by_hand(good, reject, reject)
        assert thresholds.pixel == pytest.approx(factor * reject, rel=1e-6, abs=1e-9)


def test_peaks_of_other_images_than_the_highest_scores_still_match_by_rank() -> None:
    rng = np.random.default_rng(0)
    image, peak = rng.gamma(3, size=101), rng.gamma(5, size=101)
    thresholds = thresholds_from(_good(image.tolist(), peak.tolist()), 0.2, 0.1)
    assert (image > thresholds.image).sum() == (peak > thresholds.pixel).sum()


def test_few_images_say_so_and_lots_caution() -> None:
    lines = thresholds_from(_good([1.0, 2.0, 3.0], groups=2), 0.05, 0.01).lines()
    assert "some images" in lines[0]
    assert "no review zone" in lines[1]
    # 1 − √0.05 = 78 %: two groups say no more than two images.
    assert "at most 78 %" in lines[1]
    assert "to promise 1 %, add 296 good images" in lines[1]
    assert "from 2 groups" in lines[2]
    assert "can't guarantee a false-reject rate below 78 %" in lines[2]
    lines = thresholds_from(_good([*range(400)], groups=10), 0.05, 0.01).lines()
    assert not any("add" in line for line in lines)
    some = _good([1.0, 2.0, 3.0], groups=2)
    fewer = some.without(some.names[:1])
    assert "come from at most 2 groups" in fewer.cautions[0]
    (said,) = replace(_good([1.0, 2.0]), stood_out=3).cautions
    assert said.startswith(
        "left out because they look unlike all others (model.leave_out_suspects): 3"
    )
    many = np.linspace(1, 2, 500).tolist()
    lines = thresholds_from(_good(many), 0.05, 0.01).lines()
    assert len(lines) == 4
    assert "same lot, lamp and camera" in lines[3]
    assert not any("to promise" in line for line in lines)


def test_images_that_raise_the_threshold_are_named_one_by_one() -> None:
    usual = np.linspace(2.0, 2.45, 38).tolist()
    thresholds = thresholds_from(_good([3.82, *usual, 3.1]), 0.05, 0.01)
    first, second = thresholds.raised_by()
    assert (first[0], second[0]) == ("0.png", "39.png")
    assert thresholds_from(_good([*usual, 3.1]), 0.05, 0.01).image == first[2]
    assert thresholds_from(_good(usual), 0.05, 0.01).image == second[2]
    assert thresholds_from(_good(usual), 0.05, 0.01).raised_by() == []
    assert thresholds_by_hand(thresholds.good, 3.0, 3.0).raised_by() == []
    # Of 600 images two may lie above the threshold: one odd image doesn't move it by a tenth.
    many = thresholds_from(_good([9.0, *np.linspace(2.0, 2.45, 600)]), 0.05, 0.01)
    assert many.raised_by() == []


def test_scores_without_some_images_keep_them_apart_and_caution() -> None:
    good = _good([1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5])
    less = good.without(["3.png", "1.png"])
    assert (less.names, less.image, less.peak) == (("0.png", "2.png"), (1.0, 3.0), (1.5, 3.5))
    assert "left out by hand: 2 (1.png, 3.png)" in less.cautions[0]
    assert TypeAdapter(GoodScores).validate_json(json.dumps(asdict(less)), strict=True) == less
    assert less.without(["0.png"]).left_out == ("1.png", "3.png", "0.png")
    assert (less.without([]), good.without([])) == (less, good)
    with pytest.raises(DataError, match="all good images"):
        good.without(list(good.names))


def test_an_image_counts_once_with_its_latest_score() -> None:
    old = GoodScores(("a", "b"), (1.0, 2.0), (3.0, 4.0), "", hashes=("1", "2"))
    new = GoodScores(("x", "c"), (0.5, 5.0), (0.6, 6.0), "", hashes=("2", "3"))
    both = old.joined(new)
    rows = [("a", 1.0, 3.0, "1"), ("x", 0.5, 0.6, "2"), ("c", 5.0, 6.0, "3")]
    assert both.rows() == rows
    unknown = GoodScores(("d",), (7.0,), (8.0,), "")
    assert both.joined(unknown).hashes == ("1", "2", "3", "")
    assert unknown.joined(unknown).hashes == ()
    left = both.without(["x"])
    assert (left.names, left.hashes) == (("a", "c"), ("1", "3"))
    assert left.joined(both).names == ("a", "x", "c")
    assert left.without([]) == left


def _thresholds(scores: list[float]) -> Thresholds:
    return thresholds_from(_good(scores), 0.05, 0.01)


def test_what_moves_thresholds_is_named() -> None:
    before, after = _thresholds([2.0, 2.1, 2.2, 2.3]), _thresholds([2.0, 5.0, 2.2, 4.0])
    moved = ThresholdChange(before, after)
    assert moved.is_doubtful
    assert moved.lines() == ["review threshold 2.323 -> 5.05, reject threshold 2.323 -> 5.05"]
    assert "rises from 2.323 to 5.05 (by chance up to 2.646)" in moved.caution
    assert "Rejected before: 2 of 4 images (1.png: 5, 3.png: 4)" in moved.caution
    back = ThresholdChange(after, before)
    assert (back.is_doubtful, back.caution) == (False, "")
    assert ThresholdChange(before, before).lines() == []


def test_what_somebody_sets_by_hand_is_said_and_not_doubted() -> None:
    before = _thresholds([2.0, 2.1, 2.2, 2.3])
    moved = ThresholdChange(before, thresholds_by_hand(before.good, 4.0, 9.0))
    assert not moved.is_doubtful
    assert moved.lines() == ["review threshold 2.323 -> 4, reject threshold 2.323 -> 9"]
    assert "rises from 2.323 to 9" in moved.caution
    assert "No image scored above the earlier threshold" in moved.caution


@pytest.mark.parametrize("images", [12, 200])
def test_other_images_of_the_same_law_are_seldom_doubted(images: int) -> None:
    rng = np.random.default_rng(images)
    scores = rng.gamma(60, 0.1, (400, 2, images)).tolist()
    doubted = [ThresholdChange(*map(_thresholds, pair)).is_doubtful for pair in scores]
    assert np.mean(doubted) <= 0.12


@pytest.mark.parametrize("images", [40, 1000])
def test_the_interval_ends_where_one_draw_in_forty_goes_beyond(images: int) -> None:
    """Of the share above a threshold, the end is its 2.5 % quantile: for 40 images one of 1,580."""
    found = _thresholds(np.linspace(1, 2, images).tolist())
    above = sum(score > found.image for score in found.good.image)
    beyond = 10 ** -found.calibrated(found.reject_up_to)
    shares = np.random.default_rng(0).beta(above + 1, images - above, 100_000)
    assert beyond == pytest.approx(np.quantile(shares, 0.025), rel=0.05)
