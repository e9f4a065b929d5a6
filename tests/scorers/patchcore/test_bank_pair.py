"""Two banks on tensors and on arrays: what each sees of packed patches, and how scores are joined.

References are loops, poolings and interpolations in float64.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packed_patches import COARSE, FINE, coarse_of, packed, random_packed
from torch import Tensor
from torch.nn import functional as F

from anomaly.config.parsing import parse_config
from anomaly.errors import DataError, ModelError
from anomaly.scorers.patchcore import array_bank
from anomaly.scorers.patchcore.array_bank import ArrayBank
from anomaly.scorers.patchcore.bank_pair import (
    BankPair,
    coarse_patches,
    doubled,
    fine_patches,
    is_pair,
    level_tensors,
)

GRIDS = [(2, 2), (2, 8), (6, 4), (14, 14)]


def _bank(count: int, channels: int, seed: int) -> ArrayBank:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, channels)).astype(np.float32)
    return ArrayBank(vectors, rng.integers(0, 5, (count, 3)).astype(np.int32), "sharp", 3)


def pair_of(fine: int = 30, coarse: int = 20) -> BankPair:
    return BankPair(_bank(fine, FINE, 0), _bank(coarse, COARSE + FINE, 1))


def _reference(pair: BankPair, embeddings: Tensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    fine = torch.from_numpy(pair.fine.vectors).double()
    near = torch.cdist(embeddings[..., :FINE].double().flatten(0, 2), fine).min(1)
    seen = coarse_of(embeddings)
    coarse = torch.from_numpy(pair.coarse.vectors).double()
    around = torch.cdist(seen.flatten(0, 2), coarse).amin(1).view(seen.shape[:3])
    grid = tuple(embeddings.shape[1:3])
    up = F.interpolate(around[:, None], size=grid, mode="bilinear", align_corners=False)[:, 0]
    shape = embeddings.shape[:3]
    return (near.values.view(shape) + up).numpy(), near.indices.view(shape).numpy()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_each_bank_sees_is_what_was_packed(grid: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    fine = torch.randn(3, *grid, FINE, generator=generator)
    coarse = torch.randn(3, grid[0] // 2, grid[1] // 2, COARSE, generator=generator)
    embeddings = packed(fine, coarse)
    assert torch.equal(fine_patches(embeddings, FINE), fine)
    seen = coarse_patches(embeddings, FINE)
    assert (seen.shape, seen.dtype) == ((*coarse.shape[:3], COARSE + FINE), torch.float32)
    assert torch.equal(seen[..., :COARSE], coarse)
    torch.testing.assert_close(seen.double(), coarse_of(embeddings), rtol=1e-5, atol=1e-6)
    # Arrays are seen alike.
    array = embeddings.numpy()
    assert np.array_equal(fine_patches(array, FINE), fine.numpy())
    others = coarse_patches(array, FINE)
    assert others.dtype == np.float32
    np.testing.assert_allclose(others, seen.numpy(), rtol=1e-6, atol=1e-6)


def test_along_the_border_the_fine_mean_counts_zeros_beyond_it() -> None:
    embeddings = packed(torch.ones(1, 8, 6, FINE), torch.zeros(1, 4, 3, COARSE))
    mean = coarse_patches(embeddings, FINE)[0, :, :, COARSE]
    rows, columns = torch.tensor([2, 3, 3, 2]) / 3, torch.tensor([2, 3, 2]) / 3
    torch.testing.assert_close(mean, 2 * rows[:, None] * columns)


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 2), (7, 7)], ids=str)
def test_doubled_scores_are_bilinear(grid: tuple[int, int]) -> None:
    scores = torch.rand(3, *grid, generator=torch.Generator().manual_seed(0))
    up = F.interpolate(scores[:, None].double(), scale_factor=2, mode="bilinear")[:, 0]
    found = doubled(scores)
    assert (found.shape, found.dtype) == ((3, 2 * grid[0], 2 * grid[1]), torch.float32)
    torch.testing.assert_close(found.double(), up, rtol=1e-6, atol=1e-6)
    other = doubled(scores.numpy())
    assert other.dtype == np.float32
    np.testing.assert_allclose(other, found.numpy(), rtol=1e-6)
    # A score stays what it is where all are alike, to the last bit.
    assert torch.equal(doubled(torch.full((1, *grid), 0.1)).unique(), torch.tensor([0.1]))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_arrays_are_scored_as_by_brute_force(grid: tuple[int, int]) -> None:
    pair, embeddings = pair_of(), random_packed(3, grid)
    found = pair.score(embeddings.numpy())
    scores, nearest = _reference(pair, embeddings)
    assert isinstance(found.scores, np.ndarray)
    assert found.scores.dtype == np.float32
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    assert np.array_equal(found.nearest, nearest)
    # The image's score is that of its worst patch.
    worst = pair.image_scores(embeddings.numpy(), found)
    np.testing.assert_allclose(worst, scores.reshape(3, -1).max(1), rtol=1e-5)


def test_packed_channels_are_counted_and_others_refused() -> None:
    pair = pair_of()
    assert pair.dimensions == FINE + COARSE // 4
    assert pair.unit == "distance"
    for channels in (FINE, COARSE + FINE):  # what single banks would take
        with pytest.raises(DataError, match=f"have {channels} channels .* bank's have 8"):
            pair.score(np.zeros((1, 2, 2, channels), np.float32))


def test_where_banks_can_come_from() -> None:
    pair = pair_of()
    pair.check_origin(FINE + COARSE, 5)
    with pytest.raises(ModelError, match="network has 15 channels where its scorer has 14"):
        pair.check_origin(FINE + COARSE + 1, 5)
    for level in ("fine", "coarse"):
        getattr(pair, level).origins[0, 0] = 5
        with pytest.raises(ModelError, match="training image 5, of 5"):
            pair.check_origin(FINE + COARSE, 5)
        getattr(pair, level).origins[0, 0] = 4


@pytest.mark.parametrize("fine", [14, 15, 7])
def test_banks_that_do_not_go_together_are_refused(fine: int) -> None:
    """No coarse layers, fewer than none, and such as can't be dealt out to four patches."""
    pair = BankPair(_bank(5, fine, 0), _bank(5, 14, 1))
    with pytest.raises(ModelError, match=f"14 channels, of which its bank has {fine}"):
        pair.check_origin(14, 5)


def _tensors() -> dict[str, NDArray[np.generic]]:
    pair = pair_of()
    return {
        f"{level}.{name}": value
        for level, bank in (("fine", pair.fine), ("coarse", pair.coarse))
        for name, value in {
            "vectors": bank.vectors,
            "origins": bank.origins,
            "covering_radius": np.array(0.5),
            "exact": np.array(True),
        }.items()
    }


@pytest.mark.parametrize("embedding", ["levels", "sharp"])
def test_saved_arrays_and_back(embedding: str) -> None:
    settings = parse_config({"model": {"embedding": embedding}}, "a test").model.model_dump()
    tensors, pair = _tensors(), pair_of()
    back = array_bank.scorer(tensors, settings)
    assert isinstance(back, BankPair)
    back.check_origin(FINE + COARSE, 5)
    asked = random_packed(2).numpy()
    assert np.array_equal(back.score(asked).scores, pair.score(asked).scores)
    # One bank of layers on one grid.
    single = array_bank.scorer(level_tensors(tensors)[1], settings)
    assert isinstance(single, ArrayBank)
    assert single.embedding == "sharp"
    single.check_origin(FINE + COARSE, 5)
    assert np.array_equal(single.vectors, pair.coarse.vectors)


def test_unknown_and_missing_arrays_are_refused() -> None:
    settings = parse_config({}, "a test").model.model_dump()
    tensors = _tensors()
    assert is_pair(tensors)
    assert not is_pair(level_tensors(tensors)[0])
    for name, says in (
        ("middle.vectors", "tensor middle.vectors is unknown"),
        ("vectors", "tensor vectors is unknown"),
        (".vectors", "tensor .vectors is unknown"),
        ("fine.vectors.0", "vectors.0 are missing or unknown"),
    ):
        with pytest.raises(ModelError, match=says):
            array_bank.scorer({**tensors, name: tensors["fine.vectors"]}, settings)
    for name in tensors:
        fewer = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(ModelError, match=f"{name.partition('.')[2]} are missing"):
            array_bank.scorer(fewer, settings)
    half = {key: value for key, value in tensors.items() if key.startswith("fine")}
    with pytest.raises(ModelError, match="missing"):
        array_bank.scorer(half, settings)
