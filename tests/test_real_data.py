"""The whole walk on real photographs with real weights; skipped where they are absent."""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import REPOSITORY, SHARED
from portable import LEVELS

WEIGHTS = SHARED / "weights" / "resnet50_v1_imagenet_stem_to_layer3.safetensors"
BOTTLE = SHARED / "data" / "mvtec_ad" / "bottle"
MAGNETIC_TILE = SHARED / "data" / "magnetic_tile"

pytestmark = pytest.mark.slow


def _needs(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            pytest.skip(f"{path} is absent")


def _run(name: str, *arguments: object, held: Mapping[str, str] | None = None) -> None:
    """A script in a process of its own, so that its peak memory, and its processor, are its own."""
    environment = {k: v for k, v in os.environ.items() if k != "KMP_DUPLICATE_LIB_OK"}
    environment |= held or {}
    script = REPOSITORY / "scripts" / f"{name}.py"
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _train_and_evaluate(
    data: Path,
    output: Path,
    *settings: str,
    config: str = "mvtec_bottle.yaml",
    held: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    overrides = [f"data.root={data.parent}", f"data.category={data.name}", *settings]
    flags = [part for setting in overrides for part in ("--set", setting)]
    run, figures = output / "run", output / "figures"
    _run("train", "--config", config, *flags, "--output", run, "--device", "cpu", held=held)
    _run("evaluate", "--model", run, "--output", figures, "--device", "cpu", held=held)
    summary = json.loads((output / "run" / "train.json").read_text())
    metrics = json.loads((output / "figures" / "metrics.json").read_text())
    return summary, metrics["mean"]


REAL = ["backbone.name=resnet50_v1", f"backbone.weights={WEIGHTS}"]
SQUARE = ["image.resize=256", "image.crop=null"]


def test_patchcore_on_bottle(tmp_path: Path) -> None:
    _needs(BOTTLE, WEIGHTS)
    settings = [*REAL, *SQUARE, "model.coreset_ratio=0.01"]
    summary, figures = _train_and_evaluate(BOTTLE, tmp_path, *settings)
    assert summary["bank_vectors"] == 2140  # 1 % of 209 images × 1,024 patches
    assert figures["image_auroc"] >= 0.998
    assert figures["pixel_auroc"] >= 0.985


@pytest.mark.parametrize(
    ("projection", "pixel_auroc"),
    # Random subsets of 100 channels range from 0.979 to 0.983 with the seed.
    [("orthogonal", 0.982), ("random", 0.978)],
)
def test_padim_on_bottle(projection: str, pixel_auroc: float, tmp_path: Path) -> None:
    _needs(BOTTLE, WEIGHTS)
    settings = [*REAL, *SQUARE, "model.kind=padim", "model.dimensions=100"]
    settings += ["model.image_score=map_max"]
    settings += [f"model.projection={projection}"]
    _, figures = _train_and_evaluate(BOTTLE, tmp_path, *settings)
    assert figures["image_auroc"] >= 0.995
    assert figures["pixel_auroc"] >= pixel_auroc


@pytest.mark.parametrize(
    # PatchCore's image AUROC ranges from 0.900 to 0.919 with the seed; the map's maximum gives
    # 0.009 more.
    ("kind", "score", "image_auroc", "pixel_auroc"),
    [
        ("patchcore", "max", 0.895, 0.81),
        ("patchcore", "map_max", 0.904, 0.81),
        ("patchcore", "map_top_percent", 0.904, 0.81),
        ("padim", "map_top_percent", 0.881, 0.793),
        ("padim", "map_max", 0.881, 0.793),
    ],
)
def test_one_seed_of_magnetic_tile(
    kind: str, score: str, image_auroc: float, pixel_auroc: float, tmp_path: Path
) -> None:
    _needs(MAGNETIC_TILE, WEIGHTS)
    settings = [*REAL, *SQUARE, f"model.kind={kind}", "model.coreset_ratio=0.01"]
    settings += ["model.dimensions=100", "model.projection=orthogonal", "name=magnetic_tile"]
    settings += [f"model.image_score={score}"]
    _, figures = _train_and_evaluate(MAGNETIC_TILE, tmp_path, *settings)
    assert figures["image_auroc"] >= image_auroc
    assert figures["pixel_auroc"] >= pixel_auroc


@pytest.mark.parametrize(
    # Magnetic tile's were 0.959 and 0.873 in the mean of seeds 0, 1, 2.
    ("data", "image_auroc", "pixel_auroc"),
    [(BOTTLE, 0.998, 0.985), (MAGNETIC_TILE, 0.95, 0.855)],
)
def test_the_default_size_keeps_the_aspect(
    data: Path, image_auroc: float, pixel_auroc: float, tmp_path: Path
) -> None:
    _needs(data, WEIGHTS)
    settings = [*REAL, "data.format=mvtec", "model.coreset_ratio=0.1", "name=defaults"]
    _, figures = _train_and_evaluate(data, tmp_path, *settings, config="folder.yaml")
    assert figures["image_auroc"] >= image_auroc
    assert figures["pixel_auroc"] >= pixel_auroc


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 settings")
@pytest.mark.parametrize("data", [BOTTLE, MAGNETIC_TILE])
def test_figures_are_those_of_older_processors(data: Path, tmp_path: Path) -> None:
    """Trained and evaluated on each: as this one computes, and held down to older instructions."""
    _needs(data, WEIGHTS)
    settings = [*REAL, "data.format=mvtec", "model.coreset_ratio=0.01", "name=defaults"]
    settings += ["precision=fp32"]  # auto would take bf16 here and not there
    found = {}
    for level, held in {"this": {}, **LEVELS}.items():
        _, found[level] = _train_and_evaluate(
            data, tmp_path / level, *settings, config="folder.yaml", held=held
        )
    for name in ("image_auroc", "pixel_auroc"):
        figures = [found[level][name] for level in found]
        assert max(figures) - min(figures) <= 0.001, found


def test_what_isnt_a_bottle_is_for_review(tmp_path: Path) -> None:
    """And no bottle is, broken or not."""
    _needs(BOTTLE, MAGNETIC_TILE, WEIGHTS)
    settings = [*REAL, f"data.root={BOTTLE / 'train' / 'good'}", "name=bottle"]
    flags = [part for setting in settings for part in ("--set", setting)]
    run, odd, out = tmp_path / "run", tmp_path / "odd", tmp_path / "out"
    _run("train", "--config", "folder.yaml", *flags, "--output", run, "--no-calibrate")
    odd.mkdir()
    for file in sorted((BOTTLE / "test" / "good").iterdir())[:3]:
        part = cv2.imread(str(file))
        cv2.imwrite(str(odd / f"black_{file.name}"), np.zeros_like(part))
        cv2.imwrite(str(odd / f"white_{file.name}"), np.full_like(part, 255))
        cv2.imwrite(str(odd / f"blurred_{file.name}"), cv2.GaussianBlur(part, (0, 0), 12))
    for file in sorted((MAGNETIC_TILE / "test" / "good").iterdir())[:3]:
        shutil.copy(file, odd / f"other_{file.name}")
    _run("infer", "--model", run, "--input", odd, BOTTLE / "test", "--output", out)
    with (out / "results.csv").open(newline="") as stream:
        rows = [(Path(r["path"]), r["verdict"], r["reason"]) for r in csv.DictReader(stream)]
    assert len(rows) == 12 + 83
    for path, verdict, reason in rows:
        assert (verdict == "review") == bool(reason) == (path.parent == odd), (path, reason)


@pytest.mark.parametrize("kind", ["patchcore", "padim"])
def test_the_papers_network_and_size_fit_into_memory(kind: str, tmp_path: Path) -> None:
    """WideResNet50-2, 256 → 224, 10 % or 550 dimensions; random weights, meaningless figures."""
    _needs(BOTTLE)
    settings = ["backbone.weights=random", f"model.kind={kind}"]
    summary, figures = _train_and_evaluate(BOTTLE, tmp_path, *settings)
    assert summary["peak_memory_bytes"] < 6e9
    assert figures["image_auroc"] is not None
    if kind == "padim":
        assert summary["patches"] == 209 * 56 * 56
    else:
        assert summary["bank_vectors"] == int(0.1 * 209 * 28 * 28)
