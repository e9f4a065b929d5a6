"""Settings tried on known defects: from a config to one that catches more."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from conftest import FAST, Command, write_part
from kit import tiny
from moving_parts import draw

import anomaly
from anomaly.config.load import load_config
from anomaly.config.schema import Config
from anomaly.datasets.samples import Sample
from anomaly.desk import tune
from anomaly.desk.tune import Search
from anomaly.evaluation.evaluate import score_test_split
from anomaly.report.report import flattered
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


def test_parts_that_lie_any_way_are_learned_so(command: Command, tmp_path: Path) -> None:
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
    code, out, err = command("tune", asked)
    assert code == 0, err
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

    code, _, err = command("tune", asked)
    assert (code, "exists already" in err) == (2, True)


def test_what_does_not_fit_is_left_out_and_too_few_defects_are_refused(
    product: Path, run_folder: Path, command: Command, tmp_path: Path
) -> None:
    good, spots = product / "train" / "good", product / "test" / "spot"
    base = [*FAST, "data.format=folder", f"data.root={good}"]
    output = tmp_path / "tuned.yaml"
    asked = ["--config", "folder.yaml", *settings(*base), "--output", output]
    for given, parts in (([], "0 parts"), (["--defects", spots], "3 parts")):
        code, _, err = command("tune", [*asked, *given])
        assert (code, f"known defects on {parts} are too few to compare" in err) == (2, True)
    more = Path(shutil.copytree(spots, tmp_path / "spots"))
    for i in range(3):
        write_part(more / f"more{i}.png", seed=440 + i, mark=(30 + 9 * i, 40))
    code, out, err = command("tune", [*asked, "--defects", more, "--budget", "0.001s"])
    assert code == 0, err
    assert "your settings stay: no other settings catch more" in out
    assert "not tried: model.turned_copies=quarter_turns: " in out
    assert (out + err).count("takes about") == out.count("not tried: ")
    before, tuned = load_config("folder.yaml", base), load_config(output)
    assert (tuned.model, tuned.image, tuned.backbone) == (
        before.model,
        before.image,
        before.backbone,
    )

    # Other images measure honestly; these have chosen.
    model = load_model(run_folder, "cpu")
    config = model.config.model_copy(update={"chosen_by": tuned.chosen_by})
    test = anomaly.open_dataset("mvtec", product).test
    figures = score_test_split(replace(model, config=config), test)
    assert "3 of 6 test images were used to choose the settings" in flattered(figures)


def test_a_budget_is_a_time(command: Command) -> None:
    for budget in ("10", "0m", "ten minutes", "-5m"):
        code, _, err = command("tune", ["--config", "folder.yaml", f"--budget={budget}"])
        assert (code, "isn't a time; write it like 90s, 10m or 1h" in err) == (2, True)


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
    assert np.isinf(scores.good).tolist() == [False, True]
    assert scores.limit(0.01) < np.inf
