"""What `benchmarks.accuracy` compares choices with is what the product does."""

import pytest
import torch
from conftest import REPOSITORY
from patch_lists import PatchList

from anomaly.config.load import load_config
from anomaly.methods.base import PatchBatch
from anomaly.methods.patchcore.fitter import fitter as fitter_of
from benchmarks.feature_cache import ImageMaps, SetMaps
from benchmarks.variants import Variant, patch_scores

CPU = torch.device("cpu")


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)

    def image(name, defect):
        shapes = ((4, 16), (8, 8), (16, 4))
        maps = (torch.rand(c, side, side, generator=generator).half() for c, side in shapes)
        return ImageMaps(name, defect, (64, 64), tuple(maps), None)

    train = [image(f"train {i}", "good") for i in range(5)]
    return SetMaps("drawn", train, [image("good", "good"), image("bad", "scratch")])


def test_the_default_is_that_of_the_config_for_folders(images):
    config = load_config(REPOSITORY / "configs" / "folder.yaml", ["data.root=anywhere"])
    fitter = fitter_of(config.model.model_dump(), seed=2, memory_limit=2**20)

    def embedded(image):
        return fitter.align([m[None].float() for m in image.maps[1:]])

    train = PatchList(PatchBatch(embedded(one), (i,)) for i, one in enumerate(images.train))
    scorer = fitter.fit(train)
    found, _ = patch_scores(images, Variant(), 2, CPU)
    for (scores, weighted), image in zip(found, images.test, strict=True):
        expected = scorer.score(embedded(image))
        assert torch.equal(scores, expected.scores[0])
        assert torch.equal(weighted, scorer.weighted(expected)[0])
    model, default = config.model, Variant()
    assert default.score.replace("maptop1", "map_top_percent") == config.image_score_in_force
    assert (default.smoothing, default.halo, default.border) == (
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
        "neighbours:3",
        "spacing:0",
        "power:0.5",
        "power:0.75,embedding:concat",
    ],
)
def test_each_variant_scores_every_patch(images, changed):
    variant = Variant.parsed(changed)
    found, _ = patch_scores(images, variant, 0, CPU)
    side = 16 if "1" in variant.layers else 4 if variant.layers == "3" else 8
    for scores in (one for both in found for one in both):
        assert scores.shape == (side, side)
        assert bool(scores.isfinite().all())


def test_an_unknown_key_is_named():
    with pytest.raises(ValueError, match="unknown bank; there are layers"):
        Variant.parsed("bank:2")
