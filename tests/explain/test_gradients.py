from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anomaly.errors import LayerError
from anomaly.explain.saliency import GradientMonitor, GradientRecord
from anomaly.hooks import HookSet, live_hooks


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)
    )


def record_of(network: nn.Module, image: torch.Tensor) -> GradientRecord:
    """One step."""
    with GradientMonitor(network) as monitor:
        network(image).square().sum().backward()
        monitor.step()
    assert live_hooks(network) == 0
    return monitor.record()


@settings(max_examples=10)
@given(seed=st.integers(0, 100), steps=st.integers(1, 4))
def test_records_equal_the_gradients_that_training_uses(seed: int, steps: int) -> None:
    network = build(seed)
    gradients = []
    with GradientMonitor(network) as monitor:
        for _ in range(steps):
            network.zero_grad()
            network(torch.randn(6, 4)).square().sum().backward()
            monitor.step()
            layers = (network[0], network[2], network[4])
            parts = [[p.grad.double().ravel() for p in layer.parameters()] for layer in layers]
            gradients.append([np.linalg.norm(torch.cat(part)) for part in parts])
    assert live_hooks(network) == 0
    record = monitor.record()
    assert record.layers == ("0", "2", "4")
    assert not record.nonfinite.any()
    np.testing.assert_allclose(record.norms, gradients, rtol=1e-6)


def test_non_finite_gradients_are_counted_where_they_are() -> None:
    network = build()
    with GradientMonitor(network, ["[0]", "[-1]"]) as monitor:
        network(torch.randn(6, 4)).sum().backward()
        monitor.step()
        with torch.no_grad():
            network[0].weight[0, 0] = torch.nan
        network(torch.randn(6, 4)).sum().backward()
        monitor.step()
        monitor.step()
    record = monitor.record()
    assert record.layers == ("0", "4")
    assert record.nonfinite[0].tolist() == [0, 0]
    assert record.nonfinite[1].min() > 0
    assert np.isnan(record.norms[1]).all()
    assert record.norms[2].tolist() == [0, 0]


def test_several_backward_passes_within_a_step_add_up_and_sparse_gradients_count() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with GradientMonitor(layer) as monitor:
        for scale in (3.0, 4.0):
            (layer(torch.tensor([[1.0, 0.0]])) * scale).sum().backward()
        monitor.step()
    assert monitor.record().norms.item() == pytest.approx(5.0)
    words = nn.Embedding(10, 3, sparse=True)
    with GradientMonitor(words) as monitor:
        words(torch.tensor([1, 1, 4])).sum().backward()
        monitor.step()
    assert monitor.record().norms.item() == pytest.approx((3 * 4 + 3) ** 0.5)


def test_compiled_networks_are_watched() -> None:
    """Hooks on parameters are called in compiled code."""
    image = torch.randn(6, 4)
    plain = record_of(build(), image)
    compiled = record_of(torch.compile(build(), backend="eager"), image)
    assert plain.norms.all()
    np.testing.assert_allclose(plain.norms, compiled.norms, rtol=1e-5)
    torch.compiler.reset()


def test_a_monitor_sees_gradients_before_they_are_clipped() -> None:
    network = build()
    with HookSet(network) as hooks, GradientMonitor(network) as monitor:
        for parameter in network.parameters():
            hooks.accumulated(parameter, nn.utils.clip_grad_norm_, 1e-3)
        network(torch.randn(6, 4)).square().sum().backward()
        monitor.step()
    assert monitor.record().norms.max() > 1e-2
    norms = [float(parameter.grad.norm()) for parameter in network.parameters()]  # type: ignore[union-attr]
    assert 0 < max(norms) <= 1e-3 * (1 + 1e-5)


def test_layers_without_gradients_are_refused() -> None:
    with pytest.raises(LayerError, match="requires_grad"):
        GradientMonitor(build().requires_grad_(False))
    with pytest.raises(LayerError, match="requires_grad"):
        GradientMonitor(build(), nn.ReLU)
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(LayerError, match="no weights before their first pass"):
        GradientMonitor(lazy)
    lazy(torch.ones(1, 3))
    assert record_of(lazy, torch.ones(1, 3)).norms.all()
