"""int8 is another model, learned again from the quantised network; and all of it holds together."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import SHARED, Command, train_arguments
from patch_lists import PatchList

from anomaly.backbones.engine import Array, Graph
from anomaly.cli import main
from anomaly.datasets import Sample
from anomaly.detector import AnomalyDetector
from anomaly.errors import DataError
from anomaly.export import models, quantised
from anomaly.files.writing import sha256_of
from anomaly.imaging.loading import NetworkInput, turned_corner
from anomaly.imaging.loading import load as load_image
from anomaly.methods.base import PatchBatch
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from anomaly.scoring.pipeline import Model
from anomaly.storage.load import load_model

ENGINES = ("onnx", "openvino")


def arguments(run: Path, engine: str, output: Path, *more: object) -> list[object]:
    chosen = ["--model", run, "--to", engine, "--precision", "int8", "--output", output]
    return [*chosen, "--threads", 2, *more]


def export(run: Path, engine: str, output: Path) -> Path:
    assert main(["export", *map(str, arguments(run, engine, output))]) == 0
    return output


def tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model" / "scorer.safetensors")


@pytest.fixture(scope="module")
def int8(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PatchCore run in int8 for ONNX Runtime; read only."""
    return export(run_folder, "onnx", tmp_path_factory.mktemp("int8") / "e")


def test_it_is_another_model_with_the_same_patches_in_its_bank(
    int8: Path, run_folder: Path, product: Path
) -> None:
    parent, detector = load_model(run_folder, "cpu", "fp32"), load_model(int8)
    said = json.loads((int8 / "model" / "export.json").read_text())
    record = json.loads((int8 / "train.json").read_text())
    assert said["source_model_id"] == parent.model_id != detector.model_id == record["model_id"]
    assert detector.manifest["parent"] == parent.model_id
    assert detector.manifest["training_images"] == parent.manifest["training_images"]
    assert said["precision"] == detector.extractor.precision == "int8"
    assert said["learned_again"]["calibrated_on"] == said["learned_again"]["golden_images"] == 12
    assert said["equality"]["largest_difference"] < 1e-5

    before, after = tensors(run_folder), tensors(int8)
    assert np.array_equal(after["origins"], before["origins"])
    images = sorted((product / "train").rglob("*.png"))
    for i in (0, len(after["vectors"]) - 1):
        image, row, column = after["origins"][i]
        item = load_image(0, images[image], detector.loading)
        assert isinstance(item, NetworkInput)
        embedding = np.asarray(detector.embedder([item]))[0, row, column]
        np.testing.assert_allclose(after["vectors"][i], embedding, rtol=1e-5)
        assert 0 < np.linalg.norm(embedding - before["vectors"][i]) < np.linalg.norm(embedding) / 2


def test_its_thresholds_are_found_anew_at_the_parents_rates(int8: Path, run_folder: Path) -> None:
    before, after = load_model(run_folder, "cpu").thresholds, load_model(int8).thresholds
    assert before is not None
    assert after is not None
    assert after.label == "calibrated"
    assert after.good.names == before.good.names
    assert after.good.image != before.good.image
    assert after.calibration.review.target == before.calibration.review.target
    last = json.loads((int8 / "model" / "history.jsonl").read_text().splitlines()[-1])
    assert last["asked"] == {"learned again in": "int8"}
    assert last["model_before"] == load_model(run_folder, "cpu").model_id
    assert last["model_after"] == load_model(int8).model_id


def test_commands_take_it_without_torch(
    int8: Path, product: Path, tmp_path: Path, command: Command, without_torch: str
) -> None:
    chosen = ["--model", int8, "--input", product / "test", "--threads", 2, "--output"]
    assert command("infer", [*chosen, tmp_path / "torch"])[0] == 0
    bare = [sys.executable, "-m", "anomaly", "infer", *chosen, tmp_path / "bare"]
    done = subprocess.run(
        [*map(str, bare)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": without_torch},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = []
    for name in ("torch", "bare"):
        with (tmp_path / name / "results.csv").open(encoding="utf-8-sig", newline="") as file:
            rows.append([(r["path"], r["image_score"], r["verdict"]) for r in csv.DictReader(file)])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6
    code, out, _ = command("evaluate", ["--model", int8, "--output", tmp_path / "figures"])
    assert code == 0
    assert "disc" in out
    code, _, err = command("infer", [*chosen, tmp_path / "o", "--precision", "fp32"])
    assert code == 2
    assert "exported in int8" in err


def test_weights_have_7_bits_and_no_place_of_this_machine_is_in_the_graph(int8: Path) -> None:
    """Products of 8 × 8 bits overflow on processors without VNNI."""
    file = int8 / "model" / "network.onnx"
    weights = [
        onnx.numpy_helper.to_array(one)
        for one in onnx.load(file).graph.initializer
        if one.data_type == onnx.TensorProto.INT8 and len(one.dims) == 4
    ]
    assert len(weights) == 10
    assert max(int(np.abs(w.astype(int)).max()) for w in weights) <= 64
    assert b"/tmp/" not in file.read_bytes()


@pytest.mark.parametrize("engine", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
def test_defects_are_found_with_both_engines(
    engine: str, int8: Path, run_folder: Path, product: Path, tmp_path: Path
) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(engine, engine))
    detector = load_model(int8 if engine == "onnx" else export(run_folder, engine, tmp_path / "e"))
    assert detector.extractor.engine == engine
    for image in sorted((product / "test").rglob("*.png")):
        found = detector.predict(image)
        assert (found.verdict == "reject") == (image.parent.name == "spot"), image


@pytest.fixture
def graph_at_hand(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantised graph is there already, which saves most of an export's time."""
    said = json.loads((int8 / "model" / "export.json").read_text())["network"]

    def copied(detector: Model, folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
        shutil.copy(int8 / "model" / said["file"], folder)
        return dict(said)

    monkeypatch.setattr(quantised, "write_graph", copied)


@pytest.mark.usefixtures("graph_at_hand")
def test_a_model_that_says_something_else_than_what_was_learned_is_not_there(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_another(detector: Model, *rest: Any) -> str:
        vectors: Any = detector.scorer
        other = replace(vectors, vectors=vectors.vectors + 0.01)
        return save_rest(replace(detector, scorer=other), *rest)

    save_rest = quantised.save_rest
    monkeypatch.setattr(quantised, "save_rest", save_another)
    code, _, err = command("export", arguments(run_folder, "onnx", tmp_path / "e"))
    assert code == 2
    assert "scores differ: " in err
    assert not (tmp_path / "e").exists()


@pytest.mark.usefixtures("graph_at_hand")
def test_embeddings_that_are_far_off_are_refused(
    run_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of patches is enough; what was learned from them would say the same as the export."""

    class Wrong(Graph):
        def __call__(self, images: Array, **more: Any) -> list[Array]:
            made = super().__call__(images, **more)
            made[0][:, 0] *= 3
            return made

    monkeypatch.setattr(quantised, "Graph", Wrong)
    code, _, err = command("export", arguments(run_folder, "onnx", tmp_path / "e"))
    assert code == 2
    assert "int8 changes this network too much in ONNX Runtime" in err
    assert "--precision fp32, or try --to openvino" in err
    assert not (tmp_path / "e").exists()


@pytest.mark.usefixtures("graph_at_hand")
def test_verdicts_that_differ_from_the_parents_are_told(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    """Here the parent calls everything good."""
    parent = AnomalyDetector(load_model(run_folder, "cpu")).calibrate(threshold=1e6)
    parent.save(tmp_path / "lax" / "model")
    shutil.copy(run_folder / "train.json", tmp_path / "lax")
    spots = product / "test" / "spot"
    more = ["--golden", spots]
    code, out, err = command("export", arguments(tmp_path / "lax", "onnx", tmp_path / "e", *more))
    assert code == 0, err
    assert "On 3 golden images, 3 verdicts differ" in out
    assert "000.png: good -> reject" in out


def test_training_images_that_are_gone_or_changed(
    run_folder: Path, product: Path, tmp_path: Path, command: Command
) -> None:
    moved = shutil.copytree(product, tmp_path / "data" / product.name)
    run = shutil.copytree(run_folder, tmp_path / "run")
    record = json.loads((run / "train.json").read_text())
    (run / "train.json").write_text(json.dumps(record | {"data_folder": str(moved)}))
    good = moved / "train" / "good"
    away = tmp_path / "away"
    away.mkdir()
    (good / "003.png").rename(away / "x.png")
    shutil.copy(good / "000.png", good / "001.png")
    code, _, err = command("export", arguments(run, "onnx", tmp_path / "e"))
    assert code == 2
    assert "2 of 12 training images have changed (1) or weren't found (1)" in err
    assert "train/good/003.png" in err
    assert "--training-images" in err
    assert not (tmp_path / "e").exists()

    detector = load_model(run, "cpu")
    original = sha256_of(product / "train" / "good" / "001.png")
    shutil.copy(product / "train" / "good" / "001.png", away / "y.png")
    found = quantised.training_images(detector, run, None, [away])
    assert [*found] == [*range(12)]
    assert found[3].path == away / "x.png"
    assert sha256_of(found[1].path) == original
    elsewhere = quantised.training_images(detector, run, product.parent, [])
    assert elsewhere[3].path == product / "train" / "good" / "003.png"
    (run / "train.json").unlink()
    with pytest.raises(DataError, match="--data-root"):
        quantised.training_images(detector, run, None, [])
    with pytest.raises(DataError, match="--training-images"):
        quantised.training_images(detector, run, None, [tmp_path / "nowhere"])


def test_numbers_leave_out_what_was_refused(product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank's origins count the images that couldn't be used at training, too."""
    paths = sorted((product / "train" / "good").iterdir())[:2]
    given = [Sample(p, p.name) for p in paths]
    monkeypatch.setattr(quantised, "dataset_images", lambda *_: given)
    manifest = {
        "training_images": {p.name: sha256_of(p) for p in paths},
        "refused_images": {"broken.png": 1},
    }
    detector: Any = SimpleNamespace(manifest=manifest)
    found = quantised.training_images(detector, product, None, [])
    assert {i: sample.path for i, sample in found.items()} == {0: paths[0], 2: paths[1]}


def test_what_int8_needs_and_lacks(
    run_folder: Path, int8: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o"
    for more, said in ((["--whole"], "fp32 only"), (["--precision", "fp32", "--data-root", "."],
                                                    "exports that are trained again")):  # fmt: skip
        code, _, err = command("export", arguments(run_folder, "onnx", output, *more))
        assert code == 2
        assert said in err
    code, _, err = command("export", arguments(int8, "onnx", output))
    assert code == 2
    assert "exported" in err
    found = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda n: None if n == "onnxruntime" else found(n))
    code, _, err = command("export", arguments(run_folder, "openvino", output))
    assert code == 2
    assert "exporting needs onnxruntime: pip install 'anomaly[export,openvino]'" in err
    assert not output.exists()


def test_a_bank_again_has_its_patches_and_a_true_covering_radius() -> None:
    generator = torch.Generator().manual_seed(0)
    grids = torch.rand(6, 4, 5, 7, generator=generator)
    # Four tiles of an image; one of another, and of its turned copy.
    corners = ((0, 0), (0, 5), (4, 0), (4, 5), (0, 0), turned_corner(0, 0, 1))
    inside = torch.rand(6, 4, 5, generator=generator) < 0.7

    def patches(factor: float) -> PatchList:
        return PatchList(
            PatchBatch(grids[i : i + 3] * factor, ((0,) * 4 + (3,) * 2)[i : i + 3],
                       corners[i : i + 3], inside[i : i + 3])
            for i in (0, 3)
        )  # fmt: skip

    fitter = MemoryBankFitter(None, 9)
    bank = fitter.fit(patches(1))
    again = fitter.refit_embeddings(bank, patches(1))
    assert torch.equal(again.vectors, bank.vectors)
    assert again.covering_radius == pytest.approx(bank.covering_radius, rel=1e-4)
    doubled = fitter.refit_embeddings(bank, patches(2))
    assert torch.equal(doubled.vectors, 2 * bank.vectors)
    assert torch.equal(doubled.origins, bank.origins)
    assert doubled.covering_radius == pytest.approx(2 * bank.covering_radius, rel=1e-4)
    with pytest.raises(DataError, match="train again"):
        fitter.refit_embeddings(bank, PatchList(patches(1).batches[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.kind=padim",),
        ("model.kind=padim", "model.projection=random"),
        ("model.kind=subspace",),
        ("image.tile=64",),
        ("model.turned_copies=quarter_turns",),
        ("model.embedding=adaptive",),
        ("precision=bf16",),
        ("backbone.name=timm/tf_efficientnet_lite2",),
        ("backbone.name=efficientnet_b0",),
        ("image.region={polygons: [[[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.1, 0.9]]], "
         "unit: relative}",),
    ],
)  # fmt: skip
def test_methods_and_settings(
    overrides: tuple[str, ...], engine: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    code, _, err = command("train", train_arguments(product, run, *overrides))
    assert code == 0, err
    detector = load_model(export(run, engine, tmp_path / "e"))
    parent = load_model(run, "cpu")
    paths = sorted((product / "test").rglob("*.png"))
    scores = np.array([[d.predict(p).score for p in paths] for d in (parent, detector)])
    assert scores[1, :3].max() < scores[1, 3:].min()  # good, then defective
    assert np.corrcoef(scores)[0, 1] > 0.9


@pytest.mark.slow
def test_processors_without_vnni_give_the_same_bits(
    run_folder: Path, product: Path, tmp_path: Path
) -> None:
    exported = export(run_folder, "openvino", tmp_path / "e")
    code = """
import sys, anomaly
print([anomaly.load(sys.argv[1]).predict(image).score for image in sys.argv[2:]])
"""
    images = [*map(str, sorted((product / "test").rglob("*.png")))]
    said = {
        isa: subprocess.run(
            [sys.executable, "-c", code, exported, *images], capture_output=True, text=True,
            check=True, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa},
        ).stdout
        for isa in ("ALL", "AVX512_CORE", "AVX2")
    }  # fmt: skip
    assert len(set(said.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("category", ["mvtec_ad/bottle", "magnetic_tile"])
def test_real_images(category: str, engine: str, tmp_path: Path, command: Command) -> None:
    weights = SHARED / "weights" / "resnet50_v1_imagenet_stem_to_layer3.safetensors"
    data = SHARED / "data" / category
    if not (data.exists() and weights.exists()):
        pytest.skip(f"{data} or {weights} is absent")
    sets = [f"data.root={data}", "data.format=mvtec", "backbone.name=resnet50_v1",
            f"backbone.weights={weights}", "model.coreset_ratio=0.01"]  # fmt: skip
    flags = [part for one in sets for part in ("--set", one)]
    run = tmp_path / "run"
    train = ["--config", "folder.yaml", *flags, "--output", run, "--device", "cpu"]
    assert command("train", train)[0] in (0, 3)
    exported = export(run, engine, tmp_path / "e")
    figures = []
    for name, model in (("a", run), ("b", exported)):
        chosen = ["--model", model, "--output", tmp_path / name]
        assert command("evaluate", chosen)[0] in (0, 3)
        figures.append(json.loads((tmp_path / name / "metrics.json").read_text())["mean"])
    assert figures[1]["image_auroc"] > figures[0]["image_auroc"] - 0.005
    assert figures[1]["pixel_auroc"] > figures[0]["pixel_auroc"] - 0.005
