from __future__ import annotations

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anomaly.errors import LayerError
from anomaly.hooks import capture, live_hooks, match, resolve


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    return torchvision.models.resnet18(weights=None)


def test_both_forms_of_a_path_give_the_printed_one(resnet: nn.Module) -> None:
    for path, expected in (
        ("layer1[-1]", "layer1.1"),
        ("layer1[0].conv2", "layer1.0.conv2"),
        ("layer2[-2].downsample[0]", "layer2.0.downsample.0"),
        ("layer2.0.downsample[-1]", "layer2.0.downsample.1"),
        ("[0]", "conv1"),
    ):
        assert resolve(resnet, path) == (expected, resnet.get_submodule(expected))


def test_an_unknown_path_lists_the_nearest_names(resnet: nn.Module) -> None:
    unknown = ["layer9", "layer1.", ".layer1", "layer1..0", "layer1[2]", "layer1[-3]", "layer1[0"]
    unknown += ["layer1]0", "layer1[x]", "layer1.[0]", "conv1.weight", "layer1[0]conv1", "layer1 "]
    for path in [*unknown, ".[0]", "[]", "."]:
        with pytest.raises(LayerError, match=r"ResNet has no layer .*(did you mean|known:)"):
            resolve(resnet, path)
    with pytest.raises(LayerError, match=r"did you mean .*'layer3.1.conv1'"):
        resolve(resnet, "layer3.1.conv")


def test_indices_count_a_module_that_is_used_twice_each_time() -> None:
    relu = nn.ReLU()
    network = nn.Sequential(relu, nn.Identity(), relu)
    assert resolve(network, "[2]") == ("2", relu)
    assert resolve(network, "[-3]") == ("0", relu)


def test_globs_stay_within_a_level_unless_doubled(resnet: nn.Module) -> None:
    assert match(resnet, "layer?") == ["layer1", "layer2", "layer3", "layer4"]
    assert match(resnet, "layer*") == match(resnet, "layer?")
    stems = [f"layer{i}.0.conv{j}" for i in range(1, 5) for j in (1, 2)]
    assert match(resnet, "layer*.0.conv?") == stems
    below = [name for name, _ in resnet.named_modules() if name.startswith("layer2.")]
    assert match(resnet, "layer2.**") == below


def test_types_and_paths_match_in_the_networks_order(resnet: nn.Module) -> None:
    convolutions = [n for n, m in resnet.named_modules() if type(m) is nn.Conv2d]
    assert match(resnet, nn.Conv2d) == convolutions
    assert match(resnet, "layer1[-1]") == ["layer1.1"]


def test_a_pattern_without_a_match_is_an_error(resnet: nn.Module) -> None:
    for pattern in ("layer*.9", "x?", nn.LSTM):
        with pytest.raises(LayerError, match=r"did you mean|known:"):
            match(resnet, pattern)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    if depth == 0 or draw(st.booleans()):
        return nn.Identity()
    children = draw(st.lists(trees(depth - 1), min_size=1, max_size=3))
    if draw(st.booleans()):
        return nn.Sequential(*children)
    names = ["stem", "layer1", "head"]
    return nn.ModuleDict(dict(zip(names, children, strict=False)))


@given(trees())
def test_every_printed_path_and_its_index_form_resolve_to_its_module(tree: nn.Module) -> None:
    for name, module in tree.named_modules():
        assert resolve(tree, name) == (name, module)
        assert match(tree, name) == [name]
        steps, parent = [], tree
        for part in name.split(".") if name else []:
            siblings = [key for key, _ in parent.named_children()]
            steps.append(siblings.index(part))
            parent = parent.get_submodule(part)
        assert resolve(tree, "".join(f"[{i}]" for i in steps)) == (name, module)


def test_live_hooks_counts_pytorchs_own_tables() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert live_hooks(network) == 0
    handles = [
        network[0].register_forward_hook(lambda *_: None),
        network[0].register_forward_pre_hook(lambda *_: None),
        network[1].register_full_backward_hook(lambda *_: None),
        network[1].register_full_backward_pre_hook(lambda *_: None),
        network.register_forward_hook(lambda *_: None),
        network[0].weight.register_hook(lambda _: None),
        network[0].bias.register_post_accumulate_grad_hook(lambda _: None),
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ]
    for left in range(len(handles), 0, -1):
        assert live_hooks(network) == left
        handles.pop().remove()
    assert live_hooks(network) == 0


def test_a_layer_instead_of_its_path_is_told_the_path(resnet: nn.Module) -> None:
    for layers in (resnet.layer1, [resnet.layer1]):
        with pytest.raises(LayerError, match="give the path of this Sequential: 'layer1'"):
            capture(resnet, layers)  # type: ignore[arg-type]
    for find in (match, resolve):
        with pytest.raises(LayerError, match="give the path of this Conv2d: 'conv1'"):
            find(resnet, resnet.conv1)  # type: ignore[arg-type, operator]
        with pytest.raises(LayerError, match="this ReLU, which ResNet doesn't hold"):
            find(resnet, nn.ReLU())  # type: ignore[arg-type, operator]
