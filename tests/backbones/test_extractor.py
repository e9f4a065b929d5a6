"""Maps and tokens of hooked layers: the patch at a known pixel is where it belongs."""

import gc

import pytest
import torch
from torch import Tensor, nn

from anomaly.backbones.extractor import (
    FeatureExtractor,
    Layout,
    layout_of,
    token_stride,
)
from anomaly.backbones.registry import build, load_state, read_weights
from anomaly.backbones.truncation import truncate
from anomaly.errors import LayerError
from anomaly.hooks import capture, live_hooks


def test_maps_carry_layer_and_stride_and_no_hook_stays() -> None:
    state, _ = read_weights("mobilenet_v2", "random", 0)
    truncated = truncate(build("mobilenet_v2"), ["features.3", "features.6"])
    load_state(truncated.network, state, build("mobilenet_v2"), "random")
    extractor = truncated
    maps = extractor(torch.rand(2, 3, 64, 96))
    assert [tuple(values.shape) for values in maps] == [(2, 24, 16, 24), (2, 32, 8, 12)]
    assert (extractor.layers, extractor.strides) == (("features.3", "features.6"), (4, 8))
    assert extractor.coarsest_stride == 8
    assert live_hooks(extractor.network) == 0


def test_an_image_too_small_for_the_network_leaves_no_hook() -> None:
    state, _ = read_weights("resnet18", "random", 0)
    truncated = truncate(build("resnet18"), ["layer2"])
    load_state(truncated.network, state, build("resnet18"), "random")
    extractor = truncated
    with pytest.raises(LayerError, match="ResNet can't compute an image of 64×64"):
        extractor(torch.rand(1, 4, 64, 64))
    assert live_hooks(extractor.network) == 0


def test_a_pass_does_not_search_the_process_for_compiled_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, _ = read_weights("resnet18", "random", 0)
    truncated = truncate(build("resnet18"), ["layer1"])
    load_state(truncated.network, state, build("resnet18"), "random")
    extractor = truncated
    torch.compile(nn.ReLU(), backend="eager")(torch.zeros(1))
    asked: list[object] = []
    monkeypatch.setattr(gc, "get_referrers", lambda *of: asked.append(of) or [])
    with capture(truncated.network, "layer1"):
        assert asked  # that network may be anybody's
    asked.clear()
    extractor(torch.rand(1, 3, 64, 64))
    assert not asked
    torch.compiler.reset()


def network_of(name: str, layers: list[str]) -> FeatureExtractor:
    truncated = truncate(build(name), layers)
    load_state(truncated.network, read_weights(name, "random", 0)[0], build(name), "a test")
    return truncated


# Class token alone; with four registers; DINOv3's, with rotary positions; and Swin's (B, h, w, C).
@pytest.mark.parametrize(
    ("name", "layer", "patch"),
    [
        ("timm/test_vit", "blocks.0", 16),
        ("timm/vit_small_patch14_dinov2", "blocks.0", 14),
        pytest.param("timm/vit_small_patch14_reg4_dinov2", "norm", 14, marks=pytest.mark.slow),
        pytest.param("timm/vit_small_patch16_dinov3", "blocks.1", 16, marks=pytest.mark.slow),
        pytest.param("timm/swin_tiny_patch4_window7_224", "layers.1", 8, marks=pytest.mark.slow),
    ],
)
def test_a_planted_mark_is_at_its_pixel(name: str, layer: str, patch: int) -> None:
    network = network_of(name, [layer])
    height, width = 4 * patch, 7 * patch
    plain = torch.zeros(1, 3, height, width)
    for row, column in ((0, 0), (1, 5), (3, 2)):
        marked = plain.clone()
        marked[..., row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = 3
        before, after = network(plain)[0], network(marked)[0]
        assert before.shape[2:] == (4, 7)
        change = (after - before).square().sum(1)[0]  # attention spreads some of it
        assert divmod(int(change.argmax()), 7) == (row, column)


class Blocks(nn.Module):
    """A transformer's tokens: `extra` of them before those of patches of 8 pixels."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra, self.inner = extra, nn.Conv2d(3, 6, 8, 8)
        self.tokens = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        patches = self.inner(x).flatten(2).mT
        return self.tokens(torch.cat([patches.new_zeros(len(x), self.extra, 6), patches], 1))


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_tokens_before_the_patches_are_left_out(extra: int) -> None:
    with torch.device("meta"):
        network = Blocks(extra)
    truncated = truncate(network, ["tokens"])
    assert truncated.layouts == (Layout("tokens", 6, 8),)
    images = torch.randn(2, 3, 24, 40)
    network = Blocks(extra)
    with torch.no_grad():
        found = truncated.layouts[0].map_of(network(images), (24, 40))
        torch.testing.assert_close(found, network.inner(images))


def test_what_is_no_grid_is_refused() -> None:
    assert token_stride(197, (224, 224)) == token_stride(201, (224, 224)) == 16
    assert token_stride(257, (224, 224)) == token_stride(261, (224, 224)) == 14
    assert token_stride(7, (224, 224)) is None  # detection queries, say
    assert layout_of((1, 5, 5, 9), (40, 40)) == Layout("channels_last", 9, 8)
    for shape in ((1, 1000), (1, 8, 5, 4), (1, 150, 8)):
        assert layout_of(shape, (224, 224)) is None
    with pytest.raises(LayerError, match=r"'fc' gives \(1, 1000\), not .* choose another layer"):
        truncate(build("resnet18"), ["fc"])
    with pytest.raises(LayerError, match=r"takes images of 224×224 only"):
        truncate(build("vit_b_16"), ["encoder.layers.encoder_layer_0"])
