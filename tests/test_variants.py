"""What `benchmarks.accuracy` compares choices with is what the product does."""

import pytest
import torch
from patch_lists import PatchList

from anomaly.config.schema import Config
from anomaly.scorers.patchcore import method
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
    fitter = method.fitter(config.model.model_dump(), seed=2, memory_limit=2**20)
    fitter = fitter.prepared([8, 16], [8, 16], torch.device("cpu"))

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
    ("changed", "kept"),
    [
        ("", "levels"),
        ("layers:12,shots:2", "levels"),
        ("ratio:0.2,score:max", "levels"),
        ("layers:3", "sharp"),
        ("layers:123", "sharp"),
        ("layers:2|3", "sharp"),
        ("layers:2+23", "sharp"),
        ("dims:4,power:0.5", "sharp"),
        ("neighbours:3", "sharp"),
        ("weight:2", "sharp"),
        ("finest:2", "sharp"),
        ("compress:sqrt", "sharp"),
        ("dims:4,embedding:concat", "concat"),
        ("kind:subspace", "concat"),
    ],
)
def test_what_two_banks_are_not_made_for_has_one(images, changed, kept):
    _, variant = parse(f"some={changed}")
    assert variant.embedded_as == kept
    found, _ = patch_scores(images, variant, 0)
    side = 16 if "1" in variant.layers and not variant.finest else 4 if variant.layers == "3" else 8
    assert [one.shape for one in found] == [(side, side)] * 2
    assert all(bool(one.isfinite().all()) for one in found)
