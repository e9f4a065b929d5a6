"""Feature maps of several layers -> one grid of patch embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from anomaly.scorers.patchcore.bank import ADAPTIVE_DIMENSIONS

# Of a map, against 9/16 of its mean over 3×3: the centre then has half of all weight.
_CENTRE = 7 / 16
# Of a map, against a quarter of its mean over 3×3, where fine patches have a bank of their own.
_FINE_CENTRE = 3 / 4


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


def patchcore_levels(maps: Sequence[Tensor]) -> Tensor:
    """Layers on two grids, one twice as fine as the other, packed on the finer grid.

    A mean over 3×3 positions blurs each map, of which the finer grid's keep three quarters as they
    are. A coarse patch's numbers are dealt out to the four fine patches that it lies on, see
    `anomaly.scorers.patchcore.bank_pair`. What that is worth: `benchmarks/ACCURACY.md`.

    Args:
        maps: (B, C_i, h_i, w_i) each, any order of grids.

    Returns:
        (B, h, w, F + C / 4) float32, F channels of the finer grid and C of the coarser, whose
        sides are half of h and w.
    """
    most = _finest(maps)[0]
    # Convolutions without padding leave layers of one stride a few rows apart.
    fine = [m for m in maps if 4 * m.shape[-2] > 3 * most]
    coarse = [m for m in maps if 4 * m.shape[-2] <= 3 * most]
    near = []
    for m in fine:
        # Zeros beyond the border lower a mean along it, and so the centre is lowered, too.
        share = _mean_of_nine(torch.ones_like(m[:1, :1]))
        near.append(_mean_of_nine(m).lerp(m * share, _FINE_CENTRE))
    around = _join([_mean_of_nine(m) for m in coarse])
    batch, rows, columns, channels = around.shape
    # An image that isn't a multiple of the coarser stride has a fine row or column less.
    grid = torch.Size((2 * rows, 2 * columns))
    near = [_resized(m, grid) for m in near]
    dealt = around.reshape(batch, rows, columns, 2, 2, channels // 4).transpose(2, 3)
    return torch.cat([_join(near), dealt.reshape(batch, 2 * rows, 2 * columns, channels // 4)], -1)


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
    count, dimensions = len(maps), ADAPTIVE_DIMENSIONS
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
