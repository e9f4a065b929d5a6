"""What a fitter and a scorer are. A fitter turns good patches into an immutable scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, device

from anomaly.errors import ModelError

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


def check_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """See that saved tensors are those of a scorer.

    Args:
        tensors: by name.
        wanted: dtype and shape of each; -1 takes any length but 0.

    Raises:
        ModelError: one is missing, unknown, of another dtype or shape, or holds NaN or infinity.
    """
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        raise ModelError(f"the scorer's tensors {', '.join(odd)} are missing or unknown")
    for name, (dtype, shape) in wanted.items():
        tensor = tensors[name]
        fits = len(shape) == tensor.ndim and all(
            length == size or (length == -1 and size)
            for length, size in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise ModelError(
                f"the scorer's tensor {name} is {tuple(tensor.shape)} of {tensor.dtype}, which "
                "doesn't go with the others"
            )
        if not is_finite(tensor):
            raise ModelError(f"the scorer's tensor {name} holds NaN or infinite values")


def leading(tensors: Mapping[str, Tensor], name: str, axis: int = 0) -> int:
    """The length of one axis of a saved tensor, for `check_tensors`; -1 where it has no such."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else -1


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; reads a tensor once and makes no other."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return all(bool(end.isfinite()) for end in tensor.aminmax())
