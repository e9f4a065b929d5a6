"""The charts of drift say which parts and which shares they are about."""

import re

import numpy as np
import pytest

from anomaly.line.drift import Drift, Level, drift_html


@pytest.mark.parametrize(
    ("parts", "numbers"),
    [(2300, ["part 1", "576", "1,151", "1,725", "2,300"]), (2, ["part 1", "2"]), (1, ["part 1"])],
)
def test_axes_count_the_parts_and_name_their_shares(parts: int, numbers: list[str]) -> None:
    scores = np.random.default_rng(0).normal(10, 1, parts)
    drift = Drift([Level("reject", 12.3, 0.01, 4.6)], keep=True).add_all(scores)
    page = drift_html(drift, scores.tolist(), ["said"], "facts")
    below = re.findall(r'class="below"[^>]*>([^<]*)<', page)
    assert below == 2 * numbers  # of the shares and of the sums
    beside = re.findall(r'<text x="-8"[^>]*>([^<]*)<', page)
    assert len(beside) == 4
    assert beside[0].endswith(" %")
    assert beside[1] == beside[3] == "0"
    assert float(beside[2]) >= 4.6
