"""A scorer as a graph of reductions gives the scores that it gives itself."""

import pytest
import torch

from anomaly.errors import ModelError
from anomaly.methods.base import PatchBatch, Scorer
from anomaly.methods.padim import GaussianFitter
from anomaly.methods.patchcore.bank import MemoryBank


def bank(count: int) -> MemoryBank:
    vectors = torch.randn(count, 24, generator=torch.Generator().manual_seed(0)) + 5
    return MemoryBank(vectors, torch.zeros(count, 3, dtype=torch.int32), 0.0)


@pytest.mark.parametrize("count", [1, 4096, 9000])  # blocks hold 4,096 vectors
def test_the_bank_goes_by_in_blocks(count: int) -> None:
    scorer = bank(count)
    patches = torch.randn(2, 3, 5, 24, generator=torch.Generator().manual_seed(1)) + 5
    patches[0, 0, 0] = scorer.vectors[-1]
    scores, nearest = scorer.graph()(patches)
    expected = scorer.score(patches)
    torch.testing.assert_close(scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(nearest, expected.nearest)
    assert nearest.dtype == torch.int64


def test_of_equal_vectors_the_first_is_named_and_nan_stays_nan() -> None:
    scorer = bank(4)
    twice = MemoryBank(scorer.vectors[[0, 1, 1, 2]], scorer.origins, 0.0)
    patches = twice.vectors[None, None, 2:3].clone()
    assert twice.graph()(patches)[1].item() == 1
    scores, nearest = twice.graph()(torch.full_like(patches, torch.nan))
    assert scores.isnan().all()
    assert nearest.item() < 4


@pytest.mark.parametrize("images", [5, 60])  # fewer than dimensions, and more
def test_gaussians(images: int) -> None:
    good = torch.randn(images, 3, 4, 24, generator=torch.Generator().manual_seed(0))
    fitter = GaussianFitter(24).prepared(24, good.device)
    scorer = fitter.fit([PatchBatch(good, tuple(range(images)))])
    patches = torch.randn(3, 3, 4, 24)
    (scores,) = scorer.graph()(patches)
    torch.testing.assert_close(scores, scorer.score(patches).scores, rtol=1e-5, atol=1e-5)


def test_a_method_without_a_graph_says_so() -> None:
    class Other(Scorer):
        pass

    with pytest.raises(ModelError, match="--pixels"):
        Other().graph()
