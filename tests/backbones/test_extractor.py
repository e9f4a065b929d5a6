"""From a network to its maps: truncated, folded, in fp32 or bf16, each patch where it belongs."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_command, train_arguments
from torch import Tensor, nn

from anomaly.backbones import extractor as features
from anomaly.backbones.extractor import (
    FeatureExtractor,
    Layout,
    Normalisation,
    folded,
    fuse_activations,
    layout_of,
    network_input,
    token_stride,
)
from anomaly.backbones.layers import DryRun, describe, truncate, truncate_again
from anomaly.backbones.networks import build, load_state, read_weights
from anomaly.errors import LayerError
from anomaly.hooks import capture
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput
from anomaly.storage import models as checkpoint
from anomaly.storage.models import load_model

CPU = torch.device("cpu")
NORMALISE = Normalisation((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def extractor(name: str, layers: list[str]) -> FeatureExtractor:
    """An extractor with random weights."""
    truncated = truncate(build(name), layers)
    load_state(truncated.network, read_weights(name, "random", 0)[0], build(name), "a test")
    return truncated


def meta(kind: type[nn.Module], *arguments: int) -> nn.Module:
    """A network on the meta device."""
    with torch.device("meta"):
        return kind(*arguments).eval()


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
    """Uses a parameter and a submodule's weight without calling a module, and a module twice.

    Its head takes images of 96×96 only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.hidden = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()
        self.wanted = nn.Conv2d(4, 5, 2, stride=2)
        self.head = nn.Linear(5 * 48**2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale[:, None, None]
        x = self.act(torch.nn.functional.conv2d(x, self.hidden.weight))
        return self.head(self.act(self.wanted(x)).flatten(1))


def test_parameters_used_without_a_module_call_stay_and_a_head_may_want_another_size() -> None:
    truncated = truncate(meta(Direct), ["wanted"])
    kept = "scale hidden.weight hidden.bias wanted.weight wanted.bias"
    assert set(truncated.network.state_dict()) == set(kept.split())
    assert (truncated.channels, truncated.strides) == ((5,), (2,))


@pytest.mark.parametrize(
    ("name", "layers", "copies"),
    [
        ("resnet18", ["layer1.0.bn1", "layer2"], True),  # relu(inplace=True) runs over its output
        ("resnet50", ["layer1.0", "layer1.1"], False),  # a residual block reads its input again
    ],
)
def test_a_map_that_is_kept_is_not_overwritten(name: str, layers: list[str], copies: bool) -> None:
    together, alone = extractor(name, layers), extractor(name, layers[:1])
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(together(images)[0], alone(images)[0])
    assert together.copies == copies
    assert (together(images)[0] < 0).any() == copies


def test_layers_may_be_named_by_patterns() -> None:
    some = truncate(build("resnet18"), ["layer1", "layer2.*.conv2"])
    assert some.layers == ("layer1", "layer2.0.conv2", "layer2.1.conv2")
    with pytest.raises(LayerError, match="matches 'stage\\*'"):
        truncate(build("resnet18"), ["stage*"])


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
        network = meta(Lists)
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
    with pytest.raises(LayerError, match="an empty path"):
        truncate_again(build(name), describe(run) | {"layers": ["", *run.layers[1:]]})


def test_torchvision_and_timm_come_without_the_compiler_which_is_there_when_needed() -> None:
    code = """
import sys
from anomaly.backbones.networks import (build, torchvision)
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
    hooked, plain = prepared(name, layers)
    images = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), capture(plain, layers, stop=True) as captured:
        captured.run(images)
        expected = captured.pop()
    for layer, mine in zip(hooked.layers, hooked(images), strict=True):
        assert (mine - expected[layer]).norm() / expected[layer].norm() < 1e-5
    engine = folded(hooked.network, hooked.pairs, torch.float32)
    fuse_activations(engine, hooked.layers)
    activations: list[str] = []
    for path, module in engine.named_modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.register_forward_hook(lambda *_, path=path: activations.append(path))
    with torch.inference_mode(), capture(engine, hooked.layers, stop=True) as captured:
        captured.run(images)
    assert len(activations) == alone
    norms, left = (
        sum(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        for network in (hooked.network, engine)
    )
    assert len(hooked.pairs) == norms - left > norms / 2
    halves = hooked.to("cpu", "bf16")(images)
    assert halves[0].dtype == torch.bfloat16
    for layer, mine in zip(hooked.layers, halves, strict=True):
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
    pairs = DryRun(meta(Branches), ["wanted", "norm4"], 8).pairs
    assert pairs == (("plain", "norm3"),)
    images = torch.rand(1, 3, 8, 8)
    engine = folded(network, pairs, torch.float32)
    torch.testing.assert_close(engine(images), network(images), rtol=1e-4, atol=1e-5)
    assert isinstance(engine.norm3, nn.Identity)
    assert isinstance(network.norm3, nn.BatchNorm2d)


def test_what_onednn_would_pad_otherwise_is_left_alone() -> None:
    odd = (
        nn.Conv2d(3, 3, 3, padding="same"),
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
    )
    for convolution in odd:
        network = nn.Sequential(convolution, nn.ReLU())
        fuse_activations(network, [])
        assert network[0] is convolution
        assert isinstance(network[1], nn.ReLU)


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


def test_images_are_normalised_and_laid_out_for_the_network() -> None:
    view = Sizing(32, None, 32, 32).view((32, 32))
    pixels = np.random.default_rng(0).random((3, 32, 32, 3), dtype=np.float32)
    batch = [NetworkInput(i, "", view, each) for i, each in enumerate(pixels)]
    images = network_input(batch, NORMALISE, CPU)
    normal = (pixels.astype(np.float64) - NORMALISE.mean) / NORMALISE.std
    torch.testing.assert_close(images, torch.from_numpy(normal.transpose(0, 3, 1, 2)).float())
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_rounding_is_measured_against_an_independent_rounding() -> None:
    """One layer, so that the share can be worked out: conv in float64 against rounded operands."""
    one = extractor("resnet18", ["conv1"])
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    share = features.rounding_share(one, images)
    weight = one.network.conv1.weight.detach().double()
    exact = torch.nn.functional.conv2d(images.double(), weight, stride=2, padding=3)
    rounded = torch.nn.functional.conv2d(
        images.bfloat16().double(), weight.bfloat16().double(), stride=2, padding=3
    ).bfloat16()
    change = (rounded.double() - exact).square().mean()
    expected = (change / exact.var(dim=(0, 2, 3)).mean()).sqrt()
    assert share == pytest.approx(float(expected), rel=0.05)


def test_auto_takes_bf16_only_where_it_is_fast_and_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    hooked = extractor("resnet18", ["layer1", "layer2"])
    monkeypatch.setattr(features, "has_bf16", lambda device: False)
    assert features.choose_precision(hooked, images) == "fp32"
    monkeypatch.setattr(features, "has_bf16", lambda device: True)
    assert features.choose_precision(hooked, images) == "bf16"
    assert "bf16" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(features, "MOST_ROUNDING", 1e-6)
        assert features.choose_precision(hooked, images) == "fp32"
    assert "bf16" not in caplog.text  # nothing that a person has to do
    broken = extractor("resnet18", ["layer1", "layer2"])
    with torch.no_grad():
        broken.network.bn1.weight *= float("inf")  # maps that aren't numbers
    assert features.choose_precision(broken, images) == "fp32"


def test_precision_is_saved_and_a_change_is_pointed_out(
    product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_command("train", train_arguments(product, tmp_path / "run", "precision=bf16"))
    caplog.clear()
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(checkpoint, "has_bf16", lambda device: True)
    model = load_model(tmp_path / "run", CPU)
    assert model.config.precision == model.extractor.precision == "bf16"
    assert not caplog.records
    assert load_model(tmp_path / "run", CPU, "fp32").extractor.precision == "fp32"
    assert "trained in bf16 and runs in fp32 (as asked)" in caplog.text
    monkeypatch.setattr(checkpoint, "has_bf16", lambda device: False)
    assert load_model(tmp_path / "run", CPU).extractor.precision == "fp32"
    assert "this machine doesn't have bf16" in caplog.text
