"""What `benchmarks.accuracy` compares choices with is what the product does."""

import pytest
import torch
from patch_lists import PatchList

from anomaly.config.schema import Config
from anomaly.scorers.patchcore.fitter import fitter as fitter_of
from anomaly.scorers.patches import PatchBatch
from benchmarks.accuracy import parse
from benchmarks.feature_cache import Seen, SeenSet
from benchmarks.variants import Variant, forget, patch_scores


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)

    def one(name, defect):
        shapes = ((4, 16), (8, 8), (16, 4))
        maps = (torch.rand(c, side, side, generator=generator).half() for c, side in shapes)
        return Seen(name, defect, (64, 64), tuple(maps), None)

    train = [one(f"train {i}", "good") for i in range(5)]
    yield SeenSet("drawn", train, [one("good", "good"), one("bad", "scratch")])
    forget()


def test_the_default_is_todays(images):
    config = Config.model_validate({})
    fitter = fitter_of(config.model.model_dump(), seed=2, memory_limit=2**20)

    def embedded(one):
        return fitter.align([m[None].float() for m in one.maps[1:]])

    train = PatchList(PatchBatch(embedded(one), (i,)) for i, one in enumerate(images.train))
    scorer = fitter.fit(train)
    found, _ = patch_scores(images, Variant(), 2)
    for scores, one in zip(found, images.test, strict=True):
        assert torch.equal(scores, scorer.score(embedded(one)).scores[0])
    model, usual = config.model, Variant()
    assert usual.score.replace("maptop1", "map_top_percent") == config.image_score_in_force
    assert (usual.smoothing, usual.halo, usual.border) == (
        model.smoothing,
        model.halo_damping,
        model.border_damping,
    )


@pytest.mark.parametrize(
    "changed",
    [
        "",
        "layers:12,shots:2",
        "ratio:0.2,score:max",
        "layers:3",
        "layers:123",
        "layers:2|3",
        "layers:2+23",
        "dims:4,power:0.5",
        "neighbours:3",
        "weight:2",
        "finest:2",
        "compress:sqrt",
        "dims:4,embedding:concat",
        "kind:subspace",
    ],
)
def test_each_variant_scores_every_patch(images, changed):
    _, variant = parse(f"some={changed}")
    found, _ = patch_scores(images, variant, 0)
    side = 16 if "1" in variant.layers and not variant.finest else 4 if variant.layers == "3" else 8
    assert [one.shape for one in found] == [(side, side)] * 2
    assert all(bool(one.isfinite().all()) for one in found)
