"""Exported models say what their source says, or aren't there; and they are looked after alike."""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import SHARED, Command, train_arguments, write_part
from families import FAMILIES

from anomaly.backbones import engine as engine_module
from anomaly.backbones.engine import Graph
from anomaly.backbones.registry import build, default_layers, load_state, read_weights
from anomaly.backbones.truncation import truncate
from anomaly.cli import main
from anomaly.cli.common_options import device_and_threads
from anomaly.detector import AnomalyDetector
from anomaly.errors import AnomalyError, DataError, ModelError
from anomaly.export import graph as graph_module
from anomaly.export.equality import compare, golden_images
from anomaly.export.graph import write_graph
from anomaly.files.writing import as_json, sha256_of
from anomaly.imaging.loading import NetworkInput
from anomaly.imaging.loading import load as load_image
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.folder import sealed
from anomaly.storage.load import load_model
from anomaly.storage.save import save

ENGINES = ("onnx", "openvino")


def export(run: Path, engine: str, output: Path, *more: object) -> Path:
    arguments = ["--model", run, "--to", engine, "--output", output, "--threads", 2, *more]
    assert main(["export", *map(str, arguments)]) == 0
    return output


@pytest.fixture(scope="module")
def gaussian_export(padim_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PaDiM run for OpenVINO, the whole graph too; read only."""
    return export(padim_folder, "openvino", tmp_path_factory.mktemp("gauss") / "e", "--whole")


@pytest.fixture(params=["bank", pytest.param("gaussian", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A run and its export."""
    run = "run_folder" if request.param == "bank" else "padim_folder"
    return request.getfixturevalue(run), request.getfixturevalue(f"{request.param}_export")


@pytest.fixture
def copied(bank_export: Path, tmp_path: Path) -> Path:
    """A copy of an exported model's folder."""
    shutil.copytree(bank_export / "model", tmp_path / "model")
    return tmp_path / "model"


def predictions(detector: Model, paths: Sequence[Path], batch: int) -> list[Prediction]:
    found = list(detector.score_all(paths, batch_size=batch))
    scored = [one for one in found if isinstance(one, Prediction)]
    assert len(scored) == len(paths)
    return sorted(scored, key=lambda one: one.index)


@pytest.mark.slow
def test_an_export_takes_few_images_at_a_time(run_folder: Path, bank_export: Path) -> None:
    """More of them take memory, and neither engines nor torch on a CPU are faster for it."""
    model, exported = load_model(run_folder, "cpu"), load_model(bank_export)
    assert model.config.batch_size == exported.config.batch_size == 8
    assert (model.batch_size, exported.batch_size) == (4, 2)


def check_equal(run: Path, exported: Path, paths: Sequence[Path]) -> None:
    torch_, other = load_model(run, "cpu", "fp32"), load_model(exported)
    expected = predictions(torch_, paths, 8)
    for batch in (1, 3, 8):
        for one, two in zip(expected, predictions(other, paths, batch), strict=True):
            assert two.score == pytest.approx(one.score, rel=1e-4)
            assert two.verdict == one.verdict
            scale = np.nanmax(one.patch_scores)  # outside a region there is none
            np.testing.assert_allclose(two.patch_scores, one.patch_scores, atol=1e-4 * scale)


def test_scores_and_verdicts_are_torchs_in_batches_of_1_3_and_8(
    pair: tuple[Path, Path], product: Path
) -> None:
    check_equal(*pair, sorted((product / "test").rglob("*.png")))


def test_one_graph_takes_images_of_all_shapes(run_folder: Path, bank_export: Path) -> None:
    torch_, other = load_model(run_folder, "cpu", "fp32"), load_model(bank_export)
    rng = np.random.default_rng(0)
    for size in ((96, 120), (300, 60), (50, 400), (64, 64)):
        image = rng.integers(0, 255, size, dtype=np.uint8)
        one, two = torch_.predict(image), other.predict(image)
        assert one.patch_scores.shape == two.patch_scores.shape
        assert two.score == pytest.approx(one.score, rel=1e-4)


def test_the_whole_graph_needs_nothing_of_this_program(
    pair: tuple[Path, Path], product: Path
) -> None:
    run, exported = pair
    said = json.loads((exported / "model" / "export.json").read_text())
    file = exported / "model" / said["whole"]["file"]
    detector = load_model(run, "cpu", "fp32")
    paths = sorted((product / "test").rglob("*.png"))
    items = [load_image(i, path, detector.loading) for i, path in enumerate(paths)]
    pixels = np.stack([item.pixels for item in items if isinstance(item, NetworkInput)])
    images = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    if said["engine"] == "onnx":
        import onnxruntime

        outputs = onnxruntime.InferenceSession(file).run(None, {"images": images})
    else:
        import openvino

        compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        outputs = list(compiled({"images": images}).to_tuple())
    assert [one["name"] for one in said["whole"]["outputs"]][: len(outputs)] == [
        "patch_scores",
        "nearest",
    ][: len(outputs)]
    for expected, scores, *nearest in zip(predictions(detector, paths, 8), *outputs, strict=True):
        scale = expected.patch_scores.max()
        np.testing.assert_allclose(scores, expected.patch_scores, atol=1e-4 * scale)
        assert (expected.nearest is None) == (not nearest)
        if nearest:
            assert (nearest[0] == expected.nearest).mean() > 0.99  # ties may fall either way


def test_what_an_export_says_of_itself(run_folder: Path, bank_export: Path) -> None:
    folder = bank_export / "model"
    said = json.loads((folder / "export.json").read_text())
    source = load_model(run_folder)
    assert said["model_id"] == source.model_id == load_model(bank_export).model_id
    assert said["other_precision"] is None
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


def test_commands_take_an_exported_model(
    bank_export: Path, run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    rows: dict[str, list[dict[str, str]]] = {}
    for name, run in (("torch", run_folder), ("onnx", bank_export)):
        output = tmp_path / name
        chosen = ["--input", product / "test", "--output", output, "--threads", 2]
        assert command("infer", ["--model", run, *chosen])[0] == 0
        code, out, _ = command("infer", ["--model", run, *chosen, "--resume"])
        assert code == 0
        assert "complete" in out
        with (output / "results.csv").open(encoding="utf-8-sig") as file:
            rows[name] = list(csv.DictReader(file))
    for one, two in zip(rows["torch"], rows["onnx"], strict=True):
        assert (one["engine"], two["engine"]) == ("torch", "onnx")
        same = ("path", "verdict", "model_id", "threshold", "image_sha256", "model_name")
        assert [one[name] for name in same] == [two[name] for name in same]
    other = ["--model", bank_export, "--input", product / "test", "--output", tmp_path / "torch"]
    code, _, err = command("infer", [*other, "--resume"])
    assert code == 2
    assert "another engine" in err

    golden = shutil.copytree(product / "test", tmp_path / "golden")
    assert command("selfcheck", ["--model", run_folder, "--golden", golden, "--record"])[0] == 0
    code, out, _ = command("selfcheck", ["--model", bank_export, "--golden", golden,
                                         "--tolerance", "0.05"])  # fmt: skip
    assert code == 0, out
    code, out, _ = command("evaluate", ["--model", bank_export, "--output", tmp_path / "figures"])
    assert code == 0
    assert "onnx" in next((tmp_path / "figures").rglob("report.html")).read_text()


def test_what_needs_a_network_is_refused_and_names_the_source(
    bank_export: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    image = product / "test" / "spot" / "000.png"
    asked: list[tuple[str, list[object]]] = [
        ("explain", ["--input", image, "--output", tmp_path / "o"]),
        ("calibrate", ["--threshold", "1"]),
        ("export", ["--to", "onnx", "--output", tmp_path / "o"]),
        ("infer", ["--input", image, "--output", tmp_path / "o", "--precision", "bf16"]),
    ]
    for name, arguments in asked:
        code, _, err = command(name, ["--model", bank_export, *arguments])
        assert code == 2, name
        assert "export" in err
        assert "Traceback" not in err
    with pytest.raises(ModelError, match="exported model"):
        save(load_model(bank_export), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_export_that_says_something_else_is_not_there(
    resnet_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_graph = graph_module.write_graph

    def write_another(detector: Model, folder: Path, engine: str) -> dict[str, Any]:
        """The graph with a thousandth more of one weight."""
        entry = write_graph(detector, folder, engine)
        graph = onnx.load(folder / entry["file"])
        weights = max(graph.graph.initializer, key=lambda one: len(one.raw_data))
        values = onnx.numpy_helper.to_array(weights) * np.float32(1.001)
        weights.raw_data = values.tobytes()
        onnx.save(graph, folder / entry["file"])
        return entry

    monkeypatch.setattr(graph_module, "write_graph", write_another)
    output = tmp_path / "e"
    code, _, err = command("export", ["--model", resnet_folder, "--to", "onnx", "--output", output])
    assert code == 2
    assert "scores differ: " in err
    assert str(Path("train", "good")) in err
    assert "of the score" in err
    assert not output.exists()


def test_what_was_compared_is_counted_and_what_was_left_behind_goes(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    good = product / "train" / "good" / "000.png"
    golden = tmp_path / "golden"
    golden.mkdir()
    shutil.copy(good, golden / "a.png")
    (golden / "b.png").write_bytes(good.read_bytes()[:1000])
    left = tmp_path / "e" / ".anomaly-0123456789abcdef.part"  # as SIGKILL leaves it
    left.mkdir(parents=True)
    (left / "network.onnx").touch()
    chosen = ["--model", run_folder, "--to", "onnx", "--output", tmp_path / "e"]
    code, out, err = command("export", [*chosen, "--golden", golden, "--threads", 2])
    assert code == 0
    assert "on 1 golden image: same verdicts" in out
    assert "1 of 2 golden images can't be scored" in err
    said = json.loads((tmp_path / "e" / "model" / "export.json").read_text())
    assert said["equality"]["images"] == ["a.png"]
    assert {f.name for f in (tmp_path / "e").iterdir()} == {"model", "train.json"}


def test_a_verdict_that_changes_is_refused_however_little_scores_differ(
    run_folder: Path, product: Path
) -> None:
    detector = load_model(run_folder, "cpu")
    assert detector.thresholds is not None
    paths = sorted((product / "test").rglob("*.png"))
    assert {*compare(detector, detector, detector, paths, workers=2).shares} == {0}
    strict = AnomalyDetector(detector).calibrate(threshold=1e-3).model
    with pytest.raises(
        ModelError, match=r"000\.png has score .*\(good\) with torch .*\(reject\) with torch"
    ):
        compare(strict, strict, detector, paths, workers=2)


def test_images_to_compare_on(run_folder: Path, product: Path, tmp_path: Path) -> None:
    detector = load_model(run_folder, "cpu")
    drawn = golden_images(detector, run_folder, None)
    assert len(drawn) == 12
    assert drawn == golden_images(detector, run_folder, None)
    assert golden_images(detector, tmp_path, product / "test" / "spot") == sorted(
        (product / "test" / "spot").iterdir()
    )
    model = shutil.copytree(run_folder / "model", tmp_path / "model")  # without its run
    with pytest.raises(DataError, match="--golden"):
        golden_images(detector, model, None)


@pytest.mark.parametrize("layout", ["csv", "visa"])
def test_images_to_compare_on_whose_names_begin_elsewhere(layout: str, tmp_path: Path) -> None:
    """Names are relative to the list's folder, or to the folder of VisA's categories."""
    names = [f"candle/Data/{i}.JPG" for i in range(3)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    if layout == "csv":
        place = tmp_path / "list.csv"
        place.write_text("\n".join(["path,split", *(f"./{name},train" for name in names)]))
    else:
        place = tmp_path / "candle"
        (tmp_path / "split_csv").mkdir()
        rows = ["object,split,label,image,mask", *(f"candle,train,normal,{n}," for n in names)]
        (tmp_path / "split_csv" / "1cls.csv").write_text("\n".join(rows))
    (tmp_path / "train.json").write_text(json.dumps({"data_folder": str(place)}))
    config = SimpleNamespace(seed=0, data=SimpleNamespace(format=layout))
    hashes = {name: sha256_of(tmp_path / name) for name in names}
    detector: Any = SimpleNamespace(config=config, manifest={"training_images": hashes})
    assert golden_images(detector, tmp_path, None) == [tmp_path / name for name in names]


def edited(folder: Path, **changed: Any) -> None:
    """Change export.json, sealed again; what is None isn't in it any more."""
    values = json.loads((folder / "export.json").read_text()) | changed
    del values["manifest_sha256"]
    kept = {name: value for name, value in values.items() if name not in changed or value}
    (folder / "export.json").write_text(as_json(sealed(kept)))


def test_damaged_and_half_copied_folders(copied: Path) -> None:
    good = {file.name: file.read_bytes() for file in copied.iterdir()}

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match) as caught:
            load_model(copied)
        assert str(copied) in str(caught.value)
        assert "again" in str(caught.value) or "remove it" in str(caught.value)
        for name, content in good.items():
            (copied / name).write_bytes(content)

    for name in ("network.onnx", "whole.onnx", "scorer.safetensors", "thresholds.json"):
        (copied / name).unlink()
        refused(f"lacks {name}")
        (copied / name).write_bytes(good[name][:-100])
        refused("another size")
        (copied / name).write_bytes(good[name][:-1] + bytes([good[name][-1] ^ 1]))
        refused("was changed")
    (copied / "export.json").unlink()
    refused(r"holds network\.onnx of an exported model, but lacks export\.json")
    (copied / "network.onnx").unlink()
    (copied / "export.json").unlink()
    refused(r"lacks backbone\.safetensors")
    (copied / "export.json").write_text(good["export.json"].decode().replace("fp32", "bf16"))
    refused("was changed")
    (copied / "export.json").write_text("{")
    refused("isn't JSON")
    edited(copied, format="anomaly-export/1")
    refused("anomaly-export/1")
    edited(copied, precision="int8")
    refused("precision can't be int8")
    edited(copied, engine="tensorrt")
    refused("engine")
    (copied / "network.onnx").write_bytes(b"nothing")
    size = {"bytes": 7, "sha256": sha256_of(copied / "network.onnx")}
    files = json.loads(good["export.json"])["files"]
    edited(copied, files=files | {"network.onnx": size})
    with pytest.raises(ModelError, match="can't be loaded by ONNX Runtime") as caught:
        load_model(copied).predict(np.zeros((64, 64), np.uint8))
    assert "Protobuf" not in str(caught.value)


def test_files_of_two_models_are_not_mixed(
    copied: Path, run_folder: Path, tmp_path: Path, command: Command, product: Path
) -> None:
    """Each file is whole, and export.json vouches for the network."""
    other = AnomalyDetector(load_model(run_folder, "cpu", "fp32")).calibrate(
        threshold=1, force=True
    )
    other.save(tmp_path / "other" / "model")
    exported = export(tmp_path / "other", "onnx", tmp_path / "e", "--golden", product / "train")
    for file in (exported / "model").glob("network.*"):
        shutil.copy(file, copied)
    shutil.copy(exported / "model" / "export.json", copied)
    chosen = ["--model", copied, "--input", product / "test", "--output", tmp_path / "o"]
    code, _, err = command("infer", chosen)
    assert code == 2
    assert "mixes files of two models: export.json belongs to another one than manifest" in err
    assert str(copied) in err


def test_a_graph_that_the_engine_cannot_compute_here_ends_in_one_line(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO has no bilinear resizing on processors below AVX2, and says so at the first run."""

    def run(images: object) -> list[object]:
        raise RuntimeError("[CPU] Interpolate node with name 'x' bad combination")

    detector = load_model(copied)
    monkeypatch.setattr("anomaly.backbones.engine._onnx", lambda *_: run)
    with pytest.raises(ModelError, match="can't be computed by ONNX Runtime") as caught:
        detector.predict(np.zeros((64, 64), np.uint8))
    assert "Interpolate" not in str(caught.value)


@pytest.mark.parametrize(("engine", "module"), [("onnx", "onnxruntime"), ("openvino",) * 2])
def test_an_engine_that_is_not_installed_names_its_extra(
    engine: str, module: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(copied, engine=engine)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=rf"pip install 'anomaly\[{engine}\]'"):
        load_model(copied)


def test_a_precision_or_device_that_an_engine_lacks(
    bank_export: Path, run_folder: Path, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments = ["--model", run_folder, "--output", tmp_path / "o", "--precision", "bf16"]
    code, _, err = command("export", [*arguments, "--to", "onnx"])
    assert code == 2
    assert "bf16" in err
    code, _, err = command("export", [*arguments, "--to", "openvino", "--whole"])
    assert code == 2
    assert "fp32" in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AnomalyError, match="computes on the CPU"):
        load_model(bank_export, "cuda")
    assert load_model(bank_export).device.type == "cpu"
    for named in (bank_export, [bank_export / "model"]):
        options = argparse.Namespace(device="auto", threads=2, model=named)
        assert device_and_threads(options)[0].type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "overrides",
    [
        ("image.tile=64",),
        ("model.embedding=adaptive",),
        ("model.kind=padim", "model.projection=random"),
        ("model.kind=padim", "image.resize=96", "image.crop=80"),
        ("model.image_score=reweighted",),
        ("image.region={polygons: [[[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.1, 0.9]]], "
         "unit: relative}",),
        ("image.tile=64", "model.image_score=top_percent",
         "image.region={polygons: [[[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.1, 0.9]]], "
         "unit: relative}"),
    ],
)  # fmt: skip
def test_settings_survive(
    overrides: tuple[str, ...], engine: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    code, _, err = command("train", train_arguments(product, run, *overrides, "precision=fp32"))
    assert code == 0, err
    exported = export(run, engine, tmp_path / "e", "--whole")
    check_equal(run, exported, sorted((product / "test").rglob("*.png")))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_of_networks(
    name: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings are torch's, for any size and number of images."""
    full = build(name)
    truncated = truncate(build(name), default_layers(name, full, 2))
    load_state(truncated.network, read_weights(name, "random", 0)[0], full, "a test")
    detector = replace(load_model(run_folder, "cpu", "fp32"), extractor=truncated)
    for engine in ENGINES:
        said = write_graph(detector, tmp_path, engine)
        graph = Graph(tmp_path / said["file"], engine, "fp32", 2)
        for shape in ((1, 3, 64, 96), (3, 3, 160, 128), (8, 3, 32, 64)):
            images = torch.rand(*shape)
            maps = detector.extractor(detector.normalise(images))
            expected = detector.scorer.align(maps).numpy()
            found = graph(images.numpy())[0]
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["patchcore", "padim"])
@pytest.mark.parametrize("category", ["mvtec_ad/bottle", "magnetic_tile"])
def test_real_images(
    category: str, kind: str, engine: str, tmp_path: Path, command: Command
) -> None:
    weights = SHARED / "weights" / "resnet50_v1_imagenet_stem_to_layer3.safetensors"
    data = SHARED / "data" / category
    if not (data.exists() and weights.exists()):
        pytest.skip(f"{data} or {weights} is absent")
    if kind == "padim" and category == "magnetic_tile":
        pytest.skip("its images have many shapes, which PaDiM doesn't take")
    sets = [f"data.root={data}", "data.format=mvtec", "backbone.name=resnet50_v1",
            f"backbone.weights={weights}", "model.coreset_ratio=0.01", f"model.kind={kind}",
            "precision=fp32"]  # fmt: skip
    flags = [part for one in sets for part in ("--set", one)]
    run = tmp_path / "run"
    train = ["--config", "folder.yaml", *flags, "--output", run, "--device", "cpu"]
    assert command("train", train)[0] in (0, 3)
    exported = export(run, engine, tmp_path / "e", "--whole")
    check_equal(run, exported, sorted(p for p in (data / "test").rglob("*.png"))[:40])


@pytest.mark.slow
def test_a_run_that_was_broken_off_ends_with_the_same_bytes(
    bank_export: Path, tmp_path: Path, command: Command
) -> None:
    from conftest import result_files

    for i in range(60):
        write_part(tmp_path / "in" / f"{i:02}.png", i, mark=(30, 50) if i % 7 == 0 else None)
    chosen = ["--model", bank_export, "--input", tmp_path / "in", "--threads", 2, "--output"]
    assert command("infer", [*chosen, tmp_path / "whole"])[0] == 0
    expected = result_files(tmp_path / "whole")

    import anomaly.inference.run as run_module

    settled = run_module._Run._record_first
    for stop in (1, 7, 30):
        left = iter(range(stop))

        def settle(self: Any, left: Any = left) -> Any:
            next(left, None) is None and pytest.fail("broken off")
            return settled(self)

        output = tmp_path / str(stop)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module._Run, "_record_first", settle)
            with pytest.raises(BaseException, match="broken off"):
                command("infer", [*chosen, output])
        assert command("infer", [*chosen, output, "--resume"])[0] == 0
        assert result_files(output) == expected


def test_an_engine_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    code = "from anomaly.backbones.engine import installed; installed('openvino', '').Core()"
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
    assert most[0] == 1
    assert most[1] == 1  # begun by the second thread once the first one was done
    assert engine_module._has_run.is_set()


@pytest.mark.parametrize(
    ("network", "layers"),
    [
        ("mobilenet_v2", "features.6,features.13.conv.0"),
        pytest.param("resnet18", "layer1,layer3.0.conv1", marks=pytest.mark.slow),
        pytest.param("densenet121", "features.denseblock2.denselayer3", marks=pytest.mark.slow),
    ],
)
def test_the_last_layer_may_lie_inside_a_block(
    network: str, layers: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    settings = [
        f"backbone.name={network}",
        "backbone.weights=random",
        f"backbone.layers=[{layers}]",
    ]
    assert command("train", train_arguments(product, run, *settings))[0] == 0
    check_equal(run, export(run, "onnx", tmp_path / "x"), sorted((product / "test").rglob("*.png")))


def test_a_network_that_cannot_run_to_its_end_is_told_in_words(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_module, "_runs", lambda *_: False)
    arguments = ["--model", run_folder, "--to", "onnx", "--output", tmp_path / "x"]
    code, _, said = command("export", arguments)
    assert code == 2
    assert "tiny doesn't run to its end on images of 128×160; train with another" in said
    assert not (tmp_path / "x" / "model").exists()


@pytest.fixture(scope="module")
def bf16_run(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PatchCore run as if it had been trained in bf16; on processors without it, too."""
    folder = tmp_path_factory.mktemp("bf16") / "run"
    shutil.copytree(run_folder, folder)
    shutil.rmtree(folder / "model")
    model = load_model(run_folder, "cpu", "fp32")
    made = model.manifest["made_with"] | {"precision": "bf16"}
    save(
        replace(
            model,
            config=model.config.model_copy(update={"precision": "bf16"}),
            manifest=model.manifest | {"made_with": made},
        ),
        folder / "model",
    )
    return folder


def test_another_precision_than_trainings_keeps_thresholds_and_says_what_differs(
    bf16_run: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    images = sorted((product / "test").rglob("*.png"))
    chosen = ["--model", bf16_run, "--to", "onnx", "--threads", 2, "--output", tmp_path / "e"]
    code, out, _ = command("export", [*chosen, "--golden", product / "test"])
    assert code == 0
    before, after = load_model(bf16_run, "cpu", "bf16"), load_model(tmp_path / "e")
    assert after.model_id == before.model_id
    assert after.thresholds == before.thresholds
    said = json.loads((tmp_path / "e" / "model" / "export.json").read_text())
    assert said["equality"]["largest_difference"] < 1e-4
    assert said["equality"]["compared_with"].endswith("fp32")
    other = said["other_precision"]
    assert (other["trained_in"], other["verdicts_changed"]) == ("bf16", [])
    scores = [[one.score for one in predictions(model, images, 8)] for model in (before, after)]
    assert before.thresholds is not None
    least = np.maximum(scores[0], before.thresholds.review)
    shifts = np.abs(np.subtract(*scores)) / least
    assert other["largest_difference"] == pytest.approx(shifts.max(), rel=1e-2)
    assert other["median_difference"] == pytest.approx(np.median(shifts), rel=1e-2)
    assert f"{100 * other['largest_difference']:.2f} % at most; 0 verdicts changed" in out


def test_a_verdict_that_changes_with_the_precision_needs_consent(
    bf16_run: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    """Golden parts are compared where there are some; here on each side of a threshold."""
    run = shutil.copytree(bf16_run, tmp_path / "run")
    images = sorted((product / "test").rglob("*.png"))
    pairs = zip(
        *(predictions(load_model(run, "cpu", one), images, 8) for one in ("bf16", "fp32")),
        strict=True,
    )
    first, second = max(pairs, key=lambda pair: pair[1].score - pair[0].score)
    assert second.score > first.score
    between = (first.score + second.score) / 2
    arguments = ["--model", run, "--threshold", between, "--device", "cpu", "--yes"]
    assert command("calibrate", arguments)[0] == 0
    assert first.path is not None
    (run / "golden").mkdir()
    shutil.copy(first.path, run / "golden" / "part.png")
    record = ["--model", run, "--golden", run / "golden", "--record", "--device", "cpu"]
    assert command("selfcheck", record)[0] == 0
    chosen = ["--model", run, "--to", "onnx", "--threads", 2, "--output", tmp_path / "e"]
    code, _, err = command("export", chosen)
    assert code == 2
    assert "trained in bf16, and in fp32 1 of 1 golden images get another verdict" in err
    assert "(part.png: good -> reject)" in err
    assert "--force" in err
    assert not (tmp_path / "e" / "model").exists()
    code, out, _ = command("export", [*chosen, "--force"])
    assert code == 0
    assert "1 verdict changed\n  part.png: good -> reject" in out
    said = json.loads((tmp_path / "e" / "model" / "export.json").read_text())
    (changed,) = said["other_precision"]["verdicts_changed"]
    assert (changed["before"], changed["after"]) == ("good", "reject")
    assert load_model(tmp_path / "e").thresholds == load_model(run, "cpu", "bf16").thresholds
