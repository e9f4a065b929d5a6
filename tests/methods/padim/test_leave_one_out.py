"""The closed form against Gaussians that were fitted again without each image."""

import numpy as np
import pytest
import torch
from patch_lists import PatchList

from anomaly.errors import DataError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim.fitter import GaussianFitter
from anomaly.methods.padim.gaussian import PatchGaussian


def left_out(scorer: PatchGaussian, images: int) -> PatchGaussian:
    """The scorer of training images, each without itself."""
    folds = [(image,) for image in range(images)]
    fitter = GaussianFitter(scorer.dimensions)
    ((_, without),) = fitter.held_out(scorer, PatchList([]), folds, grouped=False)
    return without


@pytest.mark.parametrize("images", [3, 12, 40])
@pytest.mark.parametrize(("scale", "tolerance"), [(0.01, 1e-4), (0.3, 1e-3), (3.0, 3e-2)])
def test_scores_are_those_of_refits_but_for_the_stated_factor(
    images: int, scale: float, tolerance: float
) -> None:
    g = torch.Generator().manual_seed(images)
    embeddings = scale * torch.randn(images, 2, 3, 6, generator=g)
    fitter = GaussianFitter(dimensions=6, regularisation=0.01)
    batch = PatchBatch(embeddings, tuple(range(images)))
    scorer = fitter.fit([batch])
    quick = left_out(scorer, images).score(embeddings).scores.numpy()

    true = np.empty_like(quick)
    for i in range(images):
        others = np.delete(embeddings.double().numpy(), i, axis=0)
        for row, column in np.ndindex(2, 3):
            mean = others[:, row, column].mean(0)
            covariance = np.atleast_2d(np.cov(others[:, row, column].T)) + 0.01 * np.eye(6)
            r = embeddings[i, row, column].double().numpy() - mean
            true[i, row, column] = np.sqrt(r @ np.linalg.solve(covariance, r))
    factor = np.sqrt((images - 2) / (images - 1))
    ratio = quick / true
    assert (ratio <= 1 + tolerance).all()
    assert (ratio >= factor * (1 - tolerance)).all()


@pytest.mark.parametrize("regularisation", [0.01, 1e-4])
@pytest.mark.parametrize("images", [10, 40])
def test_fewer_images_than_dimensions_score_as_refits_do(
    images: int, regularisation: float
) -> None:
    """Leverages are 1 but for ε over the variance here: no difference from 1 may be taken."""
    g = torch.Generator().manual_seed(images)
    variances = torch.logspace(1.5, -2, 100)
    embeddings = 3 + torch.randn(images, 1, 2, 100, generator=g) * variances.sqrt()
    fitter = GaussianFitter(dimensions=100, regularisation=regularisation)
    projection = fitter.draw(100)
    scorer = fitter.fit([PatchBatch(embeddings, tuple(range(images)))])
    quick = left_out(scorer, images).score(embeddings).scores[:, 0]

    projected = projection(embeddings[:, 0]).double().numpy()
    for i in range(0, images, 3):
        others = np.delete(projected, i, axis=0)
        for column in range(2):
            r = projected[i, column] - others[:, column].mean(0)
            covariance = np.cov(others[:, column].T) + regularisation * np.eye(100)
            true = np.sqrt(r @ np.linalg.solve(covariance, r))
            assert float(quick[i, column]) == pytest.approx(true, rel=1e-3)


def test_equal_images_are_scored() -> None:
    """Their difference has no variance; each still has its twin."""
    g = torch.Generator().manual_seed(0)
    embeddings = torch.randn(8, 1, 1, 20, generator=g)
    embeddings[1] = embeddings[0]
    fitter = GaussianFitter(dimensions=20)
    scorer = fitter.fit([PatchBatch(embeddings, tuple(range(8)))])
    scores = left_out(scorer, 8).score(embeddings).scores.flatten()
    assert scores.isfinite().all()
    assert scores[:2].max() < 0.5 * scores[2:].min()


def test_two_images_are_too_few() -> None:
    embeddings = torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))
    fitter = GaussianFitter(dimensions=4)
    scorer = fitter.fit([PatchBatch(embeddings, (0, 1))])
    with pytest.raises(DataError, match="--no-calibrate"):
        left_out(scorer, 2)
