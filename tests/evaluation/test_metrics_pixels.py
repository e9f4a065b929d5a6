"""Pixel metrics against scikit-learn and slow, independently written references."""

import numpy as np
import pytest
from hypothesis import given, settings
from pixel_references import (
    IMAGES,
    NAMES,
    brute_force_aupro,
    flat,
    measured,
    published_aupro,
    smooth_images,
)
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    precision_recall_curve,
    roc_auc_score,
)

from anomaly.errors import DataError
from anomaly.evaluation.metrics.pixels import PixelAccumulator


def assert_classification(got, images):
    scores, labels = flat(images)
    assert got["pixel_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)
    assert got["pixel_ap"] == pytest.approx(average_precision_score(labels, scores), abs=1e-9)
    precision, recall, _ = precision_recall_curve(labels, scores)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    assert got["pixel_f1_max"] == pytest.approx(f1.max(), abs=1e-9)
    flagged = scores > got["pixel_f1_max_threshold"]
    assert f1_score(labels, flagged) == pytest.approx(f1.max(), abs=1e-9)


def test_exact_form_agrees_with_the_references():
    images = smooth_images(np.random.default_rng(0))
    got = measured(images)
    assert set(got.values) == NAMES
    assert not got.reasons
    assert_classification(got.values, images)
    small = [(m[:36, :36], k[:36, :36]) for m, k in images]
    exact = measured(small).values
    assert exact["aupro_30"] == pytest.approx(brute_force_aupro(small, 0.30), abs=1e-9)
    assert exact["aupro_05"] == pytest.approx(brute_force_aupro(small, 0.05), abs=1e-9)


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
        for max_bins in (None, 1 << 20):
            found = measured(images, max_bins).values[name]
            assert found == pytest.approx(expected, abs=1e-6)


@settings(max_examples=50)
@given(IMAGES)
def test_exact_form_agrees_on_degenerate_images(images):
    got = measured(images)
    _, labels = flat(images)
    assert set(got.values) == NAMES
    assert {name for name, value in got.values.items() if value is None} == set(got.reasons)
    if labels.any() and not labels.all():
        assert_classification(got.values, images)
        seen = [(np.nan_to_num(m, nan=-5.0), k) for m, k in images]
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


def test_unusable_maps_are_refused():
    accumulator = PixelAccumulator()
    with pytest.raises(DataError, match=r"\(4, 5\).*\(4, 6\)"):
        accumulator.update(np.zeros((4, 6)), np.zeros((4, 5), bool))
    with pytest.raises(ValueError, match="infinite"):
        accumulator.update(np.full((4, 6), np.inf), np.zeros((4, 6), bool))
