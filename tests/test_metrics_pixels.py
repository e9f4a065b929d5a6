"""Pixel metrics against scikit-learn and slow, independently written references."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.ndimage import gaussian_filter
from scipy.ndimage import label as scipy_label
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    precision_recall_curve,
    roc_auc_score,
)

from anomaly.errors import DataError
from anomaly.metrics import PixelAccumulator

NAMES = {
    "pixel_auroc",
    "pixel_ap",
    "pixel_f1_max",
    "pixel_f1_max_threshold",
    "aupro_30",
    "aupro_05",
    "aupimo",
    "lost_defect_share",
}


def measured(images, max_bins=None):
    accumulator = PixelAccumulator(max_bins)
    for anomaly_map, mask in images:
        accumulator.update(anomaly_map, mask)
    return accumulator.result()


def flat(images):
    """Inspected scores and labels of all images."""
    scores = np.concatenate([m.ravel() for m, _ in images])
    labels = np.concatenate([k.ravel() for _, k in images])
    seen = ~np.isnan(scores)
    return scores[seen], labels[seen]


def brute_force_aupro(images, limit):
    """Threshold by threshold, region by region, as the MVTec AD evaluation defines it."""
    regions, good = [], []
    for anomaly_map, mask in images:
        seen = ~np.isnan(anomaly_map)
        labels, count = scipy_label(mask, np.ones((3, 3)))
        regions += [anomaly_map[(labels == i + 1) & seen] for i in range(count)]
        good.append(anomaly_map[seen & ~mask])
    regions = [r for r in regions if r.size]
    good = np.concatenate(good)
    points = [(0.0, 0.0)] + [
        ((good >= t).mean(), np.mean([(r >= t).mean() for r in regions]))
        for t in np.unique(flat(images)[0])[::-1]
    ]
    total = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x1 <= limit:
            total += (x1 - x0) * (y0 + y1) / 2
        elif x0 < limit:
            y = y0 + (y1 - y0) * (limit - x0) / (x1 - x0)
            total += (limit - x0) * (y0 + y) / 2
    return total / limit


def brute_force_aupimo(images, low=1e-5, high=1e-4):
    """Mean over defective images of the area under recall over log(shared FPR), in fp64."""
    good = [m[~np.isnan(m)].astype(np.float64) for m, k in images if not k.any()]
    defects = [m[k & ~np.isnan(m)].astype(np.float64) for m, k in images if k.any()]
    scores = np.unique(np.concatenate([*good, *defects]))[::-1]
    curve = []
    for t in scores:
        rate = sum((g >= t).sum() / g.size for g in good) / len(good)
        curve.append((rate, [(d >= t).sum() / d.size for d in defects]))
        if rate > high:
            break
    areas = []
    for i in range(len(defects)):
        area, last_x, last_y = 0.0, None, 0.0
        for rate, recalls in curve:
            if rate > 0:
                x, y = math.log(rate), recalls[i]
                if last_x is None:
                    area += max(min(x, math.log(high)) - math.log(low), 0.0) * last_y
                else:
                    a, b = (min(max(v, math.log(low)), math.log(high)) for v in (last_x, x))
                    if x > last_x:
                        at = [last_y + (y - last_y) * (v - last_x) / (x - last_x) for v in (a, b)]
                        area += (b - a) * sum(at) / 2
                last_x = x
            last_y = recalls[i]
        areas.append(area / math.log(high / low))
    return np.mean(areas)


def smooth_images(rng, good=6, defective=5, shape=(160, 190), dtype=np.float32):
    """Maps as a detector makes them, masks with several regions of unequal size."""
    images = []
    for i in range(good + defective):
        scores = gaussian_filter(rng.gamma(3.0, 1.0, shape), 1.0)
        mask = np.zeros(shape, bool)
        if i >= good:
            for size in (3, 9, 25):
                y, x = rng.integers(0, 130, 2)
                mask[y : y + size, x : x + size] = True
            scores[mask] += rng.gamma(6.0, 0.5, mask.sum())
        images.append((scores.astype(dtype), mask))
    return images


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
    assert not got.error_bounds
    assert_classification(got.values, images)
    small = [(m[:60, :60], k[:60, :60]) for m, k in images]
    exact = measured(small).values
    assert exact["aupro_30"] == pytest.approx(brute_force_aupro(small, 0.30), abs=1e-9)
    assert exact["aupro_05"] == pytest.approx(brute_force_aupro(small, 0.05), abs=1e-9)
    assert got.values["aupimo"] == pytest.approx(brute_force_aupimo(images), abs=1e-9)
    assert 0.05 < got.values["aupimo"] < 0.95


def test_aupimo_agrees_with_the_published_implementation():
    # The figure is that of anomalib 2.7.0, aupimo_scores(num_thresholds=300_000), on these
    # arrays. With a million good pixels both bounds of the rate are met exactly, so its curves,
    # which start and stop at the nearest threshold, cover the same range.
    rng = np.random.default_rng(1)
    maps = -np.log1p(-rng.random((16, 250, 400))).astype(np.float32)
    masks = np.zeros(maps.shape, bool)
    for i in range(6):
        masks[i, 20 * i : 20 * i + 60, 30 * i : 30 * i + 50] = True
        maps[i][masks[i]] += (-np.log1p(-rng.random((3000, 8)))).sum(axis=1).astype(np.float32)
    images = list(zip(maps, masks, strict=True))
    assert measured(images).values["aupimo"] == pytest.approx(0.3320951, abs=1e-4)
    binned = measured(images, 1 << 20)
    assert binned.values["aupimo"] == pytest.approx(0.3320951, abs=1e-4)


@pytest.mark.parametrize("levels", [3, 40])
def test_aupimo_with_ties_agrees_with_the_reference(levels):
    rng = np.random.default_rng(levels)
    images = smooth_images(rng)
    peak = max(m.max() for m, _ in images)
    tied = [(np.round(m / peak * levels).astype(np.float32), k) for m, k in images]
    assert measured(tied).values["aupimo"] == pytest.approx(brute_force_aupimo(tied), abs=1e-9)


def test_aupimo_where_one_tie_passes_the_whole_range():
    good = np.zeros((400, 400), np.float32)
    good[:10, :10] = 5.0  # 6e-4 of the image at once
    defective = np.zeros((400, 400), np.float32)
    mask = np.zeros((400, 400), bool)
    mask[0, :4] = True
    defective[0, 0] = 9.0
    defective[0, 1:3] = 5.0
    images = [(good, mask & False), (defective, mask)]
    assert measured(images).values["aupimo"] == pytest.approx(0.25, abs=1e-12)
    assert brute_force_aupimo(images) == pytest.approx(0.25, abs=1e-12)


# Scores of a few levels over many powers of two, both signs and both zeros.
SCORES = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, 1.5, 2.0, 300.0, 1e-20, -1.0, math.nan])
IMAGES = st.lists(
    st.tuples(
        hnp.arrays(np.float32, (4, 5), elements=SCORES),
        hnp.arrays(bool, (4, 5), elements=st.sampled_from([False, False, True])),
    ),
    min_size=1,
    max_size=4,
)


@given(IMAGES)
def test_exact_form_agrees_on_degenerate_images(images):
    got = measured(images)
    _, labels = flat(images)
    assert set(got.values) == NAMES
    assert {name for name, value in got.values.items() if value is None} == set(got.reasons)
    if labels.any() and not labels.all():
        assert_classification(got.values, images)
        for name, limit in (("aupro_30", 0.30), ("aupro_05", 0.05)):
            assert got.values[name] == pytest.approx(brute_force_aupro(images, limit), abs=1e-9)
    else:
        assert got.values["pixel_auroc"] is None
        assert got.values["aupro_30"] is None
    defect_pixels = sum(int(k.sum()) for _, k in images)
    if defect_pixels:
        lost = sum(int((k & np.isnan(m)).sum()) for m, k in images)
        assert got.values["lost_defect_share"] == lost / defect_pixels
    else:
        assert got.values["lost_defect_share"] is None


@given(IMAGES, st.integers(2, 40), st.randoms(use_true_random=False))
def test_binned_form_is_within_its_bound_in_any_order(images, max_bins, random):
    exact, binned = measured(images), measured(images, max_bins)
    assert exact.reasons == binned.reasons
    for name, bound in binned.error_bounds.items():
        assert abs(binned.values[name] - exact.values[name]) <= bound + 1e-12
    if not binned.error_bounds:
        assert binned.values == pytest.approx(exact.values, abs=1e-12)
    shuffled = random.sample(images, len(images))
    again = measured(shuffled, max_bins)
    assert again.values == pytest.approx(binned.values, abs=1e-12)
    assert again.error_bounds == pytest.approx(binned.error_bounds, abs=1e-12)


@pytest.mark.parametrize("max_bins", [2, 50, 1000, 1 << 14, 1 << 20])
def test_binned_form_is_within_its_bound_on_smooth_maps(max_bins):
    images = smooth_images(np.random.default_rng(7))
    exact, binned = measured(images).values, measured(images, max_bins)
    named = NAMES - {"pixel_f1_max_threshold", "lost_defect_share"}
    assert set(binned.error_bounds) == named
    for name in named:
        assert abs(binned.values[name] - exact[name]) <= binned.error_bounds[name] + 1e-12
    scores, labels = flat(images)
    flagged = scores > binned.values["pixel_f1_max_threshold"]
    assert f1_score(labels, flagged) == pytest.approx(binned.values["pixel_f1_max"], abs=1e-9)


def test_average_precision_bound_covers_the_best_order_inside_a_bin():
    # One bin holds everything: 100 defect pixels, all just above 100 good ones.
    scores = np.arange(200, dtype=np.float32).reshape(10, 20) / 1000 + 1
    mask = scores > 1.0995
    got = measured([(scores, mask)], 2)
    assert measured([(scores, mask)]).values["pixel_ap"] == pytest.approx(1.0)
    assert 1.0 - got.values["pixel_ap"] <= got.error_bounds["pixel_ap"] + 1e-12
    assert got.values["pixel_ap"] < 1.0


def test_more_images_over_the_same_range_keep_the_bins():
    images = smooth_images(np.random.default_rng(9), good=1, defective=1)
    once, often = measured(images, 300), measured(images * 30, 300)
    once.error_bounds.pop("aupimo", None)
    for name, bound in once.error_bounds.items():
        assert often.error_bounds[name] == pytest.approx(bound, rel=1e-2)


def test_default_bins_are_fine_enough():
    images = smooth_images(np.random.default_rng(8))
    exact, binned = measured(images).values, measured(images, 1 << 20)
    for name in ("pixel_auroc", "pixel_f1_max", "aupro_30", "aupro_05", "aupimo"):
        assert binned.error_bounds[name] < 1e-4
        assert binned.values[name] == pytest.approx(exact[name], abs=1e-5)
    assert binned.values["pixel_ap"] == pytest.approx(exact["pixel_ap"], abs=1e-5)


@pytest.mark.parametrize("max_bins", [None, 1000])
def test_one_bad_pixel(max_bins):
    scores, mask = np.zeros((400, 300), np.float32), np.zeros((400, 300), bool)
    scores[7, 9], mask[7, 9] = 1.0, True
    got = measured([(np.zeros_like(scores), mask & False), (scores, mask)], max_bins).values
    wanted = NAMES - {"pixel_f1_max_threshold", "lost_defect_share"}
    assert {name: got[name] for name in wanted} == dict.fromkeys(wanted, 1.0)


def test_regions_touching_at_a_corner_are_one():
    # Two diagonal pixels found and a single one missed: as regions 1/2, as pixels 2/3.
    mask = np.zeros((20, 20), bool)
    mask[[3, 4, 15], [3, 4, 15]] = True
    scores = np.where(mask, 5.0, 1.0).astype(np.float32)
    scores[15, 15] = 0.0
    got = measured([(scores, mask)]).values
    assert got["aupro_30"] == pytest.approx(0.5 + 0.5 * 0.0)
    assert got["pixel_auroc"] == pytest.approx(2 / 3)


def test_uninspected_pixels_are_left_out_and_reported():
    images = smooth_images(np.random.default_rng(4))
    cropped = []
    for anomaly_map, mask in images:
        outside = anomaly_map.copy()
        outside[:, :30] = np.nan
        cropped.append((outside, mask))
    got = measured(cropped).values
    assert_classification(got, cropped)
    inner = [(m[:, 30:], k[:, 30:]) for m, k in images]
    kept = sum(k[:, 30:].sum() for _, k in images)
    lost = 1 - kept / sum(k.sum() for _, k in images)
    assert 0 < lost < 1
    assert got["lost_defect_share"] == pytest.approx(lost)
    assert got["pixel_auroc"] == pytest.approx(measured(inner).values["pixel_auroc"], abs=1e-12)


def test_region_split_by_the_crop_stays_one_region():
    mask = np.zeros((9, 9), bool)
    mask[4, 2:7] = True
    mask[8, 8] = True
    scores = np.zeros((9, 9), np.float32)
    scores[4, 2] = 3.0
    scores[4, 4] = np.nan
    # The bar is found to a quarter, the dot not at all.
    assert measured([(scores, mask)]).values["aupro_30"] == pytest.approx(
        brute_force_aupro([(scores, mask)], 0.30)
    )


def test_undefined_metrics_have_reasons():
    empty = PixelAccumulator().result()
    assert set(empty.values) == NAMES == set(empty.reasons)
    assert set(empty.reasons.values()) == {"no image with a ground-truth mask"}
    mask = np.zeros((10, 10), bool)
    all_good = measured([(np.ones((10, 10), np.float32), mask)])
    assert set(all_good.values.values()) == {None}
    assert "no defect pixels" in all_good.reasons["pixel_auroc"]
    mask[3, 3] = True
    few = measured([(np.ones((10, 10), np.float32), mask)] * 2)
    assert few.reasons == {"aupimo": "no good images with a ground-truth mask"}
    few = measured([(np.ones((10, 10), np.float32), m) for m in (mask, mask & False)])
    assert few.reasons["aupimo"] == (
        "the good images have 100 pixels; a false-positive rate of 1e-05 needs 100,000"
    )
    hidden = measured([(np.where(mask, np.nan, 1.0), mask)])
    assert hidden.values["lost_defect_share"] == 1.0
    assert "have values" in hidden.reasons["aupro_30"]


def test_unusable_maps_are_refused():
    accumulator = PixelAccumulator()
    with pytest.raises(DataError, match=r"\(4, 5\).*\(4, 6\)"):
        accumulator.update(np.zeros((4, 6)), np.zeros((4, 5), bool))
    with pytest.raises(ValueError, match="infinite"):
        accumulator.update(np.full((4, 6), np.inf), np.zeros((4, 6), bool))


def test_counts_past_sixteen_million_pixels():
    # A float32 running sum stops at 16,777,216.
    scores = np.zeros((4200, 4200), np.float32)
    mask = np.zeros(scores.shape, bool)
    mask[0, :2] = True
    scores[0, 0] = 1.0
    got = measured([(scores, mask)], 1000).values
    assert got["pixel_auroc"] == pytest.approx(0.75, abs=1e-12)
    assert got["pixel_ap"] == pytest.approx(0.5 + 0.5 * 2 / 4200**2, abs=1e-12)


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
    assert held < 40 * (1 << 12) + 50_000


def test_curves_for_plots():
    images = smooth_images(np.random.default_rng(5), shape=(160, 160))
    scores, labels = flat(images)
    accumulator = PixelAccumulator(1 << 16)
    assert accumulator.roc_curve() is None
    assert accumulator.pr_curve() is None
    for image in images:
        accumulator.update(*image)
    roc, pr = accumulator.roc_curve(60), accumulator.pr_curve(60)
    assert max(len(roc.x), len(pr.x)) <= 60
    for x, y, threshold in zip(roc.x, roc.y, roc.thresholds, strict=True):
        assert x == pytest.approx((scores[~labels] > threshold).mean())
        assert y == pytest.approx((scores[labels] > threshold).mean())
    for x, y, threshold in list(zip(pr.x, pr.y, pr.thresholds, strict=True))[1:]:
        assert x == pytest.approx((scores[labels] > threshold).mean())
        assert y == pytest.approx(labels[scores > threshold].mean())


@settings(max_examples=30)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=30, unique=True))
def test_scores_in_fine_bins_come_back_in_order(values):
    # One image, one row of distinct scores: with bins to spare the binned form is exact.
    scores = np.array([values], np.float32)
    mask = np.zeros(scores.shape, bool)
    mask[0, : len(values) // 2 + 1] = True
    if np.unique(scores).size < 2 or mask.all():
        return
    binned = measured([(scores, mask)], 1 << 16)
    exact = roc_auc_score(mask.ravel(), scores.ravel())
    assert (
        abs(binned.values["pixel_auroc"] - exact)
        <= binned.error_bounds.get("pixel_auroc", 0.0) + 1e-12
    )
