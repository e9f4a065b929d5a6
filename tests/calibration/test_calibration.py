"""Calibration against scipy's closed forms, seeded simulations and its own promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from anomaly.calibration.rates import (
    OUTSIDE,
    REACH,
    ScoreScale,
    images_needed,
    rate_above,
    supported_rate,
)
from anomaly.calibration.thresholds import (
    GoodScores,
    Thresholds,
    threshold_at,
    threshold_for_expected_rate,
    threshold_for_false_reject_rate,
    thresholds_from,
)
from anomaly.errors import DataError

SCORES = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60)
TIED = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 7.0]), min_size=1, max_size=30)


def _thresholds(scores) -> Thresholds:
    values = tuple(scores.tolist())
    return thresholds_from(GoodScores(tuple(map(str, values)), values, values, ""), 0.05, 0.01)


def test_forty_images_support_seven_percent():
    assert supported_rate(40) == pytest.approx(1 - 0.05 ** (1 / 40), rel=1e-12)
    assert images_needed(0.01) == 299
    for images in (1, 2, 19, 40, 299, 999):
        target = supported_rate(images)
        assert images_needed(target) == images
        assert images_needed(target * 0.999) > images
        assert threshold_for_false_reject_rate(np.arange(images), target).supported
        less = threshold_for_false_reject_rate(np.arange(images), target * 0.999)
        assert (less.supported, less.false_rejects.count) == (False, 0)


@pytest.mark.parametrize(("count", "images"), [(0, 1), (0, 40), (3, 40), (39, 40), (40, 40)])
def test_bounds_are_clopper_pearson(count, images):
    got = rate_above(np.arange(images), images - count - 1)  # so many scores lie above it
    two_sided = stats.binomtest(count, images).proportion_ci(0.95, "exact")
    one_sided = stats.binomtest(count, images, alternative="less").proportion_ci(0.95, "exact")
    assert (got.count, got.images, got.expected) == (count, images, count / images)
    assert (got.low, got.high) == pytest.approx((two_sided.low, two_sided.high), abs=1e-12)
    assert got.at_most == pytest.approx(one_sided.high, abs=1e-12)


@pytest.mark.parametrize("kept", ["bound", "mean"])
@given(scores=SCORES | TIED, target=st.floats(0.001, 0.6))
def test_threshold_is_the_lowest_that_keeps_the_target(kept, scores, target):
    by_kind = {"bound": threshold_for_false_reject_rate, "mean": threshold_for_expected_rate}
    got = by_kind[kept](scores, target)
    good, n = np.array(scores), len(scores)

    def promised(value):
        above = (good > value).sum()
        if kept == "mean":
            return (above + 1) / (n + 1)
        return stats.beta.ppf(0.95, above + 1, n - above) if above < n else 1.0

    # The order statistic under it, which the promise is about: never on it, and not far above.
    assert got.value not in good
    rate = got.false_rejects
    assert rate.count == (good > got.value).sum()
    rates = {"bound": rate.at_most, "mean": rate.expected}
    assert rates[kept] == pytest.approx(promised(got.value), rel=1e-6)
    assert got.supported == (rates[kept] <= target * (1 + 1e-9))
    statistic = good[good < got.value].max()
    if got.supported:
        lower = good[good < statistic * (1 - REACH)]
        assert promised(got.value) <= target * (1 + 1e-6)
        assert not lower.size or promised(lower.max()) >= target * (1 - 1e-6)
    else:
        assert statistic == good.max()
        assert got.value == pytest.approx(good.max() * (1 + OUTSIDE), rel=1e-6)
        assert kept == "mean" or n < images_needed(target)


@pytest.mark.parametrize(
    ("parts", "views", "alike"), [(40, [6], 0.95), (60, [1, 2, 3, 9], 0.9), (350, [3], 0.95)]
)
def test_bounds_hold_for_views_that_are_alike(parts, views, alike):
    """Normal scores of images, most of whose variance is their part's."""
    rng = np.random.default_rng(parts)
    held = []
    for _ in range(200):
        count = rng.choice(views, parts)
        own = rng.normal(size=count.sum())
        scores = alike**0.5 * rng.normal(size=parts).repeat(count) + (1 - alike) ** 0.5 * own
        review = threshold_for_expected_rate(scores, 0.05, parts)
        reject = threshold_for_false_reject_rate(scores, 0.01, parts)
        for threshold in (review, reject, threshold_at(review.value, scores, parts)):
            rate, true = threshold.false_rejects, stats.norm.sf(threshold.value)
            held.append((true <= rate.at_most, rate.low <= true <= rate.high))
    assert np.mean(held, axis=0).min() >= 0.94


def test_each_image_a_group_changes_nothing_and_views_count_as_one():
    scores = np.random.default_rng(3).gamma(3, 1, 120)
    one = threshold_for_false_reject_rate(scores, 0.08)
    assert threshold_for_false_reject_rate(scores, 0.08, 120) == one
    assert threshold_for_false_reject_rate(scores, 0.08, 500) == one
    twice = threshold_for_false_reject_rate(scores.repeat(2), 0.08, 120).false_rejects
    assert (twice.count, twice.images) == (2 * one.false_rejects.count, 240)
    assert twice.at_most == one.false_rejects.at_most


def test_rates_are_kept_and_are_those_that_new_parts_show():
    rng = np.random.default_rng(0)
    # Three standard deviations below 95 %; the steps of so few images only err to the safe side.
    often = 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)
    for images, target, threshold_for in (
        (120, 0.08, threshold_for_false_reject_rate),
        (400, 0.05, threshold_for_false_reject_rate),
        (40, 0.05, threshold_for_expected_rate),
        (100, 0.1, threshold_for_expected_rate),
    ):
        got = [threshold_for(rng.gamma(3, 1, images), target) for _ in range(2000)]
        true = stats.gamma.sf([t.value for t in got], 3)
        noise = 4 * true.std() / math.sqrt(len(true))
        claim = np.mean([t.false_rejects.expected for t in got])
        assert true.mean() == pytest.approx(claim, abs=noise)
        assert true.mean() <= target + noise
        at_most = np.array([t.false_rejects.at_most for t in got])
        assert (true <= at_most).mean() >= often
        if threshold_for is threshold_for_false_reject_rate:
            assert (true <= target).mean() >= often


def test_two_thresholds_and_their_verdicts():
    got = _thresholds(np.arange(1000.0))
    assert got.review < got.image
    assert (got.to_review.target, got.to_reject.target) == (0.05, 0.01)
    scores = (0.0, got.review, (got.review + got.image) / 2, got.image, 1e9, math.nan)
    verdicts = ["good", "good", "review", "review", "reject", "reject"]
    assert [got.verdict(s) for s in scores] == verdicts
    with pytest.raises(ValueError, match="is above the review rate"):
        thresholds_from(got.good, 0.01, 0.05)
    with pytest.raises(ValueError, match="lies above"):
        replace(got, to_review=got.to_reject, to_reject=got.to_review)


def test_unusable_scores_are_refused():
    for use in (
        lambda s: threshold_for_false_reject_rate(s, 0.05),
        lambda s: threshold_at(1.0, s),
        ScoreScale,
    ):
        with pytest.raises(DataError, match="at least one image"):
            use([])
        with pytest.raises(ValueError, match="finite"):
            use([1.0, math.nan])
        with pytest.raises(ValueError, match=r"\(1, 2\)"):
            use([[1.0, 2.0]])
    with pytest.raises(ValueError, match="NaN"):
        threshold_at(math.nan, [1.0])
    for target in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="target"):
            threshold_for_false_reject_rate([1.0], target)


@pytest.mark.parametrize("images", [20, 209])
def test_bounds_of_any_threshold_hold_at_all_of_them_at_once(images):
    """Uniform scores: the rate above a threshold t is 1 − t, and the worst t is at a score."""
    bounds = [threshold_at(t, np.arange(images)).false_rejects for t in range(images)]
    at_most, low, high = np.array([(b.at_most, b.low, b.high) for b in bounds]).T
    rng = np.random.default_rng(images)
    rates = 1 - np.sort(rng.random((3000, images)), axis=1)
    assert (rates <= at_most).all(axis=1).mean() == pytest.approx(0.95, abs=0.012)
    assert (rates <= high).all(axis=1).mean() == pytest.approx(0.975, abs=0.009)
    # Just below a score one more is above: the lower bounds are broken there first.
    assert (rates[:, 1:] >= low[:-1]).all(axis=1).mean() >= 0.966


NOISE = 1e-4


def test_no_image_changes_sides_at_usual_sizes():
    for images in (20, 40, 209, 5000):
        rng = np.random.default_rng(images)
        for _ in range(20):
            good = rng.normal(20, 2, images).astype(np.float32)
            got = _thresholds(good)
            noisy = good * (1 + rng.uniform(-NOISE, NOISE, images))
            assert [got.verdict(s) for s in noisy] == [got.verdict(s) for s in good]


def test_a_raised_threshold_flags_fewer_and_keeps_no_lower_bound():
    scores = np.arange(1000.0)
    found = threshold_for_false_reject_rate(scores, 0.05)
    assert found.false_rejects.low > 0
    assert found.raised(found.value, scores) is found
    higher = found.raised(989.5, scores)
    rate, before = higher.false_rejects, found.false_rejects
    assert (higher.value, higher.target, rate.count) == (989.5, 0.05, 10)
    assert rate.expected == pytest.approx(11 / 1001)
    assert (rate.low, rate.high, rate.at_most) == (0.0, before.high, before.at_most)


def test_rarity_is_the_rate_to_expect():
    scores = np.random.default_rng(0).gamma(3, 1, 99)
    scale = ScoreScale(scores)
    ranked = np.sort(scores)[::-1]
    np.testing.assert_allclose(scale(ranked), -np.log10(np.arange(1, 100) / 100), atol=1e-12)
    for target in (0.1, 0.3):
        got = threshold_for_false_reject_rate(scores, target)
        statistic = scores[scores < got.value].max()
        assert 10 ** -float(scale(statistic)) == pytest.approx(got.false_rejects.expected)
        assert scale(got.value) > scale(statistic)


def test_tail_is_exponential_and_continuous():
    scores = np.random.default_rng(0).gamma(3, 1, 80)
    scale, ranked = ScoreScale(scores), np.sort(scores)[::-1]
    excess = np.mean(ranked[:8] - ranked[8])
    beyond = ranked[0] + np.array([0.0, 1e-9, 1.0, 50.0])
    expected = math.log10(81) + (beyond - ranked[0]) / excess / math.log(10)
    np.testing.assert_allclose(scale(beyond), expected, rtol=1e-9)
    deficit = np.mean(ranked[-9] - ranked[-8:])
    below = ranked[-1] - np.array([1e-12, 0.5])
    shares = 1 - (1 / 81) * np.exp(-(ranked[-1] - below) / deficit)
    np.testing.assert_allclose(scale(below), -np.log10(shares), rtol=1e-6)


@given(SCORES | TIED, st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20))
def test_rarity_rises_with_the_score(scores, probes):
    scale = ScoreScale(scores)
    probes = np.sort(np.concatenate([probes, scores]))
    rarities = scale(probes)
    assert (np.diff(rarities) >= -1e-12).all()
    assert (rarities >= 0).all()
    assert np.isfinite(rarities).all()
    assert np.isnan(scale(np.array([[math.nan], [1.0]]))).tolist() == [[True], [False]]
    top = float(scale(max(scores)))
    assert scale(max(scores) + 1.0) > top
    assert scale(max(scores) + 2.0) > scale(max(scores) + 1.0)
