"""Bicubic resampling as products of matrices, which every runtime computes alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_RESAMPLE = torch.ops.aten._upsample_bicubic2d_aa.vec


def resampled_by_products(traced: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A traced program without antialiased bicubic resampling, which says the same.

    Transformers bring the position of each patch to the image's grid in that way. OpenVINO 2026.4
    leaves the antialiasing out, and is off by a third of the score where the grid is a small one.
    """
    if all(node.target is not _RESAMPLE for node in traced.graph.nodes):
        return traced
    without: torch.export.ExportedProgram = traced.run_decompositions(
        {_RESAMPLE: bicubic_antialiased}
    )
    return without


def bicubic_antialiased(
    maps: Tensor, size: list[int], align_corners: bool, scale_factors: Any = None
) -> Tensor:
    """`torch.nn.functional.interpolate(mode="bicubic", antialias=True)`.

    Args:
        maps: (B, C, H, W).
        size: (h, w) of the result.
        align_corners: not heeded; positions of patches are resampled without it.
        scale_factors: not heeded, since the size is given.

    Returns:
        (B, C, h, w).
    """
    rows, columns = (
        _weights(wanted, known, maps) for wanted, known in zip(size, maps.shape[2:], strict=True)
    )
    return rows @ maps @ columns.T


def _weights(wanted: int, known: int, like: Tensor) -> Tensor:
    """What each of some places (wanted, known) gets of those there are: Keys's cubic, a = -0.5."""
    places = torch.arange(wanted, device=like.device, dtype=like.dtype) + 0.5
    scale = known / torch.ones_like(places).sum()  # their number may be unknown while tracing
    own = torch.arange(known, device=like.device, dtype=like.dtype) + 0.5
    away = ((own - places[:, None] * scale) / scale.clamp(min=1)).abs()
    near = (1.5 * away - 2.5) * away * away + 1
    far = ((-0.5 * away + 2.5) * away - 4) * away + 2
    weights = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)
