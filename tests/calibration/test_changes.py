"""Thresholds in the place of others: what is said, and what is doubted."""

import numpy as np
import pytest

from anomaly.calibration.thresholds import (
    GoodScores,
    ThresholdChange,
    Thresholds,
    thresholds_by_hand,
    thresholds_from,
)


def _thresholds(scores: list[float]) -> Thresholds:
    names = tuple(f"{i}.png" for i in range(len(scores)))
    good = GoodScores(names, tuple(scores), tuple(scores), "some images")
    return thresholds_from(good, 0.05, 0.01)


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
