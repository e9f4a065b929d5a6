"""Batches of few images are joined into larger ones: nothing lost, mixed up or too large."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anomaly.model import cross_fitting
from anomaly.model.cross_fitting import joined
from anomaly.scorers.patches import PatchBatch

SMALL, LARGE, TILES = ((64, 64), True), ((96, 64), True), ((64, 64), False)


def _batch(images: range, rows: int = 2, masked: bool = False) -> PatchBatch:
    values = torch.tensor([float(image) for image in images]).reshape(-1, 1, 1, 1)
    embeddings = values.expand(-1, rows, 2, 3).clone()
    inside = embeddings[..., 0] % 2 == 0 if masked else None
    return PatchBatch(embeddings, tuple(images), inside=inside)


def _views(*kinds: Any) -> dict[int, Any]:
    return {i: SimpleNamespace(size=size, whole=whole) for i, (size, whole) in enumerate(kinds)}


@pytest.mark.parametrize(
    ("room", "sizes"), [(1, [4] * 5 + [2]), (8, [8, 8, 6]), (15, [8, 8, 6]), (100, [16, 6])]
)
@pytest.mark.parametrize("masked", [False, True])
def test_as_many_images_as_fit(room: int, sizes: list[int], masked: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(cross_fitting, "_MOST_BYTES", room * 2 * 2 * 3 * 4)
    batches = [_batch(range(i, min(i + 4, 22)), masked=masked) for i in range(0, 22, 4)]
    found = list(joined(batches, _views(*22 * [SMALL])))
    assert [len(batch.images) for batch in found] == sizes
    assert [image for batch in found for image in batch.images] == list(range(22))
    for batch in found:
        assert batch.embeddings[:, 0, 0, 0].tolist() == list(batch.images)
        assert (batch.inside is not None) == masked
        if batch.inside is not None:
            assert batch.inside[:, 1, 1].tolist() == [image % 2 == 0 for image in batch.images]


@pytest.mark.parametrize(
    ("second", "view"),
    [
        (_batch(range(1, 2), masked=True), SMALL),
        (_batch(range(1, 2)), LARGE),
        (_batch(range(1, 2)), TILES),
        (_batch(range(1, 2), rows=3), SMALL),
    ],
)
def test_what_differs_stays_apart(second: Any, view: Any) -> None:
    found = list(joined([_batch(range(1)), second], _views(SMALL, view)))
    assert [len(batch.images) for batch in found] == [1, 1]
    assert found[1] is second
