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


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("images", SPLITS, ids=str)
def test_intervals_of_figures_hold(images, law):
    repeats = 300 if sum(images) < 1000 else 60
    # Two points below 95 %, and as much as the simulation itself is uncertain by.
    least = 0.93 - 2 * np.sqrt(0.95 * 0.05 / repeats)
    for name, held in figure_coverage(law, images, repeats).items():
        assert held >= least, name


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("images", CALIBRATIONS, ids=str)
def test_what_is_told_of_thresholds_holds(images, law):
    repeats = 300
    got = threshold_coverage(law, images, repeats)
    for name, held in got.items():
        assert held >= 0.93 - 2 * np.sqrt(0.95 * 0.05 / repeats), name
