"""Nearest centres by cells against all distances."""

import pytest
import torch

from anomaly.scorers.patchcore.assignment import Assignment


@pytest.mark.parametrize("count", [1, 50, 1023, 1024, 3000])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_finds_what_all_distances_find(count: int, offset: float) -> None:
    g = torch.Generator().manual_seed(count)
    spread = torch.rand(4000, 1, generator=g) * 5
    points = spread * torch.randn(4000, 16, generator=g) + offset
    centres = 3 * torch.randn(count, 16, generator=g) + offset
    found = Assignment(centres)(points)
    distances = torch.cdist(points.double(), centres.double())
    got = distances.gather(1, found[:, None])[:, 0]
    torch.testing.assert_close(got, distances.amin(1), rtol=1e-5, atol=1e-3 if offset else 1e-6)


def test_points_that_are_centres_find_themselves() -> None:
    centres = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Assignment(centres)(centres), torch.arange(2000))


def test_fewer_points_than_cells() -> None:
    g = torch.Generator().manual_seed(1)
    centres, points = torch.randn(1500, 4, generator=g), torch.randn(3, 4, generator=g)
    expected = torch.cdist(points, centres).argmin(1)
    torch.testing.assert_close(Assignment(centres)(points), expected)
