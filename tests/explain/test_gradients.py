from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anomaly.errors import LayerError
from anomaly.explain.gradients import GradientMonitor, clip_gradients, draw_gradients, limit_norm
from anomaly.hooks import HookSet, live_hooks


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)
    )


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 100), steps=st.integers(1, 4))
def test_records_equal_the_gradients_that_training_uses(seed: int, steps: int) -> None:
    network = build(seed)
    gradients = []
    with GradientMonitor(network) as monitor:
        for _ in range(steps):
            network.zero_grad()
            network(torch.randn(6, 4)).square().sum().backward()
            monitor.step()
            gradients.append(
                [
                    np.concatenate([p.grad.double().numpy().ravel() for p in layer.parameters()])
                    for layer in (network[0], network[2], network[4])
                ]
            )
    assert live_hooks(network) == 0
    record = monitor.record()
    assert record.layers == ("0", "2", "4")
    assert not record.nonfinite.any()
    for s, layers in enumerate(gradients):
        for i, values in enumerate(layers):
            assert record.norms[s, i] == pytest.approx(np.linalg.norm(values))
            magnitudes = np.abs(values[values != 0])
            clipped = magnitudes.clip(record.edges[0], record.edges[-1])
            expected = np.histogram(np.log10(clipped), bins=np.log10(record.edges))[0]
            # A value on an edge may fall to either side.
            assert np.abs(record.histograms[s, i] - expected).sum() <= 2
            assert record.histograms[s, i].sum() == len(magnitudes)


def test_compiled_networks_are_watched_and_clipped() -> None:
    """Hooks on parameters are called in compiled code."""
    plain, network = build(), build()
    x = torch.randn(6, 4)
    records = []
    for one, run in ((plain, plain), (network, torch.compile(network, backend="eager"))):
        one.zero_grad()
        with GradientMonitor(run) as monitor, clip_gradients(run, max_norm=0.01):
            run(x).square().sum().backward()
            monitor.step()
        records.append(monitor.record())
        norms = [float(parameter.grad.norm()) for parameter in one.parameters()]  # type: ignore[union-attr]
        assert 0 < max(norms) <= 0.01 * (1 + 1e-6)
    np.testing.assert_allclose(records[0].norms, records[1].norms, rtol=1e-5)
    network.compile(backend="eager")
    with GradientMonitor(network) as monitor:
        network(x).sum().backward()
        monitor.step()
    assert monitor.record().norms.all()
    torch.compiler.reset()


def test_scripted_networks_are_clipped() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is on its way out
        network = torch.jit.script(build())
    with clip_gradients(network, max_norm=0.01):
        network(torch.randn(6, 4)).square().sum().backward()
    assert 0 < max(float(parameter.grad.norm()) for parameter in network.parameters()) <= 0.0101


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


def test_several_backward_passes_within_a_step_add_up() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with GradientMonitor(layer) as monitor:
        for scale in (3.0, 4.0):
            (layer(torch.tensor([[1.0, 0.0]])) * scale).sum().backward()
        monitor.step()
    assert monitor.record().norms[0, 0] == pytest.approx(5.0)


def test_no_hook_survives_an_exception_and_an_empty_record_is_drawn() -> None:
    network = build()
    monitor = GradientMonitor(network)
    with pytest.raises(ZeroDivisionError), monitor:  # noqa: PT012
        assert live_hooks(network) == 6
        raise ZeroDivisionError
    assert live_hooks(network) == 0
    record = monitor.record()
    assert record.norms.shape == (0, 3)
    assert record.histograms.shape == (0, 3, 32)
    assert draw_gradients(record).shape[0] == 18 * 4 + 8


def test_the_drawing_has_a_line_a_layer_and_shows_bad_steps_red() -> None:
    network = build()
    with GradientMonitor(network) as monitor:
        for factor in (1.0, float("nan"), 1.0, 1.0):
            (network(torch.randn(6, 4)).sum() * factor).backward()
            monitor.step()
    picture = draw_gradients(monitor.record())
    assert picture.dtype == np.uint8
    red = (picture == (220, 30, 30)).all(axis=2)
    columns = np.flatnonzero(red.any(axis=0))
    assert red[18:-8, columns].all()
    assert len(columns) == 420 // 4
    assert columns[0] == 8 + 190 + 8 + 420 // 4


@settings(deadline=None, max_examples=20)
@given(max_norm=st.floats(1e-3, 1e3))
def test_clipping_by_hooks_equals_clipping_each_parameter_afterwards(max_norm: float) -> None:
    network, reference = build(), build()
    x = torch.randn(6, 4)
    with clip_gradients(network, max_norm):
        network(x).square().sum().backward()
    reference(x).square().sum().backward()
    for got, expected in zip(network.parameters(), reference.parameters(), strict=True):
        torch.nn.utils.clip_grad_norm_(expected, max_norm)
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-6)
        assert got.grad.norm() <= max_norm * (1 + 1e-5)
    assert live_hooks(network) == 0


def test_a_monitor_sees_gradients_before_they_are_clipped() -> None:
    network = build()
    x = torch.randn(6, 4)
    before, after = GradientMonitor(network), GradientMonitor(network)
    with before, clip_gradients(network, 1e-3), after:
        network(x).square().sum().backward()
        before.step()
        after.step()
    assert before.record().norms.max() > 1e-2
    assert np.array_equal(before.record().norms, after.record().norms)


def test_accumulated_gradients_are_clipped_as_a_sum() -> None:
    parameter = nn.Linear(4, 1, bias=False)
    with clip_gradients(parameter, 1.0):
        for _ in range(4):
            (5 * parameter(torch.ones(1, 4))).sum().backward()
            assert parameter.weight.grad is not None
            assert parameter.weight.grad.norm() <= 1 + 1e-6
    assert live_hooks(parameter) == 0
    with HookSet(parameter) as hooks, pytest.raises(LayerError, match="gets no gradient"):
        hooks.accumulated(nn.Parameter(torch.ones(1), requires_grad=False), print)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_limiting_keeps_the_dtype_and_leaves_small_gradients_alone(dtype: torch.dtype) -> None:
    small = torch.full((4,), 0.125, dtype=dtype)
    assert torch.equal(limit_norm(small, 1.0), small)
    large = torch.full((4,), 300.0, dtype=dtype)
    limited = limit_norm(large, 1.0)
    assert limited.dtype == dtype
    torch.testing.assert_close(limited.float(), torch.full((4,), 0.5), rtol=1e-2, atol=0)
    assert torch.equal(limit_norm(torch.zeros(3), 1.0), torch.zeros(3))
    assert torch.equal(limit_norm(large, float("inf")), large)


def test_senseless_settings_are_refused() -> None:
    network = build()
    for max_norm in (0.0, -1.0, float("nan")):
        with pytest.raises(LayerError, match="norm above 0"):
            clip_gradients(network, max_norm)
    frozen = copy.deepcopy(network).requires_grad_(False)
    with pytest.raises(LayerError, match="requires_grad"):
        GradientMonitor(frozen)
    with pytest.raises(LayerError, match="requires_grad"):
        clip_gradients(network, 1.0, nn.ReLU)
    assert live_hooks(network) == 0


def test_sparse_and_complex_gradients() -> None:
    network = nn.Embedding(10, 3, sparse=True)
    with GradientMonitor(network) as monitor, clip_gradients(network, max_norm=0.5):
        network(torch.tensor([1, 1, 4])).sum().backward()
        monitor.step()
    assert monitor.record().norms.item() == pytest.approx((3 * 4 + 3) ** 0.5)
    assert network.weight.grad is not None
    assert network.weight.grad.to_dense().norm().item() == pytest.approx(0.5)
    limited = limit_norm(torch.tensor([3 + 4j, 0j]), 1.0)
    torch.testing.assert_close(limited, torch.tensor([0.6 + 0.8j, 0j]))


def test_lazy_layers_are_watched_once_they_have_weights() -> None:
    network = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(LayerError, match="'0' has no weights before its first pass"):
        clip_gradients(network, max_norm=1.0)
    network(torch.ones(1, 3))
    with clip_gradients(network, max_norm=1.0):
        pass
