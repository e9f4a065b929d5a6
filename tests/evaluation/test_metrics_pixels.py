"""Pixel metrics against scikit-learn and slow, independently written references."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pixel_references import (
    NAMES,
    brute_force_aupro,
    flat,
    images_of,
    measured,
    published_aupro,
    smooth_images,
)
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from anomaly.evaluation.metrics import PixelAccumulator, ScoreHistogram


def assert_classification(got, images):
    scores, labels = flat(images)
    assert got["pixel_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)
    assert got["pixel_ap"] == pytest.approx(average_precision_score(labels, scores), abs=1e-9)
    precision, recall, _ = precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    assert got["pixel_f1_max"] == pytest.approx(f1.max(), abs=1e-9)


LIMITS = {"aupro_30": 0.30, "aupro_05": 0.05}


@pytest.mark.parametrize("levels", [None, 3])
def test_aupro_agrees_with_the_published_implementation(levels):
    images = smooth_images(np.random.default_rng(6), shape=(140, 150))
    if levels:  # ties
        peak = max(m.max() for m, _ in images)
        images = [(np.round(m / peak * levels).astype(np.float32), k) for m, k in images]
    for name, limit in LIMITS.items():
        expected = published_aupro(images, limit)
        assert 0.05 < expected < 0.99
        assert measured(images).values[name] == pytest.approx(expected, abs=1e-6)


@settings(max_examples=50)
@given(images_of(1.0, 1.0000001, 1.001, 1.05))
def test_figures_agree_on_degenerate_images(images):
    got = measured(images)
    _, labels = flat(images)
    assert set(got.values) == NAMES
    assert {name for name, value in got.values.items() if value is None} == set(got.reasons)
    if labels.any() and not labels.all():
        assert_classification(got.values, images)
        seen = [(np.nan_to_num(m, nan=0.99), k) for m, k in images]
        for name, limit in LIMITS.items():
            assert got.values[name] == pytest.approx(brute_force_aupro(images, limit), abs=1e-9)
            published = published_aupro(seen, limit)
            assert measured(seen).values[name] == pytest.approx(published, abs=1e-6)
    else:
        assert got.values["pixel_auroc"] is None
        assert got.values["aupro_30"] is None
    defect_pixels = sum(int(k.sum()) for _, k in images)
    if defect_pixels:
        lost = sum(int((k & np.isnan(m)).sum()) for m, k in images)
        assert got.values["lost_defect_share"] == lost / defect_pixels
    else:
        assert got.values["lost_defect_share"] is None


def test_undefined_metrics_have_reasons():
    empty = PixelAccumulator().result()
    assert set(empty.values) == NAMES == set(empty.reasons)
    assert set(empty.reasons.values()) == {"no image with a ground-truth mask"}
    mask = np.zeros((10, 10), bool)
    all_good = measured([(np.ones((10, 10), np.float32), mask)])
    assert set(all_good.values.values()) == {None}
    assert all_good.reasons["pixel_auroc"] == "no defective image with a ground-truth mask"
    mask[3, 3] = True
    assert not measured([(np.ones((10, 10), np.float32), mask)] * 2).reasons
    hidden = measured([(np.where(mask, np.nan, 1.0), mask)])
    assert hidden.values["lost_defect_share"] == 1.0
    assert "have values" in hidden.reasons["aupro_30"]


@settings(max_examples=50)
@given(
    images_of(0.0, -0.0, 1.0, 1.0000001, 2.0, 300.0, 1e-20, -1.0),
    st.integers(2, 40),
    st.randoms(use_true_random=False),
)
def test_binned_form_is_one_in_any_order(images, max_bins, random):
    binned = measured(images, max_bins)
    again = measured(random.sample(images, len(images)), max_bins)
    assert again.values == pytest.approx(binned.values, abs=1e-12)


def test_counts_past_sixteen_million_pixels():
    """A float32 running sum stops at 16,777,216."""
    histogram = ScoreHistogram(1, 10)
    for weight in (2.0**24, 1.0):
        histogram.add(np.ones(1, np.float32), {0: np.array([weight])})
    assert histogram.weighted()[1].tolist() == [[2**24 + 1]]


def test_memory_stays_bounded():
    rng = np.random.default_rng(0)
    accumulator = PixelAccumulator(1 << 12)
    mask = np.zeros((500, 500), bool)
    mask[:50, :50] = True
    images = [rng.gamma(3.0, 10.0 ** rng.integers(-3, 4), (500, 500)) for _ in range(12)]
    tracemalloc.start()
    try:
        for index, scores in enumerate(images):
            accumulator.update(scores, mask if index % 2 else mask & False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 24 * (1 << 12) + 50_000
