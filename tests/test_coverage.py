"""Do intervals and bounds hold as often as they say? Simulations, and levels against exact ones."""

import numpy as np
import pytest

from anomaly.calibration.rates import _LEVELS, _SIZES
from benchmarks.coverage import (
    CALIBRATIONS,
    LAWS,
    SPLITS,
    exact_level,
    figure_coverage,
    threshold_coverage,
)


def test_levels_of_all_thresholds_at_once_are_the_exact_ones():
    for images, *levels in zip(_SIZES[:11], *_LEVELS, strict=False):
        exact = [exact_level(images, confidence) for confidence in (0.95, 0.975)]
        assert levels == pytest.approx(exact, rel=2e-3)
    between = np.exp(np.interp(np.log([15, 60]), np.log(_SIZES), np.log(_LEVELS[0])))
    assert between == pytest.approx([exact_level(n, 0.95) for n in (15, 60)], rel=0.01)


def test_intervals_of_figures_and_what_is_told_of_thresholds_hold():
    """For the fewest images; benchmarks/coverage.py measures it for more."""
    for law in (LAWS[0], LAWS[-1]):
        for repeats, held in (
            (100, figure_coverage(law, SPLITS[0], 100)),
            (300, threshold_coverage(law, CALIBRATIONS[0], 300)),
        ):
            # Two points below 95 %, and as much as the simulation itself is uncertain by.
            least = 0.93 - 2 * np.sqrt(0.95 * 0.05 / repeats)
            assert min(held.values()) >= least, (law.name, held)
