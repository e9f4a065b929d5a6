"""Settings tried on known defects: which ones, what they catch, and when others are better."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml
from conftest import FAST, Says, write_part
from kit import tiny
from moving_parts import draw
from scipy.stats import norm

import anomaly
from anomaly.config.load import load_config, parse_config
from anomaly.config.schema import Config
from anomaly.datasets.samples import Sample
from anomaly.desk import tune
from anomaly.desk.advice import LEAST_DEFECTS
from anomaly.desk.tune import (
    Scores,
    Search,
    cost,
    judge,
    possible_changes,
    times,
    with_changes,
    worths,
)
from anomaly.evaluation.evaluate import score_test_split
from anomaly.report.report import optimism_warning
from anomaly.storage.models import load_model


@pytest.fixture(autouse=True)
def no_other_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one takes seconds, and whether its weights are here differs."""
    monkeypatch.setattr(tune, "networks_on_disk", list)


def settings(*chosen: str) -> list[str]:
    return [part for setting in chosen for part in ("--set", setting)]


def write_angle(file: Path, seed: int, turns: int, mark: bool) -> None:
    """An angle iron that lies in one of four ways; a mark is a notch in its corner."""
    draw = np.random.default_rng(seed)
    picture = np.full((64, 64), 60, np.uint8)
    cv2.rectangle(picture, (14, 14), (26, 50), 170, -1)
    cv2.rectangle(picture, (14, 38), (50, 50), 220, -1)
    if mark:
        cv2.circle(picture, (32 + seed % 8, 44), 4, 90, -1)
    picture = np.rot90(picture, turns) + draw.normal(0, 4, (64, 64))
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), np.clip(picture, 0, 255).astype(np.uint8))


def test_parts_that_lie_any_way_are_learned_so(says: Says, tmp_path: Path) -> None:
    """They lie one way where they are learned, and four ways later."""
    angles = tmp_path / "angles"
    for i in range(16):
        write_angle(angles / "train" / "good" / f"{i:02}.png", i, 0, mark=False)
        if i < 12:
            write_angle(angles / "test" / "good" / f"{i:02}.png", 100 + i, i % 4, mark=False)
            write_angle(angles / "test" / "notch" / f"{i:02}.png", 200 + i, i % 4, mark=True)
    config = tmp_path / "angle.yaml"
    config.write_text(yaml.safe_dump({"data": {"root": str(angles)}}))
    asked = ["--config", config, "--budget", "1h", *settings(*FAST, "data.format=mvtec")]
    out = says(0, "tune", asked)
    # Found by their pose, they would be for review: no training part lies in these ways.
    assert "model.turned_copies=quarter_turns" in out.split("\n\n")[-2]
    written = tmp_path / "angle_tuned.yaml"
    tuned = load_config(written)
    assert tuned.name == "angle_tuned"
    assert (tuned.image.align, tuned.model.turned_copies) == ("none", "quarter_turns")
    assert len(tuned.chosen_by) == 24
    text = written.read_text()
    assert "# use model.turned_copies=quarter_turns: it catches 12 of 12" in text
    before = re.search(r"# your settings +(\d+) of", text)
    expected = re.search(r"of new parts: (\d+) of", text)
    assert before
    assert expected
    assert int(expected[1]) > int(before[1])
    assert f"anomaly train --config {written}" in out

    assert "exists already" in says(2, "tune", asked)


def test_what_does_not_fit_is_left_out_and_too_few_defects_are_refused(
    product: Path, run_folder: Path, says: Says, tmp_path: Path
) -> None:
    good, spots = product / "train" / "good", product / "test" / "spot"
    base = [*FAST, "data.format=folder", f"data.root={good}"]
    output = tmp_path / "tuned.yaml"
    asked = ["--config", "folder.yaml", *settings(*base), "--output", output]
    for given, parts in (([], "0 parts"), (["--defects", spots], "3 parts")):
        said = says(2, "tune", [*asked, *given])
        assert f"known defects on {parts} are too few to compare" in said
    more = Path(shutil.copytree(spots, tmp_path / "spots"))
    for i in range(3):
        write_part(more / f"more{i}.png", seed=440 + i, mark=(30 + 9 * i, 40))
    said = says(0, "tune", [*asked, "--defects", more, "--budget", "0.001s"])
    assert "your settings stay: no other settings catch more" in said
    assert "not tried: model.turned_copies=quarter_turns: " in said
    assert said.count("needs about") == said.count("not tried: ")
    before, tuned = load_config("folder.yaml", base), load_config(output)
    for section in ("model", "image", "backbone"):
        assert getattr(tuned, section) == getattr(before, section)

    # Other images measure honestly; these have chosen.
    model = load_model(run_folder, "cpu")
    config = model.config.model_copy(update={"chosen_by": tuned.chosen_by})
    test = anomaly.open_dataset("mvtec", product).test
    figures = score_test_split(replace(model, config=config), test)
    assert "3 of 6 test images were used to choose the settings" in optimism_warning(figures)


def test_a_budget_is_a_time(says: Says) -> None:
    for budget in ("10", "0m", "ten minutes", "-5m"):
        said = says(2, "tune", ["--config", "folder.yaml", f"--budget={budget}"])
        assert "isn't a time; write it like 90s, 10m or 1h" in said


def test_from_python(product: Path) -> None:
    config = load_config("folder.yaml", [*FAST, "data.format=mvtec", f"data.root={product}"])
    data = anomaly.open_dataset("mvtec", product)
    views = [replace(sample, group="one part") for sample in data.test if sample.is_defect]
    with pytest.raises(anomaly.AnomalyError, match="known defects on 1 part are too few"):
        anomaly.tune(config, data, defects=views, device="cpu")
    two = [replace(sample, group=f"part {i}") for i in range(6) for sample in views[:2]]
    tuning = anomaly.tune(config, data, defects=two, budget=0.001, device="cpu")
    assert not tuning.judgement.better
    assert tuning.config.model == config.model
    assert (tuning.judgement.caught.images, tuning.judgement.parts) == (12, 6)


def test_images_with_a_reason_for_review_are_caught_whatever_their_score(tmp_path: Path) -> None:
    """As `infer` does: a part farther away than any training part is never good."""
    places = [(0.0, 0.0, float(y)) for y in range(-5, 6)] + [(0.0, 40.0, 0.0), (0.0, 0.0, 2.0)]
    samples = []
    for seed, pose in enumerate(places):
        file = tmp_path / f"{seed:02}.png"
        cv2.imwrite(str(file), draw(pose, seed))
        samples.append(Sample(file, file.name))
    *train, far, usual = samples
    image = {"area": 128, "align": "shift"}
    config = Config.model_validate(tiny(image=image))
    given = train, [far, usual], [usual, far]
    scores = Search(config, *given, 0.0, torch.device("cpu"), tmp_path).trial(()).scores
    assert np.isinf(scores.defects).tolist() == [True, False]
    assert np.isinf(scores.good[-2:]).tolist() == [False, True]
    assert scores.threshold_at(0.01) < np.inf


def config(**values: Any) -> Config:
    return parse_config(values, "a test")


def axes(given: Config) -> set[str]:
    return {step.axis for step in possible_changes(given, ["resnet50"])}


def test_what_is_tried_depends_on_what_is_there() -> None:
    every = {"image score", "bank", "size", "turns", "pose", "network"}
    assert axes(config(model={"coreset_ratio": 0.02})) == every
    assert "bank" not in axes(config(model={"coreset_ratio": 0.5}))
    assert axes(config(model={"kind": "padim"})) == {"image score", "size", "pose", "network"}
    assert "turns" not in axes(config(model={"turned_copies": "quarter_turns"}))
    assert "size" not in axes(config(image={"resize": 256}))
    assert "pose" not in axes(config(image={"align": "shift"}))
    assert "network" not in axes(config(backbone={"name": "resnet50"}))


def test_every_candidate_is_a_valid_config_that_differs() -> None:
    for values in (
        {},
        {"model": {"kind": "padim"}},
        {"model": {"image_score": "max"}},
        {"image": {"tile": 1024}},
        {"image": {"area": 64}},
        {"image": {"resize": 256, "crop": 224}},
    ):
        base = config(**values)
        for change in possible_changes(base, ["resnet50"]):
            assert with_changes(base, [change]) != base
            assert change.reason


def test_turned_copies_keep_the_bank_as_large_as_it_was() -> None:
    base = config(model={"coreset_ratio": 0.04})
    turned = [step for step in possible_changes(base, []) if step.axis == "turns"]
    for step, copies in zip(turned, (4, 8), strict=True):
        settled = with_changes(base, [step])
        assert settled.model.coreset_ratio == pytest.approx(0.04 / copies, rel=1e-2)
        assert cost(settled, base) == pytest.approx(1.0, rel=1e-2)
        assert times(settled)[1] == copies * times(base)[1]


RATE = 0.05


def seen(draw: np.random.Generator, gains: list[float], parts: int, views: int) -> list[Scores]:
    """Scores of several views of each part: settings differ from part to part, not within one."""
    of_good, of_part = draw.normal(size=100), draw.normal(size=parts)
    settings = []
    for gain in gains:
        own = 1.5 + gain + 0.7 * (of_part + draw.normal(size=parts))
        defects = own.repeat(views) + 0.2 * draw.normal(size=parts * views)
        held_out = 0.7 * (of_good + draw.normal(size=100))
        settings.append(Scores(defects, held_out))
    return settings


def test_good_images_of_another_lot_raise_the_threshold() -> None:
    held_out, defects = np.arange(100.0), np.array([150.0])
    without = Scores(defects, held_out)
    with_others = Scores(defects, np.append(held_out, np.full(20, 200.0)))
    assert (without.threshold_at(RATE), with_others.threshold_at(RATE)) == (95.0, 200.0)
    assert (worths(without, RATE)[0], worths(with_others, RATE)[0]) == (1.0, 0.0)


def test_what_is_clearly_better_is_taken_and_of_equals_the_cheapest() -> None:
    settings = seen(np.random.default_rng(1), [0.0, 9.0, 9.0, 0.0], 25, 1)
    assert judge(settings, [1, 3, 2, 1], RATE).index == 2
    assert judge(settings, [1, 2, 3, 1], RATE).index == 1
    assert judge(settings, [1, 2, 3, 1], RATE).better
    assert judge(settings, [1, 2, 3, 1], RATE, seed=7) == judge(
        settings, [1, 2, 3, 1], RATE, seed=7
    )


def test_settings_that_are_alike_are_not_taken_for_better() -> None:
    draw, groups = np.random.default_rng(0), np.arange(10).repeat(6)
    wrong, more = [], []
    for _ in range(100):
        settings = seen(draw, [0.0] * 12, parts=10, views=6)
        judged = judge(settings, [1.0] * 12, RATE, groups=groups)
        caught = [(scores.defects > scores.threshold_at(RATE)).mean() for scores in settings]
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
        limit, gain = settings[said.index].threshold_at(RATE), 2.0 if said.index else 0.0
        caught = norm.sf(limit, 1.5 + gain, np.hypot(0.7 * 2**0.5, 0.2))
        flagged = norm.sf(limit, 0, 0.7 * 2**0.5)
        more = said.caught.expected - caught, said.flagged.expected - flagged
        caught_held = said.caught.low <= caught <= said.caught.high
        rows.append((*more, caught_held, said.flagged.low <= flagged <= said.flagged.high))
    more_caught, more_flagged, *held = np.mean(rows, 0)
    assert abs(more_caught) < 0.02
    assert abs(more_flagged) < 0.006
    assert min(held) >= 0.94


def test_six_defects_of_one_part_are_one() -> None:
    settings = seen(np.random.default_rng(1), [0.0, 9.0], 2 * LEAST_DEFECTS, 1)
    judged = judge(settings, [1, 2], RATE, groups=[0] * LEAST_DEFECTS + [1] * LEAST_DEFECTS)
    assert (judged.parts, judged.better) == (2, False)
    assert judged.caught.low < 0.2 < 0.8 < judged.caught.high


def test_good_images_of_one_group_are_parted() -> None:
    settings = seen(np.random.default_rng(1), [0.0, 9.0], 8, 1)
    groups = [*range(8), *["lot"] * 100]
    assert judge(settings, [1, 2], RATE, groups=groups) == judge(settings, [1, 2], RATE)
