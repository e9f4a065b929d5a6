"""A method is one module and one line of the registry; all commands work with it."""

import csv
from pathlib import Path

import pytest
import torch
from conftest import Command, train_arguments
from safetensors.torch import load_file

from anomaly.config.schema import METHODS, Method
from anomaly.storage.load import load_model


@pytest.fixture
def third_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(METHODS, "mean", Method("Mean embedding", "mean_embedding"))


@pytest.mark.usefixtures("third_method")
def test_a_method_from_elsewhere_goes_through_all_commands(
    product: Path, command: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, _, err = command("train", train_arguments(product, run, "model.kind=mean"))
    assert code == 0, err
    detector = load_model(run)
    assert (detector.method, detector.unit) == ("Mean embedding", "distance to the mean")
    saved = load_file(run / "model" / "scorer.safetensors")
    assert detector.thresholds is not None
    assert torch.equal(detector.scorer.tensors()["mean"], saved["mean"])

    results = tmp_path / "results"
    infer = ["--model", run, "--input", product / "test", "--output", results]
    assert command("infer", infer)[0] == 0
    with (results / "results.csv").open(encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"ok"}
    assert {"good", "reject"} & {row["verdict"] for row in rows}

    figures = tmp_path / "figures"
    assert command("evaluate", ["--model", run, "--output", figures])[0] == 0
    report = next(figures.rglob("report.html")).read_text()
    assert "Mean embedding" in report
    assert "distance to the mean" in report

    image = next((product / "test").rglob("*.png"))
    explain = ["--model", run, "--input", image, "--output", tmp_path / "why"]
    code, _, err = command("explain", explain)
    assert code == 0, err
    assert (tmp_path / "why").is_dir()

    code, _, err = command("calibrate", ["--model", run, "--without", "train/good/000.png"])
    assert code == 0, err


@pytest.mark.usefixtures("third_method")
def test_a_method_refuses_tensors_that_are_not_its_own(
    product: Path, command: Command, tmp_path: Path
) -> None:
    from anomaly.config.load import parse_config
    from anomaly.errors import ModelError
    from anomaly.scoring.build import scorer_of

    config = parse_config({"model": {"kind": "mean"}}, "a test")
    with pytest.raises(ModelError, match="vectors"):
        scorer_of(config, {"vectors": torch.ones(3, 2)}, torch.device("cpu"))


def test_the_registry_names_modules_that_hold_what_it_promises() -> None:
    from importlib import import_module

    for method in METHODS.values():
        assert callable(import_module(method.module).fitter)
        assert callable(import_module(method.arrays or method.module).scorer)
