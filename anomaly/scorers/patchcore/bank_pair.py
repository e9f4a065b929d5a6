"""Two memory banks that a patch is held against at once. Imports no torch.

Layers on two grids, one twice as fine as the other, are packed into one embedding for each patch of
the finer grid: all numbers of the finer layers, and a quarter of the coarser ones', so that four
neighbouring patches hold a coarse patch between them. What is fine is compared with other fine
patches alone, and the coarse patch, beside the mean of its four fine ones, with other coarse
patches: half as many numbers as all layers side by side at each fine patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anomaly.arrays import Array, module_of
from anomaly.errors import ModelError
from anomaly.scorers.base import ArrayScorer, PatchScores
from anomaly.scorers.patchcore.bank import Bank, check_channels

# What the finer layers' means count for among the coarse layers' numbers; see ACCURACY.md.
_FINE_IN_COARSE = 2.0


@dataclass(frozen=True, eq=False)
class BankPair(ArrayScorer):
    """The sum of a patch's distances to the nearest vectors of two banks.

    Attributes:
        fine: of patches of the finest grid (M, F).
        coarse: of patches twice as long and wide (K, C + F), see `coarse_patches`.
    """

    fine: Bank
    coarse: Bank
    unit = "distance"

    @property
    def dimensions(self) -> int:
        """D, the channels of packed embeddings."""
        fine = self.fine.dimensions
        return fine + (self.coarse.dimensions - fine) // 4

    def score(self, embeddings: Array) -> PatchScores:
        """Each patch's distance to the nearest fine vector, and that of what surrounds it.

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32, packed, on the banks' device; h and w are even.

        Returns:
            The sums, the coarse distances brought to the finer grid bilinearly; `nearest` are rows
            of the fine bank.

        Raises:
            DataError: another number of channels than the banks were made of.
        """
        check_channels(embeddings.shape[-1], self.dimensions)
        channels = self.fine.dimensions
        near = self.fine.score(fine_patches(embeddings, channels))
        around = self.coarse.score(coarse_patches(embeddings, channels))
        return PatchScores(near.scores + doubled(around.scores), near.nearest)

    def check_origin(self, channels: int, images: int) -> None:
        """See that the banks can come from a network's embeddings of so many images.

        Args:
            channels: of all hooked layers together.
            images: training images, numbered from 0.

        Raises:
            ModelError: they can't; the message says what doesn't fit.
        """
        self.coarse.check_origin(channels, images)
        fine = self.fine.dimensions
        if not 0 < fine < channels or (channels - fine) % 4:
            raise ModelError(f"its network has {channels} channels, of which its bank has {fine}")
        self.fine.check_origin(fine, images)


def is_pair(tensors: Mapping[str, Array]) -> bool:
    """Whether saved tensors are those of two banks rather than of one."""
    return any("." in name for name in tensors)


def level_tensors(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """The saved tensors of the fine and the coarse bank, by their own names.

    Raises:
        ModelError: there are others.
    """
    parts: dict[str, dict[str, Array]] = {"fine": {}, "coarse": {}}
    for name, tensor in tensors.items():
        level, _, own = name.partition(".")
        if level not in parts:
            raise ModelError(f"the scorer's tensor {name} is unknown")
        parts[level][own] = tensor
    return parts["fine"], parts["coarse"]


def fine_patches(embeddings: Array, channels: int) -> Array:
    """What packed embeddings hold of the finer layers.

    Args:
        embeddings: (B, h, w, D).
        channels: F, of the finer layers.

    Returns:
        (B, h, w, F).
    """
    return embeddings[..., :channels]


def coarse_patches(embeddings: Array, channels: int) -> Array:
    """What packed embeddings hold of the coarser layers, beside the mean of the finer ones.

    Args:
        embeddings: (B, h, w, D) float32; h and w are even.
        channels: F, of the finer layers.

    Returns:
        (B, h / 2, w / 2, C + F) float32; the mean is over 3×3 coarse patches, as the coarser
        layers' numbers are.
    """
    xp = module_of(embeddings)
    batch, height, width, dimensions = embeddings.shape
    blocks = embeddings.reshape(batch, height // 2, 2, width // 2, 2, dimensions)
    # The four patches of a block side by side: (B, h / 2, w / 2, 2, 2, C / 4).
    coarse = blocks[..., channels:].swapaxes(2, 3).reshape(batch, height // 2, width // 2, -1)
    fine = blocks[..., :channels]
    means = sum(fine[:, :, row, :, column] for row in (0, 1) for column in (0, 1)) / 4
    means = _mean_of_three(_mean_of_three(means).swapaxes(1, 2)).swapaxes(1, 2)
    return xp.concatenate([coarse, means * _FINE_IN_COARSE], -1)


def _mean_of_three(values: Array) -> Array:
    """The mean of each row (B, h, …) and those beside it, with zeros beyond the border."""
    xp = module_of(values)
    nothing = xp.zeros_like(values[:, :1])
    before = xp.concatenate([nothing, values[:, :-1]], 1)
    after = xp.concatenate([values[:, 1:], nothing], 1)
    return (before + values + after) / 3


def doubled(scores: Array) -> Array:
    """Scores brought bilinearly to a grid twice as fine.

    Args:
        scores: (B, h, w) float32.

    Returns:
        (B, 2 h, 2 w) float32.
    """
    return _doubled(_doubled(scores).swapaxes(1, 2)).swapaxes(1, 2)


def _doubled(scores: Array) -> Array:
    """The rows (B, h, w) doubled: each new one lies a quarter of a step beside an old one."""
    xp = module_of(scores)
    before = xp.concatenate([scores[:, :1], scores[:, :-1]], 1)
    after = xp.concatenate([scores[:, 1:], scores[:, -1:]], 1)
    pairs = xp.stack([scores + (before - scores) / 4, scores + (after - scores) / 4], 2)
    return pairs.reshape(scores.shape[0], -1, scores.shape[2])
