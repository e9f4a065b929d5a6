"""The table of layers against what is known about networks by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anomaly.backbones.layers import Layer, default_layers, layer_table, side_multiple
from anomaly.backbones.networks import build
from anomaly.hooks import live_hooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.twice = nn.Conv2d(8, 8, 1)
        self.idle = nn.Linear(7, 7)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.body(x)))
        return self.head(x.mean(dim=(2, 3)))


def by_path(table: list[Layer]) -> dict[str, Layer]:
    return {layer.path: layer for layer in table}


def test_a_small_network_by_hand() -> None:
    with torch.device("meta"):
        network = Net().eval()
    table = layer_table(network, 32)
    assert live_hooks(network) == 0
    assert [x.path for x in table] == ["", "body", "body.0", "body.1", "twice", "idle", "head"]
    layers = by_path(table)
    conv, twice, head = 64 * 8 * 27, 64 * 64, 8 * 5
    assert layers["body"].multiply_adds == conv
    assert layers["twice"].multiply_adds == conv + 2 * twice  # after its last call
    assert layers[""].multiply_adds == conv + 2 * twice + head
    assert layers["body"].share == pytest.approx(conv / (conv + 2 * twice + head))
    assert (layers["body.0"].shape, layers["body.0"].stride) == ((1, 8, 8, 8), 4)
    assert (layers["head"].shape, layers["head"].stride) == ((1, 5), None)
    assert layers["body"].parameters == 8 * 27 + 8
    idle = layers["idle"]
    assert (idle.shape, idle.finished, idle.parameters) == (None, -1, 56)
    assert (layers["body"].runs, layers["twice"].runs, idle.runs) == (1, 2, 0)


FAMILIES = (
    "resnet50_v1 mobilenet_v2 mobilenet_v3_small efficientnet_b0 efficientnet_v2_s convnext_tiny "
    "densenet121 googlenet mnasnet1_0 regnet_y_400mf vgg16_bn timm/tf_efficientnet_lite2"
)


@pytest.mark.parametrize("name", FAMILIES.split())
def test_stages_are_the_layers_that_each_family_hooks(name: str) -> None:
    network = build(name)
    table = layer_table(network, 224)
    layers, known = default_layers(name, network, 3), by_path(table)
    assert [known[path].stride for path in layers] == [4, 8, 16]
    assert side_multiple(network) == 32


def test_transformers_have_no_late_map_and_take_squares_only() -> None:
    network = build("vit_b_16")
    table = layer_table(network, 224)
    assert [x.path for x in table if x.stride] == ["conv_proj"]
    assert side_multiple(network) is None
    assert side_multiple(network, ["conv_proj"]) is None  # it checks before its first layer
