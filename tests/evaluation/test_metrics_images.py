"""Image metrics against brute force and their own promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score, roc_curve

from anomaly.evaluation.metrics import confusion, image_intervals, image_metrics, metrics_by_type

# Few distinct values, so that ties are the rule; neighbours in float32, so that a threshold
# between two of them is hard to find.
ONE = np.arange(np.float32(1).view(np.int32), np.float32(1).view(np.int32) + 3, dtype=np.int32)
TIED = st.sampled_from([0.0, -0.0, 0.5, *ONE.view(np.float32).tolist(), 1e-30, 7.25, -3.0])
LABELLED = st.lists(
    st.tuples(TIED | st.floats(-(2.0**100), 2.0**100, width=32), st.booleans()),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(LABELLED)
def test_figures_are_those_of_all_thresholds(pairs):
    scores, labels = (np.array(column) for column in zip(*pairs, strict=True))
    got = image_metrics(scores, labels).values
    if labels.all() or not labels.any():
        assert set(got.values()) == {None}
        return
    good, defects = scores[~labels], scores[labels]
    above = np.mean((defects[:, None] > good) + 0.5 * (defects[:, None] == good))
    assert got["image_auroc"] == pytest.approx(above, abs=1e-9)
    # From the highest threshold to the lowest, each flagging what scores more.
    flagged = [scores > t for t in (*np.unique(scores)[::-1], -np.inf)]
    found = np.array([f[labels].mean() for f in flagged])
    false = np.array([f[~labels].mean() for f in flagged])
    right = [labels[f].mean() for f in flagged[1:]]
    assert got["image_ap"] == pytest.approx(np.sum(np.diff(found) * right), abs=1e-9)
    best = max(f1_score(labels, f) for f in flagged)
    assert got["image_f1_max"] == pytest.approx(best, abs=1e-9)
    for rate in (0.01, 0.05):
        assert got[f"recall_at_frr_{rate}"] == found[false <= rate].max()


def test_undefined_metrics_have_reasons():
    no_defects = image_metrics([1.0, 2.0], [False, False])
    assert set(no_defects.values.values()) == {None}
    assert set(no_defects.reasons) == set(no_defects.values)
    assert no_defects.reasons["image_ap"] == "no defective images"
    no_good = image_metrics([1.0, 2.0], [True, True])
    assert set(no_good.values.values()) == {None}
    assert no_good.reasons == dict.fromkeys(no_good.values, "no good images")
    assert image_metrics([], []).values["image_auroc"] is None


def test_types_are_measured_one_by_one():
    rng = np.random.default_rng(8)
    types = np.array(["good", "dent", "stain", "good", "good"] * 30)
    labels = types != "good"
    scores = np.round(rng.normal(labels * 1.0 + (types == "dent"), 1.0), 1)
    got = metrics_by_type(scores, labels, types.tolist())
    assert list(got) == ["dent", "stain"]
    for name, figures in got.items():
        some = (types == "good") | (types == name)
        wanted = roc_auc_score(labels[some], scores[some])
        assert figures.values["image_auroc"] == pytest.approx(wanted)
    alone = metrics_by_type([1.0], [True], ["dent"])["dent"]
    assert alone.values["image_auroc"] is None
    assert set(alone.reasons) == set(alone.values)
    assert metrics_by_type([1.0], [False], ["good"]) == {}


@pytest.mark.parametrize("hundreds", [1, 3, 7, 23])
def test_recall_at_a_rate_that_is_just_reached(hundreds):
    n = 100 * hundreds
    scores = np.concatenate([np.arange(n), [n - 5 * hundreds - 1.5], np.full(9, n + 1.0)])
    got = image_metrics(scores, np.arange(n + 10) >= n).values
    assert (got["recall_at_frr_0.01"], got["recall_at_frr_0.05"]) == (0.9, 0.9)
    scores[n] = n - 5 * hundreds - 0.5
    assert image_metrics(scores, np.arange(n + 10) >= n).values["recall_at_frr_0.05"] == 1.0


def test_intervals_are_those_of_sticks_broken_at_random():
    """A plain loop: pieces of good parts at the upper ends of their gaps, and the other way."""
    rng = np.random.default_rng(0)
    labels = np.arange(70) < 30
    scores = rng.normal(labels * 1.5, 1.0)
    good, defects = np.sort(scores[~labels]), np.sort(scores[labels])
    found = {"low": [], "high": []}
    for _ in range(80):
        shares, found_shares = rng.dirichlet(np.ones(41)), rng.dirichlet(np.ones(31))
        for end, beyond in (("low", (99.0, -99.0)), ("high", (-99.0, 99.0))):
            s = np.concatenate([good, beyond[:1], defects, beyond[1:]])
            y = np.arange(72) > 40
            w = np.concatenate([40 * shares, 30 * found_shares])
            false, recall, _ = roc_curve(y, s, sample_weight=w, drop_intermediate=False)
            found[end].append(
                (
                    roc_auc_score(y, s, sample_weight=w),
                    average_precision_score(y, s, sample_weight=w),
                    *(recall[false <= rate].max() for rate in (0.01, 0.05)),
                )
            )
    low, high = np.quantile(found["low"], 0.025, axis=0), np.quantile(found["high"], 0.975, axis=0)
    got = image_intervals(scores, labels, draws=4000, seed=1)
    f1 = got.pop("image_f1_max")
    np.testing.assert_allclose(list(got.values()), np.stack([low, high], 1), atol=0.08)
    point = image_metrics(scores, labels).values
    for name, (lowest, highest) in (got | {"image_f1_max": f1}).items():
        assert lowest <= point[name] <= highest


@pytest.mark.parametrize(("n_good", "n_defect"), [(20, 20), (20, 63), (209, 63)])
def test_classes_without_an_overlap_leave_the_figures_open_below(n_good, n_defect):
    """Whatever the scores: pairs say that AUROC is at least 0.025 ** (1 / fewer images)."""
    labels = np.arange(n_good + n_defect) >= n_good
    got = image_intervals(labels * 1.0, labels)
    low, high = got["image_auroc"]
    assert 0.3 < low <= 0.025 ** (1 / min(n_good, n_defect)) + 0.005
    assert high == 1.0
    # Twenty good images, or 209, can't show what 1 % of them do.
    assert got["recall_at_frr_0.01"] == (0.0, 1.0)
    assert (got["recall_at_frr_0.05"][0] > 0) == (n_good == 209)


def test_intervals_are_seeded_keep_every_draw_and_are_undefined_without_a_class():
    scores, labels = np.arange(700.0) % 661, np.arange(700) % 2 == 0
    once = image_intervals(scores, labels, draws=1400, seed=5)
    assert once == image_intervals(scores, labels, draws=1400, seed=5)
    more = image_intervals(scores, labels, draws=2000, seed=6)  # more numbers than come at once
    assert once != more
    for name, interval in more.items():
        assert interval == pytest.approx(once[name], abs=0.03)
    assert set(image_intervals(scores, labels & False).values()) == {None}
    assert set(image_intervals([], []).values()) == {None}


def test_confusion_counts_by_type():
    verdicts = ["good", "reject", "review", "good", "reject", "good"]
    types = ["good", "good", "good", "scratch", "scratch", "dent"]
    labels = [False, False, False, True, True, True]
    got = confusion(zip(verdicts, labels, types, strict=True))
    assert (got.escapes, got.false_rejects) == (2, 1)
    assert (got.good.review, got.good.total, got.defective.total) == (1, 3, 3)
    assert list(got.by_type) == ["good", "scratch", "dent"]
    assert (got.by_type["scratch"].good, got.by_type["scratch"].reject) == (1, 1)
    assert got.by_type["dent"].total == 1
