"""Models of several products behind one pass of the network."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import train_products_arguments

import anomaly
from anomaly.backbones.extractor import FeatureExtractor
from anomaly.cli import main
from anomaly.detector import ProductSet
from anomaly.errors import DataError, ModelError
from anomaly.imaging.region import DrawnMask, Region
from anomaly.scoring.pipeline import Model
from anomaly.scoring.prediction import Prediction
from anomaly.storage.save import save

PRODUCTS = ("disc", "stripes")


def opened(folder: Path, product: str | None = None) -> ProductSet:
    found = anomaly.load(folder, "cpu", product=product)
    assert isinstance(found, ProductSet)
    return found


def images(root: Path, product: str) -> list[Path]:
    return sorted((root / product / "test").rglob("*.png"))


def check_equal(one: Prediction, other: Prediction) -> None:
    assert (one.score, one.verdict, one.reason) == (other.score, other.verdict, other.reason)
    np.testing.assert_array_equal(one.patch_scores, other.patch_scores)
    if other.nearest is not None:
        assert one.nearest is not None
        np.testing.assert_array_equal(one.nearest, other.nearest)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="bank"),
        pytest.param(("model.kind=padim",), id="padim", marks=pytest.mark.slow),
        pytest.param(("image.tile=64",), id="tiles", marks=pytest.mark.slow),
    ],
)
def test_products_are_told_apart_and_scored_as_by_their_own_models(
    two_products: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    folder = tmp_path / "both"
    assert (
        main(["train", *map(str, train_products_arguments(two_products, folder, *settings))]) == 0
    )
    both = opened(folder)
    assert "disc, stripes" in repr(both)
    for product in PRODUCTS:
        alone = anomaly.load(folder / product, "cpu")
        assert isinstance(alone, anomaly.AnomalyDetector)
        paths = images(two_products, product)
        found = both.predict(paths)
        assert [one.product for one in found] == [product] * len(paths)
        for one, other in zip(found, alone.predict(paths), strict=True):
            check_equal(one, other)
            assert one.thresholds == alone.thresholds
            assert other.product == ""


def test_the_network_runs_once_for_a_batch_of_both(
    product_runs: Path, two_products: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = opened(product_runs)
    first, second = both.products.values()
    assert first.model.extractor is second.model.extractor
    passes: list[int] = []
    run = FeatureExtractor.__call__

    def counted(self: FeatureExtractor, batch: Any) -> Any:
        passes.append(len(batch))
        return run(self, batch)

    monkeypatch.setattr(FeatureExtractor, "__call__", counted)
    every = zip(images(two_products, "disc"), images(two_products, "stripes"), strict=True)
    paths = [path for pair in every for path in pair]
    found = both.predict(paths)
    assert sum(passes) == len(paths)
    assert len(passes) == -(-len(paths) // both.model.batch_size)
    assert [one.path for one in found] == paths
    assert [one.product for one in found] == list(PRODUCTS) * (len(paths) // 2)
    alone = {product: opened(product_runs).products[product] for product in PRODUCTS}
    for one in found:
        assert one.path is not None
        np.testing.assert_allclose(one.score, alone[one.product].predict(one.path).score, rtol=1e-4)


def test_a_product_that_is_given_scores_all_and_another_is_for_review(
    product_runs: Path, two_products: Path
) -> None:
    both = opened(product_runs, "disc")
    alone = both.products["disc"]
    discs, stripes = (images(two_products, product) for product in PRODUCTS)
    for one, other in zip(both.predict(discs), alone.predict(discs), strict=True):
        check_equal(one, other)
        assert one.product == "disc"
    for one, other in zip(both.stream(stripes), alone.predict(stripes), strict=True):
        assert (one.product, one.score, one.verdict) == ("disc", other.score, "review")
        assert one.reason == "looks like stripes, not disc"
    assert opened(product_runs).given("stripes").predict(stripes[0]).reason == ""
    with pytest.raises(ModelError, match=r"no product 'bottle'; it has disc, stripes"):
        both.given("bottle")
    with pytest.raises(ModelError, match=r"no product 'bottle'"):
        anomaly.load(product_runs, "cpu", product="bottle")
    with pytest.raises(ModelError, match=r"the model of one product"):
        anomaly.load(product_runs / "disc", "cpu", product="disc")


def test_what_is_like_no_product_is_for_review(product_runs: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (96, 120, 3), dtype=np.uint8)
    for product in (None, *PRODUCTS):
        found = opened(product_runs, product).predict(noise)
        assert found.verdict == "review"
        assert "looks like" not in found.reason
        blank = opened(product_runs, product).predict(np.full((96, 120, 3), 70, np.uint8))
        assert "blank" in blank.reason


def test_a_set_is_evaluated_product_by_product(product_runs: Path) -> None:
    both = opened(product_runs)
    for several in (both, both.given("disc")):
        with pytest.raises(DataError, match=r"products\.products\[name\]"):
            anomaly.evaluate(several)
    assert anomaly.evaluate(both.products["disc"]).metrics["image_auroc"] is not None


def test_ids_follow_from_the_models(product_runs: Path, tmp_path: Path) -> None:
    known = opened(product_runs).model_id
    assert known == opened(product_runs).model_id != opened(product_runs, "disc").model_id
    shutil.copytree(product_runs, tmp_path / "both")
    disc = anomaly.load(tmp_path / "both" / "disc", "cpu")
    disc.calibrate(threshold=100).save(tmp_path / "both" / "disc" / "model", overwrite=True)
    assert opened(tmp_path / "both").model_id != known
    assert opened(tmp_path / "both").products["disc"].thresholds.image == 100


Change = Callable[[Model], Model]


def _with(section: str, **values: object) -> Change:
    def change(one: Model) -> Model:
        part = getattr(one.config, section).model_copy(update=values)
        return replace(one, config=one.config.model_copy(update={section: part}))

    return change


def _other_precision(one: Model) -> Model:
    other = "bf16" if one.config.precision == "fp32" else "fp32"
    made = {**one.manifest["made_with"], "precision": other}
    config = one.config.model_copy(update={"precision": other})
    return replace(one, config=config, manifest={**one.manifest, "made_with": made})


def _other_weights(one: Model) -> Model:
    first = next(one.extractor.network.parameters())
    first.data += 1
    return one


def _with_a_region(one: Model) -> Model:
    return replace(one, region=Region(None, DrawnMask(np.eye(96, 120, dtype=bool))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with("image", area=96), "image.area is 64 in disc and 96 in stripes"),
        (_with("model", embedding="adaptive"), "model.embedding is 'sharp' in disc"),
        (_other_precision, "precision is 'fp32' in disc and 'bf16' in stripes"),
        (_other_weights, "the content of backbone.safetensors is"),
        (_with_a_region, "the content of ignore.png is None in disc"),
    ],
    ids=["area", "embedding", "precision", "weights", "region"],
)
def test_models_that_cannot_share_a_pass_are_refused(
    product_runs: Path, tmp_path: Path, change: Change, said: str
) -> None:
    shutil.copytree(product_runs / "disc", tmp_path / "both" / "disc")
    one = anomaly.load(product_runs / "stripes", "cpu").model
    if change is _other_precision and one.config.precision != "fp32":
        said = said.replace("fp32", "x").replace("bf16", "fp32").replace("x", "bf16")
    save(change(one), tmp_path / "both" / "stripes")
    with pytest.raises(ModelError, match="can't share one pass") as told:
        opened(tmp_path / "both")
    assert said in str(told.value)
    assert f"score them one by one, with {tmp_path / 'both' / 'disc'}" in str(told.value)
    if change is _other_precision:
        assert anomaly.load(tmp_path / "both", "cpu", "fp32")


def test_models_of_two_methods_or_aspects_are_refused(
    product_runs: Path, padim_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(product_runs / "stripes", tmp_path / "mixed" / "stripes")
    shutil.copytree(padim_folder, tmp_path / "mixed" / "disc")
    with pytest.raises(ModelError, match=r"model\.kind is 'padim' in disc and 'patchcore'"):
        opened(tmp_path / "mixed")
    one = anomaly.load(padim_folder, "cpu").model
    shutil.copytree(padim_folder, tmp_path / "aspects" / "disc")
    wide = replace(one, aspect=2.0, manifest={**one.manifest, "aspect": 2.0})
    save(wide, tmp_path / "aspects" / "wide")
    with pytest.raises(ModelError, match=r"the images' aspect is 0\.8 in disc and 2\.0 in wide"):
        opened(tmp_path / "aspects")


def test_products_learned_from_a_few_images_have_to_be_named(
    product_runs: Path, two_products: Path, tmp_path: Path
) -> None:
    shutil.copytree(product_runs / "disc", tmp_path / "both" / "disc")
    few = replace(anomaly.load(product_runs / "stripes", "cpu").model, training_statistics=None)
    save(few, tmp_path / "both" / "stripes")
    with pytest.raises(ModelError, match="stripes has too few training images"):
        opened(tmp_path / "both")
    path = images(two_products, "stripes")[0]
    found = opened(tmp_path / "both", "stripes").predict(path)
    assert found.score == few.predict(path).score
    shutil.rmtree(tmp_path / "both" / "disc")
    assert opened(tmp_path / "both").predict(path).product == "stripes"
