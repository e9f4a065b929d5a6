"""Do intervals and bounds hold as often as they say? Simulations of the fewest images."""

import numpy as np

from benchmarks.coverage import (
    CALIBRATIONS,
    LAWS,
    SPLITS,
    figure_coverage,
    threshold_coverage,
)


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
