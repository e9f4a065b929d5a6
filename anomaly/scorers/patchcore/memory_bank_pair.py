"""Two memory banks of good patches, of layers on two grids, fitted and searched together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from anomaly.scorers.base import Align, Fitter, Fold, Progress, Scorer
from anomaly.scorers.patchcore.aligner import patchcore_levels
from anomaly.scorers.patchcore.bank_pair import (
    BankPair,
    coarse_patches,
    doubled,
    fine_patches,
    level_tensors,
)
from anomaly.scorers.patchcore.fitter import MemoryBankFitter
from anomaly.scorers.patchcore.levels import Coarse, Fine, Level, fine_corner
from anomaly.scorers.patchcore.memory_bank import MemoryBank
from anomaly.scorers.patches import PatchSet, PointsOf


@dataclass(frozen=True, eq=False)
class MemoryBankPair(BankPair, Scorer):
    """Two memory banks; a patch's score is the sum of its distances to both.

    Attributes:
        fine: of patches of the finest grid.
        coarse: of patches twice as long and wide.
    """

    fine: MemoryBank
    coarse: MemoryBank

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings that `score` takes."""
        return patchcore_levels

    def evidence(
        self, embeddings: Tensor, patch: tuple[int, int], count: int
    ) -> tuple[Tensor, Tensor]:
        """The training patches that look most like a patch in its surroundings.

        They are those of the coarse bank, whose vectors hold all layers: patches that are alike in
        the finer layers alone may be of any other part of the product.

        Args:
            embeddings: (h, w, D) float32, packed, on the banks' device.
            patch: its row and column.
            count: K, how many.

        Returns:
            Distances (K,) float32, ascending, the coarse bank's share of the score, and origins
            (K, 3) int32 on the finer grid.
        """
        row, column = patch
        coarse = coarse_patches(embeddings[None], self.fine.dimensions)[0]
        distances, origins = self.coarse.evidence(coarse, (row // 2, column // 2), count)
        places = [(image, *fine_corner(*corner)) for image, *corner in origins.tolist()]
        within = torch.tensor([0, row % 2, column % 2], dtype=torch.int32)
        return distances, torch.tensor(places, dtype=torch.int32) + within

    def graph(self) -> nn.Module:
        """`score` as a module that can be traced."""
        return _PairGraph(self)

    def to(self, target: torch.device | str) -> MemoryBankPair:
        """The same banks on another device."""
        return MemoryBankPair(self.fine.to(target), self.coarse.to(target))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved, by name."""
        return {
            f"{level}.{name}": tensor
            for level, bank in (("fine", self.fine), ("coarse", self.coarse))
            for name, tensor in bank.tensors().items()
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MemoryBankPair:
        """The way back from `tensors`.

        Raises:
            ModelError: they aren't those of two memory banks.
        """
        fine, coarse = level_tensors(tensors)
        return cls(MemoryBank.from_tensors(fine), MemoryBank.from_tensors(coarse))


class _PairGraph(nn.Module):
    """Packed embeddings -> the sum of both distances, and the fine bank's nearest vector."""

    def __init__(self, pair: MemoryBankPair) -> None:
        super().__init__()
        self.fine, self.coarse = pair.fine.graph(), pair.coarse.graph()
        self._channels = pair.fine.dimensions

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, h, w) float32 and nearest vectors (B, h, w) int64 of (B, h, w, D)."""
        scores, nearest = self.fine(fine_patches(embeddings, self._channels))
        around, _ = self.coarse(coarse_patches(embeddings, self._channels))
        return scores + doubled(around), nearest


@dataclass(frozen=True)
class BankPairFitter(Fitter[MemoryBankPair]):
    """Settings of PatchCore with a bank for each of two grids.

    Attributes:
        banks: settings of both; a number of vectors is the fine bank's, and the coarse one, which
            has a quarter as many patches, keeps a quarter as many.
        channels: F, of the layers of the finer grid; 0 before `prepared`.
        base: the banks that `fit` adds to; None where it makes them.
    """

    banks: MemoryBankFitter
    channels: int = 0
    base: MemoryBankPair | None = None

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings to learn from."""
        return patchcore_levels

    def prepared(
        self, channels: Sequence[int], strides: Sequence[int], device: torch.device
    ) -> BankPairFitter | MemoryBankFitter:
        """The fitter for a network, which knows how many numbers are of the finer grid.

        Layers that aren't on two grids, one twice as fine as the other, have one bank.

        Args:
            channels: of each hooked layer.
            strides: network pixels between neighbouring positions of each.
            device: where the embeddings will be.
        """
        finest = min(strides)
        coarse = sum(c for c, s in zip(channels, strides, strict=True) if s == 2 * finest)
        if set(strides) != {finest, 2 * finest} or coarse % 4:
            return self.banks
        return replace(self, channels=sum(channels) - coarse)

    @property
    def projected_by(self) -> tuple[PointsOf, ...]:
        """What makes the points that each bank's vectors are selected from."""
        return tuple(PointsOf(self.banks.projection, view) for view in _views(self.channels))

    def fit(self, batches: PatchSet, progress: Progress | None = None) -> MemoryBankPair:
        """Choose the banks, one after the other.

        Args:
            batches: good patches, packed, of any grids.
            progress: called with (bank vectors selected, all of them).

        Raises:
            ConfigError: the coreset's ratio or size can't be had.
            DataError: no patches, or some that hold NaN or infinite values.
        """
        if not self.channels:
            raise ValueError("no layers are known yet; take the fitter that prepared() returns")
        batches.will_project(self.projected_by)
        done = 0

        def told(some: int, wanted: int) -> None:
            if progress is not None:
                more = 0 if done else math.ceil(wanted / 4)  # about what the coarse bank adds
                progress(done + some, done + wanted + more)

        fine, coarse = self._levels(batches, self.channels)
        to_fine, to_coarse = self._fitters()
        near = to_fine.fit(fine, told)
        done = len(near.vectors)
        return MemoryBankPair(near, to_coarse.fit(coarse, told))

    def held_out(
        self, scorer: MemoryBankPair, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, MemoryBankPair]]:
        """Banks without the images of one fold after another, each repaired, never fitted anew."""
        fine, coarse = self._levels(patches, scorer.fine.dimensions)
        to_fine, to_coarse = self._fitters()
        near = to_fine.held_out(scorer.fine, fine, folds, grouped=grouped)
        around = to_coarse.held_out(scorer.coarse, coarse, folds, grouped=grouped)
        for (fold, one), (_, other) in zip(near, around, strict=True):
            yield fold, MemoryBankPair(one, other)

    def again(self, scorer: MemoryBankPair, patches: PatchSet) -> MemoryBankPair:
        """The same patches of the same images in the banks, embedded by another network."""
        fine, coarse = self._levels(patches, scorer.fine.dimensions)
        near = self.banks.again(scorer.fine, fine)
        return MemoryBankPair(near, self.banks.again(scorer.coarse, coarse))

    def continuing(self, scorer: MemoryBankPair, learned: int) -> BankPairFitter:
        """A fitter whose `fit` adds vectors to the banks, see `MemoryBankFitter.base`."""
        return replace(self, base=scorer, channels=scorer.fine.dimensions)

    def merged(
        self, scorers: Sequence[MemoryBankPair], numbers: Sequence[Mapping[int, int]]
    ) -> MemoryBankPair:
        """All vectors of several pairs; a patch that more than one has kept, once."""
        fine = self.banks.merged([one.fine for one in scorers], numbers)
        return MemoryBankPair(fine, self.banks.merged([one.coarse for one in scorers], numbers))

    def _fitters(self) -> tuple[MemoryBankFitter, MemoryBankFitter]:
        size = self.banks.coreset_size
        coarse = replace(self.banks, coreset_size=size and math.ceil(size / 4))
        if self.base is None:
            return self.banks, coarse
        return replace(self.banks, base=self.base.fine), replace(coarse, base=self.base.coarse)

    def _levels(self, patches: PatchSet, channels: int) -> list[Level]:
        return [Level(patches, view) for view in _views(channels)]


def _views(channels: int) -> tuple[Fine, Coarse]:
    return Fine(channels), Coarse(channels)
