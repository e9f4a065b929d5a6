"""Fused activations and sums: the same maps, wherever the hooks are."""

import copy

import pytest
import torch
from torch import nn

from anomaly.features.backbones import build
from anomaly.features.extractor import FeatureExtractor
from anomaly.features.optimise import folded, fused
from anomaly.features.truncation import truncate
from anomaly.hooks import capture

# By network: layers of which some lie inside what could be fused, and how many activations are
# computed by themselves afterwards.
NETWORKS = {
    "resnet18": (["layer1", "layer3"], 0),
    "resnet50": (["relu", "layer1", "layer2.1.bn2", "layer3"], 3),
    "resnext50_32x4d": (["conv1", "layer2"], 1),
    "mobilenet_v2": (["features.3.conv.0.0", "features.4", "features.7.conv.1"], 1),
    "timm/tf_efficientnet_lite2": (["blocks.0.0.bn1", "blocks.1.0.bn1.drop", "blocks.2"], 4),
    "vgg16_bn": (["features.5", "features.23"], 0),
}


def _prepared(name: str, layers: list[str]) -> tuple[FeatureExtractor, nn.Module]:
    """An extractor with random weights, and its network as it was built."""
    truncated = truncate(build(name), layers)
    network = truncated.network.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for key, tensor in network.state_dict().items():
        low = 0.5 if "var" in key or (key.endswith("weight") and tensor.ndim == 1) else -0.1
        if tensor.is_floating_point():
            tensor.uniform_(low, low + 0.2 if low < 0 else 1.5, generator=generator)
    return truncated.extractor(), copy.deepcopy(network).eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_stay_the_same(name: str) -> None:
    layers, alone = NETWORKS[name]
    extractor, plain = _prepared(name, layers)
    images = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), capture(plain, layers, stop=True) as captured:
        captured.run(images)
        expected = captured.pop()
    for found in extractor(images):
        mine, theirs = found.values, expected[found.layer]
        assert (mine - theirs).norm() / theirs.norm() < 1e-5
    engine = fused(folded(extractor.network, extractor.pairs, torch.float32), extractor.layers)
    activations: list[str] = []
    for path, module in engine.named_modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.register_forward_hook(lambda *_, path=path: activations.append(path))
    with torch.inference_mode(), capture(engine, extractor.layers, stop=True) as captured:
        captured.run(images)
    assert len(activations) == alone


def test_a_map_that_is_kept_is_not_overwritten_by_the_next_block() -> None:
    """A residual block reads its input once more at its end, and has to leave it as it was."""
    extractor, _ = _prepared("resnet50", ["layer1.0", "layer1.1"])
    alone, _ = _prepared("resnet50", ["layer1.0"])
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(extractor(images)[0].values, alone(images)[0].values)


def test_what_onednn_would_pad_otherwise_is_left_alone() -> None:
    odd = (
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    )
    for convolution in odd:
        network = nn.Sequential(convolution, nn.ReLU())
        assert fused(network, [])[0] is convolution
        assert isinstance(network[1], nn.ReLU)
