"""A model that was logged in MLflow and loaded again says what it said before."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import Command

import anomaly
from anomaly.errors import DataError
from anomaly.export import commands
from anomaly.export.mlflow_model import ScoringModel
from anomaly.scoring.prediction import Prediction


@pytest.fixture
def _mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "pandas"):
        pytest.importorskip(name, reason="needs the extra [mlflow]")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.slow
@pytest.mark.usefixtures("_mlflow")
def test_a_registered_model_scores_paths_and_arrays(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    import mlflow
    import pandas as pd

    store = (tmp_path / "store").as_uri()
    arguments = ["--model", run_folder, "--name", "disc", "--store", store]
    for version in (1, 2):
        code, out, err = command("register", arguments)
        assert (code, f"registered as models:/disc/{version}" in out) == (0, True), err
    model = mlflow.pyfunc.load_model("models:/disc/2")
    local = anomaly.load(run_folder, device="cpu")
    files = sorted((product / "test").rglob("*.png"))
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(files[0].read_bytes()[:-30])
    expected = local.predict(files)
    found = model.predict([str(files[0]), str(damaged), *map(str, files[1:])])
    assert list(found["status"]) == ["ok", "unreadable", *["ok"] * 5]
    scored = found[found["status"] == "ok"]
    assert list(scored["path"]) == [str(file) for file in files]
    assert list(scored["verdict"]) == [one.verdict for one in expected]
    assert list(scored["image_score"]) == pytest.approx([one.score for one in expected], rel=1e-4)
    assert set(found["model_id"]) == {local.model_id}
    pixels = np.stack([cv2.imread(str(file))[..., ::-1] for file in files])
    for given in (pixels, list(pixels), pd.DataFrame({"n": range(6), "path": map(str, files)})):
        again = model.predict(given)
        assert list(again["image_score"]) == pytest.approx([x.score for x in expected], rel=1e-4)
    one = model.predict(str(files[0]))
    assert list(one["verdict"]) == [expected[0].verdict]
    # What MLflow has kept is the model folder, byte for byte, and nothing pickled.
    kept = Path(mlflow.artifacts.download_artifacts("models:/disc/2"))
    assert {f.name: f.read_bytes() for f in (kept / "data" / "model").iterdir()} == {
        f.name: f.read_bytes() for f in (run_folder / "model").iterdir()
    }
    assert not list(kept.rglob("*.pkl"))
    told = mlflow.get_run(model.metadata.run_id).data.params
    assert (told["model_id"], told["method"]) == (local.model_id, "PatchCore")


def test_each_refused_image_has_its_own_reason(
    run_folder: Path, product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused when it is scored comes later than one that can't be read."""
    pytest.importorskip("pandas", reason="needs the extra [mlflow]")

    def refuse(*_: object) -> list[Prediction]:
        raise DataError("it has another grid")

    model = anomaly.load(run_folder, device="cpu").model
    monkeypatch.setattr(type(model), "score", refuse)
    whole = product / "test" / "good" / "000.png"
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(whole.read_bytes()[:-30])
    table = ScoringModel(model).predict([str(whole), str(damaged)])
    assert list(table["status"]) == ["unsupported", "unreadable"]
    assert "another grid" in table["reason"][0]
    assert "damaged.png" in table["reason"][1]


@pytest.mark.slow
@pytest.mark.usefixtures("_mlflow")
def test_a_store_that_is_not_there(run_folder: Path, command: Command) -> None:
    arguments = ["--model", run_folder, "--store", "http://ada:secret@127.0.0.1:9"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        code, _, err = command("register", arguments)
    assert (code, "http://127.0.0.1:9" in err) == (2, True)
    assert "secret" not in err
    assert "Traceback" not in err


def test_mlflow_is_asked_for_where_it_is_missing(
    run_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    code, _, err = command("register", ["--model", run_folder])
    assert (code, "needs mlflow, pandas" in err) == (2, True)
    assert "pip install 'anomaly[mlflow]'" in err
