"""Good patches -> Gaussians: what PaDiM learns, and what a config says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anomaly.arrays import Array
from anomaly.errors import ConfigError, DataError
from anomaly.methods.base import (
    Align,
    Fitter,
    Fold,
    PatchBatch,
    PatchSet,
    Progress,
    Scorer,
)
from anomaly.methods.padim.accumulator import GaussianAccumulator
from anomaly.methods.padim.gaussian import (
    LowRankWhitening,
    PatchGaussian,
    Projection,
    Whitening,
    check_grid,
)

# Leverages are below 1; rounding must not carry them over.
_MOST = 1 - 1e-6
# Variances below this share of a position's largest are rounding errors of nothing.
_NOTHING = 1e-6


@dataclass(frozen=True, eq=False)
class LeaveOneOut(Whitening):
    """A whitening for training residuals, each without its own image. Nothing is fitted again.

    Taking one sample x out of N changes the mean and the scatter S of its position by rank one, so
    that the Sherman–Morrison formula gives its distance to what is left from that to the whole.

    With no more images than dimensions that is what a refit gives. Measured with 100 dimensions,
    variances from 0.01 to 30 and a regularisation ε of 0.01 or 1e-4: 10 to 60 images within 0.06 %;
    99 images, whose last directions 16 bits hardly hold, within 3 % and 13 %.

    With more, the formula is exact for a regularisation of ε(N−1)/(N−2), so scores are below those
    of a refit with ε by a factor of √((N−2)/(N−1)) at most, 0.25 % for 200 images, but for
    rounding, which leverages near 1 multiply: with ε = 1e-4 by up to 3 % for 101 images, 0.8 % for
    110 and 0.06 % for 200.

    Attributes:
        whitening: of all images together.
        images: N, how many images those are.

    Raises:
        DataError: fewer than three images.
    """

    whitening: Whitening
    images: int

    def __post_init__(self) -> None:
        if self.images < 3:
            raise DataError(
                f"{self.images} training images can't be scored without themselves: what is left "
                "has no covariance; add images, or train with --no-calibrate and without "
                "model.leave_out_suspects"
            )

    @property
    def numbers(self) -> int:
        """Number of values that one position needs in memory."""
        return self.whitening.numbers

    def to(self, target: torch.device | str) -> LeaveOneOut:
        """An equal whitening on another device."""
        return LeaveOneOut(self.whitening.to(target), self.images)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the whitening of all images."""
        return self.whitening.tensors()

    def squared_distances(self, residuals: Array, positions: slice) -> Array:
        """Squared norms (p, B) of training residuals (p, B, d)."""
        if isinstance(self.whitening, LowRankWhitening):
            return self._from_directions(self.whitening, residuals, positions)
        # With q = rᵀ(S/(N−1) + εI)⁻¹r:  q · (N/(N−1))² · (N−2)/(N−1) / (1 − N·q/(N−1)²).
        n = self.images
        squared = self.whitening.squared_distances(residuals, positions).double()
        leverage = (squared * (n / (n - 1) ** 2)).clamp_(max=_MOST)
        return (squared * ((n / (n - 1)) ** 2 * (n - 2) / (n - 1)) / (1 - leverage)).float()

    def _from_directions(
        self, whitening: LowRankWhitening, residuals: Tensor, positions: slice
    ) -> Array:
        """The same, without cancellation if a leverage is almost 1.

        A training residual lies in the span of the samples, so it is given by its shares v² in
        their N − 1 directions, which sum to (N−1)/N. With ε' = ε(N−2)/(N−1) the squared distance
        without it is N(N−2)/(N−1) · Σ v²λ/(λ+ε') / Σ v²ε'/(λ+ε').
        """
        n, ridge = self.images, whitening.regularisation
        raised = 1 / whitening.precision[positions, None].double()
        basis, scale = whitening.basis[positions].float(), whitening.scale[positions, None]
        # The rows of G have norms √(λ/(λ+ε)): no difference of λ + ε and ε has to be taken.
        variances = basis.square().sum(dim=2)[:, None].double() * scale.double().square() * raised
        explained = torch.bmm(residuals, basis.mT).mul_(scale).double()
        real = variances > _NOTHING * variances.amax(dim=2, keepdim=True)
        shares = explained.square() * raised / (n - 1) / variances.square()
        shares = shares.where(real, 0)
        # What equal images share lies in directions without variance, which can't be measured.
        rest = ((n - 1) / n - shares.sum(dim=2)).clamp_(min=0).where(~real.all(dim=2), 0)
        less = ridge * (n - 2) / (n - 1)
        inside = (shares * variances / (variances + less)).sum(dim=2)
        outside = (shares * less / (variances + less)).sum(dim=2) + rest
        return (n * (n - 2) / (n - 1) * inside / outside).float()


def fitter(settings: Mapping[str, Any], *, seed: int, memory_limit: int) -> GaussianFitter:
    """The fitter of a config's section `model`.

    Args:
        settings: its values by key.
        seed: of the projection.
        memory_limit: isn't used: it is of patches that a coreset is selected from.
    """
    return GaussianFitter(
        settings["dimensions"], settings["projection"], settings["regularisation"], seed
    )


@dataclass(frozen=True)
class GaussianFitter(Fitter[PatchGaussian]):
    """Settings of PaDiM.

    Attributes:
        dimensions: d, channels kept of the embeddings' D.
        projection: `random` or `orthogonal`, see `draw`.
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
        """Turn feature maps into projected embeddings to learn from.

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
        sums: GaussianAccumulator | None = None
        if self.base is not None:
            grid, projection = self.base.grid, self.base.projection
            sums = self._sums_of(self.base)
        for batch in batches:
            embeddings = batch.embeddings
            if sums is None:
                grid = (embeddings.shape[1], embeddings.shape[2])
                projection = self.drawn or self.draw(embeddings.shape[-1])
                projection = projection.to(embeddings.device)
                shape = grid[0] * grid[1], projection.dimensions
                sums = GaussianAccumulator(*shape, embeddings.device, self.memory_limit)
            check_grid(embeddings, grid, projection.dim, projection.dimensions)
            sums.add(projection.by_position(embeddings))
        if sums is None or sums.count < 2:
            raise DataError(
                f"{sums.count if sums else 0} training images: a covariance needs at least "
                "2, and a good one some 50; add images, or use model.kind=patchcore"
            )
        return self._gaussian(sums, projection, grid, progress)

    def incremental(self, scorer: PatchGaussian, learned: int) -> GaussianFitter:
        """A fitter whose `fit` adds images to learned Gaussians.

        It gives what a fit on all images would, but for the 16 bits that these are kept in.
        """
        return replace(self, drawn=scorer.projection, base=scorer, learned=learned)

    def _sums_of(self, base: PatchGaussian) -> GaussianAccumulator:
        """The sums behind learned Gaussians."""
        mean = base.mean.double().sum(0)
        positions, dimensions = mean.shape
        sums = GaussianAccumulator(positions, dimensions, mean.device, self.memory_limit)
        sums.take(mean, base.whitening, self.learned, self.regularisation)
        return sums

    def _gaussian(
        self,
        sums: GaussianAccumulator,
        projection: Projection,
        grid: tuple[int, int],
        progress: Progress | None = None,
    ) -> PatchGaussian:
        mean, whitening = sums.gaussians(self.regularisation, progress or (lambda *_: None))
        leading = mean.float()
        split_mean = torch.stack([leading, (mean - leading).float()])
        return PatchGaussian(projection, grid, split_mean, whitening)

    def held_out(
        self, scorer: PatchGaussian, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """Scorers for cross-fitting: leave-one-out in closed form, or a refit for each fold."""
        if grouped:
            yield from super().held_out(scorer, patches, folds, grouped=True)
        else:
            everything = tuple(image for fold in folds for image in fold)
            without = LeaveOneOut(scorer.whitening, self.learned + len(everything))
            yield everything, replace(scorer, whitening=without)

    def draw(self, channels: int) -> Projection:
        """The projection of embeddings with D = `channels`, by the seed alone.

        Drawn on the CPU, so that every device gets the same one. `random` is a random subset of the
        channels (Defard et al. 2020, section 3.2), `orthogonal` the Q factor of a Gaussian matrix,
        uniform over all semi-orthogonal ones (Kim et al. 2021, "Semi-orthogonal embedding"); more
        accurate at the same d, and it hangs less on the seed. With d = D all channels are kept as
        they are: rotating them changes no Mahalanobis distance.

        Raises:
            ConfigError: more dimensions than channels, or an unknown kind.
        """
        if self.projection not in ("random", "orthogonal"):
            raise ConfigError(
                f"projection {self.projection!r} is unknown; use 'random' or 'orthogonal'"
            )
        if not 1 <= self.dimensions <= channels:
            raise ConfigError(
                f"model.dimensions is {self.dimensions}, but the hooked layers give {channels} "
                f"channels; choose 1 to {channels}, or hook more layers"
            )
        generator = torch.Generator().manual_seed(self.seed)
        if self.dimensions == channels:
            return Projection(torch.arange(channels), channels)
        if self.projection == "random":
            chosen = torch.randperm(channels, generator=generator)[: self.dimensions]
            return Projection(chosen.sort().values, channels)
        shape = channels, self.dimensions
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        # With a positive diagonal in R the factorisation is unique, and Q uniformly distributed.
        return Projection((q * r.diagonal().sign()).float(), channels)
