"""Production images beside what was promised: differences are found, and seldom imagined."""

import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command, write_part
from scipy.stats import binom, gamma, norm, rv_continuous

import anomaly
from anomaly.calibration.rates import rate_of
from anomaly.calibration.thresholds import GoodScores, Thresholds, thresholds_from
from anomaly.desk.advice import DEFECT_SHARE, compare_flagged, flagged_line
from anomaly.desk.calibrate import thresholds_from_production
from anomaly.errors import DataError

PROMISED = rate_of(9, 209, 10 / 210)  # the review threshold of 209 good images


def test_a_difference_is_told_with_its_number_and_what_to_do() -> None:
    line = flagged_line(23, 50, PROMISED, "runs/part")
    assert line.startswith("23 of 50 images flagged (46 %); 4.8 % expected, at most 7.4 %")
    assert "Look at them first: if most are defects, change nothing. If most are good" in line
    assert "anomaly calibrate --model runs/part --production FOLDER" in line
    few = flagged_line(0, 500, PROMISED)
    assert few.startswith("0 of 500 images flagged (0 %); 4.8 % expected, at least 2 %")
    assert "defects pass" in few
    assert flagged_line(3, 50, PROMISED) == flagged_line(19, 19, PROMISED) == ""


@pytest.mark.parametrize("images", [20, 50, 2000])
def test_the_comparison_is_a_binomial_test_against_the_bounds(images: int) -> None:
    most = PROMISED.at_most + DEFECT_SHARE * (1 - PROMISED.at_most)
    for flagged in range(images + 1):
        comparison = compare_flagged(flagged, images, PROMISED)
        assert (comparison == "more") == (binom.sf(flagged - 1, images, most) < 0.01)
        assert (comparison == "fewer") == (binom.cdf(flagged, images, PROMISED.low) < 0.01)


def test_of_many_images_the_comparison_is_hardly_less_sharp() -> None:
    images, most = 100_000, PROMISED.at_most + DEFECT_SHARE * (1 - PROMISED.at_most)
    for share, comparison in (
        (0.9 * PROMISED.low, "fewer"),
        (1.1 * PROMISED.low, "as promised"),
        (0.9 * most, "as promised"),
        (1.1 * most, "more"),
    ):
        assert compare_flagged(round(images * share), images, PROMISED) == comparison


def test_images_like_the_training_images_seldom_seem_to_differ_however_often_one_looks() -> None:
    rng = np.random.default_rng(0)
    share = rng.beta(10, 200, 1000)  # of good parts above the tenth highest of 209 scores
    flagged = (rng.random((1000, 2000)) < (share + DEFECT_SHARE * (1 - share))[:, None]).cumsum(1)
    seemed = np.zeros(1000, dtype=bool)
    for images in np.unique(np.geomspace(20, 2000, 80).astype(int)):
        outcomes = [compare_flagged(f, images, PROMISED) for f in range(images + 1)]
        seemed |= np.array(outcomes)[flagged[:, images - 1]] != "as promised"
    assert seemed.mean() < 0.05


def _scores(values: np.ndarray, prefix: str = "") -> GoodScores:
    names = tuple(f"{prefix}{i}" for i in range(len(values)))
    return GoodScores(names, tuple(values.tolist()), tuple((2 * values).tolist()), "images")


KNOWN = _scores(10 + norm.ppf(np.linspace(0.001, 0.999, 209)))
PLACES = {"above": (30, 1), "below": (1, 0.1), "among": (13, 2), "in the tail": (14.6, 0.1)}


def _choice(
    law: rv_continuous, images: int, defects: int, place: str, rng: np.random.Generator
) -> Thresholds:
    good = 10 + law.rvs(size=images - defects, random_state=rng)
    mean, width = PLACES[place]
    scores = rng.permutation(np.append(good, rng.normal(mean, width, defects)))
    return thresholds_from_production(KNOWN, _scores(scores), 0.05, 0.05, 0.01)[0]


@pytest.mark.parametrize(
    ("law", "defects", "place"),
    [
        (norm(2), 0, "above"),
        *((norm(2), 5, place) for place in PLACES),
        (gamma(3), 3, "above"),
        (gamma(3), 5, "in the tail"),
    ],
)
def test_bounds_hold_wherever_defects_score(law: rv_continuous, defects: int, place: str) -> None:
    rng = np.random.default_rng([defects, len(place)])
    inside = {"review": 0, "reject": 0}
    for _ in range(60):
        found = _choice(law, 100, defects, place, rng)
        for name, threshold in (("review", found.to_review), ("reject", found.to_reject)):
            rate, share = threshold.false_rejects, law.sf(threshold.value - 10)
            inside[name] += rate.low <= share <= min(rate.high, rate.at_most + 1e-12)
    assert min(inside.values()) >= 57


def test_half_are_taken_as_defects_and_the_reject_threshold_keeps_its_distance() -> None:
    scores = np.append(np.linspace(20, 30, 98), [50, 60])
    thresholds, taken = thresholds_from_production(KNOWN, _scores(scores), 0.05, 0.05, 0.01)
    assert [*taken] == ["99", "98"]
    # Between the fourth of 95 images, 5 % in the mean, and the fifth of 100.
    assert scores[91] < thresholds.review < scores[96]
    known = thresholds_from(KNOWN, 0.05, 0.01)
    ratio = thresholds.image / thresholds.review
    assert ratio == pytest.approx(known.image / known.review, rel=0.01)
    assert thresholds.images == 98


def test_a_share_of_less_than_one_image_is_refused() -> None:
    with pytest.raises(DataError, match="less than one image: give 20 or more"):
        thresholds_from_production(KNOWN, _scores(np.arange(1.0, 20.0)), 0.05, 0.05, 0.01)


PRINTED = re.compile(r"(?:^|: )\s*(anomaly [a-z]+ -.*|anomaly explain .*)$", re.MULTILINE)


def test_no_printed_command_loses_a_known_defect(
    run_folder: Path, product: Path, tmp_path: Path, command: Command,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From a model that misses some; a third of the production images are defective."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    run = Path(shutil.copytree(run_folder, tmp_path / "runs" / "disc"))
    spots = sorted((product / "test" / "spot").iterdir())
    for i in range(30):
        file = tmp_path / "FOLDER" / f"{i:03}.png"
        write_part(file, seed=500 + i, mark=(30, 35 + i) if i % 3 == 0 else None)
        rough = np.random.default_rng(i).normal(0, 14, (96, 120, 3))
        rougher = np.clip(np.asarray(cv2.imread(str(file))) + rough, 0, 255).astype(np.uint8)
        cv2.imwrite(str(file), rougher)

    def caught() -> int:
        return sum(p.verdict != "good" for p in anomaly.load(run, device="cpu").predict(spots))

    lowest, second, _ = sorted(p.score for p in anomaly.load(run, device="cpu").predict(spots))
    by_hand = ["--threshold", (lowest + second) / 2, "--yes"]
    assert command("calibrate", ["--model", run, *by_hand])[0] == 0
    most = caught()
    assert most == 2
    model = anomaly.load(run, device="cpu")
    assert model.thresholds is not None
    promised = model.thresholds.to_review.false_rejects
    (advice,) = re.findall("anomaly calibrate .*", flagged_line(30, 30, promised, str(run)))
    waiting = [
        advice,
        f"anomaly evaluate --model {run} --output figures",
        f"anomaly infer --model {run} --input FOLDER --output rows",
    ]
    followed: list[str] = []
    while waiting:
        line = waiting.pop(0)
        name, *arguments = shlex.split(line)[1:]
        caplog.clear()
        _, out, _ = command(name, arguments)
        followed.append(line)
        assert caught() >= most, line
        most = caught()
        new = dict.fromkeys(PRINTED.findall("\n".join([out, *caplog.messages])))
        # tune takes minutes, and writes nothing but a config.
        waiting += [one for one in new if one not in [*followed, *waiting] and " tune " not in one]
        assert not any("defective" in one or "--yes" in one for one in new)
    names = {line.split()[1] for line in followed}
    assert {"explain", "calibrate", "train"} <= names, followed
    assert any("--production" in line for line in followed)
