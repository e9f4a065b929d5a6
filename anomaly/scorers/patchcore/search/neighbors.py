"""Nearest bank vectors. An index is derived from the bank, and never part of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from anomaly.errors import ConfigError, nearest
from anomaly.scorers.patchcore.search.measuring import distances_to
from anomaly.scorers.patchcore.search.product_index import ProductIndex
from anomaly.scorers.patchcore.search.screened_index import ScreenedIndex

METHODS = ("auto", "product", "screened", "faiss", "ivf")


class Index(Protocol):
    """A way to find which bank vectors are nearest."""

    def candidates(self, queries: Tensor, k: int) -> Tensor:
        """The k nearest (Q, k) int64 of queries (Q, D), in any order, 1 <= k <= M."""
        ...


class NearestNeighbors:
    """The k nearest bank vectors, with distances measured directly.

    An index only names candidates. Their distances are taken afterwards as ‖x − y‖, not from
    ‖x‖² − 2xy + ‖y‖², which cancels: a vector of the bank is at distance 0 from itself, and a
    query's distance doesn't depend on what else is searched with it. Which vectors are named
    doesn't hang on rounding either: where products in float32 can't tell two of them apart, exact
    indices measure, or multiply in float64.

    Args:
        bank: (M, D) float32, on the device where queries will be.
        method: `auto`, or one of `product` (blocked matrix products, any device),
            `screened` (exact, measures only what a few dimensions can't rule out, CPU), `faiss`
            (Flat, CPU), `ivf` (faiss inverted lists, approximate, CPU).
        cache: a folder for trained `ivf` indices; they are trained anew where it is None.
        within: neighbours in a bank that holds all these vectors, and which ones they are (M,):
            what its index has computed isn't computed again.

    Raises:
        ConfigError: an unknown method, or one that doesn't run on the bank's device.
    """

    def __init__(
        self,
        bank: Tensor,
        method: str = "auto",
        cache: Path | None = None,
        within: tuple[NearestNeighbors, Tensor] | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"search method {method!r} is unknown; {nearest(method, METHODS)}")
        if method in ("screened", "faiss", "ivf") and bank.device.type != "cpu":
            raise ConfigError(f"search method {method!r} runs on the CPU only; use 'auto'")
        self._bank = bank
        self.method = _best(bank) if method == "auto" else method
        self._index = self._build(cache, within)

    def search(self, queries: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Find the nearest bank vectors.

        Args:
            queries: (Q, D) float32.
            k: how many each, at most M are returned.

        Returns:
            (Q, k) float32 Euclidean distances, ascending and differentiable in the queries, and
            (Q, k) int64 indices.
        """
        k = min(k, len(self._bank))
        if not len(queries):
            return queries.new_empty(0, k), queries.new_empty(0, k, dtype=torch.int64)
        found = self._index.candidates(queries.detach(), k)
        distances = distances_to(self._bank, queries, found)
        if k == 1:
            return distances, found
        distances, order = distances.sort(dim=1, stable=True)
        return distances, found.gather(1, order)

    def _build(self, cache: Path | None, within: tuple[NearestNeighbors, Tensor] | None) -> Index:
        if self.method == "screened":
            if within is not None and isinstance(within[0]._index, ScreenedIndex):
                return within[0]._index.only(self._bank, within[1])
            return ScreenedIndex(self._bank)
        if self.method in ("faiss", "ivf"):
            from anomaly.scorers.patchcore.search.faiss_index import FaissIndex

            return FaissIndex(self._bank, inverted=self.method == "ivf", cache=cache)
        return ProductIndex(self._bank)


def _best(bank: Tensor) -> str:
    """What measured fastest (`python -m benchmarks.search`).

    | bank          | CPU      | CUDA    | why                                                     |
    |---------------|----------|---------|---------------------------------------------------------|
    | below 1,024   | product  | product | one small product; no axes to fit first                 |
    | from 1,024 up | screened | product | less to read; faiss Flat takes 1.4 to 10 times as       |
    |               |          |         | long. A GPU multiplies faster than it gathers.          |
    """
    return "screened" if bank.device.type == "cpu" and len(bank) >= 1024 else "product"
