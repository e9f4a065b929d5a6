"""Nearest neighbours by blocked matrix products, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of one product, queries × bank: the product stays in a CPU's cache; a GPU wants few launches.
_BLOCK = {"cpu": (1024, 2048), "cuda": (8192, 16384)}
# What squared distances by way of float32 products are off by at most, relative to the squared
# norms of the query and of the farthest bank vector.
SLACK = 1e-5


class ProductIndex:
    """Blocks of ‖y‖² − 2xy, never the whole matrix.

    Products in float32 cancel: what they tell about two neighbours that are closer to each other
    than rounding hangs on the processor. Such queries, a few in a hundred, are multiplied again in
    float64, so the result is that of the distances themselves.

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
        return torch.cat([self._search(q, k) for q in blocks])

    def exactly(self, queries: Tensor, k: int) -> Tensor:
        """`candidates`, by products in float64 alone."""
        blocks = torch.split(queries.double() - self._mean, self._query_rows)
        return torch.cat([self._multiply(q, k)[1][:, :k] for q in blocks])

    def _search(self, queries: Tensor, k: int) -> Tensor:
        centred = queries - self._mean
        scores, found, farthest = self._multiply(centred, k + 1)
        if len(self._bank) > k:
            slack = SLACK * (centred.square().sum(1) + farthest)
            close = scores[:, k] - scores[:, k - 1] <= slack
            found = found[:, :k].contiguous()
            if bool(close.any()):
                found[close] = self.exactly(queries[close], k)
        return found

    def _multiply(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of centred queries (Q, D): scores and indices (Q, k), ascending, and max ‖y‖² ().

        In the queries' dtype; fewer than k columns where the bank is smaller.
        """
        scores = queries.new_empty(len(queries), 0)
        found = queries.new_empty(len(queries), 0, dtype=torch.int64)
        farthest = queries.new_zeros(())
        start = 0
        for block in torch.split(self._bank, self._bank_rows):
            bank = block.to(queries.dtype) - self._mean
            norms = bank.square().sum(1)
            block_scores, block_found = _smallest(torch.addmm(norms, queries, bank.T, alpha=-2), k)
            scores = torch.cat([scores, block_scores], dim=1)
            found = torch.cat([found, block_found + start], dim=1)
            scores, kept = _smallest(scores, k)
            found = found.gather(1, kept)
            farthest = torch.maximum(farthest, norms.max())
            start += len(bank)
        return scores, found, farthest


def _smallest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row, ascending, or all where it has fewer. Overwrites `scores`."""
    k = min(k, scores.shape[1])
    if k > 2:
        top = scores.topk(k, dim=1, largest=False)
        return top.values, top.indices
    # Reading twice takes a tenth of the time that topk does.
    found = []
    for _ in range(k):
        least = scores.min(dim=1, keepdim=True)
        found.append((least.values, least.indices))
        scores.scatter_(1, least.indices, torch.inf)
    return torch.cat([f[0] for f in found], 1), torch.cat([f[1] for f in found], 1)
