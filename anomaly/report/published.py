"""What the papers published on MVTec AD, to stand beside our figures of the very same setting.

PatchCore: Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022. The
10 % figures are those of the authors' released models (amazon-science/patchcore-inspection:
IM224_WR50_L2-3_P01_D1024-1024_PS-3_AN-1/results.csv, and the README for AUPRO); the 1 % figures and
their means are the paper's tables S1, S2 and 5. PaDiM: Defard et al., "PaDiM: a Patch Distribution
Modeling Framework", ICPR 2021: pixel AUROC by category, and means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CATEGORIES = (
    "bottle", "cable", "capsule", "carpet", "grid", "hazelnut", "leather", "metal_nut", "pill",
    "screw", "tile", "toothbrush", "transistor", "wood", "zipper",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A setting's published figures, shares from 0 to 1.

    Attributes:
        source: who published them, and how their setting differs from ours.
        figures: metric to category to figure.
        mean: metric to the mean over all fifteen categories.
    """

    source: str
    figures: Mapping[str, Mapping[str, float]]
    mean: Mapping[str, float]


def _listed(*percentages: float) -> dict[str, float]:
    return {name: round(p / 100, 5) for name, p in zip(CATEGORIES, percentages, strict=True)}


_PATCHCORE = (
    "embeddings pooled to 1024 dimensions; ours keep what model.embedding and model.image_score say"
)
PATCHCORE_10 = Published(
    f"PatchCore 10 %, the authors' released models ({_PATCHCORE})",
    {
        "image_auroc": _listed(
            100.0, 99.68, 97.93, 98.60, 97.91, 100.0, 100.0, 99.90, 96.67, 98.77, 99.49, 100.0,
            99.87, 99.12, 99.50,
        ),
        "pixel_auroc": _listed(
            98.48, 98.41, 98.95, 99.05, 98.80, 98.68, 99.29, 98.34, 97.80, 99.52, 95.71, 98.57,
            96.10, 95.08, 98.87,
        ),
    },
    {"image_auroc": 0.9916, "pixel_auroc": 0.9811, "aupro_30": 0.944},
)  # fmt: skip
PATCHCORE_1 = Published(
    f"PatchCore 1 %, Roth et al. 2022 ({_PATCHCORE})",
    {
        "image_auroc": _listed(
            100.0, 99.3, 98.0, 98.0, 98.6, 100.0, 100.0, 99.7, 97.0, 96.4, 99.4, 100.0, 99.9,
            99.2, 99.2,
        ),
        "pixel_auroc": {
            "bottle": 0.985, "grid": 0.986, "metal_nut": 0.984, "screw": 0.992, "zipper": 0.988,
        },
    },
    {"image_auroc": 0.990, "pixel_auroc": 0.980, "aupro_30": 0.931},
)  # fmt: skip
PADIM_550 = Published(
    "PaDiM WR50-Rd550, Defard et al. 2021",
    {
        "pixel_auroc": _listed(
            98.3, 96.7, 98.5, 99.1, 97.3, 98.2, 99.2, 97.2, 95.7, 98.5, 94.1, 98.8, 97.5, 94.9,
            98.5,
        )
    },
    {"image_auroc": 0.953, "pixel_auroc": 0.975, "aupro_30": 0.921},
)  # fmt: skip
PADIM_100 = Published(
    "PaDiM R18-Rd100, Defard et al. 2021",
    {
        "pixel_auroc": _listed(
            98.1, 95.8, 98.3, 98.9, 94.9, 97.7, 99.1, 96.7, 94.7, 97.4, 91.2, 98.7, 97.2, 93.6,
            98.2,
        )
    },
    {"pixel_auroc": 0.967, "aupro_30": 0.901},
)  # fmt: skip


_ALL_THREE = ["layer1", "layer2", "layer3"]
_BANK = {"kind": "patchcore", "coreset_size": None}
_RANDOM = {"kind": "padim", "projection": "random"}
# Figures, network, layers, and the settings of the model that they were published for.
_PUBLISHED_FOR: list[tuple[Published, str, list[str], dict[str, Any]]] = [
    (PATCHCORE_10, "wide_resnet50_2", _ALL_THREE[1:], {**_BANK, "coreset_ratio": 0.1}),
    (PATCHCORE_1, "wide_resnet50_2", _ALL_THREE[1:], {**_BANK, "coreset_ratio": 0.01}),
    (PADIM_550, "wide_resnet50_2", _ALL_THREE, {**_RANDOM, "dimensions": 550}),
    (PADIM_100, "resnet18", _ALL_THREE, {**_RANDOM, "dimensions": 100}),
]


def published(settings: Mapping[str, Any], layers: list[str]) -> Published | None:
    """The figures published for a setting; None where there are none.

    Args:
        settings: a model's config as plain values.
        layers: the layers it hooks.
    """
    data, image, backbone, model = (
        settings.get(k, {}) for k in ("data", "image", "backbone", "model")
    )
    preparation = (image.get("resize"), image.get("crop"), backbone.get("weights"))
    if preparation != (256, 224, "imagenet"):
        return None
    if model.get("smoothing") != 4 or any(
        model.get(key, 0) != 0 for key in ("halo_damping", "border_damping")
    ):
        return None
    if data.get("format") != "mvtec" or image.get("region") or image.get("ignore"):
        return None
    if model.get("kind") == "patchcore" and (
        model.get("embedding") == "sharp" or model.get("spacing_neighbours", 0)
    ):
        return None
    for figures, network, hooked, wanted in _PUBLISHED_FOR:
        as_published = all(model.get(key) == value for key, value in wanted.items())
        if as_published and (backbone.get("name"), layers) == (network, hooked):
            return figures
    return None
