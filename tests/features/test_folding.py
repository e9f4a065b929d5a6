"""Folded batch norms: the same maps, fewer modules, and nothing folded that somebody else reads."""

import pytest
import torch
from torch import Tensor, nn

from anomaly.features.backbone_weights import load_state, read_weights
from anomaly.features.backbones import build, default_layers
from anomaly.features.extractor import FeatureExtractor
from anomaly.features.optimise import foldable, folded
from anomaly.features.truncation import truncate

# How many of each network's batch norms come right behind a convolution, up to the third stage.
FOLDED = {
    "resnet18": (15, 15),
    "wide_resnet50_2": (43, 43),
    "mobilenet_v2": (39, 39),
    "efficientnet_b0": (33, 33),
    "timm/tf_efficientnet_lite2": (45, 45),  # which apply their activations themselves
    "densenet121": (87, 43),  # the others come before a convolution
    "vgg16_bn": (13, 13),
    "convnext_tiny": (0, 0),
}


def unsettle(network: nn.Module) -> None:
    """Batch norms that change what they're given."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.weight, 0.5, 1.5),
                (module.bias, -0.5, 0.5),
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2.0),
            ):
                assert tensor is not None
                tensor.data.uniform_(low, high, generator=generator)


@pytest.mark.parametrize("name", FOLDED)
def test_maps_stay_the_same(name: str) -> None:
    full = build(name)
    truncated = truncate(build(name), default_layers(name, full, 3))
    load_state(truncated.network, read_weights(name, "random", 0)[0], full, name)
    unsettle(truncated.network)
    norms = [m for m in truncated.network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert (len(norms), len(truncated.pairs)) == FOLDED[name]
    extractor = truncated.extractor()
    plain = FeatureExtractor(truncated.network, extractor.layers, extractor.layouts, True, ())
    images = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(extractor(images), plain(images), strict=True):
        error = (mine.values - theirs.values).norm() / theirs.values.norm()
        assert error < 1e-5
    halves = extractor.to("cpu", "bf16")(images)
    assert halves[0].values.dtype == torch.bfloat16
    for mine, theirs in zip(halves, plain(images), strict=True):
        error = (mine.values.float() - theirs.values).norm() / theirs.values.norm()
        assert 0 < error < 0.05
    # The truth stays whole: it is what's saved, explained and differentiated.
    assert sum(isinstance(m, nn.BatchNorm2d) for m in extractor.network.modules()) == len(norms)


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
    network = Branches().eval()
    unsettle(network)
    with torch.device("meta"):
        dry = Branches().eval()
    image = torch.empty(1, 3, 8, 8, device="meta")
    pairs = foldable(dry, ["wanted", "norm4"], image)
    assert pairs == (("plain", "norm3"),)
    images = torch.rand(1, 3, 8, 8)
    engine = folded(network, pairs, torch.float32)
    torch.testing.assert_close(engine(images), network(images), rtol=1e-4, atol=1e-5)
    assert isinstance(engine.norm3, nn.Identity)
    assert isinstance(network.norm3, nn.BatchNorm2d)
