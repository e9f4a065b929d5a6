"""Training by shards: workers in threads here, on Ray in `test_ray`."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, fast, write_part, write_product
from thread_cluster import Once, ThreadCluster

from anomaly.cluster.workers import cluster_features
from anomaly.config.load import load_config
from anomaly.datasets.layouts import open_dataset
from anomaly.errors import DataError, OutputError
from anomaly.methods.patchcore import fitter as patchcore
from anomaly.training.fit import Training
from anomaly.training.runs import train_run

_CPU = torch.device("cpu")


def _trained(
    product: Path, output: Path, *overrides: str, cluster: Any = None, calibrate: bool = True
) -> tuple[Training, dict[str, Any]]:
    where = [f"data.root={product.parent}", f"data.category={product.name}", "data.format=mvtec"]
    config = load_config(
        str(REPOSITORY / "configs" / "folder.yaml"), [*where, *fast(*overrides), *overrides]
    )
    data = open_dataset(config.data.format, config.data.root, config.data.category)
    (output / "features-of-one-that-was-killed").mkdir(parents=True)
    shared = None if cluster is None else partial(cluster_features, cluster)
    more: dict[str, Any] = {"features_of": shared, "calibrate": calibrate}
    return train_run(config, data, output, device=_CPU, **more)


def _same(one: Training, other: Training) -> bool:
    here, there = one.model.scorer.tensors(), other.model.scorer.tensors()
    return all(torch.equal(here[name], there[name]) for name in here)


def _cut_short(product: Path, *numbers: int) -> Path:
    for i in numbers:
        file = product / "train" / "good" / f"{i:03}.png"
        file.write_bytes(file.read_bytes()[:300])
    return product


def test_a_bank_is_one_machines_whatever_the_workers(tmp_path: Path) -> None:
    """Though they die, and no image of the first shard can be used."""
    product = _cut_short(write_product(tmp_path / "disc", n_train=36), 0, 1, 2, 3)
    one, summary = _trained(product, tmp_path / "one")
    dies = Once("learn", 1, "apply", 2)
    clusters = [ThreadCluster(1), ThreadCluster(3, dies)]
    for i, cluster in enumerate(clusters):
        more, said = _trained(product, tmp_path / f"{i}", cluster=cluster)
        assert _same(one, more)
        assert one.model.thresholds == more.model.thresholds
        alike = ("patches", "images", "refused", "odd", "stand_out", "patch_size")
        assert {key: said[key] for key in alike} == {key: summary[key] for key in alike}
    assert len(said["refused"]) == 4
    assert max(dies.left.values()) < 0  # both have died
    assert clusters[1].started > 3  # in their place
    assert all(cluster.stopped == cluster.started for cluster in clusters)
    assert [folder.parent.name for folder in tmp_path.glob("*/features*")] == ["one"]
    recorded = json.loads((tmp_path / "1" / "model" / "manifest.json").read_text())
    assert recorded["made_with"]["shard_images"] == 4
    assert recorded["training_images"] == one.model.manifest["training_images"]


def test_refused_images_suspects_and_several_sizes_are_as_on_one_machine(tmp_path: Path) -> None:
    """Others share batches then, so that features round otherwise; the selection is the same."""
    product = _cut_short(write_product(tmp_path / "disc", n_train=30), 17)
    write_part(product / "train" / "good" / "007.png", 7, mark=(30, 50))
    for i in (3, 20, 21):
        file = product / "train" / "good" / f"{i:03}.png"
        cv2.imwrite(str(file), np.ascontiguousarray(cv2.imread(str(file))[:-16]))
    leave_out = "model.leave_out_suspects=true"
    one, summary = _trained(product, tmp_path / "one", leave_out)
    more, said = _trained(product, tmp_path / "more", leave_out, cluster=ThreadCluster(2))
    assert list(summary["refused"]) == list(said["refused"])
    assert len(said["refused"]) == 1
    assert "train/good/007.png" in one.stand_out
    assert list(one.stand_out) == list(more.stand_out)
    assert len(one.images) == len(more.images) == 29 - len(one.stand_out)
    bank, other = (t.model.scorer.tensors() for t in (one, more))
    assert torch.equal(bank["origins"], other["origins"])
    assert 7 not in set(bank["origins"][:, 0].tolist())
    torch.testing.assert_close(bank["vectors"], other["vectors"], rtol=1e-4, atol=1e-4)
    for which in ("review", "image"):
        of = [getattr(t.model.thresholds, which) for t in (one, more)]
        assert of[0] == pytest.approx(of[1], rel=1e-4)


def test_more_patches_than_memory_are_selected_by_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = write_product(tmp_path / "disc", n_train=36)
    select = patchcore.select_coreset
    monkeypatch.setattr(
        patchcore, "select_coreset", lambda *a, **how: select(*a, **{**how, "memory_limit": 1})
    )
    one, _ = _trained(product, tmp_path / "one", calibrate=False)
    more, _ = _trained(product, tmp_path / "more", cluster=ThreadCluster(2), calibrate=False)
    bank, other = (t.model.scorer.tensors() for t in (one, more))
    radius, again = float(bank["covering_radius"]), float(other["covering_radius"])
    assert radius == pytest.approx(again, rel=1e-3)


def test_sums_are_those_of_one_machine(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=16)
    one, summary = _trained(product, tmp_path / "one", "model.kind=padim")
    more, said = _trained(product, tmp_path / "more", "model.kind=padim", cluster=ThreadCluster(2))
    here, there = one.model.scorer.tensors(), more.model.scorer.tensors()
    for name in here:
        assert torch.allclose(here[name].double(), there[name].double(), rtol=0, atol=1e-10), name
    for name in ("image", "review", "pixel"):
        of = [getattr(t.model.thresholds, name) for t in (one, more)]
        assert of[0] == pytest.approx(of[1], rel=1e-6)
    names = [[suspect["name"] for suspect in s["suspects"]] for s in (summary, said)]
    assert names[0] == names[1]


def test_an_image_that_kills_workers_is_refused(tmp_path: Path) -> None:
    product = write_product(tmp_path / "disc", n_train=16)
    poison = 13  # the second image of the fourth shard

    def dies(method: str, arguments: tuple[Any, ...]) -> bool:
        return method == "learn" and poison in arguments[0]

    training, _ = _trained(
        product, tmp_path / "run", cluster=ThreadCluster(2, dies), calibrate=False
    )
    assert len(training.images) == 15
    assert "crashed" in training.refused[f"train/good/{poison:03}.png"]
    refused = training.model.manifest["refused_images"]
    assert refused == {f"train/good/{poison:03}.png": poison}


def test_what_ends_a_training(
    product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = ThreadCluster(2, lambda method, arguments: True)
    with pytest.raises(OutputError, match="workers die even when they are given no image"):
        _trained(product, tmp_path / "a", cluster=always)
    assert always.stopped == always.started

    class Elsewhere(ThreadCluster):
        def start(self, kind: type, *arguments: Any) -> Any:
            *others, scratch, folder = arguments
            return super().start(kind, *others, scratch / "no", folder)

    with pytest.raises(DataError, match=r"sees no .*has to be on a disk that all machines share"):
        _trained(product, tmp_path / "b", cluster=Elsewhere(1))

    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"the features of 12 images take about .* are free"):
        _trained(product, tmp_path / "c", cluster=ThreadCluster(1))
