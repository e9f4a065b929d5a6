"""The patches and tiles that an image score is made of, and the size an image is scored at."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit import bare_model

from anomaly.config.load import parse_config
from anomaly.imaging.geometry import Sizing
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.scoring.build import loading_of
from anomaly.scoring.model import Model, _Scored


@pytest.mark.parametrize(
    "how", ["max", "map_max", "map_top_percent", "map_top_relative", "reweighted"]
)
def test_a_broken_patch_counts_where_it_lies_inside_the_region(how: str) -> None:
    bank = MemoryBank(torch.zeros(4, 8), torch.zeros(4, 3, dtype=torch.int32), 0.0)
    model = bare_model({"model": {"kind": "patchcore", "image_score": how}}, scorer=bank)
    embeddings = torch.ones(2, 4, 5, 8)
    embeddings[:, 0, 0] = math.nan
    inside = torch.ones(2, 4, 5, dtype=torch.bool)
    inside[1, 0, 0] = False
    layout = Sizing(None, None, 36, 8).view((32, 40))
    _, scores = model.score_patches(embeddings, [(layout, (0, 0), 0)] * 2, inside)
    assert scores.isfinite().tolist() == [False, True]


def test_a_tile_without_a_score_leaves_the_image_without_one() -> None:
    def scored(batch: list[float]) -> list[_Scored]:
        patches = np.ones((1, 1), np.float32)
        return [_Scored(cast(Any, 0), patches, None, score) for score in batch]

    model: Any = SimpleNamespace(batch_size=2, device=torch.device("cpu"), _scored=scored)
    for scores, best in ((1.0, 3.0, 2.0), 3.0), ((1.0, 3.0, 2.0, math.nan, 1.0), math.nan):
        view = SimpleNamespace(axes=((None,), (None,) * len(scores)))
        item: Any = SimpleNamespace(view=view, tiles=lambda size, of=scores: [[*of]])
        whole = Model._tiles_scored(model, item)
        assert whole.patches.shape == (1, len(scores))
        assert whole.score == pytest.approx(best, nan_ok=True)


def test_kept_aspects_fill_whole_patches_of_every_layer() -> None:
    for stride, size in ((16, (352, 192)), (64, (384, 192))):  # from 362 × 181
        network: Any = SimpleNamespace(strides=(stride,), patch=None)
        sizing = loading_of(parse_config({}, "a test"), network, None, None).sizing
        assert sizing.view((600, 300)).size == size  # type: ignore[union-attr]
