"""Distances measured directly, as ‖x − y‖."""

from __future__ import annotations

import torch
from torch import Tensor

# Candidates that are measured at once: 32 MiB at 1536 dimensions.
_MEASURED = 4096


def distances_to(bank: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    """Euclidean distances (Q, k) float32 of queries to candidates, differentiable in the queries.

    Args:
        bank: (M, D) float32.
        queries: (Q, D) float32.
        candidates: (Q, k) int64, rows of the bank; k is 1 or more.
    """
    rows = max(1, _MEASURED // candidates.shape[1])
    blocks = zip(torch.split(queries, rows), torch.split(candidates, rows), strict=True)
    return torch.cat([_distances(bank, q, c) for q, c in blocks])


def _distances(bank: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    vectors = bank.index_select(0, candidates.flatten()).view(*candidates.shape, -1)
    distances: Tensor = torch.linalg.vector_norm(vectors.sub_(queries[:, None]), dim=2)
    return distances
