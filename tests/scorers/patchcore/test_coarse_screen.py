"""No screen rules out a vector that is within the limit, and all rule out most others."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

from anomaly.scorers.patchcore.search import bfloat16_screen, screened_index
from anomaly.scorers.patchcore.search.bfloat16_screen import BFloat16Screen
from anomaly.scorers.patchcore.search.coarse_screen import (
    CoarseScreen,
    Float32Screen,
    Int8Screen,
    has_exact_int8,
)
from anomaly.scorers.patchcore.search.coordinates import Coordinates, PrincipalCoordinates
from anomaly.scorers.patchcore.search.screened_index import ScreenedIndex

quick = pytest.mark.skipif(not has_exact_int8(), reason="no exact products of 8-bit numbers here")
# Products of bfloat16 numbers are right on every processor, and quick on some.
SCREENS = [Float32Screen, BFloat16Screen, pytest.param(Int8Screen, marks=quick)]


class LargeBFloat16Screen(BFloat16Screen):
    """As a large bank has it, for banks of any size."""

    @staticmethod
    def coordinates(bank: Tensor) -> Coordinates:
        return PrincipalCoordinates(bank, 60)


def bounds_of(screen: CoarseScreen, prepared: tuple[Tensor, ...]) -> Tensor:
    room = torch.empty(len(prepared[0]) * screen.width, dtype=screen.dtype)
    return screen.bounds(prepared, room)


@pytest.mark.parametrize("screen", SCREENS)
@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 140),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(0, 20),
    near=st.floats(1e-3, 2),
)
@settings(max_examples=60)
def test_nothing_is_ruled_out_wrongly(
    screen: type, seed: int, dim: int, scale: float, offset: float, near: float
) -> None:
    g = torch.Generator().manual_seed(seed)
    bank = (torch.randn(130, dim, generator=g) + offset) * scale
    queries = bank[:40] + near * scale * torch.randn(40, dim, generator=g)
    tried = screen(bank)
    exact = torch.from_numpy(cdist(queries.double(), bank.double(), "sqeuclidean"))
    prepared = tried.prepared(queries)
    bounds = bounds_of(tried, prepared)
    assert bounds.shape[1] == tried.width > 130
    for rank in (0, 3, 60):
        limit = exact.sort(1).values[:, rank]
        passing = bounds <= tried.limits(prepared, limit.float())[:, None]
        assert bool(passing[:, :130][exact <= limit[:, None]].all())
        assert not bool(passing[:, 130:].any())  # vectors at infinity


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("strange", [math.nan, -math.nan, math.inf, 1e30])
def test_of_a_query_that_is_no_number_nothing_at_infinity_passes(
    screen: type, strange: float
) -> None:
    bank = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    queries = torch.full((2, 8), strange)
    tried = screen(bank)
    prepared = tried.prepared(queries)
    bounds = bounds_of(tried, prepared)
    limits = tried.limits(prepared, queries.square().sum(1))
    assert not bool((bounds <= limits[:, None])[:, 40:].any())
    if math.isnan(strange):
        # Processors differ in the sign of a NaN that they make; whole numbers have none.
        either = [bounds, -bounds] if bounds.is_floating_point() else [bounds]
        assert not any(bool((signed <= limits[:, None]).any()) for signed in either)


@pytest.mark.parametrize("screen", SCREENS)
def test_most_others_are_ruled_out(screen: type) -> None:
    g = torch.Generator().manual_seed(0)
    bank = 3 * torch.randn(2000, 128, generator=g)
    queries = bank[:200] + torch.randn(200, 128, generator=g)
    exact = torch.from_numpy(cdist(queries, bank, "sqeuclidean"))
    tried = screen(bank)
    prepared = tried.prepared(queries)
    limits = tried.limits(prepared, 1.5 * exact.amin(1).float())
    passing = bounds_of(tried, prepared) <= limits[:, None]
    assert int(passing.sum()) < 1.05 * int((exact <= 1.6 * exact.amin(1)[:, None]).sum())


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("screen", [*SCREENS, LargeBFloat16Screen])
def test_all_find_the_nearest(monkeypatch: pytest.MonkeyPatch, screen: type, k: int) -> None:
    monkeypatch.setattr(screened_index, "_screen", lambda: screen)
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(40, 300, generator=g)
    bank = torch.randn(3000, 40, generator=g) @ mix + 0.3 * torch.randn(3000, 300, generator=g) + 9
    queries = bank[:300] + torch.randn(300, 300, generator=g)
    found = ScreenedIndex(bank).candidates(queries, k).sort(1).values
    exact = cdist(queries.double(), bank.double()).argsort(1)[:, :k]
    np.testing.assert_array_equal(found.numpy(), np.sort(exact, axis=1))


@quick
@pytest.mark.parametrize("shape", [(1, 128, 64), (192, 128, 21440), (37, 192, 1000)])
def test_products_that_are_called_exact_are(shape: tuple[int, int, int]) -> None:
    """The largest numbers, too, whose sums of two don't go into 16 bits."""
    q, d, m = shape
    g = torch.Generator().manual_seed(0)
    queries = torch.randint(-127, 128, (q, d), generator=g)
    bank = torch.randint(-127, 128, (m, d), generator=g)
    queries[0], bank[0], bank[1] = 127, 127, -127
    found = torch._int_mm(queries.to(torch.int8), bank.to(torch.int8).T)
    assert torch.equal(found.double(), queries.double() @ bank.double().T)


def test_a_query_without_numbers_moves_no_other_bound() -> None:
    """Rows of an odd length would be read on into the next one."""
    g = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(640, 17, generator=g), torch.randn(20, 17, generator=g)
    screen = BFloat16Screen(bank)
    before = bounds_of(screen, screen.prepared(queries))
    queries[7, 0] = math.nan
    others = torch.arange(20) != 7
    assert torch.equal(bounds_of(screen, screen.prepared(queries))[others], before[others])


@pytest.mark.parametrize(
    ("found", "allowed", "expected"),
    [
        ({"amx_bf16": True, "avx512_vnni": True}, True, BFloat16Screen),
        ({"amx_bf16": True}, False, Float32Screen),
        ({"avx512_bf16": True}, True, Float32Screen),
        ({}, True, Float32Screen),
    ],
)
def test_the_screen_is_the_processors(
    found: dict[str, bool], allowed: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(bfloat16_screen, "has_bf16", lambda device: allowed)
    monkeypatch.setattr(screened_index, "has_exact_int8", lambda: False)
    assert screened_index._screen() is expected
