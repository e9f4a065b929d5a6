"""Whatever happens to one file on its way to the network is that file's alone."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from conftest import write_part
from hypothesis import given
from hypothesis import strategies as st

from anomaly.errors import ImageError
from anomaly.imaging import loading
from anomaly.imaging.geometry import Sizing
from anomaly.imaging.loading import (
    NO_PIXELS,
    NetworkInput,
    Preprocessing,
    UnusableImage,
    by_shape,
    load,
)
from anomaly.imaging.read import Decoding


def _loading(tile: int | None = None) -> Preprocessing:
    return Preprocessing(Sizing(None, None, 32, 8, tile=tile), Decoding(10**6))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_part(tmp_path / "a.png", seed=1)
    return tmp_path / "a.png"


def test_a_mistake_in_a_decoder_is_this_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ZeroDivisionError("division\nby zero")
    monkeypatch.setattr(loading, "read_image", Mock(side_effect=error))
    found = load(3, file, _loading())
    assert found == UnusableImage(3, "failed", f"{file}: ZeroDivisionError: division by zero")


def test_an_image_that_cant_be_resized_points_to_tiles(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (MemoryError(), cv2.error("Failed to allocate\n 3 GB")):
        monkeypatch.setattr(loading, "render", Mock(side_effect=error))
        found = load(0, file, _loading())
        assert isinstance(found, UnusableImage)
        assert found.status == "unsupported"
        assert found.reason.startswith(f"{file}: its 120×96 pixels are too many to be brought")
        assert "image.tile" in found.reason
        assert "allocate" not in found.reason  # OpenCV's own words
        tiled = load(0, file, _loading(tile=64))  # nothing is rendered yet
        assert isinstance(tiled, NetworkInput)
        with pytest.raises(ImageError, match=r"image\.tile"):
            next(tiled.tiles(2))


def test_tiles_are_views_of_the_same_picture(file: Path) -> None:
    whole, tiled = load(0, file, _loading()), load(0, file, _loading(tile=64))
    assert isinstance(whole, NetworkInput)
    assert isinstance(tiled, NetworkInput)
    assert not tiled.view.whole
    assert tiled.pixels.size == 0
    np.testing.assert_array_equal(whole.decoded.pixels, tiled.decoded.pixels)
    assert whole.pixels.shape == (*whole.view.size, 3)
    assert [len(batch) for batch in by_shape([tiled, tiled], 8)] == [1, 1]  # each at once


@given(
    st.lists(st.sampled_from([(32, 32), (32, 64), (64, 32), None]), max_size=60),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_a_list_without_whole_batches_is_split_into_the_others(
    sizes: list[tuple[int, int] | None], batch_size: int, random: Random
) -> None:
    """So a run that goes on scores the same batches as one that wasn't broken off."""

    def batches(indices: Iterable[int]) -> list[tuple[int, ...]]:
        items = [_item(i, sizes[i]) for i in indices]
        done = by_shape(items, batch_size)
        return [
            (b.index,) if isinstance(b, UnusableImage) else tuple(x.index for x in b) for b in done
        ]

    every = batches(range(len(sizes)))
    assert sorted(i for batch in every for i in batch) == list(range(len(sizes)))
    assert all(len({sizes[i] for i in batch}) == 1 for batch in every)
    assert all(len(b) <= batch_size and b[-1] - b[0] < 4 * batch_size for b in every)
    kept = [batch for batch in every if random.random() < 0.5]
    again = batches(sorted(i for batch in kept for i in batch))
    assert sorted(again) == sorted(kept)


def _item(index: int, size: tuple[int, int] | None) -> NetworkInput | UnusableImage:
    if size is None:
        return UnusableImage(index, "unreadable", "")
    view = SimpleNamespace(size=size, whole=True)
    return NetworkInput(index, "", view, NO_PIXELS)  # type: ignore[arg-type]
