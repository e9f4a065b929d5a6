"""The bounded-memory form of the pixel metrics: close to the exact one, whatever the order."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pixel_references import IMAGES, NAMES, flat, measured, smooth_images
from sklearn.metrics import f1_score

from anomaly.evaluation.metrics.pixels import PixelAccumulator, ScoreHistogram


@settings(max_examples=50)
@given(IMAGES, st.integers(2, 40), st.randoms(use_true_random=False))
def test_binned_form_is_one_in_any_order(images, max_bins, random):
    binned = measured(images, max_bins)
    assert binned.reasons == measured(images).reasons
    again = measured(random.sample(images, len(images)), max_bins)
    assert again.values == pytest.approx(binned.values, abs=1e-12)


def test_default_bins_are_fine_enough_for_smooth_maps():
    images = smooth_images(np.random.default_rng(7))
    scores, labels = flat(images)
    exact, binned = measured(images).values, measured(images, 1 << 20).values
    for name in NAMES - {"pixel_f1_max_threshold"}:
        assert binned[name] == pytest.approx(exact[name], abs=1e-5)
    for max_bins in (2, 1000, 1 << 20):
        figures = measured(images, max_bins).values
        flagged = scores > figures["pixel_f1_max_threshold"]
        assert f1_score(labels, flagged) == pytest.approx(figures["pixel_f1_max"], abs=1e-9)


def test_counts_past_sixteen_million_pixels():
    """A float32 running sum stops at 16,777,216."""
    histogram = ScoreHistogram(1, 10)
    for weight in (2.0**24, 1.0):
        histogram.add(np.ones(1, np.float32), {0: np.array([weight])})
    assert histogram.tally().weights.tolist() == [[2**24 + 1]]


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
