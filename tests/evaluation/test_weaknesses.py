"""Sets that are weak in one way each: the right advice comes first. A good model gets none."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import FAST, Command, MadeOnce, run_command

from anomaly.evaluation.splits import images_to_test
from anomaly.evaluation.weaknesses import Run, Weakness, lines, of_training, width_of
from anomaly.report.category import evaluated
from anomaly.storage.load import load_model
from anomaly.training.runs import training_record

ENOUGH = 44  # good images: both thresholds differ from 39 on
Picture = np.ndarray


def part(seed: int, side: int = 96) -> Picture:
    """A brown L on grey ground, BGR."""
    picture = np.full((side, side, 3), (60, 60, 60), np.float32)
    unit = side // 12
    picture[2 * unit : 10 * unit, 3 * unit : 5 * unit] = (40, 110, 170)
    picture[8 * unit : 10 * unit, 3 * unit : 9 * unit] = (40, 110, 170)
    noise = np.random.default_rng(seed).normal(0, 4, picture.shape)
    return np.asarray(np.clip(picture + noise, 0, 255).astype(np.uint8))


def brighter(picture: Picture) -> Picture:
    return np.asarray(np.clip(picture * 1.5, 0, 255).astype(np.uint8))


def grey(picture: Picture) -> Picture:
    return cv2.cvtColor(cv2.cvtColor(picture, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)


def turned(picture: Picture) -> Picture:
    return np.ascontiguousarray(np.rot90(picture))


def with_hole(picture: Picture) -> Picture:
    return cv2.circle(picture.copy(), (60, 30), 9, (40, 110, 170), -1)


def scratched(picture: Picture) -> Picture:
    return cv2.line(picture.copy(), (20, 20), (80, 70), (230, 230, 230), 4)


def unchanged(picture: Picture) -> Picture:
    return picture


def write(folder: Path, change: Callable[[Picture], Picture], seeds: range) -> Path:
    folder.mkdir(parents=True)
    for seed in seeds:
        cv2.imwrite(str(folder / f"{seed:03}.png"), change(part(seed)))
    return folder


def trained(root: Path, output: Path, *settings: str) -> None:
    chosen = ["data.format=folder", f"data.root={root}", "name=part", *FAST, *settings]
    overrides = [text for setting in chosen for text in ("--set", setting)]
    run_command("train", ["--config", "folder", *overrides, "--output", output, "--device", "cpu"])


@pytest.fixture(scope="module")
def run(made_once: MadeOnce) -> Path:
    """A run of enough good parts; read only."""

    def train(folder: Path) -> None:
        trained(write(folder / "good", unchanged, range(ENOUGH)), folder / "run")

    return made_once("weaknesses/part", train) / "run"


def found(run: Path, tmp_path: Path, **changes: Callable[[Picture], Picture]) -> list[Weakness]:
    """What is weak where the good parts, and the defects, look like this."""
    folders = {
        name: write(tmp_path / name, change, range(100 * i, 100 * i + 24))
        for i, (name, change) in enumerate(changes.items(), 1)
    }
    model = load_model(run, "cpu")
    named = {name: [folder] for name, folder in folders.items()}
    samples, place = images_to_test(model, run, **named)
    evaluation = evaluated(model, samples, place, mask_above=0, own_split=False, model=str(run))
    return list(evaluation.weaknesses)


def test_a_good_model_gets_no_advice(run: Path, tmp_path: Path, command: Command) -> None:
    assert found(run, tmp_path, good=unchanged, defects=scratched) == []
    _, out, _ = command(
        "infer", ["--model", run, "--input", tmp_path / "good", "--output", tmp_path / "r"]
    )
    assert "mend" not in out


@pytest.mark.parametrize(
    ("change", "says", "does"),
    [
        (brighter, "a brightness above the training images'", "update"),
        (grey, "are grey, and all training images are in colour", "train"),
        (turned, "once they are turned or mirrored", "train"),
        (with_hole, "expected for good parts like the training images", "update"),
    ],
)
def test_good_parts_that_are_flagged(
    change: Callable[[Picture], Picture],
    says: str,
    does: str,
    run: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    first = found(run, tmp_path, good=change)[0]
    assert says in first.what
    assert shlex.split(first.command)[:2] == ["anomaly", does]
    images = ["--input", tmp_path / "good", "--output", tmp_path / "results"]
    code, out, err = command("infer", ["--model", run, *images])
    assert code == 0, err
    assert says in out.partition("1. ")[2].partition("2. ")[0]


def test_defects_that_pass(run: Path, tmp_path: Path) -> None:
    first = found(run, tmp_path, good=unchanged, defects=unchanged)[0]
    assert re.match(r"2\d of 24 defects pass as good \(\d+ %\)\.", first.what)
    assert shlex.split(first.command)[:2] == ["anomaly", "tune"]
    assert "97 % of the defects caught instead of 59 %" in first.expected


def test_a_tuned_model_leads_to_its_missed_defects(
    run: Path, tmp_path: Path, command: Command
) -> None:
    data = write(tmp_path / "defects", unchanged, range(100, 108))
    model = load_model(run, "cpu")
    tuned = replace(model, config=model.config.model_copy(update={"chosen_by": ("0" * 16,)}))
    samples, place = images_to_test(model, run, defects=[data])
    evaluation = evaluated(tuned, samples, place, mask_above=0, own_split=False, model=str(run))
    arguments = shlex.split(evaluation.weaknesses[0].command)
    assert arguments[:2] == ["anomaly", "missed"]
    code, out, err = command("missed", arguments[2:])
    assert code == 0, err
    assert out.count("called good, score") == 3
    tune = shlex.split(out.rpartition("more can: ")[2])
    assert tune[tune.index("--output") + 1] == "part_tuned.yaml"


def test_no_threshold_mends_images_unlike_the_training_images(
    run: Path, tmp_path: Path, command: Command
) -> None:
    dark = write(tmp_path / "dark", lambda picture: picture * 0.3, range(100, 124))
    _, out, _ = command("infer", ["--model", run, "--input", dark, "--output", tmp_path / "r"])
    assert "24 of 24 images are flagged" in out
    assert "24 of 24 flagged images have a" in out
    assert "anomaly update" in out
    assert "anomaly calibrate" not in out
    assert "turned or mirrored" not in out


def test_patches_too_coarse_for_the_defects(tmp_path: Path) -> None:
    large, dot = 384, (200, 300)
    data = tmp_path / "data"
    for i in range(ENOUGH + 12):
        picture = part(i, large)
        folder = "train/good"
        if i >= ENOUGH:
            folder = "test/dot"
            mask = cv2.circle(np.zeros((large, large), np.uint8), dot, 3, 255, -1)
            picture[mask > 0] = np.clip(picture[mask > 0] + 8.0, 0, 255)
            (data / "ground_truth" / "dot").mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(data / "ground_truth" / "dot" / f"{i:03}_mask.png"), mask)
        (data / folder).mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(data / folder / f"{i:03}.png"), picture)
    trained(data, tmp_path / "run", "data.format=mvtec")
    model = load_model(tmp_path / "run", "cpu")
    samples, place = images_to_test(model, tmp_path / "run")
    evaluation = evaluated(model, samples, place, mask_above=0, model=str(tmp_path / "run"))
    first = evaluation.weaknesses[0]
    assert re.match(r"1\d of 1\d missed defects are narrower than a patch: [67]", first.what)
    assert re.search(r"image\.tile=\d+", first.command)


def test_few_good_images(tmp_path: Path, command: Command) -> None:
    trained(write(tmp_path / "good", unchanged, range(6)), tmp_path / "run")
    first = of_training(_of(tmp_path / "run"))[0]
    assert "6 good images can't guarantee a false-reject rate below 39 %" in first.what
    assert "Use 299 images for 1 %" in first.remedy
    assert "lens cap" in first.remedy
    assert "model.turned_copies=quarter_turns_and_mirrors" in shlex.split(first.command)


def test_a_defect_among_the_training_images(tmp_path: Path, command: Command) -> None:
    good = write(tmp_path / "good", unchanged, range(ENOUGH))
    cv2.imwrite(str(good / "020.png"), scratched(part(20)))
    trained(good, tmp_path / "run")
    first = of_training(_of(tmp_path / "run"))[0]
    assert re.match(r"\d training images? looks? unlike all others: 020\.png", first.what)
    raised = re.search(r"Without .* reject threshold would be (\S+) instead of (\S+)\.", first.what)
    assert raised
    assert float(raised[1]) < 0.5 * float(raised[2])
    arguments = shlex.split(first.command)
    assert arguments[:2] == ["anomaly", "train"]
    (good / "020.png").unlink()
    code, out, err = command(arguments[1], [*arguments[2:], "--device", "cpu"])
    assert code == 0, err
    assert "020.png" not in out


def _of(folder: Path) -> Run:
    return Run(load_model(folder, "cpu"), folder, training_record(folder))


def test_three_are_printed() -> None:
    weaknesses = [Weakness(f"weak {i}", "do", "anomaly so", "much") for i in range(5)]
    text = "\n".join(lines(weaknesses, "part"))
    assert text.startswith(
        "part: weaknesses, the most important first, 3 of 5:\n1. weak 0\n   do\n     anomaly so\n"
    )
    assert "weak 3" not in text
    assert lines([]) == []


def test_the_width_of_a_defect() -> None:
    mask = np.zeros((60, 80), bool)
    mask[10:20, 5:70] = True  # ten pixels high
    assert width_of(mask) == pytest.approx(10, abs=0.5)
