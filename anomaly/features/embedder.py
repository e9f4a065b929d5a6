"""Images -> patch embeddings: normalise, hook features, align."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anomaly.features.aligner import Align
from anomaly.features.backbones import Normalisation
from anomaly.features.extractor import FeatureExtractor
from anomaly.imaging.geometry import Layout
from anomaly.imaging.preprocessing import Loaded
from anomaly.imaging.region import Region, counted


@dataclass(frozen=True, eq=False)
class Embedder:
    """The stages between a rendered image and its patch embeddings."""

    extractor: FeatureExtractor
    normalise: Normalisation
    align: Align
    device: torch.device

    def images(self, batch: Sequence[Loaded]) -> Tensor:
        """Normalised images (B, 3, H, W) of one size."""
        pixels = torch.from_numpy(np.stack([item.pixels for item in batch]))
        if self.device.type == "cuda":  # from pinned memory the copy doesn't hold up this thread
            pixels = pixels.pin_memory().to(self.device, non_blocking=True)
        # (B, H, W, 3) is what torch calls channels_last.
        return self.normalise(pixels.permute(0, 3, 1, 2))

    def maps(self, batch: Sequence[Loaded]) -> list[Tensor]:
        """Feature maps (B, C_i, h_i, w_i) of images of one size, in the extractor's precision."""
        return [m.values for m in self.extractor(self.images(batch))]

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


def inside_of(batch: Sequence[Loaded], embeddings: Tensor, region: Region | None) -> Tensor | None:
    """Which patches (B, h, w) of embeddings (B, h, w, D) count; None for all.

    Raises:
        DataError: none of an image's patches does.
    """
    return inside([(item.layout, item.tile) for item in batch], embeddings, region)


def inside(
    pieces: Sequence[tuple[Layout, tuple[int, int]]], embeddings: Tensor, region: Region | None
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
