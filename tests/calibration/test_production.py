"""Production images beside what was promised: differences are found, and seldom imagined."""

import numpy as np
import pytest
from scipy.stats import binom

from anomaly.calibration.production import DEFECT_SHARE, compare_flagged, flagged_line
from anomaly.calibration.rates import rate_of

PROMISED = rate_of(9, 209, 10 / 210)  # the review threshold of 209 good images


def test_a_difference_is_told_with_its_number_and_what_to_do() -> None:
    line = flagged_line(23, 50, PROMISED, "runs/part")
    assert line.startswith("23 of 50 images flagged (46 %); 4.8 % expected, at most 7.4 %")
    assert "many parts are defective, or these images differ from the training images" in line
    assert "anomaly calibrate --model runs/part --production FOLDER" in line
    few = flagged_line(0, 500, PROMISED)
    assert few.startswith("0 of 500 images flagged (0 %); 4.8 % expected, at least 2 %")
    assert "defects pass" in few
    assert flagged_line(3, 50, PROMISED) == flagged_line(19, 19, PROMISED) == ""


@pytest.mark.parametrize("images", [20, 50, 200, 2000])
def test_the_comparison_is_a_binomial_test_against_the_bounds(images: int) -> None:
    most = PROMISED.at_most + DEFECT_SHARE * (1 - PROMISED.at_most)
    for flagged in range(images + 1):
        comparison = compare_flagged(flagged, images, PROMISED)
        assert (comparison == "more") == (binom.sf(flagged - 1, images, most) < 0.01)
        assert (comparison == "fewer") == (binom.cdf(flagged, images, PROMISED.low) < 0.01)


def test_images_like_the_training_images_seldom_seem_to_differ_however_often_one_looks() -> None:
    rng = np.random.default_rng(0)
    share = rng.beta(10, 200, 1000)  # of good parts above the tenth highest of 209 scores
    flagged = (rng.random((1000, 2000)) < (share + DEFECT_SHARE * (1 - share))[:, None]).cumsum(1)
    seemed = np.zeros(1000, dtype=bool)
    for images in np.unique(np.geomspace(20, 2000, 80).astype(int)):
        outcomes = [compare_flagged(f, images, PROMISED) for f in range(images + 1)]
        seemed |= np.array(outcomes)[flagged[:, images - 1]] != "as promised"
    assert seemed.mean() < 0.05


@pytest.mark.parametrize(("share", "comparison"), [(0.3, "more"), (0.0, "as promised")])
def test_fifty_images_tell_a_lot_of_which_a_third_is_flagged(share: float, comparison: str) -> None:
    flagged = round(50 * share)
    assert compare_flagged(flagged, 50, PROMISED) == comparison
