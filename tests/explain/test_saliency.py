from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anomaly.errors import AnomalyError, LayerError
from anomaly.explain.saliency import guided_backpropagation, image_gradient, saliency_map
from anomaly.hooks import live_hooks
from anomaly.scoring.image_score import image_scores, network_map


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda batch: batch.detach().sum(), "doesn't depend on the image"),
        (lambda batch: batch.max().item(), "doesn't depend on the image"),
        (lambda batch: nn.Parameter(torch.ones(1)).sum(), "doesn't depend on the image"),
        (lambda batch: batch.sum(dim=(0, 1, 2)), r"shape \(2,\), not one number"),
    ],
)
def test_scores_without_a_gradient_are_refused(score: object, message: str) -> None:
    with pytest.raises(AnomalyError, match=message):
        image_gradient(score, torch.zeros(3, 2, 2))


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), inplace=st.booleans(), shared=st.booleans())
def test_guided_backpropagation_equals_its_definition(
    seed: int, inplace: bool, shared: bool
) -> None:
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    first = nn.ReLU(inplace)
    second = first if shared else nn.ReLU6(inplace)
    network = nn.Sequential(
        convolutions[0], first, convolutions[1], second, nn.BatchNorm2d(3).eval(), convolutions[2]
    )
    image = torch.randn(3, 4, 5) * 3
    got = guided_backpropagation(network, lambda batch: network(batch).sum(), image)
    assert live_hooks(network) == 0

    # By hand, layer by layer: R_l = (f_l > 0) · (R_{l+1} > 0) · R_{l+1}
    inputs, x = [], image[None]
    for layer in network:
        inputs.append(x)
        x = layer(x.clone()).detach()
    flow = torch.ones_like(x)
    for layer, before in zip(reversed(network), reversed(inputs), strict=True):
        if isinstance(layer, nn.ReLU | nn.ReLU6):
            passes = (before > 0) & (before < (6 if isinstance(layer, nn.ReLU6) else torch.inf))
            flow = flow.clamp(min=0) * passes
        else:
            leaf = before.clone().requires_grad_()
            (flow,) = torch.autograd.grad(layer(leaf), leaf, flow)
    torch.testing.assert_close(got, flow[0])


def test_guided_backpropagation_needs_relu_layers() -> None:
    with pytest.raises(LayerError, match="Sequential has none"):
        guided_backpropagation(
            nn.Sequential(nn.GELU()), lambda batch: batch.sum(), torch.ones(3, 1, 1)
        )


def test_saliency_is_the_largest_absolute_gradient_of_the_colours() -> None:
    gradient = torch.zeros(3, 20, 20)
    gradient[0, 3, 4], gradient[2, 3, 4], gradient[1, 7, 8] = 1.0, -4.0, 2.0
    saliency = saliency_map(gradient)
    assert np.argwhere(saliency).tolist() == [[3, 4], [7, 8]]
    assert saliency[3, 4] == 1.0
    assert not saliency_map(torch.zeros(3, 4, 4)).any()


@pytest.mark.parametrize("how", ["map_top_percent", "map_max"])
def test_what_is_not_looked_at_has_no_gradient_and_spoils_none(how: str) -> None:
    """Far outside the patches that count, the map's weights are 0."""
    scores = torch.rand(1, 16, 16, dtype=torch.float64).float().requires_grad_()
    inside = torch.zeros(1, 16, 16, dtype=torch.bool)
    inside[:, 2:6, 2:6] = True
    maps = network_map(scores, (128, 128), 4.0, inside)
    assert maps.isnan().sum() == 128 * 128 - 32 * 32
    (gradient,) = torch.autograd.grad(image_scores(scores, maps, how).sum(), scores)
    assert gradient.isfinite().all()
    assert gradient[inside].abs().sum() > 0
    assert (gradient[~inside] == 0).all()
