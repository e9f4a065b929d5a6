"""Published figures: beside the setting they belong to and no other; in line with their means."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from anomaly.report.index import Published, all_published, published

PATCHCORE: dict[str, Any] = {
    "data": {"format": "mvtec"},
    "image": {"resize": 256, "crop": 224},
    "backbone": {"name": "wide_resnet50_2", "weights": "imagenet"},
    "model": {
        "kind": "patchcore",
        "smoothing": 4.0,
        "coreset_ratio": 0.1,
        "coreset_size": None,
        "embedding": "concat",
        "projection": "random",
        "dimensions": 550,
    },
}


@pytest.mark.parametrize("figures", all_published())
def test_the_means_are_those_that_were_published_too(figures: Published) -> None:
    for key, of in figures.figures.items():
        if len(of) == 15:
            assert np.mean(list(of.values())) == pytest.approx(figures.mean[key], abs=6e-4)


def test_the_papers_settings_are_recognised() -> None:
    layers = ["layer2", "layer3"]
    assert source(PATCHCORE, layers).startswith("PatchCore 10 %")
    assert source(_with("model", "coreset_ratio", 0.01), layers).startswith("PatchCore 1 %")
    padim = _with("model", "kind", "padim")
    assert source(padim, ["layer1", *layers]).startswith("PaDiM WR50-Rd550")


def source(settings: dict[str, Any], layers: list[str]) -> str:
    figures = published(settings, layers)
    assert figures
    return figures.source


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "format", "csv"),
        ("image", "crop", None),
        ("image", "region", {"polygons": [[[0, 0], [1, 0], [1, 1]]]}),
        ("image", "ignore", {"png": "ignore.png"}),
        ("image", "resize", None),
        ("backbone", "name", "resnet50_v1"),
        ("backbone", "weights", "random"),
        ("model", "coreset_ratio", 0.25),
        ("model", "coreset_size", 1000),
        ("model", "smoothing", 0.0),
        ("model", "halo_damping", 0.5),
        ("model", "embedding", "sharp"),
    ],
)
def test_another_setting_has_no_published_figures(section: str, key: str, value: object) -> None:
    assert published(_with(section, key, value), ["layer2", "layer3"]) is None


def _with(section: str, key: str, value: object) -> dict[str, Any]:
    settings = deepcopy(PATCHCORE)
    settings[section][key] = value
    return settings
