"""Truncation: nothing behind the last wanted layer is there."""

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from anomaly.backbones.extractor import describe, truncate, truncate_again
from anomaly.backbones.networks import (
    build,
    load_state,
    read_weights,
)
from anomaly.errors import LayerError


def test_nothing_behind_the_last_layer_is_kept() -> None:
    truncated = truncate(build("wide_resnet50_2"), ["layer2", "layer3"])
    kept = sum(p.numel() for p in truncated.network.parameters())
    assert kept == 24_862_528  # of 68.9 million
    assert not [k for k in truncated.network.state_dict() if k.startswith(("layer4", "fc"))]


def test_inside_a_stage_too_and_unasked_branches_stay() -> None:
    truncated = truncate(build("resnet50"), ["layer3[2]", "layer1.0"])
    assert truncated.layers == ("layer1.0", "layer3.2")  # in running order, canonical
    keys = truncated.network.state_dict()
    assert "layer3.2.conv3.weight" in keys
    assert "layer3.3.conv1.weight" not in keys
    assert "layer1.0.downsample.0.weight" in keys


class Direct(nn.Module):
    """Uses a parameter and a submodule's weight without calling a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.hidden = nn.Conv2d(3, 4, 1)
        self.wanted = nn.Conv2d(4, 5, 2, stride=2)
        self.behind = nn.Conv2d(5, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale[:, None, None]
        x = torch.nn.functional.conv2d(x, self.hidden.weight)
        return self.behind(self.wanted(x))


def test_parameters_used_without_a_module_call_stay() -> None:
    with torch.device("meta"):
        network = Direct()
    truncated = truncate(network, ["wanted"])
    assert set(truncated.network.state_dict()) == {
        "scale",
        "hidden.weight",
        "hidden.bias",
        "wanted.weight",
        "wanted.bias",
    }
    assert (truncated.channels, truncated.strides) == ((5,), (2,))


def test_a_layer_that_is_overwritten_in_place_is_captured_before() -> None:
    """relu(inplace=True) runs over the batch norm's output."""
    name, state = "resnet18", read_weights("resnet18", "random", 0)[0]
    truncated = truncate(build(name), ["layer1.0.bn1", "layer2"])
    load_state(truncated.network, state, build(name), "random")
    alone = truncate(build(name), ["layer1.0.bn1"])
    load_state(alone.network, state, build(name), "random")
    images = torch.rand(1, 3, 64, 64)
    together = truncated(images)[0]
    torch.testing.assert_close(together, alone(images)[0])
    assert truncated.copies
    assert (together < 0).any()


def test_layers_may_be_named_by_patterns() -> None:
    some = truncate(build("resnet18"), ["layer1", "layer2.*.conv2"])
    assert some.layers == ("layer1", "layer2.0.conv2", "layer2.1.conv2")
    with pytest.raises(LayerError, match="matches 'stage\\*'"):
        truncate(build("resnet18"), ["stage*"])


class Again(nn.Module):
    """Calls an activation twice, and what follows takes images of 96×96 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=4, padding=1)
        self.act = nn.ReLU()
        self.second = nn.Conv2d(4, 5, 3, stride=2, padding=1)
        self.head = nn.Linear(5 * 12**2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.act(self.first(x)))
        return self.head(self.act(x).flatten(1))


def test_what_follows_the_last_layer_may_want_another_size() -> None:
    with torch.device("meta"):
        network = Again()
    truncated = truncate(network, ["second"])
    assert (truncated.channels, truncated.strides) == ((5,), (8,))
    assert not [key for key in network.state_dict() if key.startswith("head")]


def test_a_layer_that_runs_several_times_or_never_is_refused() -> None:
    said = r"'layer2\.3\.relu' of ResNet runs 3 times in one pass.*; choose another layer"
    with pytest.raises(LayerError, match=said):
        truncate(build("resnet50"), ["layer1", "layer2.3.relu", "layer3"])
    assert truncate(build("resnet50"), ["relu"]).layers == ("relu",)  # once, at the stem
    with pytest.raises(LayerError, match=r"'AuxLogits\.conv0\.conv' of Inception3 never runs"):
        truncate(build("inception_v3"), ["Mixed_5d", "AuxLogits.conv0.conv"])


class Lists(nn.Module):
    """Goes through lists of modules, which are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 3, 1, stride=2) for _ in range(3)])
        self.acts = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.heads = nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for conv, act in zip(self.convs, [*self.acts, nn.Identity()], strict=True):
            x = act(conv(x))
        for head in self.heads:
            x = head(x)
        return x


def test_layers_in_lists_of_modules() -> None:
    for layer in ("acts.1", "convs.1", "convs.2"):
        with torch.device("meta"):
            network = Lists()
        truncated = truncate(network, [layer])
        assert truncated.layers == (layer,)
        network.to_empty(device="cpu")(torch.rand(1, 3, 32, 32))  # still goes through its lists
        kept = {name for name, _ in network.named_parameters()}
        assert not any(name.startswith("heads") for name in kept)
        assert ("convs.2.weight" in kept) == (layer == "convs.2")


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet18", ["layer1", "layer2.0.conv1"]),
        ("swin_t", ["features.1"]),
        ("timm/test_vit", ["blocks.0"]),
    ],
)
def test_what_the_dry_run_showed_makes_the_same_extractor(name: str, layers: list[str]) -> None:
    run = truncate(build(name), layers)
    again = truncate_again(build(name), json.loads(json.dumps(describe(run))))
    assert vars(again) | {"network": 0} == vars(run) | {"network": 0}
    assert str(again.network) == str(run.network)


def test_torchvision_and_timm_come_without_the_compiler_which_is_there_when_needed() -> None:
    code = """
import sys
from anomaly.backbones.networks import torchvision
from anomaly.backbones.networks import build
import torch
for name in ("wide_resnet50_2", "mobilenet_v2", "vit_b_16", "timm/tf_efficientnet_lite2"):
    build(name)
assert not {name for name in sys.modules if name.startswith("torch._dynamo")}
boxes = [torch.tensor([[0, 0, 9.0, 9]])]
assert torchvision.ops.roi_align(torch.ones(1, 1, 9, 9), boxes, 2).mean() == 1
assert torchvision.ops.roi_align.__globals__["is_compile_supported"]("cpu") in (True, False)
assert sys.modules["torch._dynamo"].__file__
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert torch.compiler.disable.__module__ == "torch.compiler"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
