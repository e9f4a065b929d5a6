"""Images on their way into the network; fp32 or bf16."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_command, train_arguments

from anomaly.backbones import extractor as features
from anomaly.backbones.extractor import FeatureExtractor, network_input, truncate
from anomaly.backbones.networks import Normalisation, build, load_state, read_weights
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput
from anomaly.storage import load as checkpoint
from anomaly.storage.load import load_model

CPU = torch.device("cpu")
NORMALISE = Normalisation((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def images(count: int) -> list[NetworkInput]:
    """Images of one size, each of other pixels."""
    rng = np.random.default_rng(0)
    view = Sizing(32, None, 32, 32).view((32, 32))
    every = rng.random((count, 32, 32, 3), dtype=np.float32)
    return [
        NetworkInput(i, "", view, pixels, lambda _, kept=pixels: kept)
        for i, pixels in enumerate(every)
    ]


def test_images_are_normalised_and_laid_out_for_the_network() -> None:
    batch = images(3)
    found = network_input(batch, NORMALISE, CPU)
    pixels = np.stack([item.pixels for item in batch]).astype(np.float64)
    normal = (pixels - NORMALISE.mean) / NORMALISE.std
    torch.testing.assert_close(found, torch.from_numpy(normal.transpose(0, 3, 1, 2)).float())
    assert found.is_contiguous(memory_format=torch.channels_last)


def extractor(scale: float = 1.0) -> FeatureExtractor:
    truncated = truncate(build("resnet18"), ["layer1", "layer2"])
    load_state(
        truncated.network, read_weights("resnet18", "random", 0)[0], build("resnet18"), "random"
    )
    with torch.no_grad():
        truncated.network.bn1.weight *= scale
    return truncated


def test_rounding_is_measured_against_an_independent_rounding() -> None:
    """One layer, so that the share can be worked out: conv in float64 against rounded operands."""
    one = truncate(build("resnet18"), ["conv1"])
    state = read_weights("resnet18", "random", 0)[0]
    load_state(one.network, state, build("resnet18"), "random")
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    (share,) = features.rounding_share(one, images)
    weight = state["conv1.weight"].double()
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
    monkeypatch.setattr(features, "has_bf16", lambda device: False)
    assert features.choose_precision(extractor(), images) == "fp32"
    monkeypatch.setattr(features, "has_bf16", lambda device: True)
    assert features.choose_precision(extractor(), images) == "bf16"
    assert "bf16" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(features, "LIMIT", 1e-6)
        assert features.choose_precision(extractor(), images) == "fp32"
    assert "bf16 would blur" in caplog.text
    broken = extractor(float("inf"))  # maps that aren't numbers
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
