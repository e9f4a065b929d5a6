"""Nearest neighbours by blocked matrix products, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of one product, queries × bank: the product stays in a CPU's cache; a GPU wants few launches.
_BLOCK = {"cpu": (1024, 2048), "cuda": (8192, 16384)}


class ProductIndex:
    """Blocks of ‖y‖² − 2xy, never the whole matrix. Exact up to float32's rounding.

    Args:
        bank: (M, D) float32.
    """

    def __init__(self, bank: Tensor) -> None:
        self._bank = bank
        # Distances are multiplied out relative to the mean, so that large norms don't cancel. A
        # block is centred when it is used, a few percent of its product: no copy is kept.
        self._mean = bank.mean(0)
        self._query_rows, self._bank_rows = _BLOCK[bank.device.type]

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) int64 of queries (Q, D)."""
        blocks = torch.split(queries, self._query_rows)
        return torch.cat([self._search(q - self._mean, k) for q in blocks])

    def _search(self, queries: Tensor, k: int) -> Tensor:
        scores = queries.new_empty(len(queries), 0)
        found = queries.new_empty(len(queries), 0, dtype=torch.int64)
        start = 0
        for block in torch.split(self._bank, self._bank_rows):
            bank = block - self._mean
            product = torch.addmm(bank.square().sum(1), queries, bank.T, alpha=-2)
            block_scores, block_found = _smallest(product, k)
            scores = torch.cat([scores, block_scores], dim=1)
            found = torch.cat([found, block_found + start], dim=1)
            scores, kept = _smallest(scores, k)
            found = found.gather(1, kept)
            start += len(bank)
        return found


def _smallest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row, or all where it has fewer; the first of equals for k = 1."""
    if k == 1:
        least = scores.min(dim=1, keepdim=True)
        return least.values, least.indices
    top = scores.topk(min(k, scores.shape[1]), dim=1, largest=False)
    return top.values, top.indices
