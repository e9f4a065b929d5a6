"""Which patches an image score is made of."""

import math
from typing import Any, cast

import pytest
import torch

from anomaly.config.load import parse_config
from anomaly.imaging.geometry import Sizing
from anomaly.methods.patchcore.bank import MemoryBank
from anomaly.scoring.pipeline import Model


@pytest.mark.parametrize(
    "how", ["max", "map_max", "map_top_percent", "map_top_relative", "reweighted"]
)
def test_a_broken_patch_counts_where_it_lies_inside_the_region(how: str) -> None:
    config = parse_config({"model": {"kind": "patchcore", "image_score": how}}, "a test")
    bank = MemoryBank(torch.zeros(4, 8), torch.zeros(4, 3, dtype=torch.int32), 0.0)
    nothing = cast(Any, None)
    pipeline = Model(config, nothing, nothing, bank, None, torch.device("cpu"))
    embeddings = torch.ones(2, 4, 5, 8)
    embeddings[:, 0, 0] = math.nan
    inside = torch.ones(2, 4, 5, dtype=torch.bool)
    inside[1, 0, 0] = False
    layout = Sizing(None, None, 36, 8).view((32, 40))
    _, scores = pipeline.score_patches(embeddings, [(layout, (0, 0), 0)] * 2, inside)
    assert scores.isfinite().tolist() == [False, True]
