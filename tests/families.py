"""One network of each family whose layers are known by name, and parameters in two tiers."""

from collections.abc import Iterable
from typing import Any

import pytest

FAMILIES = [
    "wide_resnet50_2",
    "resnet18",
    "resnet50",
    "resnet50_v1",
    "resnext50_32x4d",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "convnext_tiny",
    "densenet121",
    "googlenet",
    "mnasnet1_0",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "vgg11",
    "vgg16_bn",
    "timm/tf_efficientnet_lite2",
]


def quick_and_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of a test, of which all but some are marked slow."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]
