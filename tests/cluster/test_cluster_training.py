"""Training by shards: workers in threads here, on Ray in `test_ray`."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import FAST, REPOSITORY, write_part, write_product
from thread_cluster import Once, ThreadCluster

from anomaly.cluster.features import ClusterFeatures
from anomaly.config.load import load_config
from anomaly.datasets import open_dataset
from anomaly.errors import DataError, OutputError
from anomaly.imaging.loading import turn_of
from anomaly.methods.patchcore import fitter as patchcore
from anomaly.training.fit import Training
from anomaly.training.runs import train_run

_CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images, one cut short."""
    root = write_product(tmp_path_factory.mktemp("data") / "disc", n_train=36)
    file = root / "train" / "good" / "017.png"
    file.write_bytes(file.read_bytes()[:300])
    return root


def _trained(
    product: Path, output: Path, *overrides: str, cluster: Any = None, calibrate: bool = True
) -> tuple[Training, dict[str, Any]]:
    where = [f"data.root={product.parent}", f"data.category={product.name}", "data.format=mvtec"]
    config = load_config(str(REPOSITORY / "configs" / "folder.yaml"), [*where, *FAST, *overrides])
    data = open_dataset(config.data.format, config.data.root, config.data.category)
    (output / "features-of-one-that-was-killed").mkdir(parents=True)
    shared = None if cluster is None else partial(ClusterFeatures, cluster)
    more: dict[str, Any] = {"shared": shared, "calibrate": calibrate}
    return train_run(config, data, output, device=_CPU, workers=1, **more)


def _same(one: Training, other: Training) -> bool:
    here, there = one.detector.scorer.tensors(), other.detector.scorer.tensors()
    return all(torch.equal(here[name], there[name]) for name in here)


def test_a_bank_is_one_machines_whatever_the_workers(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=36)
    one, summary = _trained(product, tmp_path / "one")
    dies = Once("learn", 1, "score", 2, "apply", 0)
    clusters = [ThreadCluster(1), ThreadCluster(3, dies)]
    for i, cluster in enumerate(clusters):
        more, said = _trained(product, tmp_path / f"{i}", cluster=cluster)
        assert _same(one, more)
        assert one.detector.thresholds == more.detector.thresholds
        alike = ("patches", "images", "refused", "odd", "stand_out", "patch_size")
        assert {key: said[key] for key in alike} == {key: summary[key] for key in alike}
    assert max(dies.left.values()) < 0  # all three have died
    assert clusters[1].started > 3  # in their place
    assert all(cluster.stopped == cluster.started for cluster in clusters)
    assert [folder.parent.name for folder in tmp_path.glob("*/features*")] == ["one"]
    recorded = json.loads((tmp_path / "1" / "model" / "manifest.json").read_text())
    assert recorded["made_with"]["shard_images"] == 4
    assert recorded["training_images"] == one.detector.manifest["training_images"]


def test_a_refused_image_and_several_sizes_cost_nothing(product: Path, tmp_path: Path) -> None:
    """Others share batches then, so that features round otherwise; the selection is the same."""
    for i in (3, 20, 21, 30):
        file = product / "train" / "good" / f"{i:03}.png"
        cv2.imwrite(str(file), np.ascontiguousarray(cv2.imread(str(file))[:-16]))
    kept_shape = "image.area=64"
    one, summary = _trained(product, tmp_path / "one", kept_shape)
    more, said = _trained(product, tmp_path / "more", kept_shape, cluster=ThreadCluster(2))
    assert summary["refused"] == said["refused"]
    assert len(said["refused"]) == 1
    bank, other = (t.detector.scorer.tensors() for t in (one, more))
    assert torch.equal(bank["origins"], other["origins"])
    torch.testing.assert_close(bank["vectors"], other["vectors"], rtol=1e-4, atol=1e-4)
    for which in ("review", "image"):
        of = [getattr(t.detector.thresholds, which) for t in (one, more)]
        assert of[0] == pytest.approx(of[1], rel=1e-4)


@pytest.mark.slow
def test_more_patches_than_memory_are_measured_by_workers(
    product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    there = patchcore.distances_to_nearest

    def watched(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        measured.append(len(points))
        return there(points, centres)

    monkeypatch.setattr(patchcore, "distances_to_nearest", watched)
    select = patchcore.select_streamed
    monkeypatch.setattr(
        patchcore, "select_streamed", lambda *a, **how: select(*a, **{**how, "memory_limit": 1})
    )
    one, _ = _trained(product, tmp_path / "one", calibrate=False)
    more, _ = _trained(product, tmp_path / "more", cluster=ThreadCluster(2), calibrate=False)
    bank, other = (t.detector.scorer.tensors() for t in (one, more))
    assert not bank["exact"]
    assert not other["exact"]
    assert measured[0] == sum(measured[1:])  # at once, and a shard at a time
    assert len(measured) > 3
    radius, again = float(bank["covering_radius"]), float(other["covering_radius"])
    assert radius == pytest.approx(again, rel=1e-3)


@pytest.mark.slow
def test_turned_copies_are_learned_by_shards_too(product: Path, tmp_path: Path) -> None:
    copies = "model.turned_copies=quarter_turns"
    one, _ = _trained(product, tmp_path / "one", copies)
    more, _ = _trained(product, tmp_path / "more", copies, cluster=ThreadCluster(2))
    here, there = one.detector.scorer.tensors(), more.detector.scorer.tensors()
    assert here["vectors"].shape == there["vectors"].shape
    assert 0.9 < float(there["covering_radius"]) / float(here["covering_radius"]) < 1.3
    assert {turn_of(row)[0] for row in there["origins"][:, 1].tolist()} == {0, 1, 2, 3}
    assert one.learned == more.learned == len(more.detector.thresholds.good.names)


def test_sums_are_those_of_one_machine(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=24)
    one, summary = _trained(product, tmp_path / "one", "model.kind=padim")
    more, said = _trained(product, tmp_path / "more", "model.kind=padim", cluster=ThreadCluster(2))
    here, there = one.detector.scorer.tensors(), more.detector.scorer.tensors()
    for name in here:
        assert torch.allclose(here[name].double(), there[name].double(), rtol=0, atol=1e-10), name
    assert one.detector.thresholds is not None
    assert more.detector.thresholds is not None
    for name in ("image", "review", "pixel"):
        of = [getattr(t.detector.thresholds, name) for t in (one, more)]
        assert of[0] == pytest.approx(of[1], rel=1e-6)
    names = [[suspect["name"] for suspect in s["suspects"]] for s in (summary, said)]
    assert names[0] == names[1]


def test_suspects_are_left_out_as_on_one_machine(tmp_path: Path) -> None:
    root = write_product(tmp_path / "disc", n_train=30)
    write_part(root / "train" / "good" / "007.png", 7, mark=(30, 50))
    leave_out = "model.leave_out_suspects=true"
    one, _ = _trained(root, tmp_path / "one", leave_out)
    more, _ = _trained(root, tmp_path / "more", leave_out, cluster=ThreadCluster(2))
    assert list(one.stand_out) == list(more.stand_out) == ["train/good/007.png"]
    assert one.learned == more.learned == 29
    assert 7 not in set(more.detector.scorer.tensors()["origins"][:, 0].tolist())


@pytest.mark.slow
def test_a_shard_of_which_no_image_can_be_used_costs_the_others_nothing(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=32)
    for i in range(4):  # the first shard
        file = product / "train" / "good" / f"{i:03}.png"
        file.write_bytes(file.read_bytes()[:300])
    one, _ = _trained(product, tmp_path / "one")
    more, said = _trained(product, tmp_path / "more", cluster=ThreadCluster(2))
    assert len(said["refused"]) == 4
    assert _same(one, more)


def test_an_image_that_kills_workers_is_refused(product: Path, tmp_path: Path) -> None:
    poison = 13  # the second image of the fourth shard

    def dies(method: str, arguments: tuple[Any, ...]) -> bool:
        return method == "learn" and poison in arguments[0]

    training, _ = _trained(
        product, tmp_path / "run", cluster=ThreadCluster(2, dies), calibrate=False
    )
    assert training.learned == 34
    assert "crashed" in training.refused[f"train/good/{poison:03}.png"]
    refused = training.detector.manifest["refused_images"]
    assert refused == {"train/good/017.png": 17, f"train/good/{poison:03}.png": poison}


@pytest.mark.slow
def test_too_small_a_disk_for_all_shards_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first shard, whatever others have taken of it meanwhile."""
    product = write_product(tmp_path / "disc", n_train=36)
    size = 0

    def usage(place: Path) -> SimpleNamespace:
        taken = sum(file.stat().st_size for file in place.iterdir())
        return SimpleNamespace(free=max(0, size - taken))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    how = ("precision=fp32", "backbone.name=resnet18", "backbone.layers=[layer2, layer3]")
    images = 36 * 4 * (128 * 64 + 256 * 16 + 64 * 128)  # as in test_feature_cache
    size = images - 1
    with pytest.raises(OutputError, match=r"the features of 36 images take about .* are free"):
        _trained(product, tmp_path / "a", *how, cluster=ThreadCluster(1), calibrate=False)
    size = images
    training, _ = _trained(product, tmp_path / "b", *how, cluster=ThreadCluster(3), calibrate=False)
    assert training.learned == 36


@pytest.mark.slow
def test_what_ends_a_training(product: Path, tmp_path: Path) -> None:
    always = ThreadCluster(2, lambda method, arguments: True)
    with pytest.raises(OutputError, match="workers die even when they are given no image"):
        _trained(product, tmp_path / "a", cluster=always)
    assert always.stopped == always.started

    class Elsewhere(ThreadCluster):
        def put(self, value: Any) -> Any:
            place = getattr(value, "scratch", None)
            return value if place is None else replace(value, scratch=place / "no")

    with pytest.raises(DataError, match=r"sees no .*has to be on a disk that all machines share"):
        _trained(product, tmp_path / "b", cluster=Elsewhere(1))
