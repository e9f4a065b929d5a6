from __future__ import annotations

import copy
import pickle
import threading
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anomaly.errors import LayerError
from anomaly.hooks import HookSet, capture, live_hooks

LAYERS = {
    "conv": lambda: nn.Conv2d(3, 3, 3, padding=1),
    "norm": lambda: nn.BatchNorm2d(3),
    "relu": lambda: nn.ReLU(inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "gelu": lambda: nn.GELU(),
}
NETWORKS = st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=7)

# An activation may work in place only behind a layer that doesn't need its own output again.
TRAINABLE = st.lists(
    st.tuples(
        st.sampled_from(["conv", "norm"]), st.sampled_from(["relu", "relu6", "hardswish", "gelu"])
    ),
    min_size=1,
    max_size=3,
).map(lambda blocks: [kind for block in blocks for kind in block])


def build(kinds: list[str]) -> nn.Sequential:
    torch.manual_seed(len(kinds))
    return nn.Sequential(*(LAYERS[kind]() for kind in kinds)).eval()


def by_hand(network: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Each layer's output, computed without hooks and safe from the in-place layers behind it."""
    outputs = []
    for layer in network:
        x = layer(x.clone())
        outputs.append(x.clone())
    return outputs


@settings(max_examples=25)
@given(kinds=NETWORKS, data=st.data())
def test_captured_values_equal_a_forward_pass_by_hand(
    kinds: list[str], data: st.DataObject
) -> None:
    network = build(kinds)
    wanted = data.draw(st.sets(st.integers(0, len(kinds) - 1), min_size=1))
    stop = data.draw(st.booleans())
    x = torch.randn(2, 3, 5, 5)
    outputs = by_hand(network, x)
    mode = data.draw(st.sampled_from([torch.no_grad, torch.enable_grad, torch.inference_mode]))
    with mode(), capture(network, [str(i) for i in wanted], stop=stop) as captured:
        result = captured.run(x.clone())
        maps = captured.pop()
    assert list(maps) == [str(i) for i in wanted]
    for i in wanted:
        torch.testing.assert_close(maps[str(i)], outputs[i], rtol=0, atol=0)
    if stop:
        assert result is None
    else:
        torch.testing.assert_close(result, outputs[-1], rtol=0, atol=0)
    assert live_hooks(network) == 0


@settings(max_examples=25)
@given(kinds=TRAINABLE, data=st.data())
def test_gradients_of_captured_tensors_equal_autograd(
    kinds: list[str], data: st.DataObject
) -> None:
    network = build(kinds)
    i = data.draw(st.integers(0, len(kinds) - 1))
    x = torch.randn(2, 3, 5, 5)
    with capture(network, str(i), grad=True) as captured:
        result = captured.run(x.clone().requires_grad_() * 1)
        hidden = captured.pop()[str(i)]
    (got,) = torch.autograd.grad(result.square().sum(), hidden)

    start = by_hand(network, x)[i].detach().requires_grad_()
    y = start
    for layer in network[i + 1 :]:
        y = layer(y.clone())
    (expected,) = torch.autograd.grad(y.square().sum(), start)
    torch.testing.assert_close(got, expected)
    assert live_hooks(network) == 0


def test_nothing_behind_the_last_wanted_layer_runs() -> None:
    ran = []
    network = nn.Sequential(*(nn.Identity() for _ in range(5)))
    for i, layer in enumerate(network):
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    with capture(network, ["2", "0"], stop=True) as captured:
        assert captured.run(torch.zeros(1)) is None
        assert ran == [0, 1, 2]
        captured.run(torch.zeros(1))
        assert ran == [0, 1, 2] * 2


def test_calling_the_network_itself_under_an_early_stop_is_an_error() -> None:
    network, x = build(["conv", "relu", "conv"]), torch.zeros(1, 3, 4, 4)
    with capture(network, "1", stop=True) as captured:
        for _ in range(2):
            with pytest.raises(LayerError, match=r"call captured\.run"):
                network(x)
            captured.run(x)
        assert captured.pop()["1"].shape == (1, 3, 4, 4)
    assert live_hooks(network) == 0


def test_copies_of_a_hooked_network_carry_no_hooks() -> None:
    network = build(["conv", "relu", "conv"])
    x = torch.randn(1, 3, 4, 4)
    expected = network(x)
    with capture(network, "1", stop=True) as captured:
        copies = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
        for twin in copies:
            assert live_hooks(twin) == 0
            torch.testing.assert_close(twin(x), expected)
        with pytest.raises(LayerError, match="didn't run"):
            captured.pop()


def test_nested_captures_stop_where_each_one_wants() -> None:
    network = build(["conv", "relu", "conv", "norm"])
    x = torch.randn(1, 3, 4, 4)
    expected = by_hand(network, x)
    with capture(network, "2", stop=True) as outer:
        with capture(network, "0", stop=True) as inner:
            assert inner.run(x) is None
            torch.testing.assert_close(inner.pop()["0"], expected[0])
        assert live_hooks(network) == 1
        outer.run(x)
        torch.testing.assert_close(outer.pop()["2"], expected[2])
    assert live_hooks(network) == 0


def test_it_is_open_once_runs_only_then_and_is_empty_once_read() -> None:
    network = build(["conv", "relu"])
    with capture(network, ["0", "1"]) as captured:
        with pytest.raises(LayerError, match="already open"):
            captured.__enter__()
        assert live_hooks(network) == 2
        captured.run(torch.zeros(1, 3, 4, 4))
        assert set(captured.pop()) == {"0", "1"}
        with pytest.raises(LayerError, match="'0', '1' didn't run"):
            captured.pop()
    with pytest.raises(LayerError, match="nothing is hooked"):
        captured.run(torch.zeros(1))


def test_without_clone_an_overwritten_output_is_an_error_and_others_are_not_copied() -> None:
    network = nn.Sequential(nn.Identity(), nn.Identity(), nn.ReLU(inplace=True))
    x = torch.randn(1, 3)
    with torch.no_grad(), capture(network, "0", clone=False) as captured:
        captured.run(x)
        with pytest.raises(LayerError, match="'0' was overwritten in place"):
            captured.pop()
    with torch.no_grad(), capture(network[:2], "0", clone=False) as captured:
        captured.run(x)
        assert captured.pop()["0"].data_ptr() == x.data_ptr()


def test_policies_change_device_dtype_and_kind() -> None:
    network = build(["conv", "relu"])
    x = torch.randn(2, 3, 4, 4)
    expected = by_hand(network, x)[0]
    with capture(network, "0", device="cpu", dtype=torch.bfloat16) as captured:
        captured.run(x)
        kept = captured.pop()["0"]
        assert kept.dtype == torch.bfloat16
        assert not kept.requires_grad
        captured.run(x)
        array = captured.pop_numpy()["0"]
    assert isinstance(array, np.ndarray)
    np.testing.assert_array_equal(array, expected.detach().bfloat16().float().numpy())
    pooling = nn.Sequential(nn.MaxPool2d(2, return_indices=True))  # indices stay exact
    with capture(pooling, "0", dtype=torch.float16) as captured:
        pooling(torch.randn(1, 1, 128, 128))
        assert [v.dtype for v in captured.pop().values()] == [torch.float16, torch.int64]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_calls_of_one_module_are_told_apart() -> None:
    network, inputs = Twice(), [torch.randn(2, 4), torch.randn(2, 4)]
    by_hand = []
    for x in inputs:
        by_hand += [network.layer(x), network.layer(network.layer(x))]
    for keep, expected in ((1, 1), (3, 3), (None, 4)):
        with capture(network, "layer", keep=keep) as captured:
            for x in inputs:
                captured.run(x)
            calls = captured.pop_calls()["layer"]
        assert len(calls) == expected
        for got, want in zip(reversed(calls), reversed(by_hand), strict=False):
            torch.testing.assert_close(got, want)


def test_memory_is_bounded() -> None:
    network = nn.Sequential(nn.Identity())
    x = torch.zeros(256)
    with capture(network, "0", keep=None, max_bytes=3 * x.nbytes) as captured:
        for _ in range(3):
            captured.run(x)
        with pytest.raises(LayerError, match="take 4096 bytes, more than max_bytes=3072"):
            captured.run(x)
    with capture(network, "0", keep=3, max_bytes=3 * x.nbytes) as captured:
        for _ in range(10):
            captured.run(x)
        assert len(captured.pop_calls()["0"]) == 3


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def put_out(x: Tensor, kind: str) -> object:
    return {
        "dict": {"out": x, "aux": {"low": x + 1}, "note": "not a tensor"},
        "keys": {"a.b": x, "a": {"b": x}, "c": {"0": x, 0: x}, "'a": x, "": x},
        "list": [x, None, x + 2],
        "default dict": defaultdict(list, out=x),
        "named tuple": Pair(x, x + 3),
        "none": None,
    }[kind]


class Several(nn.Module):
    def forward(self, x: Tensor, kind: str) -> object:
        return put_out(x, kind)


def test_outputs_of_several_tensors_have_a_name_each() -> None:
    network, x = nn.ModuleList([Several()]), torch.ones(2, requires_grad=True)
    named = {
        "dict": ["0:out", "0:aux.low"],
        "keys": ["0:'a.b'", "0:a.b", "0:c.0", "0:c.[0]", '0:"\'a"', "0:''"],
        "list": ["0:0", "0:2"],
        "default dict": ["0:out"],
        "named tuple": ["0:0", "0:1"],
    }
    for kind, names in named.items():
        for grad in (False, True):
            with capture(network, "0", grad=grad) as captured:
                output = network[0](x, kind=kind)
                values = captured.pop()
            assert list(values) == names
            assert type(output) is type(put_out(x, kind))
            assert all(value.requires_grad == grad for value in values.values())
    with capture(network, "0"), pytest.raises(LayerError, match="'0' put out NoneType"):
        network[0](x, kind="none")


def test_senseless_options_are_refused() -> None:
    network = build(["conv"])
    for options, says in (
        *(({"grad": True, key: value}, "grad=True keeps the very tensor")
          for key, value in (("dtype", torch.float16), ("device", "cpu"), ("clone", False))),
        ({"keep": 0}, "keep at least"),
        ({"dtype": "float16"}, "give one of torch's"),
        *(({"device": device}, "is no device") for device in ("gpu", [])),
    ):  # fmt: skip
        with pytest.raises(LayerError, match=says):
            capture(network, "0", **options)  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="name at least one"):
        capture(network, [])
    refused = pytest.raises(LayerError, match="needs autograd")
    with torch.no_grad(), refused, capture(network, "0", grad=True) as captured:
        captured.run(torch.zeros(1, 3, 4, 4))


def test_forward_passes_of_other_threads_are_not_heard() -> None:
    network = build(["conv", "relu"])
    x = torch.zeros(1, 3, 4, 4)
    with capture(network, "0", stop=True) as captured:
        outputs: list[Tensor] = []
        thread = threading.Thread(target=lambda: outputs.append(network(x)))
        thread.start()
        thread.join()
        assert len(outputs) == 1
        with pytest.raises(LayerError, match="didn't run"):
            captured.pop()


def test_compiled_and_replicated_networks_are_refused_with_a_reason() -> None:
    network = build(["conv", "relu"])
    compiled = torch.compile(network)
    with pytest.raises(LayerError, match="is compiled"):
        capture(compiled, "_orig_mod.0")
    inner = nn.Sequential(nn.Identity(), build(["conv"]))
    inner[1].compile()
    capture(inner, "0")
    with pytest.raises(LayerError, match="layer '1' of Sequential is compiled"):
        capture(inner, "1.0")
    parallel = nn.DataParallel(network)
    parallel.device_ids = [0, 1]
    with pytest.raises(LayerError, match="copied to 2 GPUs"):
        capture(parallel, "module.0")


def test_a_compiled_network_does_not_run_past_hooks() -> None:
    network = build(["conv", "relu"])
    compiled = torch.compile(network, backend="eager")
    x = torch.zeros(1, 3, 4, 4)
    compiled(x)
    ran: list[int] = []
    refused = pytest.raises(LayerError, match="this network is compiled")
    with capture(network, "0"), refused:
        compiled(x)
    for how in ("forward", "forward_pre", "backward"):
        with HookSet(network) as hooks:
            getattr(hooks, how)("0", lambda *_: ran.append(1))
            with refused:
                compiled(x)
    assert compiled(x).shape == (1, 3, 4, 4)
    # What the message and the documentation advise.
    with HookSet(compiled._orig_mod) as hooks, capture(compiled._orig_mod, "0") as captured:
        hooks.forward("0", lambda *_: ran.append(2))
        captured.run(x)
        assert captured.pop()["0"].shape == (1, 3, 4, 4)
    assert ran == [2]
    with capture(build(["conv"]), "0"):
        compiled(x)  # nothing of it is hooked
    torch.compiler.reset()


def test_the_last_layer_is_copied_too() -> None:
    """Its output may be the caller's own buffer."""
    buffer, network = torch.zeros(2), nn.Sequential(nn.Identity())
    for stop in (False, True):
        with torch.inference_mode(), capture(network, "0", stop=stop, keep=None) as captured:
            for value in range(3):
                captured.run(buffer.fill_(value))
            assert [one[0].item() for one in captured.pop_calls()["0"]] == [0, 1, 2]


def test_a_layer_under_two_names_is_refused() -> None:
    linear = nn.Linear(2, 2)
    network = nn.ModuleDict({"a": linear, "b": linear})
    with pytest.raises(LayerError, match="'a' and 'b' are one layer under two names"):
        capture(network, ["a", "b"])
    with capture(network, ["a", "a"]):
        pass
