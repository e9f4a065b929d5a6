"""Images -> patch embeddings: normalise, hook features, align."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anomaly.features.backbones import Normalisation
from anomaly.features.extractor import FeatureExtractor
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.preprocessing import Loaded
from anomaly.imaging.region import Region, counted


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

    def maps(self, batch: Sequence[Loaded]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return [m.values for m in self.extractor(network_input(batch, self.normalise, self.device))]

    def __call__(self, batch: Sequence[Loaded]) -> Tensor:
        """Patch embeddings (B, h, w, D) of images of one size."""
        with torch.inference_mode():
            return self.align(self.maps(batch))

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels, by a dry run."""
        with torch.inference_mode():
            nothing = torch.zeros(1, 3, *size, device=self.device)
            height, width = self.align([m.values for m in self.extractor(nothing)]).shape[1:3]
        return height, width


def network_input(
    batch: Sequence[Loaded], normalise: Normalisation, device: torch.device
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


def inside_of(batch: Sequence[Loaded], embeddings: Tensor, region: Region | None) -> Tensor | None:
    """Which patches (B, h, w) of embeddings (B, h, w, D) count; None for all.

    Raises:
        DataError: none of an image's patches does.
    """
    return inside([(item.layout, item.tile) for item in batch], embeddings, region)


def inside(
    pieces: Sequence[tuple[AnyView, tuple[int, int]]], embeddings: Tensor, region: Region | None
) -> Tensor | None:
    """Which patches of images count, by their layouts and tiles.

    Args:
        pieces: how each image was turned into the network's input, and which tile of it this is.
        embeddings: (B, h, w, D).
        region: what of each image counts; None for all of it.

    Returns:
        (B, h, w) bool; None for all.

    Raises:
        DataError: none of an image's patches counts.
    """
    if region is None:
        return None
    grid = (embeddings.shape[1], embeddings.shape[2])
    masks = [counted(region, layout, tile, grid) for layout, tile in pieces]
    return torch.from_numpy(np.stack(masks)).to(embeddings.device)
