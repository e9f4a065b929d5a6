"""`MemoryBank` on numpy arrays, for exported models. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.runtime.once import made_once
from anomaly.scorers.patchcore.bank import Bank, check_bank, spacing_for
from anomaly.scorers.patchcore.search import NearestNeighbors


def scorer(tensors: dict[str, NDArray[Any]], settings: Mapping[str, Any]) -> ArrayBank:
    """The memory bank that was saved.

    Args:
        tensors: as `MemoryBank.tensors` gave them.
        settings: the config's section `model`, by key; its `search` has no say here.

    Raises:
        ModelError: they aren't those of a memory bank.
    """
    check_bank(tensors)
    return ArrayBank(
        tensors["vectors"],
        tensors["origins"],
        settings["embedding"],
        settings["neighbours"],
        spacing_for(tensors, settings),
    )


@dataclass(frozen=True, eq=False)
class ArrayBank(Bank):
    """A memory bank of arrays, searched exactly; attributes as those of `Bank`."""

    vectors: NDArray[np.float32]
    origins: NDArray[np.int32]
    embedding: str
    reweighting: int
    spacing: NDArray[np.float32] | None = None

    @made_once
    def _index(self) -> NearestNeighbors:
        return NearestNeighbors(self.vectors)

    def neighbours(
        self, patches: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The bank vectors nearest to patches.

        Args:
            patches: (N, D) float32.
            count: K, vectors for each.

        Returns:
            Distances (N, K) float32, ascending, and indices (N, K) int64.
        """
        return self._index.search(patches, count)
