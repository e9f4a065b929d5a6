"""Feature maps of several layers -> one grid of patch embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Weight of the map itself beside 9/16 for its mean over 3×3: the centre then counts as much as its
# eight neighbours together.
_CENTRE = 7 / 16


def patchcore_sharp(maps: Sequence[Tensor]) -> Tensor:
    """Patch embeddings of the layers side by side; those of the finest grid are averaged less.

    A mean over 3×3 positions of the finest layer blurs what it sees best, small defects. There the
    centre counts as much as its eight neighbours together; in coarser layers, which are brought to
    a finer grid, all nine count alike. What that is worth: `benchmarks/ACCURACY.md`.

    Args:
        maps: (B, C_i, h_i, w_i) each, of any grids.

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
        maps: (B, C_i, h_i, w_i) each, of any grids.

    Returns:
        (B, h, w, ΣC_i) float32 on the finest grid.
    """
    return _join([_mean_of_nine(m) for m in maps])


def _mean_of_nine(m: Tensor) -> Tensor:
    """Means (B, C, h, w) over 3×3 positions, zeros beyond the border."""
    return F.avg_pool2d(m, 3, stride=1, padding=1)


def _finest(maps: Sequence[Tensor]) -> torch.Size:
    """The largest grid (h, w) of the maps."""
    return max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])


def _join(maps: Sequence[Tensor]) -> Tensor:
    """Maps (B, C_i, h_i, w_i) joined on the finest grid, (B, h, w, ΣC_i) float32."""
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
    """A map (B, C, h, w) on another grid, bilinearly and without aligned corners."""
    if m.shape[-2:] == grid:
        return m
    return F.interpolate(m, size=grid, mode="bilinear", align_corners=False)


# By `model.embedding`.
ALIGNERS = {"sharp": patchcore_sharp, "concat": patchcore_concat}
