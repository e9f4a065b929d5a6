"""The search in a memory bank as plain reductions, for programs that know nothing of this one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Bank vectors that patches are compared with at once: 16 MiB for an image of 1024 patches.
_BLOCK = 4096


class BankGraph(nn.Module):
    """Patch embeddings -> the distance to the nearest bank vector, and which one it is.

    The bank goes by in blocks, so that memory doesn't grow with it. Products name the nearest
    vector; its distance is then measured directly, which cancels nothing.

    Args:
        vectors: the bank (M, D) float32.
    """

    centre: Tensor
    vectors: Tensor
    squares: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        # Around their mean, products lose fewer digits.
        self.register_buffer("centre", vectors.mean(0))
        self.register_buffer("vectors", vectors - self.centre)
        self.register_buffer("squares", self.vectors.square().sum(1))

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, h, w) float32 and nearest vectors (B, h, w) int64 of (B, h, w, D)."""
        patches, count = embeddings - self.centre, len(self.vectors)
        least, nearest = self._nearest(patches, 0)
        for start in range(_BLOCK, count, _BLOCK):
            values, found = self._nearest(patches, start)
            nearest = torch.where(values < least, found, nearest)
            least = torch.minimum(values, least)
        nearest = nearest.clamp(max=count - 1)  # of NaN none is the nearest
        difference = patches - self.vectors[nearest]
        return difference.square().sum(-1).sqrt(), nearest

    def _nearest(self, patches: Tensor, start: int) -> tuple[Tensor, Tensor]:
        block = slice(start, min(start + _BLOCK, len(self.vectors)))
        # ‖x − y‖² without ‖x‖², which is the same for all y.
        values = self.squares[block] - 2 * (patches @ self.vectors[block].T)
        least = values.amin(-1)
        places = torch.arange(block.start, block.stop, device=patches.device)
        beyond = torch.full_like(places, len(self.vectors))
        return least, torch.where(values <= least[..., None], places, beyond).amin(-1)
