"""What a fitter and a scorer are. A fitter turns good patches into an immutable scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor, device

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class PatchBatch:
    """The patch embeddings of a few images that share one grid.

    Attributes:
        embeddings: (B, h, w, D) float32.
        images: the B training-image indices.
        corners: row and column of each grid's first patch in its image; (0, 0) but in tiles.
        inside: (B, h, w) bool, which patches count; None for all.
    """

    embeddings: Tensor
    images: tuple[int, ...]
    corners: tuple[tuple[int, int], ...] | None = None
    inside: Tensor | None = None


@dataclass(frozen=True)
class PatchScores:
    """How anomalous each patch is.

    Attributes:
        scores: (B, h, w) float32, a distance (never squared); higher is more anomalous.
        nearest: (B, h, w) int64, the nearest bank vector of each patch; None without a bank.
    """

    scores: Tensor
    nearest: Tensor | None = None


class Scorer(Protocol):
    """An immutable model of good patches."""

    def score(self, embeddings: Tensor) -> PatchScores:
        """Score patch embeddings (B, h, w, D)."""
        ...

    def to(self, target: device | str) -> Scorer:
        """The same scorer on another device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name; `from_tensors` is the way back."""
        ...


class Fitter(Protocol):
    """Settings of a scorer that isn't there yet. Holds no learned state."""

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> Scorer:
        """Learn from good patches.

        Args:
            batches: re-iterable; may be read more than once, and gives the same each time.
            progress: called with (done, total) while something takes long.
        """
        ...
