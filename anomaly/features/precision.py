"""fp32 or bf16: settled once, at training, and part of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from anomaly.features.extractor import FeatureExtractor
from anomaly.runtime.devices import has_bf16

log = logging.getLogger(__name__)

# The standard deviation that rounding may add, as a share of the maps' own: a hundredth of their
# variance. ResNet-50 stays at 0.03 to 0.08. What that does to scores: docs/reproducibility.md.
LIMIT = 0.1


def choose_precision(extractor: FeatureExtractor, images: Tensor) -> str:
    """bf16 where the device has it and a trial shows that it is safe, else fp32.

    Args:
        extractor: with its weights, on its device.
        images: (B, 3, H, W), a few normalised training images, on the same device.

    Returns:
        `fp32` or `bf16`.
    """
    device = images.device
    if not has_bf16(device):
        log.debug("fp32: %s has no bf16", device)
        return "fp32"
    share = rounding_share(extractor, images)
    if max(share) <= LIMIT:
        log.debug("bf16: rounding is %.1f %% of the feature maps' variation", 100 * max(share))
        return "bf16"
    log.warning(
        "bf16 would blur this network's feature maps (rounding is %.0f %% of their variation): "
        "computing in fp32",
        100 * max(share),
    )
    return "fp32"


def rounding_share(extractor: FeatureExtractor, images: Tensor) -> Sequence[float]:
    """How much bf16 changes each layer's maps, as a share of how much they vary.

    Returns:
        For each layer the root mean square of the change over the standard deviation between
        positions and images, means over channels; infinite where bf16 overflows.
    """
    exact = extractor.to(images.device, "fp32")(images)
    rounded = extractor.to(images.device, "bf16")(images)
    shares = []
    for a, b in zip(exact, rounded, strict=True):
        change = (b.values.float() - a.values).square().mean()
        variation = a.values.var(dim=(0, 2, 3)).mean()
        share = float((change / variation).sqrt())
        shares.append(share if share == share else float("inf"))
    return shares
