"""Packed patches of layers on two grids, made and taken apart patch by patch, as references."""

import torch
from patch_lists import PatchList
from torch import Tensor
from torch.nn import functional as F

from anomaly.scorers.patches import PatchBatch

# Channels of the finer layers, and of the coarser ones.
FINE, COARSE = 6, 8


def packed(fine: Tensor, coarse: Tensor) -> Tensor:
    """(B, h, w, F) beside a quarter of (B, h / 2, w / 2, C) for each: upper left, upper right, …"""
    quarter = coarse.shape[3] // 4
    rows = []
    for row in range(fine.shape[1]):
        patches = []
        for column in range(fine.shape[2]):
            first = (2 * (row % 2) + column % 2) * quarter
            share = coarse[:, row // 2, column // 2, first : first + quarter]
            patches.append(torch.cat([fine[:, row, column], share], 1))
        rows.append(torch.stack(patches, 1))
    return torch.stack(rows, 1)


def coarse_of(embeddings: Tensor, channels: int = FINE) -> Tensor:
    """What the coarse bank sees of packed patches (B, h, w, D), in float64."""
    quarters = [embeddings[:, r::2, c::2, channels:] for r in (0, 1) for c in (0, 1)]
    fine = embeddings[..., :channels].double().permute(0, 3, 1, 2)
    means = F.avg_pool2d(F.avg_pool2d(fine, 2), 3, stride=1, padding=1).permute(0, 2, 3, 1)
    return torch.cat([torch.cat(quarters, 3).double(), 2 * means], 3)


def halved(inside: Tensor) -> Tensor:
    """Which coarse patches (B, h / 2, w / 2) move a bilinear score of a fine one that counts."""
    height, width = (side // 2 for side in inside.shape[1:])
    single = torch.eye(height * width, dtype=torch.float64).view(-1, 1, height, width)
    moved = F.interpolate(single, scale_factor=2, mode="bilinear", align_corners=False)[:, 0] != 0
    return (moved[None] & inside[:, None]).flatten(2).any(2).view(-1, height, width)


def random_packed(
    images: int, grid: tuple[int, int] = (6, 4), seed: int = 0, shift: float = 0.0
) -> Tensor:
    """Packed patches (B, h, w, D) of images that are alike, place by place."""
    place = torch.randn(1, *grid, FINE + COARSE // 4, generator=torch.Generator().manual_seed(99))
    noise = torch.Generator().manual_seed(seed)
    return shift + place + 0.5 * torch.randn(images, *place.shape[1:], generator=noise)


def in_batches(
    patches: Tensor,
    first: int = 0,
    size: int = 2,
    corners: tuple[tuple[int, int], ...] | None = None,
    inside: Tensor | None = None,
) -> PatchList:
    """Batches of so many images, numbered from `first` on."""
    batches = []
    for start in range(0, len(patches), size):
        some = slice(start, min(start + size, len(patches)))
        names = tuple(range(first + some.start, first + some.stop))
        batches.append(
            PatchBatch(
                patches[some],
                names,
                corners and corners[some],
                None if inside is None else inside[some],
            )
        )
    return PatchList(batches)


def coarse_batches(batches: PatchList) -> PatchList:
    """The same images' coarse patches, by `coarse_of` and `halved`."""
    return PatchList(
        PatchBatch(
            coarse_of(batch.embeddings).float(),
            batch.images,
            inside=None if batch.inside is None else halved(batch.inside),
        )
        for batch in batches
    )


def fine_batches(batches: PatchList) -> PatchList:
    """The same images' patches with the finer layers' numbers alone."""
    return PatchList(
        PatchBatch(batch.embeddings[..., :FINE], batch.images, inside=batch.inside)
        for batch in batches
    )
