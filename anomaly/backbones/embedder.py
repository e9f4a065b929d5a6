"""Images -> patch embeddings: normalise, hook features, align; and the precision for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anomaly.backbones.extractor import FeatureExtractor
from anomaly.backbones.registry import Normalisation
from anomaly.imaging.loading import NetworkInput
from anomaly.runtime.devices import has_bf16

# Images that a CPU computes together. Eight take a tenth more memory, and in float32 more time.
_CPU_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings.

    Attributes:
        extractor: the truncated backbone.
        normalise: what it expects of its input.
        align: feature maps (B, C_i, h_i, w_i) of its layers -> embeddings (B, h, w, D) float32.
        device: where it is.
    """

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Callable[[Sequence[Tensor]], Tensor]
    device: torch.device

    def maps(self, batch: Sequence[NetworkInput]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return [m.values for m in self.extractor(network_input(batch, self.normalise, self.device))]

    def __call__(self, batch: Sequence[NetworkInput]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))

    def max_batch_size(self, wanted: int) -> int:
        """How many images to compute together, at most as many as are wanted."""
        return min(wanted, _CPU_AT_ONCE) if self.device.type == "cpu" else wanted

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A `torch.inference_mode` context, in which nothing is recorded for gradients."""
        return torch.inference_mode()

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels, by a dry run."""
        with torch.inference_mode():
            nothing = torch.zeros(1, 3, *size, device=self.device)
            height, width = self.align([m.values for m in self.extractor(nothing)]).shape[1:3]
        return height, width


def network_input(
    batch: Sequence[NetworkInput], normalise: Normalisation, device: torch.device
) -> Tensor:
    """Normalised images (B, 3, H, W) float32 of one size, on a device.

    Args:
        batch: rendered images of one size.
        normalise: what the backbone expects.
        device: where the backbone is.
    """
    pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
    if device.type == "cuda":  # from pinned memory the copy doesn't hold up this thread
        pixels = pixels.pin_memory().to(device, non_blocking=True)
    # (B, H, W, 3) is what torch calls channels_last.
    return normalise(pixels.permute(0, 3, 1, 2))


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
