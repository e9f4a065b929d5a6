"""Exported models say what their source says, or aren't there; and they are looked after alike."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import Command, Says
from kit import table
from timm.layers import Conv2dSame
from torch import nn

import anomaly
from anomaly.backbones import engine as engine_module
from anomaly.backbones.engine import Graph
from anomaly.backbones.layers import truncate
from anomaly.backbones.networks import BACKBONES, Backbone, build, load_state, read_weights
from anomaly.detector import Detector
from anomaly.errors import AnomalyError, DataError, ModelError
from anomaly.export import graph as graph_module
from anomaly.export.commands import golden_images
from anomaly.export.graph import write_graph
from anomaly.scoring.model import Model
from anomaly.storage.folder import write_sealed
from anomaly.storage.models import load_model, save


@pytest.fixture
def copied(bank_export: Path, tmp_path: Path) -> Path:
    """A copy of an exported model's folder."""
    shutil.copytree(bank_export / "model", tmp_path / "model")
    return tmp_path / "model"


def test_scores_verdicts_and_patches_are_torchs_for_images_of_all_shapes(
    run_folder: Path, bank_export: Path, product: Path
) -> None:
    torch_, exported = anomaly.load(run_folder, "cpu", "fp32"), anomaly.load(bank_export)
    rng = np.random.default_rng(0)
    shapes = ((96, 120), (300, 60), (50, 400), (64, 64))
    noise = [rng.integers(0, 255, shape, dtype=np.uint8) for shape in shapes]
    images = [*sorted((product / "test").rglob("*.png")), *noise]
    for one, two in zip(torch_.predict(images), exported.predict(images), strict=True):
        assert two.score == pytest.approx(one.score, rel=1e-4)
        assert two.verdict == one.verdict
        scale = one.patch_scores.max()
        np.testing.assert_allclose(two.patch_scores, one.patch_scores, atol=1e-4 * scale)


def with_network(model: Model, name: str, layers: list[str]) -> Model:
    """The model with another network, of random weights."""
    full, extractor = build(name), truncate(build(name), layers)
    load_state(extractor.network, read_weights(name, "random", 0)[0], full, "a test")
    backbone = model.config.backbone.model_copy(update={"name": name})
    config = model.config.model_copy(update={"backbone": backbone})
    return replace(model, config=config, extractor=extractor)


class Same(nn.Sequential):
    """Convolutions as TensorFlow pads them."""

    def __init__(self) -> None:
        super().__init__(
            Conv2dSame(3, 8, 3, stride=2), nn.ReLU(), Conv2dSame(8, 8, 5, stride=4), nn.ReLU()
        )


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("tiny", ["layer1", "layer3.conv1"]),  # the last one lies inside a block
        ("same", ["2"]),  # which pads by its input's size
        ("timm/test_vit", ["blocks.0"]),  # whose positions are resampled
    ],
)
def test_networks_of_several_kinds_embed_as_torch_does_in_both_engines(
    name: str, layers: list[str], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKBONES, "same", Backbone(Same))
    model = with_network(load_model(run_folder, "cpu", "fp32"), name, layers)
    said = write_graph(model, tmp_path, "onnx")
    graphs = [Graph(tmp_path / said["file"], engine, 2) for engine in ("onnx", "openvino")]
    for shape in ((1, 3, 64, 96), (3, 3, 160, 128)):
        images = torch.rand(*shape)
        with torch.inference_mode():
            expected = model.scorer.align(model.extractor(model.normalise(images))).numpy()
        for graph in graphs:
            (found,) = graph(images.numpy())
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


class Unending(nn.Module):
    """What follows the first layer takes neither its output nor images of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)
        self.head = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)) + torch.zeros(16, 1, 1))


def test_a_network_that_cannot_run_to_its_end_is_told_in_words(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKBONES, "unending", Backbone(Unending))
    model = with_network(load_model(run_folder, "cpu", "fp32"), "unending", ["first"])
    said = "unending doesn't run to its end on images of 128×160; train with another backbone"
    with pytest.raises(ModelError, match=said):
        write_graph(model, tmp_path, "onnx")


def test_what_an_export_says_of_itself(run_folder: Path, bank_export: Path) -> None:
    folder = bank_export / "model"
    said = json.loads((folder / "export.json").read_text())
    source = load_model(run_folder)
    assert said["model_id"] == source.model_id == load_model(bank_export).model_id
    (images,), (embeddings,) = said["network"]["inputs"], said["network"]["outputs"]
    assert images["shape"] == ["batch", 3, "height", "width"]
    assert embeddings["shape"] == ["batch", "h", "w", source.scorer.dimensions]
    assert "multiples of 32" in images["meaning"]
    assert len(said["equality"]["images"]) == 12
    assert 0 < said["equality"]["largest_difference"] < 1e-4
    assert not (folder / "backbone.safetensors").exists()
    for file in folder.iterdir():
        assert b"/tmp/" not in file.read_bytes(), file
        assert str(Path(__file__).parents[2]).encode() not in file.read_bytes(), file


def test_rows_name_the_engine_and_a_run_keeps_to_it(
    bank_export: Path, product: Path, inferred: Path, tmp_path: Path, command: Command
) -> None:
    def infer(output: Path, *more: object) -> tuple[int, str, str]:
        where = ["--model", bank_export, "--input", product / "test", "--output", output]
        return command("infer", [*where, *more])

    assert infer(tmp_path / "onnx")[0] == 0
    assert {row["engine"] for row in table(tmp_path / "onnx")} == {"onnx"}
    assert "complete" in infer(tmp_path / "onnx", "--resume")[1]
    shutil.copytree(inferred, tmp_path / "torch")
    code, _, err = infer(
        tmp_path / "torch", *("--write", "heatmaps", "page", "masks", "regions", "maps", "--resume")
    )
    assert (code, "another engine" in err) == (2, True)


def test_what_needs_a_network_is_refused_and_names_the_source(
    bank_export: Path, tmp_path: Path, says: Says
) -> None:
    assert "export" in says(2, "calibrate", ["--model", bank_export, "--threshold", "1"])
    with pytest.raises(ModelError, match="exported model"):
        save(load_model(bank_export), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_export_that_says_something_else_is_not_there(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_another(detector: Model, folder: Path, engine: str) -> dict[str, Any]:
        """The graph with a hundredth more of one weight."""
        entry = write_graph(detector, folder, engine)
        graph = onnx.load(folder / entry["file"])
        weights = max(graph.graph.initializer, key=lambda one: len(one.raw_data))
        values = onnx.numpy_helper.to_array(weights) * np.float32(1.01)
        weights.raw_data = values.tobytes()
        onnx.save(graph, folder / entry["file"])
        return entry

    monkeypatch.setattr(graph_module, "write_graph", write_another)
    output = tmp_path / "e"
    code, _, err = command("export", ["--model", run_folder, "--to", "onnx", "--output", output])
    assert code == 2
    assert "scores differ: " in err
    assert str(Path("train", "good")) in err
    assert "of the score" in err
    assert not output.exists()


def test_images_to_compare_on(run_folder: Path, tmp_path: Path) -> None:
    detector = load_model(run_folder, "cpu")
    assert golden_images(detector, None) == golden_images(detector, None)
    model = shutil.copytree(run_folder / "model", tmp_path / "model")  # without its run
    with pytest.raises(DataError, match="--golden"):
        golden_images(load_model(model, "cpu"), None)


def edited(folder: Path, **changed: Any) -> None:
    """Change export.json, sealed again."""
    values = json.loads((folder / "export.json").read_text()) | changed
    del values["manifest_sha256"]
    write_sealed(folder / "export.json", values)


def test_damaged_and_half_copied_folders(copied: Path) -> None:
    good = {file.name: file.read_bytes() for file in copied.iterdir()}

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match) as caught:
            load_model(copied)
        assert str(copied) in str(caught.value)
        assert "again" in str(caught.value) or "remove it" in str(caught.value)
        for name, content in good.items():
            (copied / name).write_bytes(content)

    for name in ("network.onnx", "scorer.safetensors", "thresholds.json"):
        (copied / name).unlink()
        refused(f"lacks {name}")
        (copied / name).write_bytes(good[name][:-100])
        refused("was changed")
        (copied / name).write_bytes(good[name][:-1] + bytes([good[name][-1] ^ 1]))
        refused("was changed")
    (copied / "export.json").unlink()
    refused(r"lacks backbone\.safetensors")
    (copied / "export.json").write_text(good["export.json"].decode().replace("fp32", "fp16"))
    refused("was changed")
    (copied / "export.json").write_text("{")
    refused("isn't JSON")
    edited(copied, model_id="0" * 16)
    refused("mixes files of two models: export.json belongs to another one")


def test_a_graph_that_the_engine_cannot_load_or_compute_ends_in_one_line(copied: Path) -> None:
    graph = Graph(copied / "network.onnx", "onnx", 1)
    with pytest.raises(ModelError, match=r"can't be computed by ONNX Runtime .* 1 × 7 × 64 × 64"):
        graph(np.zeros((1, 7, 64, 64), np.float32))
    (copied / "network.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="can't be loaded by ONNX Runtime") as caught:
        Graph(copied / "network.onnx", "onnx", 1)(np.zeros((1, 3, 64, 64), np.float32))
    assert "Protobuf" not in str(caught.value)


@pytest.mark.parametrize(("engine", "module"), [("onnx", "onnxruntime"), ("openvino",) * 2])
def test_an_engine_that_is_not_installed_names_its_extra(
    engine: str, module: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(copied, engine=engine)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=rf"pip install 'anomaly\[{engine}\]'"):
        load_model(copied)


def test_a_device_that_an_engine_lacks(bank_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AnomalyError, match="on the CPU in fp32 only"):
        load_model(bank_export, "cuda")
    assert load_model(bank_export).device.type == "cpu"


def test_an_engine_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    code = "from anomaly.backbones import engine; engine.import_engine('openvino', '').Core()"
    environment = {**os.environ, "HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())


def test_openvinos_first_run_has_no_other_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once lock each other out for good, now and then, in OpenVINO's module."""
    monkeypatch.setattr(engine_module, "_has_run", threading.Event())
    running, most = 0, []

    def run(images: Any) -> list[Any]:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.05)
        running -= 1
        return [images]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(engine_module._first_alone, run), range(4)))
    assert most[:2] == [1, 1]  # the second thread begins once the first one is done


def test_a_verdict_that_changes_with_the_number_format_is_no_export(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    """The run as if it had been trained in bf16, with a threshold between a part's two scores."""
    low, high = (load_model(run_folder, "cpu", one) for one in ("bf16", "fp32"))
    images = sorted((product / "test").rglob("*.png"))
    pairs = zip(*(Detector(one).predict(images) for one in (low, high)), strict=True)
    first, second = max(pairs, key=lambda pair: pair[1].score - pair[0].score)
    assert second.score > first.score
    limit = (first.score + second.score) / 2
    golden, output = tmp_path / "golden", tmp_path / "e"
    golden.mkdir()
    assert first.path is not None
    shutil.copy(first.path, golden / "part.png")
    (golden / "cut short.png").write_bytes(first.path.read_bytes()[:1000])
    left = output / ".anomaly-0123456789abcdef.part"  # as SIGKILL leaves it
    left.mkdir(parents=True)
    (left / "network.onnx").touch()
    chosen = ["--model", tmp_path / "run", "--to", "onnx", "--output", output]
    chosen += ["--golden", golden, "--overwrite"]
    for threshold, code in ((limit, 2), (10 * limit, 0)):
        model = Detector(high).calibrate(threshold=threshold, force=True).model
        config = model.config.model_copy(update={"precision": "bf16"})
        save(replace(model, config=config), tmp_path / "run" / "model", overwrite=True)
        found, out, err = command("export", chosen)
        assert found == code, err
        if code:
            assert re.search(r"part\.png has .*\(reject\) in the export and .*\(good\) with", err)
            assert "train with --set precision=fp32" in err
            assert not (output / "model").exists()
    assert "on 1 golden image: same verdicts" in out
    assert "1 of 2 golden images can't be scored" in err
    assert {file.name for file in output.iterdir()} == {"model"}
    said = json.loads((output / "model" / "export.json").read_text())
    assert said["equality"]["images"] == ["part.png"]
    assert said["equality"]["largest_difference"] < 1e-4
    after, before = load_model(output), load_model(tmp_path / "run", "cpu", "bf16")
    assert (after.model_id, after.thresholds) == (before.model_id, before.thresholds)
