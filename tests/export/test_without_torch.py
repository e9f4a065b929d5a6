"""An exported model is scored where torch isn't installed, and says what torch says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Command
from kit import table

from anomaly.config.schema import METHODS, Method
from anomaly.errors import ModelError
from anomaly.scoring.build import scorer_of
from anomaly.scoring.model import image_scores, network_map
from anomaly.storage.models import load_model

CPU = torch.device("cpu")


Bare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bare(without_torch: str) -> Bare:
    """Runs Python with arguments there."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": without_torch},
        )  # fmt: skip

    return run


@pytest.fixture
def anomaly(bare: Bare) -> Callable[..., str]:
    """Runs a command there; gives what it printed."""

    def run(*arguments: object) -> str:
        done = bare("-m", "anomaly", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def check_rows(found: Sequence[dict[str, str]], expected: Sequence[dict[str, str]]) -> None:
    """The same rows but for the last digits, times and the engine."""
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert float(one.pop("image_score")) == pytest.approx(
            float(two.pop("image_score")), rel=1e-4
        )
        rarity = float(two.pop("calibrated_score"))
        assert float(one.pop("calibrated_score")) == pytest.approx(rarity, rel=1e-4, abs=1e-3)
        for name in ("time", "milliseconds", "engine"):
            del one[name], two[name]
        assert one == two


def test_infer_and_evaluate(
    bank_export: Path, run_folder: Path, product: Path, inferred: Path, evaluated: Path,
    tmp_path: Path, command: Command, anomaly: Callable[..., str],
) -> None:  # fmt: skip
    outputs = ["--write", "heatmaps", "page", "masks", "regions", "maps"]
    model = ["--model", bank_export]
    anomaly("infer", *model, "--input", product / "test", "--output", tmp_path / "bare", *outputs)
    assert (tmp_path / "bare" / "results.html").exists()
    check_rows(table(tmp_path / "bare"), table(inferred))

    golden = shutil.copytree(product / "test", tmp_path / "golden")
    record = ["--model", run_folder, "--golden", golden, "--overwrite"]
    assert command("evaluate", record)[0] == 0
    said = anomaly("evaluate", *model, "--golden", golden, "--tolerance", "0.05")
    assert "6 of 6 images score as recorded" in said

    anomaly("evaluate", *model, "--output", tmp_path / "figures")
    assert "onnx" in next((tmp_path / "figures").rglob("report.html")).read_text()
    found, expected = (
        json.loads((folder / "metrics.json").read_text())["mean"]
        for folder in (tmp_path / "figures", evaluated)
    )
    assert found == pytest.approx(expected, abs=0.02)


def test_the_python_api(bank_export: Path, run_folder: Path, product: Path, bare: Bare) -> None:
    code = """
import sys, anomaly
detector = anomaly.load(sys.argv[1])
one = detector.predict(sys.argv[2])
(two,) = detector.stream([sys.argv[2]])
assert one.score == two.score and one.verdict == two.verdict and len(one.heatmap()) == 96
print(one.score, one.verdict)
for what in (lambda: anomaly.fit(sys.argv[2]), lambda: anomaly.load(sys.argv[3]),
             lambda: detector.explain(sys.argv[2])):
    try:
        what()
    except anomaly.AnomalyError as error:
        assert "pip install 'anomaly[train]'" in str(error), error
    else:
        raise SystemExit("no error")
"""
    image = product / "test" / "spot" / "000.png"
    done = bare("-c", code, bank_export, image, run_folder)
    assert done.returncode == 0, done.stderr
    score, verdict = done.stdout.split()
    expected = load_model(run_folder, "cpu", "fp32").predict(image)
    assert float(score) == pytest.approx(expected.score, rel=1e-4)
    assert verdict == expected.verdict


def test_what_needs_torch_says_so(run_folder: Path, product: Path, bare: Bare) -> None:
    image, config = product / "test" / "spot" / "000.png", REPOSITORY / "configs" / "folder.yaml"
    train = ["--config", config, "--set", f"data.root={product / 'train'}"]
    for arguments in (
        ("train", *train, "--output", "/nowhere/run"),
        ("infer", "--model", run_folder, "--input", image, "--output", "/nowhere/o"),
        ("layers", "--backbone", "resnet18"),
    ):
        done = bare("-m", "anomaly", *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "pip install 'anomaly[train]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folder", ["run_folder", "padim_folder"])
def test_scorers_are_torchs(folder: str, request: pytest.FixtureRequest) -> None:
    detector = load_model(request.getfixturevalue(folder), "cpu", "fp32")
    tensors = detector.scorer.tensors()
    arrays = {name: value.numpy() for name, value in tensors.items()}
    array_scorer = scorer_of(detector.config, arrays)
    torch_scorer = scorer_of(detector.config, tensors)
    assert array_scorer.unit == torch_scorer.unit
    assert array_scorer.dimensions == torch_scorer.dimensions
    height, width = arrays.get("grid", np.array([9, 7]))
    rng = np.random.default_rng(0)
    embeddings = rng.random((3, height, width, array_scorer.dimensions), np.float32) * 2
    found, expected = (
        array_scorer.score(embeddings), torch_scorer.score(torch.from_numpy(embeddings))
    )  # fmt: skip
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
    np.testing.assert_allclose(
        array_scorer.image_scores(embeddings, found),
        torch_scorer.image_scores(torch.from_numpy(embeddings), expected),
        rtol=1e-4,
    )
    if found.nearest is not None:
        assert np.array_equal(found.nearest, expected.nearest)
    for wrong in (embeddings[..., :-1], np.tile(embeddings, (1, 2, 1, 1))[..., :-1]):
        with pytest.raises(Exception, match=r"channels|patches") as mine:
            array_scorer.score(wrong)
        with pytest.raises(type(mine.value)):
            torch_scorer.score(torch.from_numpy(wrong))
    with pytest.raises(ModelError, match="missing or unknown"):
        scorer_of(detector.config, {})


def test_maps_and_image_scores_are_torchs() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((3, 14, 9)).astype(np.float32)
    inside = rng.random(scores.shape) < 0.7
    for mask, values in ((None, scores), (inside, np.where(inside, scores, np.nan))):
        tensor, counted = torch.from_numpy(scores), mask if mask is None else torch.from_numpy(mask)
        maps = network_map(scores, (61, 72), 4.0, mask)
        expected = network_map(tensor, (61, 72), 4.0, counted)
        assert maps.dtype == np.float32
        np.testing.assert_allclose(maps, expected, rtol=1e-5)
        for how in ("max", "top_percent", "map_max", "map_top_percent", "map_top_relative"):
            found = image_scores(values, maps, how)
            wanted = image_scores(torch.from_numpy(values), expected, how)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=how)


def test_a_method_without_such_a_form_is_refused(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model(run_folder, "cpu").config
    monkeypatch.setitem(METHODS, "patchcore", Method("Mean embedding", "mean_embedding"))
    with pytest.raises(ModelError, match="Mean embedding computes with torch alone"):
        scorer_of(config, {"mean": np.ones(3)})
