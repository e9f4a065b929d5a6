"""Commands, service, export and Python give one verdict, and name the rule or zone behind it."""

import csv
import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command, run_command, train_arguments, write_part
from scipy import ndimage

from anomaly.datasets import Sample
from anomaly.evaluation.update import verdict_changes
from anomaly.inference.rows import Row
from anomaly.line.engine import Engine, PictureRequest
from anomaly.line.record import Record, Recorder
from anomaly.scoring.image_score import network_map
from anomaly.scoring.pipeline import Model
from anomaly.storage.load import load_model

LEFT = "[[0, 0], [0.5, 0], [0.5, 1], [0, 1]]"
SETTINGS = [
    f"zones={{left: {{polygons: [{LEFT}], reject_rate: 0.05}}}}",
    "rules=[{name: spot on the left, zone: left, area: 180, verdict: review},"
    " {name: never so long, length: 90, verdict: reject}]",
]
DECIDED = {
    "left.png": ("review", "rule spot on the left"),
    "middle.png": ("review", "rule spot on the left"),
    "right.png": ("reject", ""),
}


@pytest.fixture(scope="module")
def spots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parts with a spot each, on either side of the middle at column 60; read only."""
    folder = tmp_path_factory.mktemp("parts") / "spot"
    for number, (name, column) in enumerate([("left", 30), ("middle", 38), ("right", 80)]):
        write_part(folder / f"{name}.png", 300 + number, (43, column))
    return folder


@pytest.fixture(scope="module", params=["patchcore", "padim"])
def run(request: pytest.FixtureRequest, product: Path, tmp_path_factory: Any) -> Path:
    """A run with a zone of its own rate and two rules; read only."""
    folder: Path = tmp_path_factory.mktemp("rules") / "run"
    settings = [f"model.kind={request.param}", *SETTINGS]
    run_command("train", train_arguments(product, folder, *settings))
    return folder


def _of_spots(rows: list[Any]) -> dict[str, tuple[str, str]]:
    return {
        Path(row["path"]).name: (row["verdict"], row["decided_by"])
        for row in rows
        if "spot" in row["path"]
    }


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _served(model: Model, files: list[Path], record: Record) -> Iterator[Row]:
    with (
        Recorder(record, lambda *_: None) as recorder,
        Engine("disc", model, recorder, workers=1) as engine,
    ):
        wanted = PictureRequest(regions=True)
        answers: list[Future[Any]] = [
            engine.submit(file.read_bytes(), str(file), wanted) for file in files
        ]
        for answer in answers:
            scored = answer.result(120)
            rule = scored.answer.row.decided_by.removeprefix("rule ")
            assert rule in {region.rule for region in scored.drawn.regions}
            yield scored.answer.row


def test_one_verdict_everywhere(
    run: Path, product: Path, spots: Path, tmp_path: Path, command: Command
) -> None:
    files = sorted(spots.iterdir())
    model = load_model(run, "cpu")
    assert set(json.loads((run / "model" / "thresholds.json").read_text())["zones"]) == {"left"}
    assert any("in zone left, reject threshold" in line for line in model.thresholds.lines())  # type: ignore[union-attr]

    results = tmp_path / "results"
    arguments = ["--model", run, "--input", spots, "--output", results]
    code, _, said = command("infer", [*arguments, "--regions", "--device", "cpu"])
    assert code == 0, said
    assert _of_spots(_rows(results, "results.csv")) == DECIDED
    for row in _rows(results, "regions.csv"):
        assert (row["zone"] == "left") == (int(row["peak_x"]) < 60)
        assert (row["rule"] != "") == (row["zone"] == "left" and int(row["area"]) >= 180)
    assert "rule spot on the left" in (results / "results.html").read_text()

    record = Record(tmp_path / "line.sqlite")
    assert _of_spots([asdict(row) for row in _served(model, files, record)]) == DECIDED
    record.close()

    code, _, said = command(
        "export",
        ["--model", run, "--to", "onnx", "--output", tmp_path / "export", "--whole"],
    )
    assert code == 0, said
    assert "zones and rules of this model apply when anomaly runs the export" in said
    camera = ["--to", "onnx", "--output", tmp_path / "graph", "--whole", "--pixels", "120x96"]
    code, _, said = command("export", ["--model", run, *camera])
    assert (code, "regions decide its verdicts" in said) == (2, True)
    exported = load_model(tmp_path / "export")
    for file in files:
        for predicted in (model.predict(file), exported.predict(file)):
            assert (predicted.verdict, predicted.decided_by) == DECIDED[file.name]  # type: ignore[union-attr]

    figures = tmp_path / "figures"
    tested = ["--good", product / "test" / "good", "--defects", spots]
    code, _, said = command("evaluate", ["--model", run, "--output", figures, *tested])
    assert code == 0, said
    assert _of_spots(_rows(figures, "scores.csv")) == DECIDED

    samples = [Sample(file, file.name) for file in files]
    changes = verdict_changes((model, model), samples, tmp_path, 1, partial(lambda *_: None))
    assert {c.name: c.after for c in changes} == {name: DECIDED[name][0] for name in DECIDED}


def test_a_zone_decides_by_its_own_scores(run: Path, spots: Path) -> None:
    """Without rules: what flags an image is the score of its left or of its right part."""
    model = load_model(run, "cpu")
    model = replace(model, config=model.config.model_copy(update={"rules": ()}))
    limits = model.thresholds
    assert limits is not None
    for name, decided_by in (("left", "zone left"), ("middle", "zone left"), ("right", "")):
        predicted: Any = model.predict(spots / f"{name}.png")
        rest, left = predicted.scores
        assert (predicted.verdict, predicted.decided_by) == ("reject", decided_by)
        assert (left > limits.zones["left"].value) == (decided_by != "")
        assert predicted.score == pytest.approx(max(rest, left * limits.weight("left")))
        assert predicted.regions[0].zone == decided_by.removeprefix("zone ")


def test_the_smallest_defect_is_part_of_every_score(
    product: Path, tmp_path: Path, command: Command
) -> None:
    """Images and thresholds go by the level of the area; what can't be measured ends a training."""
    plain = ["border_damping=0", "halo_damping=0", "spacing_neighbours=0"]
    settings = [f"model.{setting}" for setting in [*plain, "smallest_defect.area=300"]]
    run_command("train", train_arguments(product, tmp_path / "run", *settings))
    model = load_model(tmp_path / "run", "cpu")
    predicted: Any = model.predict(product / "test" / "spot" / "000.png")
    height, width = predicted.view.size
    maps = network_map(predicted.patch_scores[None], (height, width), predicted.smoothing)
    area = round(300 * height * width / (96 * 120))
    labels = [ndimage.label(maps[0] >= predicted.score * t, np.ones((3, 3)))[0] for t in (1, 1.001)]
    largest = [int(np.bincount(of_level.ravel())[1:].max(initial=0)) for of_level in labels]
    assert largest[0] >= area > largest[1]
    assert predicted.verdict == "reject"
    assert predicted.score < maps.max()
    small = train_arguments(product, tmp_path / "small", "model.smallest_defect.area=20")
    code, _, said = command("train", small)
    assert (code, "nothing smaller can be measured" in said) == (2, True)
