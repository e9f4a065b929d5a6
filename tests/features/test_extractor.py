"""Extraction: maps of the wanted layers, no hook left, nothing run behind the last of them."""

import gc

import pytest
import torch
from torch import nn

from anomaly.features.backbone_weights import load_state, read_weights
from anomaly.features.backbones import build
from anomaly.features.truncation import truncate
from anomaly.hooks import capture, live_hooks


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
