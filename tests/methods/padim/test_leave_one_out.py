"""The closed form against Gaussians that were fitted again without each image."""

import numpy as np
import pytest
import torch
from patch_lists import PatchList

from anomaly.errors import DataError
from anomaly.methods.base import PatchBatch
from anomaly.methods.padim import GaussianFitter


def left_out(embeddings: torch.Tensor, regularisation: float = 0.01) -> np.ndarray:
    """Scores (N, h, w) of training images (N, h, w, D), each without itself."""
    images, dimensions = len(embeddings), embeddings.shape[3]
    fitter = GaussianFitter(dimensions, regularisation).prepared(dimensions, torch.device("cpu"))
    patches = PatchList([PatchBatch(embeddings, tuple(range(images)))])
    folds = [(image,) for image in range(images)]
    ((_, without),) = fitter.held_out(fitter.fit(patches), patches, folds, grouped=False)
    return without.score(embeddings).scores.numpy()


def refitted(embeddings: torch.Tensor, regularisation: float = 0.01) -> np.ndarray:
    """The same by numpy's covariances of the others."""
    every = embeddings.double().numpy()
    scores = np.empty(every.shape[:3])
    for i, *place in np.ndindex(scores.shape):
        others = np.delete(every[:, *place], i, axis=0)
        r = every[i, *place] - others.mean(0)
        covariance = np.cov(others.T) + regularisation * np.eye(every.shape[3])
        scores[i, *place] = np.sqrt(r @ np.linalg.solve(covariance, r))
    return scores


@pytest.mark.parametrize("images", [3, 12, 40])
@pytest.mark.parametrize("scale", [0.01, 0.3, 3.0])
def test_scores_are_those_of_refits(images: int, scale: float) -> None:
    g = torch.Generator().manual_seed(images)
    embeddings = scale * torch.randn(images, 2, 3, 6, generator=g)
    np.testing.assert_allclose(left_out(embeddings), refitted(embeddings), rtol=1e-6)


@pytest.mark.parametrize("regularisation", [0.01, 1e-4])
def test_few_images_score_as_refits_do(regularisation: float) -> None:
    """Leverages are 1 but for ε over the variance here: no difference from 1 may be taken."""
    variances = torch.logspace(1.5, -2, 100)
    for images in (10, 30, 99, 101):
        g = torch.Generator().manual_seed(images)
        embeddings = 3 + torch.randn(images, 1, 2, 100, generator=g) * variances.sqrt()
        found, expected = left_out(embeddings, regularisation), refitted(embeddings, regularisation)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_equal_images_are_scored() -> None:
    """Their difference has no variance; each still has its twin."""
    embeddings = torch.randn(8, 1, 1, 20, generator=torch.Generator().manual_seed(0))
    embeddings[1] = embeddings[0]
    scores = left_out(embeddings).flatten()
    assert np.isfinite(scores).all()
    assert scores[:2].max() < 0.5 * scores[2:].min()


def test_two_images_are_too_few() -> None:
    with pytest.raises(DataError, match="--no-calibrate"):
        left_out(torch.randn(2, 2, 2, 4, generator=torch.Generator().manual_seed(0)))
