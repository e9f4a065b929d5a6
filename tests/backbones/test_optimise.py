"""Folded batch norms and fused activations: the same maps, wherever the hooks are."""

import copy

import pytest
import torch
from torch import Tensor, nn

from anomaly.backbones.extractor import DryRun, FeatureExtractor, folded, fused, truncate
from anomaly.backbones.networks import build
from anomaly.hooks import capture


def prepared(name: str, layers: list[str]) -> tuple[FeatureExtractor, nn.Module]:
    """An extractor with random weights, and its network as it was built."""
    truncated = truncate(build(name), layers)
    network = unsettled(truncated.network.to_empty(device="cpu"))
    return truncated, copy.deepcopy(network).eval()


def unsettled(network: nn.Module) -> nn.Module:
    """Random weights, and batch norms that change what they're given."""
    generator = torch.Generator().manual_seed(0)
    for key, tensor in network.state_dict().items():
        low = 0.5 if "var" in key or (key.endswith("weight") and tensor.ndim == 1) else -0.1
        if tensor.is_floating_point():
            tensor.uniform_(low, low + 0.2 if low < 0 else 1.5, generator=generator)
    return network


@pytest.mark.parametrize(
    ("name", "layers", "alone"),
    [
        ("resnet50", ["relu", "layer1", "layer2.1.bn2", "layer3"], 40),
        ("mobilenet_v2", ["features.3.conv.0.0", "features.4", "features.7.conv.1"], 1),
        ("timm/tf_efficientnet_lite2", ["blocks.0.0.bn1", "blocks.1.0.bn1.drop", "blocks.2"], 4),
    ],
)
def test_maps_stay_the_same_with_norms_folded_and_activations_fused(
    name: str, layers: list[str], alone: int
) -> None:
    """Layers of which some lie inside what could be fused: their activations stay `alone`."""
    extractor, plain = prepared(name, layers)
    images = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), capture(plain, layers, stop=True) as captured:
        captured.run(images)
        expected = captured.pop()
    for layer, mine in zip(extractor.layers, extractor(images), strict=True):
        assert (mine - expected[layer]).norm() / expected[layer].norm() < 1e-5
    engine = fused(folded(extractor.network, extractor.pairs, torch.float32), extractor.layers)
    activations: list[str] = []
    for path, module in engine.named_modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.register_forward_hook(lambda *_, path=path: activations.append(path))
    with torch.inference_mode(), capture(engine, extractor.layers, stop=True) as captured:
        captured.run(images)
    assert len(activations) == alone
    norms, left = (
        sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        for network in (extractor.network, engine)
    )
    assert len(extractor.pairs) == norms - left > norms / 2
    halves = extractor.to("cpu", "bf16")(images)
    assert halves[0].dtype == torch.bfloat16
    for layer, mine in zip(extractor.layers, halves, strict=True):
        assert 0 < (mine.float() - expected[layer]).norm() / expected[layer].norm() < 0.05


class Branches(nn.Module):
    """Convolutions whose outputs have a second reader, or are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.read_twice, self.norm1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.called_twice, self.norm2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.plain, self.norm3 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.wanted, self.norm4 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read_twice(x)
        x = self.norm1(x) + x
        x = self.norm2(self.called_twice(self.called_twice(x)))
        return self.norm4(self.wanted(self.norm3(self.plain(x)).relu()))


def test_only_what_nobody_else_reads_is_folded() -> None:
    network = unsettled(Branches()).eval()
    with torch.device("meta"):
        dry = Branches().eval()
    pairs = DryRun(dry, ["wanted", "norm4"], 8).pairs
    assert pairs == (("plain", "norm3"),)
    images = torch.rand(1, 3, 8, 8)
    engine = folded(network, pairs, torch.float32)
    torch.testing.assert_close(engine(images), network(images), rtol=1e-4, atol=1e-5)
    assert isinstance(engine.norm3, nn.Identity)
    assert isinstance(network.norm3, nn.BatchNorm2d)


def test_a_map_that_is_kept_is_not_overwritten_by_the_next_block() -> None:
    """A residual block reads its input once more at its end, and has to leave it as it was."""
    extractor, _ = prepared("resnet50", ["layer1.0", "layer1.1"])
    alone, _ = prepared("resnet50", ["layer1.0"])
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(extractor(images)[0], alone(images)[0])


def test_what_onednn_would_pad_otherwise_is_left_alone() -> None:
    odd = (
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    )
    for convolution in odd:
        network = nn.Sequential(convolution, nn.ReLU())
        assert fused(network, [])[0] is convolution
        assert isinstance(network[1], nn.ReLU)
