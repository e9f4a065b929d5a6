"""Maps and tokens of hooked layers: the patch at a known pixel is where it belongs."""

import pytest
import torch
from torch import Tensor, nn

from anomaly.backbones.extractor import FeatureExtractor, truncate
from anomaly.backbones.layers import Layout, layout_of, token_stride
from anomaly.backbones.networks import build, load_state, read_weights
from anomaly.errors import LayerError
from anomaly.hooks import live_hooks


def extractor(name: str, layers: list[str]) -> FeatureExtractor:
    truncated = truncate(build(name), layers)
    load_state(truncated.network, read_weights(name, "random", 0)[0], build(name), "a test")
    return truncated


def test_maps_carry_layer_and_stride_and_no_hook_stays() -> None:
    hooked = extractor("mobilenet_v2", ["features.3", "features.6"])
    maps = hooked(torch.rand(2, 3, 64, 96))
    assert [tuple(values.shape) for values in maps] == [(2, 24, 16, 24), (2, 32, 8, 12)]
    assert (hooked.layers, hooked.strides) == (("features.3", "features.6"), (4, 8))
    assert live_hooks(hooked.network) == 0


def test_a_planted_mark_is_at_its_pixel() -> None:
    network, patch = extractor("timm/test_vit", ["blocks.0"]), 16
    plain = torch.zeros(1, 3, 4 * patch, 7 * patch)
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
        self.rows, self.tokens = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        patches = self.rows(self.inner(x).permute(0, 2, 3, 1)).flatten(1, 2)
        return self.tokens(torch.cat([patches.new_zeros(len(x), self.extra, 6), patches], 1))


def test_tokens_and_channels_last_become_maps_without_tokens_before_the_patches() -> None:
    images = torch.randn(2, 3, 24, 40)
    for extra in (0, 1, 5):
        with torch.device("meta"):
            dry = Blocks(extra)
        truncated = truncate(dry, ["rows", "tokens"])
        assert truncated.layouts == (Layout("channels_last", 6, 8), Layout("tokens", 6, 8))
        network = Blocks(extra)
        with torch.no_grad():
            maps = network.inner(images)
            for layout, put_out in zip(
                truncated.layouts, (maps.permute(0, 2, 3, 1), network(images)), strict=True
            ):
                torch.testing.assert_close(layout.map_of(put_out, (24, 40)), maps)


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
