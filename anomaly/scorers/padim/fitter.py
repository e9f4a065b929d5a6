"""Good patches -> Gaussians: what PaDiM learns, and what a config says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.scorers.base import Align, Fitter, Fold, Progress, Scorer
from anomaly.scorers.padim.accumulator import GaussianAccumulator
from anomaly.scorers.padim.gaussian import PatchGaussian, projected
from anomaly.scorers.padim.held_out import LeaveOneOut
from anomaly.scorers.padim.layout import check_grid
from anomaly.scorers.padim.projection import Projection, channel_projection
from anomaly.scorers.patches import PatchBatch, PatchSet
from anomaly.scorers.saved_tensors import check_apart


def fitter(settings: Mapping[str, Any], *, seed: int, memory_limit: int) -> GaussianFitter:
    """What a config's section `model` learns with.

    Args:
        settings: its values by key.
        seed: of the projection.
        memory_limit: isn't used: it is of patches that a coreset is selected from.
    """
    return GaussianFitter(
        settings["dimensions"], settings["projection"], settings["regularisation"], seed
    )


def scorer(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], *, device: torch.device, cache: Path
) -> PatchGaussian:
    """The Gaussians that were saved.

    Args:
        tensors: as `PatchGaussian.tensors` gave them.
        settings: the config's section `model`, by key; not used.
        device: where they go.
        cache: not used: nothing has to be derived from them.

    Raises:
        ModelError: they aren't those of Gaussians.
    """
    return PatchGaussian.from_tensors(tensors).to(device)


@dataclass(frozen=True)
class GaussianFitter(Fitter[PatchGaussian]):
    """Settings of PaDiM.

    Attributes:
        dimensions: d, channels kept of the embeddings' D.
        projection: `random` or `orthogonal`, see `channel_projection`.
        regularisation: ε, added to the diagonal of each covariance (PaDiM, eq. 1).
        seed: of the projection.
        memory_limit: bytes of training patches, and of statistics, that are kept in memory; what
            is larger waits in temporary files, at most the patches of d images and statistics of
            the model's size.
        drawn: what the embeddings went through already; None where they have D
            channels and are projected when they are fitted.
        base: the Gaussians that `fit` adds to; None where it makes new ones.
        learned: from how many images those were learned.
    """

    dimensions: int
    projection: str = "orthogonal"
    regularisation: float = 0.01
    seed: int = 0
    memory_limit: int = 512 * 1024**2
    drawn: Projection | None = None
    base: PatchGaussian | None = None
    learned: int = 0
    compact = True

    @property
    def align(self) -> Align:
        """How feature maps become the embeddings to learn from: projected on the way.

        Raises:
            ValueError: before `prepared`.
        """
        if self.drawn is None:
            raise ValueError("no projection is drawn yet; take the fitter that prepared() returns")
        return self.drawn.of_maps

    def prepared(self, channels: int, device: torch.device) -> GaussianFitter:
        """The fitter for a network, with its projection drawn.

        Args:
            channels: of all hooked layers together.
            device: where the embeddings will be.

        Raises:
            ConfigError: more dimensions than channels, or an unknown kind of projection.
        """
        return replace(self, drawn=self.draw(channels).to(device))

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> PatchGaussian:
        """Learn a Gaussian for each position, reading the batches once.

        Args:
            batches: good patches, all on one grid.
            progress: called with (blocks of positions done, all of them) after the last batch.

        Raises:
            ConfigError: more dimensions than channels, or a regularisation that is too small.
            DataError: fewer than two images, or more than one grid.
        """
        if self.regularisation <= 0:
            raise ConfigError(
                f"model.regularisation is {self.regularisation:g}; it must be above 0"
            )
        fitted: GaussianAccumulator | None = None
        if self.base is not None:
            grid, applied = self.base.grid, self.base.projection
            fitted = self._resumed([(self.base, self.learned)])
        for batch in batches:
            embeddings = batch.embeddings
            if fitted is None:
                grid = (embeddings.shape[1], embeddings.shape[2])
                applied = self.drawn or self.draw(embeddings.shape[-1])
                applied = applied.to(embeddings.device)
                fitted = GaussianAccumulator(
                    grid[0] * grid[1], applied.dimensions, embeddings.device, self.memory_limit
                )
            check_grid(embeddings, grid, applied.dim, applied.dimensions)
            fitted.add(projected(embeddings, applied))
        if fitted is None or fitted.count < 2:
            raise DataError(
                f"{fitted.count if fitted else 0} training images: a covariance needs at least "
                "2, and a good one some 50; add images, or use model.kind=patchcore"
            )
        return self._gaussian(fitted, applied, grid, progress)

    def continuing(self, scorer: PatchGaussian, learned: int) -> GaussianFitter:
        """A fitter whose `fit` adds to the sums that Gaussians come from.

        It gives what a fit on all images would, but for the 16 bits that these are kept in.
        """
        return replace(self, drawn=scorer.projection, base=scorer, learned=learned)

    def merged(
        self, scorers: Sequence[PatchGaussian], numbers: Sequence[Mapping[int, int]]
    ) -> PatchGaussian:
        """The Gaussians of all images together.

        Raises:
            ModelError: an image was learned from more than once, or grids differ.
        """
        check_apart(numbers)
        learned = [len(known) for known in numbers]
        first = scorers[0]
        for scorer in scorers[1:]:
            if scorer.grid != first.grid:
                raise ModelError(
                    f"one learned {first.grid[0]}×{first.grid[1]} patches of each image, another "
                    f"{scorer.grid[0]}×{scorer.grid[1]}; merge models of one image shape"
                )
        fitted = self._resumed(list(zip(scorers, learned, strict=True)))
        return self._gaussian(fitted, first.projection, first.grid)

    def _resumed(self, parts: Sequence[tuple[PatchGaussian, int]]) -> GaussianAccumulator:
        """What was learned from so many images each, ready for more."""
        mean = parts[0][0].mean
        fitted = GaussianAccumulator(mean.shape[1], mean.shape[2], mean.device, self.memory_limit)
        for scorer, images in parts:
            exact = scorer.mean.double().sum(0)
            fitted.take(exact, scorer.whitening, images, self.regularisation)
        return fitted

    def _gaussian(
        self,
        fitted: GaussianAccumulator,
        applied: Projection,
        grid: tuple[int, int],
        progress: Progress | None = None,
    ) -> PatchGaussian:
        mean, whitening = fitted.gaussians(self.regularisation, progress or (lambda *_: None))
        leading = mean.float()
        split_mean = torch.stack([leading, (mean - leading).float()])
        return PatchGaussian(applied, grid, split_mean, whitening)

    def held_out(
        self, scorer: PatchGaussian, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """One scorer for which each image is left out alone, or refits without each fold."""
        if grouped:
            yield from super().held_out(scorer, patches, folds, grouped=True)
        else:
            everything = tuple(image for fold in folds for image in fold)
            yield everything, LeaveOneOut(scorer, self.learned + len(everything))

    def draw(self, channels: int) -> Projection:
        """The projection of embeddings with D = `channels`, by the seed alone.

        Raises:
            ConfigError: more dimensions than channels, or an unknown kind.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return channel_projection(self.projection, channels, self.dimensions, generator=generator)
