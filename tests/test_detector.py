"""Rates that people ask for, beside those that a model has."""

from kit import bare_model

from anomaly.calibration.thresholds import (
    GoodScores,
    Thresholds,
    thresholds_by_hand,
    thresholds_from,
)
from anomaly.scoring.model import Model

_GOOD = GoodScores(("a", "b", "c"), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0), "some images")


def _detector(thresholds: Thresholds | None = None) -> Model:
    rates = {"review_rate": 0.05, "reject_rate": 0.01}
    return bare_model({"calibration": rates}, thresholds=thresholds)


def test_a_rate_that_was_not_given_gives_way() -> None:
    for review, reject, expected in (
        (None, None, (0.05, 0.01)),
        (None, 0.03, (0.05, 0.03)),
        (0.2, None, (0.2, 0.01)),
        (0.3, 0.2, (0.3, 0.2)),
        (0.2, 0.2, (0.2, 0.2)),
        (None, 0.2, (0.2, 0.2)),
        (0.002, None, (0.002, 0.002)),
    ):
        assert _detector().rates(review, reject) == expected


def test_a_rate_that_was_not_given_is_that_of_the_thresholds() -> None:
    assert _detector(thresholds_from(_GOOD, 0.3, 0.2)).rates() == (0.3, 0.2)
    assert _detector(thresholds_from(_GOOD, 0.3, 0.2)).rates(0.1) == (0.1, 0.1)
    assert _detector(thresholds_by_hand(_GOOD, 1.5, 2.5)).rates() == (0.05, 0.01)
