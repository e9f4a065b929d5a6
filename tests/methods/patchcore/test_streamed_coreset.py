"""Selection in fixed memory against selection from everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from anomaly.methods.patchcore.coreset import Selection, distances_to_nearest, select_streamed

DIM = 12


def stream_of(sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Images of a changing process: later ones hold kinds of patches that earlier ones don't."""
    g = torch.Generator().manual_seed(seed)
    kinds = 5 * torch.randn(40, DIM, generator=g)
    return [
        kinds[torch.randint(1 + i * 40 // len(sizes), (n,), generator=g)]
        + torch.randn(n, DIM, generator=g)
        for i, n in enumerate(sizes)
    ]


class _Stream:
    """Points in memory, by portions."""

    def __init__(self, portions: list[torch.Tensor]) -> None:
        self._portions = portions

    @property
    def count(self) -> int:
        return sum(map(len, self._portions))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        places = torch.arange(self.count)[:, None].expand(-1, 2)
        return zip(self._portions, places.split([*map(len, self._portions)]), strict=True)

    def distances(self, centres: torch.Tensor) -> Iterator[torch.Tensor]:
        return (distances_to_nearest(points, centres) for points in self._portions)


def streamed(stream: list[torch.Tensor], size: int, rows: int, seed: int = 0) -> Selection:
    chosen = select_streamed(
        _Stream(stream),
        size / sum(map(len, stream)),
        memory_limit=rows * DIM * 4,
        generator=torch.Generator().manual_seed(seed),
    )
    return replace(chosen, picks=chosen.picks[:, 1])


def test_more_than_fit_may_be_wanted() -> None:
    """As many as are asked for needn't have come when the memory is full for the first time."""
    stream = stream_of([500] * 10)
    assert len(set(streamed(stream, 2500, 1024).picks.tolist())) == 2500


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_any_stream(sizes: list[int], share: float, seed: int) -> None:
    """Distinct picks, as many as wanted, and a radius that holds for every point."""
    stream = stream_of(sizes, seed)
    size = max(1, int(share * sum(sizes)))
    chosen = streamed(stream, size, 0, seed)
    points = torch.cat(stream)
    assert len(set(chosen.picks.tolist())) == size
    true = cdist(points.double(), points[chosen.picks].double()).min(1).max()
    assert true <= chosen.covering_radius * (1 + 1e-4) + 1e-4
