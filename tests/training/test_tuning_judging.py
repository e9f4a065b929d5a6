"""Settings are taken for better only where they are, and what is said of them holds."""

import numpy as np
import pytest

from anomaly.training.tuning.judging import LEAST_DEFECTS, Scores, judge, worth

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


def test_too_few_defects_leave_the_settings_as_they_are() -> None:
    settings = drawn(np.random.default_rng(1), [0.0, 9.0], LEAST_DEFECTS - 1)
    assert not judge(settings, [1, 2], RATE).better
    assert judge(drawn(np.random.default_rng(1), [0.0, 9.0], LEAST_DEFECTS), [1, 2], RATE).better


def test_the_same_seed_gives_the_same_choice() -> None:
    settings = drawn(np.random.default_rng(2), [1.0, 1.6, 1.8, 2.0], 20)
    choices = {judge(settings, [1, 2, 3, 4], RATE, seed=7) for _ in range(2)}
    assert len(choices) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("defects", "most"), [(LEAST_DEFECTS, 0.05), (25, 0.12)])
def test_settings_that_are_alike_are_rarely_taken_for_better(defects: int, most: float) -> None:
    draw = np.random.default_rng(0)
    wrong = [judge(drawn(draw, [2.0] * 12, defects), [1.0] * 12, RATE).better for _ in range(200)]
    assert np.mean(wrong) <= most


@pytest.mark.slow
def test_what_is_said_of_the_chosen_settings_holds_for_new_images() -> None:
    """Counts of the images that didn't choose are what new images show, over many splits."""
    draw = np.random.default_rng(3)
    rows = []
    for _ in range(100):
        drawn_settings = drawn(draw, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], 25 + 1000, good=200)
        known = [Scores(s.held_out, s.defects[:25], s.good) for s in drawn_settings]
        told = judge(known, range(6), RATE)
        limit = known[told.index].limit(RATE)
        caught = float((drawn_settings[told.index].defects[25:] > limit).mean())
        new_good = draw.normal(size=1000) + 0.3 * draw.normal(size=1000)
        flagged = float((new_good > limit).mean())
        covered = told.caught.low <= caught <= told.caught.high
        rows.append((told.caught.expected - caught, told.flagged.expected - flagged, covered))
    differences = np.mean(rows, 0)
    assert abs(differences[0]) < 0.02
    assert abs(differences[1]) < 0.005
    assert differences[2] >= 0.93
