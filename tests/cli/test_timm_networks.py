"""Networks of timm go the whole way with random weights; files by their makers' key names fit."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, Says, train_arguments
from kit import touch
from safetensors.torch import save_file

import anomaly
from anomaly.backbones import networks
from anomaly.backbones.layers import truncate
from anomaly.errors import AnomalyError, ConfigError, WeightsError
from anomaly.storage.models import load_model


def test_the_whole_way(product: Path, tmp_path: Path, says: Says) -> None:
    name, hooked, run = "timm/test_vit", ["blocks.3", "blocks.5"], tmp_path / "run"
    settings = [f"backbone.name={name}", "image.area=64"]
    says(0, "train", train_arguments(product, run, *settings))
    detector = load_model(run, "cpu")
    assert list(detector.extractor.layers) == hooked
    backbone = detector.manifest["backbone"]
    assert (backbone["weights_sha256"], backbone["weights_licence"]) == (None, None)
    assert detector.manifest["made_with"]["packages"]["timm"]
    assert [(each["axes"], each["stride"]) for each in backbone["layouts"]] == [("tokens", 16)] * 2
    part = product / "test" / "spot" / "001.png"
    found = anomaly.load(run, "cpu").predict(part)
    assert found.patch_scores.shape == tuple(side // 16 for side in found.view.size)
    assert np.isfinite(found.anomaly_map).all()

    says(0, "explain", [part, "--model", run, "--output", tmp_path / "w"])
    facts = json.loads((tmp_path / "w" / "explanation.json").read_text())
    drawn = {f"feature_maps_{layer}.png" for layer in hooked}
    assert {"score_gradient.png", *drawn} <= set(facts["pictures"])


def test_dinov2s_own_key_names_are_taken(tmp_path: Path) -> None:
    """A state as DINOv2's makers publish it, of random numbers."""
    name = "timm/vit_small_patch14_reg4_dinov2"
    state = networks.read_weights(name, "random", 0)[0]
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([torch.zeros(1, 1, 384), state["pos_embed"]], 1)
    state["mask_token"] = torch.zeros(1, 384)
    torch.save(state, tmp_path / "own.pth")
    read, sha256 = networks.read_weights(f"{name}.lvd142m", str(tmp_path / "own.pth"), 0)
    assert sha256
    whole = networks.build(name)
    truncated = truncate(networks.build(name), ["blocks.1"])
    networks.load_state(truncated.network, read, whole, "that file")
    kept = truncated.network.state_dict()
    assert torch.equal(kept["blocks.1.mlp.fc1.weight"], state["blocks.1.mlp.fc1.weight"])
    assert "blocks.2.mlp.fc1.weight" not in kept


def test_weights_come_from_the_users_cache_and_are_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    name, hub = "timm/test_vit.r160_in1k", tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    with pytest.raises(WeightsError, match=f"`hf download {name} model.safetensors`"):
        networks.read_weights(name, "imagenet", 0)
    assert not hub.exists()
    place = hub / "models--timm--test_vit.r160_in1k"
    touch(place, "refs/main", "snapshots/abc/model.safetensors")
    (place / "refs" / "main").write_text("abc")
    state = networks.read_weights(name, "random", 0)[0]
    save_file(state, place / "snapshots" / "abc" / "model.safetensors")
    read, sha256 = networks.read_weights(name, "imagenet", 0)
    assert len(sha256 or "") == 64
    assert all(torch.equal(read[key], state[key]) for key in state)


def test_names_that_do_not_fit_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'vit_small_patch14_dinov2'"):
        networks.build("timm/vit_small_patch14_dinov")
    with pytest.raises(ConfigError, match="has no weights 'lvd'"):
        networks.build("timm/vit_small_patch14_dinov2.lvd")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(AnomalyError, match=r"pip install 'anomaly\[train\]'"):
        networks.build("timm/vit_small_patch14_dinov2")


def test_what_a_network_does_not_take_is_told_with_what_it_takes(
    product: Path, tmp_path: Path, says: Says, command: Command
) -> None:
    takes = "timm/test_maxvit doesn't take images of"
    for name, sizes, *texts in (
        ("test_maxvit", ["image.area=64"], f"{takes} 64×96, which image.area=64",
         "set image.resize=160, for it takes"),
        ("test_maxvit", ["image.resize=99", "image.crop=64"], f"{takes} 64×64",
         "set image.crop=160, for it takes"),
        ("test_maxvit", ["image.area=64", "image.tile=64"], f"{takes} 64×64, which image.area",
         "set image.area=160, for it takes"),
        ("vit_small_patch14_dinov2.lvd142m", ["image.resize=256"], "choose 252 or 266"),
        ("coat_tiny", [], "CoaT takes images of 224×224 only, so its tokens can't be placed"),
    ):  # fmt: skip
        settings = [f"backbone.name=timm/{name}", *sizes]
        code, _, err = command("train", train_arguments(product, tmp_path / "run", *settings))
        assert (code, [text for text in texts if text not in err]) == (2, []), err
        assert not (tmp_path / "run" / "model").exists()
    layers = ["--backbone", "timm/test_maxvit"]
    said = says(2, "layers", layers)
    assert "doesn't take images of 224×224; give another size, such as 160×160" in said
    says(0, "layers", [*layers, "--input-size", 160])
