from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from anomaly.errors import AnomalyError
from anomaly.explain.saliency import image_gradient, saliency_map
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
