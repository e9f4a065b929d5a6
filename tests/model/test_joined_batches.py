"""Batches of few images are joined into larger ones: nothing lost, mixed up or too large."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anomaly.model import joined_batches
from anomaly.model.joined_batches import joined
from anomaly.model.tensor_file import Piece

SMALL, LARGE, TILES = ((64, 64), True), ((96, 64), True), ((64, 64), False)


def _batch(images: range, turn: int = 0, rows: int = 2) -> tuple[tuple[Piece, ...], torch.Tensor]:
    names = tuple(Piece(image, 0, 0, turn) for image in images)
    values = torch.tensor([float(image) for image in images])
    return names, values.reshape(-1, 1, 1, 1).expand(-1, rows, 2, 3).clone()


def _views(*kinds: Any) -> dict[int, Any]:
    return {i: SimpleNamespace(size=size, whole=whole) for i, (size, whole) in enumerate(kinds)}


@pytest.mark.parametrize(
    ("room", "sizes"), [(1, [4] * 5 + [2]), (8, [8, 8, 6]), (15, [8, 8, 6]), (100, [16, 6])]
)
def test_as_many_images_as_fit(room: int, sizes: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(joined_batches, "_MOST_BYTES", room * 2 * 2 * 3 * 4)
    batches = [_batch(range(i, min(i + 4, 22))) for i in range(0, 22, 4)]
    found = list(joined(batches, _views(*22 * [SMALL])))
    assert [len(names) for names, _ in found] == sizes
    assert [name.image for names, _ in found for name in names] == list(range(22))
    for names, embeddings in found:
        assert embeddings[:, 0, 0, 0].tolist() == [name.image for name in names]


@pytest.mark.parametrize(
    ("second", "view"),
    [
        (_batch(range(1, 2), turn=1), SMALL),
        (_batch(range(1, 2)), LARGE),
        (_batch(range(1, 2)), TILES),
        (_batch(range(1, 2), rows=3), SMALL),
    ],
)
def test_what_differs_stays_apart(second: Any, view: Any) -> None:
    found = list(joined([_batch(range(1)), second], _views(SMALL, view)))
    assert [len(names) for names, _ in found] == [1, 1]
    assert found[1][1] is second[1]
