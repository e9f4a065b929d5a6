"""Images that show one weakness each: the right advice comes first. A good model gets none."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import FAST, MadeOnce, run_command, write_product

from anomaly.calibration.thresholds import thresholds_by_hand, thresholds_from
from anomaly.datasets.layouts import open_dataset
from anomaly.datasets.samples import Sample
from anomaly.desk import advice
from anomaly.desk.advice import Run, Weakness, review_rates, training_weaknesses
from anomaly.evaluation.evaluate import Evaluation
from anomaly.evaluation.metrics import Metrics
from anomaly.report.report import evaluated
from anomaly.scoring.model import Scored, score
from anomaly.storage.models import load_model
from anomaly.training.runs import training_record

ENOUGH = 44  # good images: both thresholds differ from 39 on
Picture = np.ndarray


def part(seed: int) -> Picture:
    """A brown L on grey ground, BGR."""
    picture = np.full((96, 96, 3), (60, 60, 60), np.float32)
    picture[16:80, 24:40] = (40, 110, 170)
    picture[64:80, 24:72] = (40, 110, 170)
    return picture + np.random.default_rng(seed).normal(0, 4, picture.shape)


def unchanged(picture: Picture) -> Picture:
    return picture


def with_hole(picture: Picture) -> Picture:
    return cv2.circle(picture.copy(), (60, 30), 9, (40, 110, 170), -1)


def scratched(picture: Picture) -> Picture:
    return cv2.line(picture.copy(), (20, 20), (80, 70), (230, 230, 230), 4)


def write(folder: Path, change: Callable[[Picture], Picture], seeds: range) -> list[Path]:
    folder.mkdir(parents=True)
    files = [folder / f"{seed:03}.png" for seed in seeds]
    for seed, file in zip(seeds, files, strict=True):
        cv2.imwrite(str(file), np.clip(change(part(seed)), 0, 255).astype(np.uint8))
    return files


@pytest.fixture(scope="module")
def run(made_once: MadeOnce) -> Run:
    """A run of enough good parts; read only."""

    def train(folder: Path) -> None:
        write(folder / "good", unchanged, range(ENOUGH))
        chosen = ["data.format=folder", f"data.root={folder / 'good'}", "name=part", *FAST]
        settings = [text for setting in chosen for text in ("--set", setting)]
        output = ["--output", folder / "run", "--device", "cpu"]
        run_command("train", ["--config", "folder", *settings, *output])

    folder = made_once("weaknesses/part", train) / "run"
    return Run(load_model(folder, "cpu"), folder, training_record(folder))


def scored(run: Run, files: list[Path], kind: str) -> list[Scored]:
    return score(run.model, [Sample(file, file.name, kind) for file in files])


def evaluation(run: Run, images: Sequence[Scored]) -> Evaluation:
    return Evaluation("part", tuple(images), Metrics({}), thresholds=run.model.thresholds)


def of_images(run: Run, images: Sequence[Scored]) -> tuple[Weakness, ...]:
    return advice.evaluation_weaknesses(run, evaluation(run, images))


def test_a_good_model_gets_no_advice(run: Run, tmp_path: Path) -> None:
    good = scored(run, write(tmp_path / "good", unchanged, range(100, 124)), "good")
    bad = scored(run, write(tmp_path / "bad", scratched, range(200, 212)), "scratch")
    assert of_images(run, [*good, *bad]) == ()
    assert training_weaknesses(run) == ()
    assert advice.weakness_lines([]) == []


def test_good_parts_that_are_flagged(run: Run, tmp_path: Path) -> None:
    images = scored(run, write(tmp_path / "good", with_hole, range(100, 124)), "good")
    (only,) = of_images(run, images)
    assert "24 of 24 good images are flagged (100 %)" in only.finding
    assert "expected for good parts like the training images" in only.finding
    assert shlex.split(only.command)[:2] == ["anomaly", "update"]


def passing(name: str = "0.png", width: float | None = None) -> Scored:
    return Scored(Sample(Path(name), name, "scratch"), 0.0, width=width)


def test_defects_that_pass(run: Run) -> None:
    missed = [passing(f"{i}.png") for i in range(8)]
    caught = [replace(passing(), score=1e6)] * 4
    first = of_images(run, [*missed, *caught])[0]
    assert first.finding == "8 of 12 defects pass as good (67 %)."
    assert shlex.split(first.command)[:2] == ["anomaly", "tune"]
    config = run.model.config.model_copy(update={"chosen_by": ("0" * 16,)})
    tuned = replace(run, model=replace(run.model, config=config))
    why = ["anomaly", "explain", "0.png", "--model", str(run.folder)]
    for of, among in ((tuned, missed), (run, missed[:3])):  # three are too few to tune with
        assert shlex.split(of_images(of, among)[0].command) == why
    assert len(advice.weakness_lines([first] * 4)) == 3


def test_patches_too_coarse_for_the_defects(run_folder: Path, tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=1)
    dot = cv2.circle(np.zeros((96, 120), np.uint8), (45, 35), 1, 255, -1)
    for mask in (product / "ground_truth" / "spot").iterdir():
        cv2.imwrite(str(mask), dot)
    model = load_model(run_folder, "cpu")
    assert model.thresholds is not None
    blind = replace(model, thresholds=thresholds_by_hand(model.thresholds.good, 1e6, 1e6))
    samples = open_dataset("mvtec", product, None).test
    tested = ("--defects", "FOLDER")
    found = evaluated(blind, samples, product, tested=tested, folder=run_folder).weaknesses[1]
    assert re.match(r"3 of 3 missed defects are narrower than a patch: 2", found.finding)
    assert "image.area=" in found.command


@pytest.mark.parametrize(
    ("pixels", "image", "setting"),
    [
        (12, {}, "image.area=96"),
        (24, {"tile": 256}, "image.tile=85"),
        (24, {"resize": 256}, "image.resize=768"),
        (9, {}, None),  # there are hardly more pixels to be seen
    ],
)
def test_a_finer_setting_is_named(
    run: Run, pixels: float, image: dict[str, Any], setting: str | None
) -> None:
    config = run.model.config
    other = config.model_copy(update={"image": config.image.model_copy(update=image)})
    record = {**run.record, "patch_size": {"pixels": [pixels, pixels]}}
    large = replace(run, model=replace(run.model, config=other), record=record)
    found = of_images(large, [passing(width=6.0)] * 12)
    commands = [weakness.command for weakness in found if "narrower" in weakness.finding]
    assert [setting in command for command in commands] == [True] * (setting is not None)


def test_other_review_rates_are_listed_where_they_would_catch_more(run: Run) -> None:
    limits, (present, reject) = run.model.thresholds, run.model.rates()
    assert limits is not None
    between = (thresholds_from(limits.good, 0.2, reject).review + limits.review) / 2
    good = Scored(Sample(Path("good.png"), "good.png"), 0.0)
    missed = Scored(Sample(Path("hole.png"), "hole.png", "hole"), between)
    _, *rows, command = [
        line.split() for line in review_rates(run, evaluation(run, [good, missed]))
    ]
    assert rows[-1] == ["20", "%", "1", "of", "1", "0", "of", "1"]
    assert f"{present:.0%} 0 of 1".replace("%", " % (now)").split() == [
        word for row in rows if "(now)" in row for word in row[:6]
    ]
    assert command[-2:] == ["--review-rate", "RATE"]
    assert review_rates(run, evaluation(run, [good])) == ()
