"""A method is one module and one line of the registry; all commands work with it."""

from pathlib import Path

import pytest
import torch
from conftest import Command, train_arguments
from kit import table
from safetensors.torch import load_file

from anomaly.config.load import parse_config
from anomaly.config.schema import METHODS, Method
from anomaly.errors import ModelError
from anomaly.scoring.build import fitter_of, scorer_of
from anomaly.storage.models import load_model


def test_a_method_from_elsewhere_goes_through_all_commands(
    product: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(METHODS, "mean", Method("Mean embedding", "mean_embedding"))

    def run(name: str, *arguments: object) -> None:
        code, _, err = command(name, arguments)
        assert code == 0, err

    model = tmp_path / "run"
    run("train", *train_arguments(product, model, "model.kind=mean"))
    detector = load_model(model)
    assert (detector.method, detector.unit) == ("Mean embedding", "distance to the mean")
    saved = load_file(model / "model" / "scorer.safetensors")
    assert detector.thresholds is not None
    assert torch.equal(detector.scorer.tensors()["mean"], saved["mean"])

    run("infer", "--model", model, "--input", product / "test", "--output", tmp_path / "results")
    rows = table(tmp_path / "results")
    assert {row["status"] for row in rows} == {"ok"}
    assert {"good", "reject"} & {row["verdict"] for row in rows}

    run("evaluate", "--model", model, "--output", tmp_path / "figures")
    report = next((tmp_path / "figures").rglob("report.html")).read_text()
    assert "Mean embedding" in report
    assert "distance to the mean" in report

    image = product / "test" / "spot" / "000.png"
    run("explain", image, "--model", model, "--output", tmp_path / "why")
    run("calibrate", "--model", model, "--review-rate", 0.1)

    config = parse_config({"model": {"kind": "mean"}}, "a test")
    with pytest.raises(ModelError, match="vectors"):
        scorer_of(config, {"vectors": torch.ones(3, 2)})
    with pytest.raises(ModelError, match="--pixels"):
        detector.scorer.graph()
    with pytest.raises(ModelError, match="train again"):
        fitter_of(config).incremental(detector.scorer, 3)
