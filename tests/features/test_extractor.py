"""Truncation and extraction: nothing behind the last wanted layer is there, moved or run."""

import gc

import pytest
import torch
from torch import Tensor, nn

from anomaly.errors import LayerError
from anomaly.features.backbone_weights import load_state, read_weights
from anomaly.features.backbones import build
from anomaly.features.extractor import truncate
from anomaly.hooks import capture, live_hooks


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


def test_layers_that_are_no_maps_are_refused() -> None:
    with pytest.raises(LayerError, match=r"\(1, 512, 1, 1\)|not a feature map|gives"):
        truncate(build("resnet18"), ["fc"])
    with pytest.raises(LayerError, match="takes images of 224×224 only"):
        truncate(build("vit_b_16"), ["encoder.layers.encoder_layer_0"])
    with pytest.raises(LayerError, match="did you mean 'layer3'"):
        truncate(build("resnet18"), ["layer33"])


@pytest.mark.parametrize("layer", ["layer1.0.bn1", "layer1.0.conv1", "layer1.0"])
def test_a_layer_that_is_overwritten_in_place_is_captured_before(layer: str) -> None:
    name = "resnet18"
    state, _ = read_weights(name, "random", 0)
    # relu(inplace=True) runs over bn1's output.
    truncated = truncate(build(name), [layer, "layer2"])
    load_state(truncated.network, state, build(name), "random")
    alone = truncate(build(name), [layer])
    load_state(alone.network, state, build(name), "random")
    images = torch.rand(1, 3, 64, 64)
    together = truncated.extractor()(images)[0].values
    torch.testing.assert_close(together, alone.extractor()(images)[0].values)
    if layer.endswith("bn1"):
        assert truncated.copies
        assert (together < 0).any()


def test_maps_carry_layer_and_stride_and_no_hook_stays() -> None:
    state, _ = read_weights("mobilenet_v2", "random", 0)
    truncated = truncate(build("mobilenet_v2"), ["features.3", "features.6"])
    load_state(truncated.network, state, build("mobilenet_v2"), "random")
    extractor = truncated.extractor()
    maps = extractor(torch.rand(2, 3, 64, 96))
    assert [(m.layer, m.stride, tuple(m.values.shape)) for m in maps] == [
        ("features.3", 4, (2, 24, 16, 24)),
        ("features.6", 8, (2, 32, 8, 12)),
    ]
    assert extractor.coarsest_stride == 8
    assert live_hooks(extractor.network) == 0


def test_an_image_too_small_for_the_network_leaves_no_hook() -> None:
    state, _ = read_weights("resnet18", "random", 0)
    truncated = truncate(build("resnet18"), ["layer2"])
    load_state(truncated.network, state, build("resnet18"), "random")
    extractor = truncated.extractor()
    with pytest.raises(RuntimeError):
        extractor(torch.rand(1, 4, 64, 64))
    assert live_hooks(extractor.network) == 0


def test_a_pass_does_not_search_the_process_for_compiled_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, _ = read_weights("resnet18", "random", 0)
    truncated = truncate(build("resnet18"), ["layer1"])
    load_state(truncated.network, state, build("resnet18"), "random")
    extractor = truncated.extractor()
    torch.compile(nn.ReLU(), backend="eager")(torch.zeros(1))
    asked: list[object] = []
    monkeypatch.setattr(gc, "get_referrers", lambda *of: asked.append(of) or [])
    with capture(truncated.network, "layer1"):
        assert asked  # that network may be anybody's
    asked.clear()
    extractor(torch.rand(1, 3, 64, 64))
    assert not asked
    torch.compiler.reset()


def test_layers_may_be_named_by_patterns() -> None:
    some = truncate(build("resnet18"), ["layer1", "layer2.*.conv2"])
    assert some.extractor().layers == ("layer1", "layer2.0.conv2", "layer2.1.conv2")
    with pytest.raises(LayerError, match="matches 'stage\\*'"):
        truncate(build("resnet18"), ["stage*"])
