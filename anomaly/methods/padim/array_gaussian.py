"""`PatchGaussian` on numpy arrays, for exported models. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.methods.base import ArrayScorer, PatchScores, check_fits
from anomaly.methods.padim.layout import check_gaussians, check_grid, panel_rows, position_blocks
from anomaly.runtime.devices import CPU
from anomaly.runtime.parallel import parallel_map

Floats = NDArray[np.float32]

# Numbers that one block of positions works on, see `anomaly.methods.padim.gaussian`.
_BLOCK = 1 << 21


def scorer(tensors: dict[str, NDArray[Any]], settings: Mapping[str, Any]) -> ArrayGaussian:
    """The Gaussians that were saved.

    Args:
        tensors: as `PatchGaussian.tensors` gave them.
        settings: the config's section `model`, by key; not used.

    Raises:
        ModelError: they aren't those of Gaussians.
    """
    grid, channels = check_gaussians(tensors)
    return ArrayGaussian(tensors, grid, channels)


@dataclass(frozen=True, eq=False)
class ArrayGaussian(ArrayScorer):
    """Good patches as one Gaussian for each position of the grid.

    Attributes:
        tensors: by name, as `anomaly.methods.padim.gaussian.PatchGaussian` saves them.
        grid: (h, w).
        channels: D, before the projection, which is in the exported network.
    """

    tensors: Mapping[str, NDArray[Any]]
    grid: tuple[int, int]
    channels: int
    unit = "Mahalanobis distance"

    @property
    def dimensions(self) -> int:
        """d, the channels of the embeddings that `score` takes."""
        return int(self.tensors["mean"].shape[2])

    def check_origin(self, channels: int, images: int) -> None:
        """See that the Gaussians can come from a network's embeddings.

        Args:
            channels: of all hooked layers together.
            images: training images; any number.

        Raises:
            ModelError: they can't; the message says what doesn't fit.
        """
        check_fits(channels, self.channels)

    def score(self, embeddings: Floats) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Args:
            embeddings: (B, h, w, d) float32, projected, on the grid that was learned.

        Raises:
            DataError: another grid, or another number of channels.
        """
        check_grid(embeddings, self.grid, self.dimensions)
        images, positions = len(embeddings), self.grid[0] * self.grid[1]
        patches = embeddings.reshape(images, positions, -1)
        low_rank = "basis" in self.tensors
        numbers = self.tensors["basis"][0].size if low_rank else self._numbers
        blocks = position_blocks(positions, numbers, _BLOCK)
        squared = np.concatenate(parallel_map(partial(self._squared, patches), blocks, CPU))
        return PatchScores(np.sqrt(squared).T.reshape(images, *self.grid))

    @property
    def _numbers(self) -> int:
        return sum(v[0].size for name, v in self.tensors.items() if name.startswith("factor."))

    def _squared(self, patches: Floats, positions: slice) -> Floats:
        """Squared Mahalanobis distances (p, B) of patches (B, P, d) at a slice of the positions."""
        leading, trailing = self.tensors["mean"][:, positions, None]
        residuals = patches[:, positions].swapaxes(0, 1) - leading - trailing
        return (self._explained if "basis" in self.tensors else self._whitened)(
            residuals, positions
        )

    def _whitened(self, residuals: Floats, positions: slice) -> Floats:
        """Squared Mahalanobis distances (p, B) of residuals (p, B, d), by triangular factors."""
        scale = self.tensors["scale"][positions]
        squared = np.zeros(residuals.shape[:2], np.float32)
        for i, rows in enumerate(panel_rows(self.dimensions)):
            panel = self.tensors[f"factor.{i}"][positions].astype(np.float32)
            whitened = panel @ residuals[..., : rows.stop].swapaxes(1, 2)
            squared += np.square(whitened * scale[:, rows, None]).sum(axis=1)
        return squared

    def _explained(self, residuals: Floats, positions: slice) -> Floats:
        """Squared Mahalanobis distances (p, B) of residuals (p, B, d), by principal axes."""
        basis = self.tensors["basis"][positions].astype(np.float32)
        scale = self.tensors["scale"][positions, None]
        explained = residuals @ basis.swapaxes(1, 2) * scale
        inside = (np.square(explained) * self.tensors["precision"][positions, None]).sum(axis=2)
        unexplained = residuals - (explained * scale) @ basis
        regularisation = float(self.tensors["regularisation"])
        squared: Floats = inside + np.square(unexplained).sum(axis=2) / np.float32(regularisation)
        return squared
