"""Networks of timm go the whole way with random weights; files by their makers' key names fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, train_arguments
from families import quick_and_slow
from safetensors.torch import save_file

import anomaly
from anomaly.backbones import registry as backbones
from anomaly.backbones.truncation import truncate
from anomaly.errors import ConfigError, WeightsError
from anomaly.storage.load import load_model

DINO = "timm/vit_small_patch14_dinov2.lvd142m"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "hooked", "size"),
    [
        ("timm/test_vit", "patchcore", ["blocks.3", "blocks.5"], 64),
        pytest.param("timm/test_convnext", "patchcore", ["stages.1", "stages.2"], 64,
                     marks=pytest.mark.slow),
        pytest.param(DINO, "patchcore", ["blocks.8", "blocks.11"], 56, marks=pytest.mark.slow),
        pytest.param(DINO, "padim", ["blocks.5", "blocks.8", "blocks.11"], 56,
                     marks=pytest.mark.slow),
        pytest.param("timm/vit_small_patch16_dinov3", "patchcore", ["blocks.8", "blocks.11"], 64,
                     marks=pytest.mark.slow),
        pytest.param("timm/convnext_atto", "patchcore", ["stages.1", "stages.2"], 64,
                     marks=pytest.mark.slow),
        pytest.param("timm/swin_tiny_patch4_window7_224", "patchcore", ["layers.1", "layers.2"],
                     64, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_whole_way(
    name: str, kind: str, hooked: list[str], size: int, product: Path, tmp_path: Path,
    command: Command,
) -> None:  # fmt: skip
    code, out, err = command("layers", ["--backbone", name, "--json"])
    assert code == 0, err
    table = {x["path"]: x for x in json.loads(out)["layers"]}
    assert [path for path, x in table.items() if kind in x["hooked"]] == hooked

    run = tmp_path / "run"
    settings = [f"backbone.name={name}", f"model.kind={kind}", f"image.area={size}"]
    code, _, err = command("train", train_arguments(product, run, *settings))
    assert code == 0, err
    detector = load_model(run)
    assert list(detector.extractor.layers) == hooked
    backbone = detector.manifest["backbone"]
    assert (backbone["weights_sha256"], "weights_licence" in backbone) == (None, False)
    assert detector.manifest["made_with"]["packages"]["timm"]
    patch = 14 if name == DINO else 16 if "vit" in name else None
    assert backbone.get("patch") == patch
    part = product / "test" / "spot" / "001.png"
    found = anomaly.load(run).predict(part)
    if patch:
        assert found.patch_scores.shape == tuple(s // patch for s in found.view.size)
    assert np.isfinite(found.anomaly_map).all()

    for task, arguments in (
        ("infer", ["--input", product / "test"]),
        ("evaluate", []),
        ("explain", ["--input", part]),
        ("features", ["--input", product / "test"]),
    ):
        output = ["--model", run, "--output", tmp_path / task]
        code, _, err = command(task, [*output, *arguments])
        assert code == 0, f"{task}: {err}"
    drawn = {file.name for file in (tmp_path / "explain").iterdir()}
    assert {"explanation.html", "score_gradient.png"} <= drawn
    assert {f"feature_maps_{layer}.png" for layer in hooked} <= drawn

    arguments = ["--backbone", name, "--weights", "random", "--input", part, "--input-size", 112]
    code, _, err = command("explain", [*arguments, "--output", tmp_path / "class"])
    if code == 0:
        facts = json.loads((tmp_path / "class" / "explanation.json").read_text())
        assert "grad_cam.png" in facts["pictures"]
    else:
        assert name == DINO or "dinov3" in name  # has no classes
        assert "isn't a classifier" in err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnx", "openvino"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("timm/test_vit", ["image.area=64"]),
        (DINO, ["image.resize=56"]),
        ("timm/vit_small_patch16_dinov3", ["image.resize=64"]),
        ("timm/convnext_atto", ["image.area=64"]),
        ("timm/swin_tiny_patch4_window7_224", ["image.resize=64"]),
    ],
)
def test_exported_it_says_the_same(
    name: str, size: list[str], engine: str, product: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    settings = [f"backbone.name={name}", "precision=fp32", *size]
    assert command("train", train_arguments(product, run, *settings))[0] == 0
    export = ["--model", run, "--to", engine, "--output", tmp_path / "e", "--threads", 2]
    code, _, err = command("export", export)
    assert code == 0, err
    part = product / "test" / "spot" / "001.png"
    one, two = anomaly.load(run, "cpu").predict(part), anomaly.load(tmp_path / "e").predict(part)
    assert two.score == pytest.approx(one.score, rel=1e-4)


def dinov2s_own(registers: bool) -> dict[str, torch.Tensor]:
    """A state as DINOv2's makers publish it, of random numbers."""
    name = f"timm/vit_small_patch14_{'reg4_' if registers else ''}dinov2"
    state = backbones.read_weights(name, "random", 0)[0]
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.cat([torch.zeros(1, 1, 384), state["pos_embed"]], 1)
    return state | {"mask_token": torch.zeros(1, 384)}


@pytest.mark.parametrize("registers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dinov2s_own_key_names_are_taken(registers: bool, tmp_path: Path) -> None:
    name = f"timm/vit_small_patch14_{'reg4_' if registers else ''}dinov2.lvd142m"
    state = dinov2s_own(registers)
    torch.save(state, tmp_path / "own.pth")
    read, sha256 = backbones.read_weights(name, str(tmp_path / "own.pth"), 0)
    assert sha256
    truncated = truncate(backbones.build(name), ["blocks.1"])
    backbones.load_state(truncated.network, read, backbones.build(name), "that file")
    kept = truncated.network.state_dict()
    assert torch.equal(kept["blocks.1.mlp.fc1.weight"], state["blocks.1.mlp.fc1.weight"])
    assert "blocks.2.mlp.fc1.weight" not in kept


def test_a_wrong_file_is_refused(product: Path, tmp_path: Path, command: Command) -> None:
    resnet = backbones.read_weights("resnet18", "random", 0)[0]
    save_file(resnet, tmp_path / "resnet.safetensors")
    short = {k: v for k, v in dinov2s_own(False).items() if "blocks.0." not in k}
    save_file(short, tmp_path / "short.safetensors")
    for file, says in (("resnet", "with unknown bn1."), ("short", "without blocks.0.")):
        settings = [f"backbone.name={DINO}", f"backbone.weights={tmp_path / file}.safetensors"]
        arguments = train_arguments(product, tmp_path / "run", *settings, "image.area=56")
        code, _, err = command("train", arguments)
        assert code == 2
        assert says in err
        assert "belongs to another network than VisionTransformer" in err
        assert not (tmp_path / "run" / "model").exists()


def test_weights_come_from_the_users_cache_and_are_never_downloaded(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    name = "timm/test_vit.r160_in1k"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    arguments = train_arguments(
        product, tmp_path / "run", f"backbone.name={name}", "backbone.weights=imagenet"
    )
    code, _, err = command("train", arguments)
    assert code == 2
    assert f"`hf download {name} model.safetensors`" in err
    assert not (tmp_path / "hub").exists()

    place = tmp_path / "hub" / "models--timm--test_vit.r160_in1k"
    snapshot = place / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    save_file(backbones.read_weights(name, "random", 0)[0], snapshot / "model.safetensors")
    code, _, err = command("train", arguments)
    assert code == 0, err
    backbone = load_model(tmp_path / "run").manifest["backbone"]
    assert backbone["weights_licence"] == "apache-2.0"
    assert len(backbone["weights_sha256"]) == 64
    shutil.rmtree(tmp_path / "hub")  # the model keeps what it needs
    assert anomaly.load(tmp_path / "run").predict(product / "test" / "spot" / "001.png").score > 0


def test_names_and_sides_that_do_not_fit_are_answered(
    product: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'vit_small_patch14_dinov2'"):
        backbones.build("timm/vit_small_patch14_dinov")
    with pytest.raises(ConfigError, match="has no weights 'lvd'"):
        backbones.build("timm/vit_small_patch14_dinov2.lvd")
    wrong = train_arguments(product, tmp_path / "r", f"backbone.name={DINO}", "image.resize=256")
    code, _, err = command("train", wrong)
    assert code == 2
    assert "choose 252 or 266" in err
    with pytest.raises(WeightsError, match="doesn't exist"):
        backbones.read_weights(DINO, str(tmp_path / "absent.safetensors"), 0)
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'anomaly\[train\]'"):
        backbones.build(DINO)


# What its windows divide, one size only, or a grid of 8 × 8; each takes squares of one side.
@pytest.mark.parametrize(
    ("name", "sizes", "shown", "remedy"),
    [
        ("test_maxvit", ["image.area=64"], "64×96, which image.area=64", "resize=160"),
        ("test_maxvit", ["image.resize=64"], "64×64, which image.resize=64", "resize=160"),
        ("test_maxvit", ["image.resize=99", "image.crop=64"], "64×64", "crop=160"),
        ("test_maxvit", ["image.area=64", "image.tile=64"], "64×64, which image.area", "area=160"),
        pytest.param("maxvit_tiny_rw_224", [], "256×288, which image.area=256", "resize=224",
                     marks=pytest.mark.slow),
        pytest.param("gcvit_xxtiny", [], "256×288", "resize=224", marks=pytest.mark.slow),
        pytest.param("nest_tiny", [], "256×288", "resize=224", marks=pytest.mark.slow),
        pytest.param("maxxvitv2_nano_rw_256", ["image.area=160"], "160×192", "resize=256",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_network_that_takes_few_sizes_says_which(
    name: str, sizes: list[str], shown: str, remedy: str, product: Path, tmp_path: Path,
    command: Command,
) -> None:  # fmt: skip
    settings = [f"backbone.name=timm/{name}", *(sizes or ["image.area=256"])]
    code, _, err = command("train", train_arguments(product, tmp_path / "run", *settings))
    assert code == 2
    assert f"timm/{name} doesn't take images of {shown}" in err
    assert f"set image.{remedy}, for it takes" in err
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_it_is_trained_at_the_size_that_it_takes(
    product: Path, tmp_path: Path, command: Command
) -> None:
    settings = ["backbone.name=timm/test_maxvit", "image.resize=160", "model.coreset_ratio=0.01"]
    code, _, err = command("train", train_arguments(product, tmp_path / "run", *settings))
    assert code == 0, err
    part = product / "test" / "spot" / "001.png"
    assert anomaly.load(tmp_path / "run").predict(part).view.size == (160, 160)
    code, _, err = command("layers", ["--backbone", "timm/test_maxvit"])
    assert code == 2
    assert "doesn't take images of 224×224; give another size, such as 160×160" in err


@pytest.mark.parametrize(
    "name", quick_and_slow(["twins_svt_small", "mvitv2_tiny", "coat_tiny"], "coat_tiny")
)
def test_layers_that_a_network_has_not_are_no_defaults(
    name: str, product: Path, tmp_path: Path, command: Command
) -> None:
    settings = train_arguments(product, tmp_path / "run", f"backbone.name=timm/{name}")
    code, _, err = command("train", settings)
    assert code == 2
    assert f"timm/{name} has no default layers, since none are known" in err
