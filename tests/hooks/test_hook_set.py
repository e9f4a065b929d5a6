from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from anomaly.errors import LayerError
from anomaly.hooks import HookSet, capture, live_hooks

ACTIVATIONS = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish, "silu": nn.SiLU}


class Block(nn.Module):
    """Convolution, batch norm, in-place activation, in-place residual: all the traps at once."""

    def __init__(self, activation: str, residual: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.act = ACTIVATIONS[activation](inplace=True)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(self.act(self.norm(self.conv(x)))))
        if self.residual:
            y += x
        return self.act(y)


NETWORKS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIVATIONS)), st.booleans()), min_size=1, max_size=3
)


def build(blocks: list[tuple[str, bool]]) -> nn.Sequential:
    torch.manual_seed(len(blocks))
    return nn.Sequential(*(Block(*block) for block in blocks)).eval()


def without_inplace(network: nn.Sequential, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(input, output) of each block, written out by hand."""
    pairs = []
    for block in network:
        assert isinstance(block, Block)
        act = type(block.act)()
        y = block.norm(block.conv(act(block.norm(block.conv(x)))))
        out = act(y + x if block.residual else y)
        pairs.append((x, out))
        x = out
    return pairs


@settings(max_examples=20)
@given(blocks=NETWORKS)
def test_backward_hooks_see_the_gradients_of_autograd(blocks: list[tuple[str, bool]]) -> None:
    network = build(blocks)
    x = torch.randn(2, 2, 4, 4, requires_grad=True)
    seen: dict[str, list[Any]] = {}

    def record(
        module: nn.Module, grad_input: Any, grad_output: Any, path: str, *, into: dict[str, Any]
    ) -> None:
        into[path] = [grad_input, grad_output]

    with HookSet(network) as hooks:
        for i in range(len(blocks)):
            hooks.backward(str(i), record, str(i), into=seen)
        hooks.backward(nn.BatchNorm2d, lambda *_: None)
        network(x).square().sum().backward()
    assert live_hooks(network) == 0

    pairs = without_inplace(network, x)
    loss = pairs[-1][1].square().sum()
    for i, (inputs, output) in enumerate(pairs):
        grad_in, grad_out = torch.autograd.grad(loss, [inputs, output], retain_graph=True)
        torch.testing.assert_close(seen[str(i)][1], (grad_out,))
        # An in-place residual reaches the block's input by two ways; a full hook sees their sum.
        through = torch.autograd.grad(output, inputs, grad_out, retain_graph=True)
        torch.testing.assert_close(seen[str(i)][0], through)
        if i == 0:
            torch.testing.assert_close(x.grad, grad_in)


@pytest.mark.parametrize(
    "name", ["mobilenet_v3_small", "densenet121", "swin_t", "timm/tf_efficientnet_lite0"]
)
def test_backward_hooks_on_every_layer_of_a_network_change_nothing(name: str) -> None:
    torch.manual_seed(0)
    if name.startswith("timm/"):
        network = timm.create_model(name.removeprefix("timm/"), num_classes=4).eval()
    else:
        network = torchvision.models.get_model(name, num_classes=4).eval()
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    gradients = partial(torch.autograd.grad, inputs=[x, *network.parameters()])
    expected = gradients(network(x).square().sum())
    called: set[nn.Module] = set()
    fired: list[nn.Module] = []
    with HookSet(network) as hooks:
        hooks.forward(nn.Module, lambda module, *_: called.add(module))
        hooks.backward(nn.Module, lambda module, *_: fired.append(module))
        hooks.backward_pre(nn.Module, lambda *_: None)
        got = gradients(network(x).square().sum())
    torch.testing.assert_close(got, expected)
    assert set(fired) == called
    assert live_hooks(network) == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_forward_hooks_get_extra_arguments_and_replace_inputs_and_outputs(mode: Any) -> None:
    network, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 3)

    def blend(module: nn.Module, inputs: Any, output: Tensor, layers: float, *, hook: float) -> Any:
        """Extra arguments may have any name."""
        return output * layers + hook

    with mode(), HookSet(network) as hooks:
        hooks.forward("[0]", blend, 2.0, hook=1.0)
        hooks.forward_pre("0", lambda module, inputs, by: inputs[0] + by, 1.0)
        got = network(x)
    torch.testing.assert_close(got, network[1](network[0](x + 1) * 2.0 + 1.0))


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, scale: Any = 1.0, note: str = "") -> Tensor:
        return x * scale


def test_hooks_with_kwargs_see_and_replace_keyword_arguments() -> None:
    network = nn.ModuleDict({"scaled": Scaled()})
    seen = []

    def see(module: nn.Module, inputs: Any, kwargs: Any, output: Tensor, note: str) -> None:
        seen.append((kwargs, note))

    def replace(module: nn.Module, inputs: Any, kwargs: dict[str, Any], to: float) -> Any:
        return inputs, {**kwargs, "scale": to}

    with HookSet(network) as hooks:
        hooks.forward("scaled", see, "note", with_kwargs=True)
        hooks.forward_pre("scaled", replace, with_kwargs=True, to=5.0)
        assert network["scaled"](torch.ones(1), scale=3.0).item() == 5.0
    assert seen == [({"scale": 5.0}, "note")]
    assert network["scaled"](torch.ones(1), scale=3.0).item() == 3.0


def test_backward_hooks_clip_and_scale_what_flows_on() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = torch.randn(4, 3, requires_grad=True)
    (plain,) = torch.autograd.grad(network(x).sum(), x)
    with HookSet(network) as hooks:
        hooks.backward("1", lambda module, gi, go, by: tuple(g * by for g in gi), 0.5)
        (scaled,) = torch.autograd.grad(network(x).sum(), x)
    torch.testing.assert_close(scaled, plain * 0.5)
    with HookSet(network) as hooks:
        hooks.backward_pre("2", lambda module, go: (go[0] * 3,))
        weight, (tripled,) = network[2].weight, torch.autograd.grad(network(x).sum(), x)
        got = torch.autograd.grad(network(x).sum(), weight)[0]
    torch.testing.assert_close(tripled, plain * 3)
    torch.testing.assert_close(got, torch.autograd.grad(network(x).sum(), weight)[0] * 3)


def test_tensor_hooks_replace_gradients_and_are_removed() -> None:
    x = torch.ones(3, requires_grad=True)
    network = nn.Linear(3, 1)
    with HookSet(network) as hooks:
        hooks.tensor(x, torch.clamp, -0.01, max=0.01)
        hooks.tensor(network.weight, lambda grad: grad * 2)
        assert live_hooks(network) == 1
        network(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() <= 0.01
    torch.testing.assert_close(network.weight.grad, torch.full((1, 3), 2.0))
    assert live_hooks(network) == 0
    assert not x._backward_hooks
    with HookSet(network) as hooks, pytest.raises(LayerError, match="takes no part"):
        hooks.tensor(torch.zeros(2), torch.clone)


def register(hooks: HookSet, event: Any, layers: Any, everywhere: bool, hook: Any) -> None:
    if everywhere:
        hooks.everywhere(event, hook)
    else:
        getattr(hooks, event)(layers, hook)


IN_PLACE = {
    "forward": lambda module, inputs, output: output.mul_(2),
    "forward_pre": lambda module, inputs: inputs[0].mul_(2),
    "backward": lambda module, grad_input, grad_output: (grad_input[0].mul_(2),),
    "backward_pre": lambda module, grad_output: (grad_output[0].mul_(2),),
}


@pytest.mark.parametrize("event", IN_PLACE)
def test_a_hook_that_changes_a_tensor_in_place_is_refused(event: Any) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    x = torch.ones(2, 3, requires_grad=True) * 1
    for everywhere in (False, True):
        with HookSet(network) as hooks:
            register(hooks, event, "0", everywhere, IN_PLACE[event])
            with pytest.raises(LayerError, match="lambda> changed a tensor in place"):
                network(x).square().sum().backward()
    with HookSet(network) as hooks:
        hooks.tensor(x, lambda grad: grad.mul_(2))
        with pytest.raises(LayerError, match="changed a tensor in place"):
            network(x).square().sum().backward()
    assert live_hooks(network) == 0


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return OrderedDict(low=x * 2, pair=(x * 3, [x * 4]))


class Reader(nn.Module):
    def forward(self, values: dict[str, Any]) -> Tensor:
        return values["low"].add_(values["pair"][0])


def test_backward_hooks_reach_inside_dicts_and_nested_tuples() -> None:
    """Of which the next module reads a part."""
    network = nn.Sequential(Nested(), Reader())
    x = torch.ones(2, requires_grad=True)
    seen = []
    with HookSet(network) as hooks:
        hooks.backward("0", lambda module, gi, go: seen.append((gi, go)))
        hooks.backward_pre("0", lambda module, go: tuple(g if g is None else 2 * g for g in go))
        network(x).sum().backward()
    ((grad_input, (low, first, second)),) = seen
    torch.testing.assert_close((low, first), (torch.full((2,), 2.0), torch.full((2,), 2.0)))
    assert second is None or not second.any()
    torch.testing.assert_close(grad_input, (torch.full((2,), 10.0),))


@pytest.mark.parametrize("event", ["forward", "forward_pre", "backward", "backward_pre"])
def test_global_hooks_fire_for_every_module_and_are_removed(event: Any) -> None:
    network = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU6(inplace=True)).eval()
    other = nn.Linear(2, 2)
    fired: list[nn.Module] = []

    def run() -> None:
        network(torch.zeros(1, 2, 3, 3, requires_grad=True)).sum().backward()
        other(torch.zeros(1, 2, requires_grad=True)).sum().backward()

    with HookSet(network) as hooks:
        with pytest.raises(LayerError, match=f"'{event}s'; did you mean '{event}'"):
            hooks.everywhere(f"{event}s", print)  # type: ignore[arg-type]
        (handle,) = hooks.everywhere(event, lambda module, *_: fired.append(module))
        run()
        assert live_hooks(other) > 0
        handle.remove()
        run()
    assert len(fired) == 4
    assert set(fired) == {network, network[0], network[1], other}
    assert live_hooks(network) == live_hooks(other) == 0


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failing = nn.Conv2d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.failing(x)
        except RuntimeError:
            return x * 1


def test_a_layer_that_failed_does_not_confuse_backward_hooks() -> None:
    network = nn.Sequential(Sometimes(), nn.Conv2d(2, 2, 1))
    fired = []
    x = torch.zeros(1, 2, 3, 3, requires_grad=True)
    with HookSet(network) as hooks, warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.backward(nn.Module, lambda module, gi, go: fired.append(type(module).__name__))
        network(x).sum().backward()
    assert fired == ["Conv2d", "Sometimes", "Sequential"]


@pytest.mark.parametrize("event", ["forward", "forward_pre", "backward", "backward_pre"])
def test_a_handle_removes_the_whole_hook_of_one_layer(event: str) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    called: list[nn.Module] = []
    with HookSet(network) as hooks:
        with pytest.raises(LayerError, match="no layer '7'"):
            getattr(hooks, event)(["0", "7"], lambda *_: None)
        assert live_hooks(network) == 0
        handles = getattr(hooks, event)("*", lambda module, *_: called.append(module))
        handles[1].remove()
        handles[1].remove()
        network(torch.zeros(1, 2, requires_grad=True)).sum().backward()
        assert len(called) == len(handles) - 1 == 2
        assert set(called) == {network[0], network[2]}
        before = live_hooks(network)
        with HookSet(network) as inner:
            inner.forward_pre("0", lambda *_: None)
            assert live_hooks(network) > before
        assert live_hooks(network) == before
        for handle in handles:
            handle.remove()
        assert live_hooks(network) == 0


class Breaking(nn.Module):
    """Raises in the forward or the backward pass, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.when = "never"

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ZeroDivisionError
        y = x * 1
        if self.when == "backward" and y.requires_grad:
            y.register_hook(lambda grad: 1 / 0)
        return y


@settings(max_examples=50)
@given(blocks=NETWORKS, data=st.data())
def test_no_hook_remains_after_any_path_and_the_network_is_as_before(
    blocks: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """Hooks of every kind, nested, some of them raising, in networks that may raise as well."""
    network, breaking = build(blocks), Breaking()
    network.append(breaking)
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    expected = network(x)
    breaking.when = data.draw(st.sampled_from(["never", "forward", "backward"]))
    events = st.sampled_from(["forward", "forward_pre", "backward", "backward_pre"])
    places = st.sampled_from(["*", "0", "[-1]", "**", nn.Conv2d, nn.Module, "missing"])
    plans = st.lists(st.tuples(events, places, st.booleans(), st.booleans()), max_size=5)
    captured = data.draw(st.none() | st.sampled_from(["0", "0.norm", nn.Conv2d]))
    stop, grad = data.draw(st.booleans()), data.draw(st.booleans())

    def act(*_: Any, fails: bool) -> None:
        if fails:
            raise KeyError

    errors = suppress(ZeroDivisionError, KeyError, LayerError)
    with errors, ExitStack() as stack:
        for event, layers, everywhere, fails in data.draw(plans):
            hooks = stack.enter_context(HookSet(network))
            register(hooks, event, layers, everywhere, partial(act, fails=fails))
        if captured is not None:
            opened = stack.enter_context(capture(network, captured, stop=stop, grad=grad))
            opened.run(x)
            opened.pop()
        network(x).sum().backward()
    assert live_hooks(network) == 0
    breaking.when = "never"
    torch.testing.assert_close(network(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("everywhere", [False, True])
def test_stopped_passes_leave_nothing_behind_in_backward_hooks(everywhere: bool) -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    x = torch.randn(2, 3, requires_grad=True)
    seen: list[int] = []
    with HookSet(network) as hooks:
        register(hooks, "backward", nn.Module, everywhere, lambda *_: seen.append(1))
        for _ in range(20):
            with capture(network, "2", stop=True) as captured:
                captured.run(x)
        assert sum(type(one) is BackwardHook for one in gc.get_objects()) < 14
        network(x).sum().backward()
        assert len(seen) == 13


def test_a_hook_that_cannot_be_called_is_told_when_it_is_registered() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def two(module: nn.Module, inputs: Any) -> None: ...

    def scaled(grad: Tensor, factor: float) -> Tensor:
        return grad * factor

    with HookSet(model) as hooks:
        weight = model[0].weight
        for register, says in (
            (lambda: hooks.forward("[0]", two), r"two\(module, inputs\) can't be called as two\(m"),
            (lambda: hooks.accumulated(weight, two), r"two\(parameter\): missing"),
            (lambda: hooks.tensor(weight, scaled), r"scaled\(grad\): missing .* 'factor'"),
            (lambda: hooks.tensor(weight, scaled, 2.0, factor=3.0), r"3.0\): multiple"),
            (lambda: hooks.everywhere("backward", two), r"grad_output\): too many"),
        ):
            with pytest.raises(LayerError, match=says):
                register()
        assert live_hooks(model) == 0
        hooks.forward_pre("[0]", two)
        hooks.tensor(model[0].weight, torch.mul, 2.0)
        hooks.tensor(model[0].weight, scaled, factor=2.0)
        with pytest.raises(LayerError, match=r"'\[0\]' is no tensor: give one"):
            hooks.tensor("[0]", scaled, 2.0)  # type: ignore[arg-type]


def test_backward_hooks_see_and_replace_gradients_of_keyword_inputs() -> None:
    network, x, factor = nn.Sequential(Scaled()), torch.tensor([2.0]), torch.tensor([3.0])
    x.requires_grad_(), factor.requires_grad_()
    seen: list[tuple[Tensor, ...]] = []

    def double(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_input)
        return tuple(2 * gradient for gradient in grad_input)

    with HookSet(network) as hooks:
        hooks.backward("0", double)
        network[0](x, scale=factor, note="a").backward()
    assert seen == [(torch.tensor([3.0]), torch.tensor([2.0]))]
    assert (x.grad, factor.grad) == (torch.tensor([6.0]), torch.tensor([4.0]))


class Answering(nn.Module):
    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=x * 2)


def test_an_output_whose_tensors_are_hidden_is_refused() -> None:
    network = nn.ModuleList([Answering()])
    said = "puts out SimpleNamespace, whose tensors aren't found: only tuples, lists and mappings"
    with HookSet(network) as hooks:
        hooks.backward("0", lambda module, grad_input, grad_output: None)
        with pytest.raises(LayerError, match=f"Answering {said}"):
            network[0](torch.ones(1, requires_grad=True))
    with capture(network, "0"), pytest.raises(LayerError, match=f"'0' {said}"):
        network[0](torch.ones(1))


def test_accumulated_gradients_are_seen_as_a_sum() -> None:
    layer = nn.Linear(4, 1, bias=False)
    with HookSet(layer) as hooks:
        hooks.accumulated(layer.weight, nn.utils.clip_grad_norm_, 1.0)
        for _ in range(4):
            (5 * layer(torch.ones(1, 4))).sum().backward()
            assert layer.weight.grad is not None
            assert layer.weight.grad.norm() <= 1 + 1e-6
        with pytest.raises(LayerError, match="gets no gradient"):
            hooks.accumulated(layer.weight * 2, lambda parameter: None)  # type: ignore[arg-type]
    assert live_hooks(layer) == 0


def test_a_scripted_child_is_named_and_can_be_left_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is on its way out
        scripted = torch.jit.script(nn.Sequential(nn.ReLU(), nn.Sigmoid()))
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sequential(scripted), nn.ReLU())
    ran: list[nn.Module] = []
    with HookSet(network) as hooks:
        with pytest.raises(LayerError, match=r"layer '1.0' of Sequential is scripted") as refused:
            hooks.forward(nn.Module, lambda *_: None)
        assert live_hooks(network) == 0
        assert "; or name the other layers" in str(refused.value)
        hooks.forward(["0", "2"], lambda module, *_: ran.append(module))
        network(torch.zeros(1, 3, 4, 4))
    assert ran == [network[0], network[2]]
    with pytest.raises(LayerError) as refused:  # who names it has no others to leave
        HookSet(network).forward("1.0", lambda *_: None)
    assert "the other layers" not in str(refused.value)
