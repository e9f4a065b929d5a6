from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anomaly.errors import AnomalyError
from anomaly.explain.saliency import feature_map_pictures, grad_cam, image_gradient, saliency_map
from anomaly.hooks import live_hooks
from anomaly.scoring.model import image_scores, network_map


def build(seed: int, inplace: bool = False) -> tuple[nn.Sequential, nn.Sequential, nn.Sequential]:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 2))
    head = nn.Sequential(nn.ReLU(inplace), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5))
    return nn.Sequential(body, head).eval(), body, head


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    inplace=st.booleans(),
    target=st.one_of(st.none(), st.integers(0, 4)),
    size=st.tuples(st.integers(9, 20), st.integers(9, 20)),
)
def test_grad_cam_equals_its_formula_on_a_network_cut_in_two(
    seed: int, inplace: bool, target: int | None, size: tuple[int, int]
) -> None:
    network, body, head = build(seed, inplace)
    image = torch.randn(3, *size)
    cam = grad_cam(network, image, "[0][-1]", target)
    assert cam.shape == size
    assert cam.dtype == np.float32
    assert live_hooks(network) == 0
    assert all(p.grad is None for p in network.parameters())

    maps = body(image[None]).detach().requires_grad_()
    logits = head(maps.clone())[0]
    (gradient,) = torch.autograd.grad(logits[logits.argmax() if target is None else target], maps)
    a, g = maps.detach().numpy()[0], gradient.numpy()[0]
    evidence = np.maximum(sum(g[k].mean() * a[k] for k in range(6)), 0)
    coarse = torch.from_numpy(evidence)[None, None]
    expected = nn.functional.interpolate(coarse, size, mode="bilinear")[0, 0].numpy()
    expected = expected / max(expected.max(), 1e-30)
    np.testing.assert_allclose(cam, expected, atol=1e-4)
    assert cam.max() == pytest.approx(1) or not cam.any()


def test_frozen_networks_no_grad_and_half_the_digits_make_no_difference() -> None:
    network, _, _ = build(3)
    image = torch.randn(3, 12, 12)
    expected = grad_cam(network, image, "0", 1)
    network.requires_grad_(False)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            np.testing.assert_array_equal(grad_cam(network, image.clone(), "0", 1), expected)
    found = grad_cam(network.bfloat16(), image, "0", 1)
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert feature_map_pictures(network, image, ["0"]).keys() == {"0"}


class Permuted(nn.Module):
    """Orders the axes of its input anew."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


def test_maps_in_swins_order_are_taken_as_they_lie() -> None:
    network, body, head = build(3)
    swapped = nn.Sequential(body, Permuted(0, 2, 3, 1), nn.Sequential(Permuted(0, 3, 1, 2), *head))
    swapped.eval()
    for size in ((64, 64), (64, 96)):
        image = torch.randn(3, *size)
        expected = grad_cam(network, image, "[0]", 1)
        np.testing.assert_allclose(grad_cam(swapped, image, "[1]", 1), expected, atol=1e-6)
        drawn = feature_map_pictures(swapped, image, ["0", "1"])
        np.testing.assert_array_equal(drawn["0"][30:], drawn["1"][30:])  # below their names


@pytest.mark.parametrize(
    ("layer", "target", "says"),
    [
        ("1[2]", 0, r"'1.2' puts out shape .* not a feature map"),
        ("1.*", 0, r"looks at one map, and '1\.\*' names 4: 1\.0, 1\.1"),
        ("head", 0, "no layer 'head'"),
        *(("0", target, "the network has 0 to 4") for target in (-1, 5, 1.5, "cat")),
    ],
)
def test_what_grad_cam_cannot_explain_is_said(layer: str, target: Any, says: str) -> None:
    network, body, _ = build(0)
    image = torch.randn(3, 12, 12)
    with pytest.raises(AnomalyError, match=says):
        grad_cam(network, image, layer, target)
    with pytest.raises(AnomalyError, match=r"puts out \(1, classes\), not \(1, 6,"):
        grad_cam(body, image, "0")
    assert live_hooks(network) == live_hooks(body) == 0


EXPLAINERS: list[Callable[[nn.Module, Any], object]] = [
    lambda network, image: grad_cam(network, image, "[0]"),
    lambda network, image: feature_map_pictures(network, image, ["[0]"]),
]


@pytest.mark.parametrize("explain", EXPLAINERS)
def test_what_cannot_be_explained_is_refused_and_stays_as_it_is(
    explain: Callable[[nn.Module, Any], object],
) -> None:
    network, body, _ = build(0)
    for image, says in (
        (np.zeros((3, 16, 16), np.float32), "the image is a ndarray: give one image as a tensor"),
        (torch.zeros(1, 3, 16, 16), r"float32, shape \(1, 3, 16, 16\): give one image"),
        (torch.zeros(16, 16), r"shape \(16, 16\): give one image"),
        (torch.zeros(3, 16, 16, dtype=torch.uint8), r"a Tensor of uint8, .* \(3, H, W\) of floats"),
        (torch.full((3, 16, 16), torch.nan), "holds NaN or infinite values"),
    ):
        with pytest.raises(AnomalyError, match=says):
            explain(network, image)
    before = [t.clone() for t in body.buffers()]
    with pytest.raises(AnomalyError, match=r"in train mode.* call model.eval\(\)"):
        explain(network.train(), torch.rand(3, 16, 16))
    assert all(map(torch.equal, before, body.buffers()))


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
