"""Networks without torch's compiler: what is imported, and that shapes stay right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from families import FAMILIES, quick_and_slow
from torch import Tensor, nn

from anomaly.features.backbones import build, default_layers
from anomaly.features.vision import without_values
from anomaly.hooks import capture

_BUILD = """
import sys
from anomaly.features.backbones import build, default_layers
from anomaly.features.truncation import truncate
network = build(sys.argv[1])
truncate(network, default_layers(sys.argv[1], network, 2))
print("heavy" if {"torch._dynamo", "sympy"} & set(sys.modules) else "light")
"""
_FALL_BACK = """
import sys
from importlib.abc import MetaPathFinder
class Wants(MetaPathFinder):
    "A torchvision that wants one thing more of the compiler."
    def find_spec(self, name, path, target=None):
        if name == "torchvision.ops":
            from torch._dynamo import allow_in_graph
sys.meta_path.insert(0, Wants())
from anomaly.features.vision import torchvision
assert "torch._dynamo.eval_frame" in sys.modules
import torch._dynamo
print(torch._dynamo.is_compiling(), hasattr(torchvision.models, "resnet18"))
"""
_ASK_LATER = """
import torch
from anomaly.features.vision import torchvision
boxes = torch.tensor([[0., 0., 9., 9.], [0., 0., 9., 8.], [20., 20., 30., 30.]])
print(*torchvision.ops.nms(boxes, torch.tensor([.9, .8, .7]), .5).tolist())
network = torch.compile(torch.nn.Linear(3, 2), backend="eager")
print(*network(torch.ones(1, 3)).shape)
"""


def told(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    quick_and_slow(
        ["resnet18", "wide_resnet50_2", "timm/tf_efficientnet_lite2"],
        "timm/tf_efficientnet_lite2",
    ),
)
def test_networks_are_built_and_cut_without_the_compiler(name: str) -> None:
    assert told(_BUILD, name).strip() == "light"


@pytest.mark.slow
def test_a_torchvision_that_wants_more_of_the_compiler_gets_it() -> None:
    assert told(_FALL_BACK).split() == ["False", "True"]


@pytest.mark.slow
def test_the_compiler_and_detection_work_afterwards() -> None:
    assert told(_ASK_LATER).split() == ["0", "2", "1", "2"]


@pytest.mark.parametrize("name", quick_and_slow(FAMILIES, "resnet18", "timm/tf_efficientnet_lite2"))
def test_shapes_without_values_are_those_of_a_real_pass(name: str) -> None:
    network = build(name)
    layers = default_layers(name, network, 2)
    with without_values():
        found = shapes(network, layers, torch.empty(2, 3, 96, 64))
    real = network.to_empty(device="cpu")
    assert found == shapes(real, layers, torch.zeros(2, 3, 96, 64))


def shapes(network: nn.Module, layers: Sequence[str], images: Tensor) -> dict[str, torch.Size]:
    with torch.no_grad(), capture(network, layers) as captured:
        network(images)
    return {name: kept.shape for name, kept in captured.pop().items()}
