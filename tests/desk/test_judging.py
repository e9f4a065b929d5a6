"""Settings are taken for better only where they are, and what is said of them holds."""

import numpy as np
import pytest
from scipy.stats import norm

from anomaly.desk.advice import LEAST_DEFECTS
from anomaly.desk.tune import Scores, judge, worth

RATE = 0.05


def drawn(
    draw: np.random.Generator, gains: list[float], defects: int, good: int = 100
) -> list[Scores]:
    """Scores by settings that move defects by so much; all share most of their noise."""
    held_out, known = draw.normal(size=good), draw.normal(size=defects)

    def noisy(values: np.ndarray) -> np.ndarray:
        return values + 0.3 * draw.normal(size=len(values))

    other = draw.normal(size=25)
    return [Scores(noisy(held_out), noisy(known + gain), noisy(other)) for gain in gains]


def test_a_defect_above_all_good_ones_counts_one_and_one_among_them_nothing() -> None:
    good = np.arange(100.0)
    values = worth(Scores(good, np.array([200.0, 94.5, 50.0]), np.array([])), RATE)
    assert values == pytest.approx([1.0, 0.5, 0.0])


def test_good_images_of_another_lot_raise_the_threshold() -> None:
    held_out, defects = np.arange(100.0), np.array([150.0])
    without = Scores(held_out, defects, np.array([]))
    with_others = Scores(held_out, defects, np.full(20, 200.0))
    assert (without.limit(RATE), with_others.limit(RATE)) == (95.0, 200.0)
    assert (worth(without, RATE)[0], worth(with_others, RATE)[0]) == (1.0, 0.0)


def test_the_threshold_is_that_of_training() -> None:
    from anomaly.calibration.thresholds import threshold_for_expected_rate

    held_out = np.random.default_rng(0).normal(5, 1, 137)
    scores = Scores(held_out, np.array([]), np.array([]))
    assert (held_out > scores.limit(RATE)).sum() == (
        held_out > threshold_for_expected_rate(held_out, RATE).value
    ).sum()


def test_what_is_clearly_better_is_taken_and_of_equals_the_cheapest() -> None:
    settings = drawn(np.random.default_rng(1), [1.0, 9.0, 9.0, 1.0], 25)
    assert judge(settings, [1, 3, 2, 1], RATE).index == 2
    assert judge(settings, [1, 2, 3, 1], RATE).index == 1
    assert judge(settings, [1, 2, 3, 1], RATE).better
    assert judge(settings, [1, 2, 3, 1], RATE, seed=7) == judge(
        settings, [1, 2, 3, 1], RATE, seed=7
    )


def seen(
    draw: np.random.Generator, gains: list[float], parts: int, views: int, good: int = 100
) -> list[Scores]:
    """Scores of several views of each part: settings differ from part to part, not within one."""
    of_good, of_part = draw.normal(size=good), draw.normal(size=parts)
    settings = []
    for gain in gains:
        own = 1.5 + gain + 0.7 * (of_part + draw.normal(size=parts))
        defects = own.repeat(views) + 0.2 * draw.normal(size=parts * views)
        held_out = 0.7 * (of_good + draw.normal(size=good))
        settings.append(Scores(held_out, defects, np.array([])))
    return settings


def test_settings_that_are_alike_are_not_taken_for_better() -> None:
    draw, groups = np.random.default_rng(0), np.arange(10).repeat(6)
    wrong, more = [], []
    for _ in range(100):
        settings = seen(draw, [0.0] * 12, parts=10, views=6)
        judged = judge(settings, [1.0] * 12, RATE, groups=groups)
        caught = [(scores.defects > scores.limit(RATE)).mean() for scores in settings]
        wrong.append(judged.better)
        more.append(judged.caught.expected - np.mean(caught))
    assert np.mean(wrong) <= 0.1
    assert abs(np.mean(more)) < 0.03


@pytest.mark.parametrize(("parts", "views"), [(40, 1), (30, 4)])
def test_what_is_said_of_the_chosen_settings_holds_for_new_images(parts: int, views: int) -> None:
    """Eleven settings are equally good, so the one that is chosen seems better than it is."""
    draw, groups = np.random.default_rng(3), np.arange(parts).repeat(views)
    rows = []
    for _ in range(40):
        settings = seen(draw, [0.0] + [2.0] * 11, parts, views)
        said = judge(settings, [1.0] * 12, RATE, groups=groups)
        limit, gain = settings[said.index].limit(RATE), 2.0 if said.index else 0.0
        caught = norm.sf(limit, 1.5 + gain, np.hypot(0.7 * 2**0.5, 0.2))
        flagged = norm.sf(limit, 0, 0.7 * 2**0.5)
        rows.append(
            (
                said.caught.expected - caught,
                said.flagged.expected - flagged,
                said.caught.low <= caught <= said.caught.high,
                said.flagged.low <= flagged <= said.flagged.high,
            )
        )
    more_caught, more_flagged, *held = np.mean(rows, 0)
    assert abs(more_caught) < 0.02
    assert abs(more_flagged) < 0.006
    assert min(held) >= 0.94


def test_six_defects_of_one_part_are_one() -> None:
    settings = drawn(np.random.default_rng(1), [0.0, 9.0], 2 * LEAST_DEFECTS)
    judged = judge(settings, [1, 2], RATE, groups=[0] * LEAST_DEFECTS + [1] * LEAST_DEFECTS)
    assert (judged.parts, judged.better) == (2, False)
    assert judged.caught.low < 0.2 < 0.8 < judged.caught.high


def test_good_images_of_one_group_are_parted() -> None:
    settings = drawn(np.random.default_rng(1), [0.0, 9.0], 8)
    groups = [*range(8), *["lot"] * 125]
    assert judge(settings, [1, 2], RATE, groups=groups) == judge(settings, [1, 2], RATE)
