"""Feature maps of several layers -> one grid of patch embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_ADAPTIVE_DIMENSIONS = 1024  # of embeddings, with `model.embedding: adaptive`
# Of a map, against 9/16 of its mean over 3×3: the centre then has half of all weight.
_CENTRE = 7 / 16


def patchcore_sharp(maps: Sequence[Tensor]) -> Tensor:
    """PatchCore's layers side by side, those of the finest grid averaged less.

    A mean over 3×3 positions of the finest layer blurs what it sees best, small defects. There the
    centre counts as much as its eight neighbours together; in coarser layers, which are brought to
    a finer grid, all nine count alike. What that is worth: `benchmarks/ACCURACY.md`.

    Args:
        maps: (B, C_i, h_i, w_i) each, any order of grids.

    Returns:
        (B, h, w, ΣC_i) float32 on the finest grid.
    """
    finest = _finest(maps)
    means = [(m, _mean_of_nine(m)) for m in maps]
    return _join([mean.lerp(m, _CENTRE) if m.shape[-2:] == finest else mean for m, mean in means])


def patchcore_concat(maps: Sequence[Tensor]) -> Tensor:
    """PatchCore's locally aware patches, the layers side by side.

    Each map is averaged over 3×3 positions (zeros beyond the border, as in the reference), brought
    to the finest grid bilinearly, and the channels are joined.

    Args:
        maps: (B, C_i, h_i, w_i) each, any order of grids.

    Returns:
        (B, h, w, ΣC_i) float32 on the finest grid.
    """
    return _join([_mean_of_nine(m) for m in maps])


def patchcore_adaptive(maps: Sequence[Tensor]) -> Tensor:
    """The reference implementation's embedding: each layer pooled to 1024, then all to 1024.

    The reference unfolds 3×3 neighbourhoods, averages each layer's 9·C numbers in 1024 bins,
    stacks the layers and averages again in 1024 bins. All of that is linear, so it is one grouped
    3×3 convolution for each layer here, at the layer's own resolution.

    Args:
        maps: (B, C_i, h_i, w_i) each.

    Returns:
        (B, h, w, 1024) float32 on the finest grid.
    """
    count, dimensions = len(maps), _ADAPTIVE_DIMENSIONS
    # Bins of the second averaging stay inside one layer when the layers divide 1024.
    inner = count if dimensions % count == 0 else 1
    pooled = []
    for m in maps:
        weight, groups = _bin_averages(m.shape[1], dimensions, inner)
        pooled.append(F.conv2d(m, weight.to(m), padding=1, groups=groups))
    joined = _join(pooled)
    if inner == count:
        return joined
    flat = joined.reshape(-1, 1, joined.shape[-1])
    return F.adaptive_avg_pool1d(flat, dimensions).reshape(*joined.shape[:-1], dimensions)


def _mean_of_nine(m: Tensor) -> Tensor:
    return F.avg_pool2d(m, 3, stride=1, padding=1)


def _finest(maps: Sequence[Tensor]) -> torch.Size:
    return max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])


def _join(maps: Sequence[Tensor]) -> Tensor:
    finest = _finest(maps)
    if torch.compiler.is_compiling():  # writing into places is a detour in a traced graph
        return torch.cat([_resized(m, finest) for m in maps], 1).permute(0, 2, 3, 1)
    first = maps[0]
    channels = sum(m.shape[1] for m in maps)
    joined = first.new_empty((first.shape[0], *finest, channels), dtype=torch.float32)
    # Each map is written into its place as it is made, so that no layer is held twice.
    start = 0
    for m in maps:
        place = slice(start, start + m.shape[1])
        joined[..., place] = _resized(m, finest).permute(0, 2, 3, 1)
        start = place.stop
    return joined


def _resized(m: Tensor, grid: tuple[int, ...]) -> Tensor:
    if m.shape[-2:] == grid:
        return m
    return F.interpolate(m, size=grid, mode="bilinear", align_corners=False)


@lru_cache(maxsize=16)
def _bin_averages(channels: int, dimensions: int, inner: int) -> tuple[Tensor, int]:
    """The 3×3 convolution that averages unfolded channels in bins.

    The unfolded order is channel-major, so the bins of one block of channels never touch another
    block: a grouped convolution whose groups all share these weights.

    Returns:
        Weights (dimensions / inner, channels / groups, 3, 3), and the number of groups.
    """
    outputs = dimensions // inner
    groups = math.gcd(channels, outputs)
    block = channels // groups
    with torch.inference_mode(False):  # kept, and wanted again where gradients are
        unit = torch.eye(9 * block, dtype=torch.float64)[None]
        bins = F.adaptive_avg_pool1d(unit, dimensions // groups)[0]  # (9·block, dimensions/groups)
        bins = bins.reshape(9 * block, -1, inner).mean(dim=-1)
        weight = bins.T.reshape(-1, block, 3, 3).repeat(groups, 1, 1, 1)
        return weight.float(), groups


# By `model.embedding`.
ALIGNERS = {
    "sharp": patchcore_sharp,
    "concat": patchcore_concat,
    "adaptive": patchcore_adaptive,
}
