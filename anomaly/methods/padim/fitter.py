"""Good patches -> Gaussians: PaDiM's sums, and what a config says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.imaging.arrays import Array
from anomaly.methods.base import Align, Fitter, Fold, PatchBatch, PatchSet, Result, Scorer
from anomaly.methods.padim.gaussian import PatchGaussian, check_grid, position_blocks, projected
from anomaly.runtime import Progress, parallel_map

# Images whose patches are added at once, whichever of them share a batch.
_TOGETHER = 64
# The least regularisation, as a share of the summed variances: there the 16 bits of a whitening
# turn distances by one or two percent.
_SHARE = 2.0**-24
# Leverages are below 1; rounding must not carry them over.
_LEAST = 1e-12


@dataclass(eq=False)
class Gaussians:
    """Sums of the patches at P positions, from which everything else is derived.

    Attributes:
        count: N, samples at each position.
        mean: (P, d) float64.
        scatter: (P, d, d) float64, the summed outer products of the centred samples.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def behind(cls, model: PatchGaussian, images: int, regularisation: float) -> Gaussians:
        """The sums that a model was made from, exact up to the 16 bits of its whitening.

        Args:
            model: its Gaussians.
            images: N.
            regularisation: ε.
        """

        def scatter(block: slice) -> Tensor:
            lower = _inverse(model.whitening[block].double())
            covariance = lower @ lower.mT
            covariance.diagonal(dim1=1, dim2=2).sub_(regularisation)
            return covariance.mul_(images - 1)

        return cls(images, model.mean.clone(), torch.cat(_each(model.mean, scatter)))

    def add(self, patches: Tensor) -> None:
        """Add the patches (B, P, d) of further images (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        share = len(patches) / (self.count + len(patches))

        def add(block: slice) -> None:
            samples = patches[:, block].transpose(0, 1).double()
            mean = samples.mean(1, keepdim=True)
            shift = mean - self.mean[block, None]
            rows = torch.cat([samples - mean, shift * (self.count * share) ** 0.5], 1)
            self.scatter[block].baddbmm_(rows.mT, rows)
            self.mean[block] += shift[:, 0] * share

        _each(self.mean, add)
        self.count += len(patches)

    def whitened(self, regularisation: float) -> Tensor:
        """The whitening (P, d, d) float64 of covariance + ε·I. It takes the place of the scatter.

        Raises:
            ConfigError: ε vanishes beside the variances.
            DataError: samples were NaN or infinite.
        """
        variances = self.scatter.diagonal(dim1=1, dim2=2).sum(1) / (self.count - 1)
        least = _SHARE * float(variances.amax())
        if not math.isfinite(least):
            raise DataError("training patches hold NaN or infinite values; check the backbone")
        if regularisation < least:
            raise ConfigError(
                f"model.regularisation {regularisation:g} is too small: beside variances that sum "
                f"to {least / _SHARE:.3g} rounding would decide; raise it to {least * 1.1:.2g} or "
                "more"
            )

        def whiten(block: slice) -> None:
            covariance = self.scatter[block].div_(self.count - 1)
            covariance.diagonal(dim1=1, dim2=2).add_(regularisation)
            covariance.copy_(_inverse(torch.linalg.cholesky(covariance)))

        with torch.inference_mode():
            _each(self.mean, whiten)
        return self.scatter


def _each(values: Tensor, function: Callable[[slice], Result]) -> list[Result]:
    """Results of a function of the positions that values (P, …, d) are of, block by block."""
    blocks = position_blocks(len(values), values.shape[-1], values.device)
    return parallel_map(function, blocks, values.device)


def _inverse(lower: Tensor) -> Tensor:
    """Inverses of lower triangles (P, d, d)."""
    identity = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse


def _rounded(whitening: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices (P, d, d) with rows of 16-bit integers times a scale, and the scales (P, d).

    Halves the model. Distances agree with float64 within 1e-4 on ResNet-50 features; the error
    grows with the root of the largest variance over ε, which is 3000 there.
    """
    exact = whitening.float()
    scale = exact.abs().amax(2) / 32767
    return exact.div_(scale[..., None]).round_().mul_(scale[..., None]), scale


@dataclass(frozen=True, eq=False)
class LeaveOneOut(PatchGaussian):
    """Gaussians for the images that they have learned, each scored as if it weren't among them.

    Taking one of N samples x out changes the mean and the scatter S of its position by rank one.
    With r = x − μ and A = S/(N−2) + ε·I, the Sherman–Morrison formula gives the squared distance of
    a refit, (N/(N−1))² · q / (1 − c·q) with q = rᵀA⁻¹r and c = N/((N−1)(N−2)). Where samples are
    few, c·q is nearly 1, so all of it is float64.

    Attributes:
        images: N, of which `whitening` (P, d, d) float64 is that of A.
    """

    images: int

    def squared_distances(self, patches: Array, positions: slice) -> Array:
        """Squared distances (p, B) of training patches (B, P, d) at a slice of the positions."""
        n = self.images
        squared = ((self.whitening[positions] @ self.residuals(patches, positions)) ** 2).sum(1)
        rest = (1 - squared * (n / (n - 1) / (n - 2))).clamp_(min=_LEAST)
        return squared * (n / (n - 1)) ** 2 / rest


def fitter(settings: Mapping[str, Any], *, seed: int) -> GaussianFitter:
    """The fitter of a config's section `model`.

    Args:
        settings: its values by key.
        seed: of the projection.
    """
    return GaussianFitter(settings["dimensions"], settings["regularisation"], seed)


@dataclass(frozen=True)
class GaussianFitter(Fitter[PatchGaussian]):
    """Settings of PaDiM.

    Attributes:
        dimensions: d, what the embeddings' D channels are projected to.
        regularisation: ε, added to the diagonal of each covariance (PaDiM, eq. 1).
        seed: of the projection.
        projection: (D, d) float32; None before `prepared`.
        base: the Gaussians that `fit` adds to; None where it makes new ones.
        learned: from how many images those were learned.
    """

    dimensions: int
    regularisation: float = 0.01
    seed: int = 0
    projection: Tensor | None = None
    base: PatchGaussian | None = None
    learned: int = 0
    compact = True

    @property
    def align(self) -> Align:
        """Turn feature maps into projected embeddings to learn from."""
        return partial(projected, self._projection)

    @property
    def _projection(self) -> Tensor:
        if self.projection is None:
            raise ValueError("no projection is drawn yet; take the fitter that prepared() returns")
        return self.projection

    def prepared(self, channels: int, device: torch.device) -> GaussianFitter:
        """The fitter for a network, with its projection drawn by the seed alone.

        Drawn on the CPU, so that every device gets the same one: the Q factor of a Gaussian matrix,
        uniform over all semi-orthogonal ones (Kim et al. 2021, "Semi-orthogonal embedding"). More
        accurate than as many channels (Defard et al. 2020, section 3.2), and it hangs less on the
        seed. With d = D channels are kept as they are: rotating them changes no distance.

        Args:
            channels: D, of all hooked layers together.
            device: where the embeddings will be.

        Raises:
            ConfigError: more dimensions than channels.
        """
        if not 1 <= self.dimensions <= channels:
            raise ConfigError(
                f"model.dimensions is {self.dimensions}, but the hooked layers give {channels} "
                f"channels; choose 1 to {channels}, or hook more layers"
            )
        projection = torch.eye(channels)
        if self.dimensions < channels:
            generator = torch.Generator().manual_seed(self.seed)
            shape = channels, self.dimensions
            q, r = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
            # With a positive diagonal in R the factorisation is unique, and Q uniform.
            projection = (q * r.diagonal().sign()).float()
        return replace(self, projection=projection.to(device))

    def fit(self, batches: Iterable[PatchBatch], progress: Progress | None = None) -> PatchGaussian:
        """Learn a Gaussian for each position, reading the batches once.

        Args:
            batches: projected good patches, all on one grid.
            progress: isn't called: this takes a second or two.

        Raises:
            ConfigError: a regularisation that is too small.
            DataError: fewer than two images, or more than one grid.
        """
        sums, grid = self._sums(batches)
        exact = sums.whitened(self.regularisation)
        whitening = torch.empty_like(exact, dtype=torch.float32)
        scale = torch.empty_like(whitening[..., 0])

        def fill(block: slice) -> None:
            whitening[block], scale[block] = _rounded(exact[block])

        _each(exact, fill)
        return PatchGaussian(self._projection, grid, sums.mean.clone(), whitening, scale)

    def _sums(self, batches: Iterable[PatchBatch]) -> tuple[Gaussians, tuple[int, int]]:
        """The sums of all patches, and their grid (h, w)."""
        sums, grid = None, None
        # Batches that are made in inference mode switch it on between them, but not at the end;
        # what is written to all along has to live in one mode.
        with torch.inference_mode():
            if (base := self.base) is not None:
                sums, grid = Gaussians.behind(base, self.learned, self.regularisation), base.grid
            images = (embeddings for batch in batches for embeddings in batch.embeddings)
            while group := list(islice(images, _TOGETHER)):
                height, width, dimensions = group[0].shape
                grid = grid or (height, width)
                for embeddings in group:
                    check_grid(embeddings.shape[:2], grid)
                if sums is None:
                    zeros = group[0].new_zeros(height * width, dimensions, dtype=torch.float64)
                    sums = Gaussians(0, zeros, zeros.new_zeros(*zeros.shape, dimensions))
                sums.add(torch.stack(group).flatten(1, 2))
        if sums is None or grid is None or sums.count < 2:
            raise DataError(
                f"{sums.count if sums else 0} training images: a covariance needs at least "
                "2, and a good one some 50; add images, or use model.kind=patchcore"
            )
        return sums, grid

    def incremental(self, scorer: PatchGaussian, learned: int) -> GaussianFitter:
        """A fitter whose `fit` adds images to learned Gaussians.

        It gives what a fit on all images would, up to the 16 bits that these are kept in.
        """
        return replace(self, projection=scorer.projection, base=scorer, learned=learned)

    def held_out(
        self, scorer: PatchGaussian, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """Scorers for cross-fitting: leave-one-out in closed form, or a refit for each fold."""
        if grouped:
            yield from super().held_out(scorer, patches, folds, grouped=True)
            return
        everything = tuple(image for fold in folds for image in fold)
        sums, grid = self._sums(patches.only(frozenset(everything)))
        if sums.count < 3:
            raise DataError(
                f"{sums.count} training images can't be scored without themselves: what is left "
                "has no covariance; add images, or train with --no-calibrate and without "
                "model.leave_out_suspects"
            )
        whitening = replace(sums, count=sums.count - 1).whitened(self.regularisation)
        left_out = scorer.projection, grid, sums.mean, whitening, scorer.scale, sums.count
        yield everything, LeaveOneOut(*left_out)
