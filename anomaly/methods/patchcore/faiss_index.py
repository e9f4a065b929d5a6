"""faiss on the CPU: Flat, and inverted lists (IVF) when asked for."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import torch
from torch import Tensor

from anomaly.methods.patchcore.distances import ROUNDING, squared_norms

Rows = np.ndarray[Any, Any]

_LISTS_PROBED = 4


class Candidates(Protocol):
    """Any index: names the k nearest (Q, k) int64 of queries (Q, D)."""

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest of each query."""


class FaissIndex:
    """Squared L2 over a bank, with as many threads as torch has at the time of the search.

    Args:
        bank: (M, D) float32 on the CPU.
        exact: finds what faiss's float32 products can't tell apart; None to search inverted lists,
            of which the 4 nearest of about 4√M are: approximate.
        cache: folder for the trained inverted lists.
    """

    def __init__(self, bank: Tensor, exact: Candidates | None, cache: Path | None = None) -> None:
        # Relative to the mean: faiss multiplies distances out, and large norms would cancel.
        self._mean = bank.mean(0)
        vectors = np.ascontiguousarray((bank - self._mean).numpy())
        self._exact = exact
        self._farthest = float(squared_norms(vectors).max())
        self._index: Any
        if exact is None:
            self._index = _cached(vectors, cache) if cache is not None else _inverted(vectors)
        else:
            self._index = faiss.IndexFlatL2(vectors.shape[1])
            self._index.add(vectors)

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) int64 of queries (Q, D); any of a query that is NaN."""
        faiss.omp_set_num_threads(torch.get_num_threads())
        rows = np.ascontiguousarray((queries - self._mean).numpy(force=True))
        if self._exact is not None:
            return self._flat(self._exact, queries, rows, k)
        found = self._index.search(rows, k)[1]
        # The probed lists may hold fewer than k vectors; then all of them are searched.
        short = (found < 0).any(1)
        if short.any():
            every = faiss.SearchParametersIVF(nprobe=self._index.nlist)  # type: ignore[call-arg]
            found[short] = self._index.search(rows[short], k, params=every)[1]
        return torch.from_numpy(found).clamp_(min=0)

    def _flat(self, exact: Candidates, queries: Tensor, rows: Rows, k: int) -> Tensor:
        """The k nearest by faiss; measured where its float32 products can't tell."""
        scores, found = self._index.search(rows, min(k + 1, self._index.ntotal))
        nearest = torch.from_numpy(found[:, :k].copy())
        if found.shape[1] > k:
            slack = ROUNDING * (squared_norms(rows) + self._farthest)
            close = torch.from_numpy(scores[:, k] - scores[:, k - 1] <= slack)
            if bool(close.any()):
                nearest[close] = exact.candidates(queries[close], k)
        return nearest.clamp_(min=0)


def _inverted(vectors: Rows) -> Any:
    count, dim = vectors.shape
    lists = max(1, min(int(4 * count**0.5), count // 39))  # faiss wants 39 vectors a list to train
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, lists)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = _LISTS_PROBED
    return index


def _cached(vectors: Rows, folder: Path) -> Any:
    """The trained index from the cache; made, and put there, if it isn't or can't be read."""
    key = hashlib.sha256(vectors.data).hexdigest()[:32]
    file = folder / f"ivf-{key}-faiss{faiss.__version__}.index"
    if file.is_file():
        try:
            index: Any = faiss.read_index(str(file))
            index.nprobe = _LISTS_PROBED
        except RuntimeError:
            file.unlink(missing_ok=True)
        else:
            return index
    index = _inverted(vectors)
    # A cache that can't be written to costs time, no more.
    with suppress(OSError, RuntimeError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, suffix=".part")
        os.close(handle)
        faiss.write_index(index, draft)
        Path(draft).replace(file)
    return index
