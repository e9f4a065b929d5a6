"""How images reach the device: what a GPU is asked for, told by tensors that note it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anomaly.features.backbones import Normalisation
from anomaly.features.embedder import network_input
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import NetworkInput

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
