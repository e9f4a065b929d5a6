"""Images on their way into the network; fp32 or bf16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anomaly.backbones import extractor as features
from anomaly.backbones.extractor import FeatureExtractor, network_input
from anomaly.backbones.registry import Normalisation, build, load_state, read_weights
from anomaly.backbones.truncation import truncate
from anomaly.config.load import parse_config
from anomaly.datasets import open_dataset
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput
from anomaly.sample_data import write_sample_data
from anomaly.storage import load as checkpoint
from anomaly.storage.load import load_model
from anomaly.storage.save import save
from anomaly.training.fit import train

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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of tensors, in order; what is pinned, or goes to a GPU, stays where it is."""
    noted: list[Any] = []
    to = Tensor.to

    def pin_memory(self: Tensor) -> Tensor:
        noted.append("pinned")
        return self

    def moved(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if args and isinstance(args[0], torch.device):
            noted.append((args[0].type, options))
            return self
        return to(self, *args, **options)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", moved)
    return noted


def expected(batch: list[NetworkInput]) -> Tensor:
    pixels = np.stack([item.pixels for item in batch]).astype(np.float64)
    normal = (pixels - NORMALISE.mean) / NORMALISE.std
    return torch.from_numpy(normal.transpose(0, 3, 1, 2)).float()


def test_to_a_gpu_images_are_copied_from_pinned_memory_without_waiting(asked: list[Any]) -> None:
    batch = images(3)
    found = network_input(batch, NORMALISE, torch.device("cuda"))
    assert asked == ["pinned", ("cuda", {"non_blocking": True})]
    torch.testing.assert_close(found, expected(batch))


def test_on_the_cpu_nothing_is_pinned_or_copied(asked: list[Any]) -> None:
    batch = images(3)
    found = network_input(batch, NORMALISE, torch.device("cpu"))
    assert asked == []
    torch.testing.assert_close(found, expected(batch))
    assert found.is_contiguous(memory_format=torch.channels_last)


CPU = torch.device("cpu")


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_sample_data(tmp_path / "data" / "plate", size=128, n_train=6, n_good=1, n_defect=1)
    config = parse_config(
        {
            "data": {"root": str(tmp_path / "data"), "category": "plate"},
            "image": {"area": 64},
            "backbone": {"name": "resnet18", "weights": "random"},
            "precision": "bf16",
        },
        "test",
    )
    samples = open_dataset("mvtec", tmp_path / "data", "plate").train
    training = train(config, samples, device=CPU, scratch=tmp_path)
    save(training.detector, tmp_path / "model")
    caplog.clear()
    monkeypatch.setattr(checkpoint, "has_bf16", lambda device: True)
    model = load_model(tmp_path / "model", CPU)
    assert model.config.precision == model.extractor.precision == "bf16"
    assert model.manifest["made_with"]["precision"] == "bf16"
    assert not caplog.records
    caplog.set_level(logging.WARNING)
    assert load_model(tmp_path / "model", CPU, "fp32").extractor.precision == "fp32"
    assert "trained in bf16 and runs in fp32 (as asked)" in caplog.text
    monkeypatch.setattr(checkpoint, "has_bf16", lambda device: False)
    assert load_model(tmp_path / "model", CPU).extractor.precision == "fp32"
    assert "this machine doesn't have bf16" in caplog.text
