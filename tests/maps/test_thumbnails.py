"""Small heatmaps: quick to make, and no more of them than the page shows."""

import random

import cv2
import numpy as np
import pytest

from anomaly.maps.encoding import SHOWN, Thumbnail, Thumbnails, thumbnail


@pytest.mark.parametrize("size", [(900, 900), (7, 3000), (1, 1), (1601, 1599)])
def test_a_thumbnail_looks_like_its_picture(size: tuple[int, int]) -> None:
    picture = np.zeros((*size, 3), np.uint8)
    picture[:, : size[1] // 2] = (200, 40, 90)
    small = thumbnail(picture, 120_000)
    assert small.source == size[::-1]
    assert small.size[0] * small.size[1] <= 120_000
    seen = cv2.imdecode(np.frombuffer(small.photo, np.uint8), cv2.IMREAD_COLOR)
    assert seen is not None
    assert seen.shape[1::-1] == small.size
    wanted = cv2.resize(picture, small.size, interpolation=cv2.INTER_AREA)
    assert np.abs(seen[..., ::-1].astype(int) - wanted).mean() < 6


def test_those_that_matter_most_are_kept() -> None:
    rng = random.Random(0)
    ranks = [(rng.random() < 0.01, rng.random()) for _ in range(20 * SHOWN)]
    kept = Thumbnails()
    for number, rank in enumerate(ranks):
        if kept.wants(*rank):
            kept.keep(str(number), *rank, Thumbnail(b"", (1, 1), (1, 1)))
    most = sorted(range(len(ranks)), key=lambda i: ranks[i])[-SHOWN:]
    assert {n for n in range(len(ranks)) if kept.get(str(n))} == set(most)
