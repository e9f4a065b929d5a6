"""PaDiM (Defard et al. 2020): one Gaussian for each patch position, Mahalanobis distances.

Scores torch tensors and numpy arrays alike. Exported models score without torch, so torch is
imported only in functions that fit, project feature maps or save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from anomaly.errors import ConfigError, DataError, ModelError
from anomaly.imaging.arrays import Array, as_float32, module_of
from anomaly.methods.base import (
    Align,
    Fitter,
    Fold,
    PatchBatch,
    PatchScores,
    PatchSet,
    Result,
    Scorer,
    axis_length,
    check_channels,
    check_tensors,
    device_of,
)
from anomaly.runtime import Progress, parallel_map

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Numbers that one block of positions works on. They should stay in a CPU's cache between two
# products; a GPU wants few launches.
_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}
# Images whose patches are added at once. Batches are regrouped by it, because the rounding of sums
# depends on how many images are added together.
_TOGETHER = 64
# The least regularisation, as a share of the summed variances: there the 16 bits of a whitening
# change distances by one or two percent.
_LEAST_SHARE = 2.0**-24
# 1 − c·q of `LeaveOneOut` is above 0; rounding must not carry it below.
_LEAST_REST = 1e-12


def position_blocks(positions: int, dimensions: int, device: torch.device) -> list[slice]:
    """Slices of P positions; one product takes the matrices (d, d) of a slice."""
    size = max(1, _BLOCK[device.type] // dimensions**2)
    return [slice(i, min(i + size, positions)) for i in range(0, positions, size)]


def check_grid(grid: Sequence[int], learned: tuple[int, int]) -> None:
    """Check that an image's patch grid (h, w) is that of the training images.

    Raises:
        DataError: the two differ.
    """
    if tuple(grid) != learned:
        raise DataError(
            f"an image has {grid[0]}×{grid[1]} patches where the first training image had "
            f"{learned[0]}×{learned[1]}: PaDiM needs one shape for all images; crop them to one "
            "aspect, or use model.kind=patchcore, which takes any"
        )


def projected(projection: Tensor, maps: Sequence[Tensor]) -> Tensor:
    """Project feature maps, then bring them to one grid.

    Neighbours are copied, not mixed, when a coarse layer is up-sampled, so this equals projecting
    PaDiM's full embeddings, which are never made: 40 times quicker at d = 100.

    Args:
        projection: (D, d) float32.
        maps: (B, C_i, h_i, w_i) each, ΣC_i = D.

    Returns:
        (B, h, w, d) float32 on the finest grid.
    """
    import torch  # an exported network projects for itself, where torch is absent

    grid = max((m.shape[-2:] for m in maps), key=lambda size: size[0] * size[1])
    parts: list[Tensor] = []
    by_layer = torch.split(projection, [m.shape[1] for m in maps])
    for m, weights in zip(maps, by_layer, strict=True):
        part = m.permute(0, 2, 3, 1).float() @ weights
        if part.shape[1:3] != grid:
            resized = torch.nn.functional.interpolate(part.permute(0, 3, 1, 2), size=grid)
            part = resized.permute(0, 2, 3, 1)
        parts.append(part)
    return reduce(add, parts).contiguous()


@dataclass(frozen=True, eq=False)
class PatchGaussian(Scorer):
    """Good patches as one Gaussian for each position of the grid.

    Attributes:
        projection: (D, d) float32 with orthonormal columns, from D channels to d.
        grid: (h, w), with P = h·w positions.
        mean: (P, d) float64.
        whitening: (P, d, d) float32, W = L⁻¹ of Σ + ε·I = L·Lᵀ, so that a distance is ‖W·r‖. As
            stable as solving with L, unlike Σ⁻¹, and scoring consists of matrix products. Its rows
            are 16-bit integers times their scale, see `GaussianFitter.fit`.
        scale: (P, d) float32, the scale of each row of the whitening.
    """

    projection: Array
    grid: tuple[int, int]
    mean: Array
    whitening: Array
    scale: Array
    unit = "Mahalanobis distance"

    @property
    def align(self) -> Align:
        """The function from feature maps to the projected embeddings that `score` takes."""
        return partial(projected, self.projection)

    @property
    def dimensions(self) -> int:
        """Number d of channels of the projected embeddings."""
        return int(self.mean.shape[1])

    def score(self, embeddings: Array) -> PatchScores:
        """Mahalanobis distances of patches to the Gaussian of their position (PaDiM, eq. 2).

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, d) float32 on the grid that was learned.

        Raises:
            DataError: another grid, or another number of channels.
        """
        count, height, width, dimensions = embeddings.shape
        check_grid((height, width), self.grid)
        check_channels(dimensions, self.dimensions)
        patches, device = embeddings.reshape(count, -1, dimensions), device_of(embeddings)
        blocks = position_blocks(len(self.mean), dimensions, device)
        squared = parallel_map(partial(self.squared_distances, patches), blocks, device)
        scores = as_float32(module_of(patches).concatenate(squared) ** 0.5)
        return PatchScores(scores.T.reshape(count, height, width))

    def squared_distances(self, patches: Array, positions: slice) -> Array:
        """Squared Mahalanobis distances (p, B) of patches (B, P, d) at a slice of the positions."""
        whitened = self.whitening[positions] @ as_float32(self.residuals(patches, positions))
        return (whitened**2).sum(1)

    def residuals(self, patches: Array, positions: slice) -> Array:
        """Patches (B, P, d) less their position's mean, (p, d, B) float64."""
        # Images last, so that one product with a position's matrix serves all of them.
        return (patches[:, positions] - self.mean[positions]).swapaxes(0, 1).swapaxes(1, 2)

    def graph(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """`score` of projected embeddings (B, h, w, d) as operations that can be traced."""

        def scores(embeddings: Tensor) -> tuple[Tensor]:
            """Patch scores (B, h, w) alone: there is no bank."""
            squared = self.squared_distances(embeddings.flatten(1, 2), slice(None))
            return (squared.sqrt().T.reshape(embeddings.shape[:3]),)

        return scores

    def to(self, target: torch.device | str) -> PatchGaussian:
        """The same Gaussians on another device."""
        names = ("projection", "mean", "whitening", "scale")
        return replace(self, **{name: getattr(self, name).to(target) for name in names})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        import torch  # only models of tensors are saved

        # The lower triangles, as the 16-bit integers that `GaussianFitter.fit` rounded them to.
        rows, columns = np.tril_indices(self.dimensions)
        numbers = (self.whitening / self.scale[..., None]).round()[:, rows, columns]
        return {
            "grid": torch.tensor(self.grid),
            "projection": self.projection,
            "mean": self.mean,
            "factor": numbers.to(torch.int16),
            "scale": self.scale,
        }


def scorer(tensors: Mapping[str, Array], settings: Mapping[str, Any]) -> PatchGaussian:
    """The Gaussians in saved tensors.

    Args:
        tensors: result of `PatchGaussian.tensors`; arrays for a scorer that takes arrays.
        settings: not used.

    Raises:
        ModelError: the tensors aren't those of Gaussians.
    """
    positions, dimensions = (axis_length(tensors, "mean", axis) for axis in (0, 1))
    rows, columns = np.tril_indices(max(dimensions, 1))
    check_tensors(
        tensors,
        {
            "grid": ("int64", (2,)),
            "projection": ("float32", (-1, dimensions)),
            "mean": ("float64", (-1, -1)),
            "factor": ("int16", (positions, len(rows))),
            "scale": ("float32", (positions, dimensions)),
        },
    )
    height, width = tensors["grid"].tolist()
    if min(height, width) < 1 or height * width != positions:
        raise ModelError(f"a grid of {height}×{width} doesn't go with the scorer's other tensors")
    xp = module_of(tensors["scale"])
    whitening = xp.zeros((positions, dimensions, dimensions), dtype=xp.float32)
    whitening[:, rows, columns] = as_float32(tensors["factor"])
    whitening *= tensors["scale"][..., None]
    return PatchGaussian(
        tensors["projection"], (height, width), tensors["mean"], whitening, tensors["scale"]
    )


@dataclass(eq=False)
class Gaussians:
    """Count, means and scatter of the patches at P positions, to which patches can be added.

    Attributes:
        count: number N of samples at each position, one an image.
        mean: (P, d) float64.
        scatter: (P, d, d) float64, the summed outer products of the centred samples.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of_model(cls, model: PatchGaussian, images: int, regularisation: float) -> Gaussians:
        """The count, means and scatter behind a model, up to the 16 bits of its whitening.

        Args:
            model: learned Gaussians.
            images: number N of images that they were learned from.
            regularisation: ε that was added to their covariances.
        """
        import torch

        def scatter(block: slice) -> Tensor:
            """The scatter (p, d, d) at a slice of p positions: (N − 1)·Σ, where Σ + ε·I = L·Lᵀ."""
            lower = _inverse(model.whitening[block].double())  # L = W⁻¹
            covariance = lower @ lower.mT
            covariance.diagonal(dim1=1, dim2=2).sub_(regularisation)
            return covariance.mul_(images - 1)

        return cls(images, model.mean.clone(), torch.cat(_by_block(model.mean, scatter)))

    def add(self, patches: Tensor) -> None:
        """Add the patches (B, P, d) of B images (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        import torch

        share = len(patches) / (self.count + len(patches))

        def add_block(block: slice) -> None:
            samples = patches[:, block].transpose(0, 1).double()
            mean = samples.mean(1, keepdim=True)
            shift = mean - self.mean[block, None]
            # One more row makes the product hold the scatter between the two means, too.
            rows = torch.cat([samples - mean, shift * (self.count * share) ** 0.5], 1)
            self.scatter[block].baddbmm_(rows.mT, rows)
            self.mean[block] += shift[:, 0] * share

        _by_block(self.mean, add_block)
        self.count += len(patches)

    def whitened(self, regularisation: float) -> Tensor:
        """The whitening (P, d, d) float64 of covariance + ε·I, written over the scatter.

        Raises:
            ConfigError: ε, the regularisation, is below 2⁻²⁴ of a position's summed variances.
            DataError: samples were NaN or infinite.
        """
        import torch

        variances = self.scatter.diagonal(dim1=1, dim2=2).sum(1) / (self.count - 1)
        least = _LEAST_SHARE * float(variances.amax())
        if not math.isfinite(least):
            raise DataError("training patches hold NaN or infinite values; check the backbone")
        if regularisation < least:
            raise ConfigError(
                f"model.regularisation {regularisation:g} is too small: beside variances that sum "
                f"to {least / _LEAST_SHARE:.3g} rounding would decide; raise it to "
                f"{least * 1.1:.2g} or more"
            )

        def whiten_block(block: slice) -> None:
            """Turn a slice of the scatter into covariances, then into whitenings."""
            covariance = self.scatter[block].div_(self.count - 1)
            covariance.diagonal(dim1=1, dim2=2).add_(regularisation)
            covariance.copy_(_inverse(torch.linalg.cholesky(covariance)))

        with torch.inference_mode():  # the scatter was made in it, and can't be written outside
            _by_block(self.mean, whiten_block)
        return self.scatter


def _by_block(values: Tensor, function: Callable[[slice], Result]) -> list[Result]:
    """Results of a function for each slice of the positions of values (P, …, d)."""
    blocks = position_blocks(len(values), values.shape[-1], values.device)
    return parallel_map(function, blocks, values.device)


def _inverse(lower: Tensor) -> Tensor:
    """Inverses (P, d, d) of lower triangular matrices (P, d, d)."""
    import torch

    identity = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
    return inverse


@dataclass(frozen=True, eq=False)
class LeaveOneOut(PatchGaussian):
    """Gaussians that score each of their training images as if they hadn't learned it.

    Taking one of N samples x out changes the mean and the scatter S of its position by rank one.
    With r = x − μ and A = S/(N−2) + ε·I, the Sherman–Morrison formula gives the squared distance of
    a refit, (N/(N−1))² · q / (1 − c·q) with q = rᵀA⁻¹r and c = N/((N−1)(N−2)). Where samples are
    few, c·q is nearly 1, so all of it is float64.

    Attributes:
        images: number N of training images. `whitening` is that of A, in float64.
    """

    images: int

    def squared_distances(self, patches: Array, positions: slice) -> Array:
        """Squared distances (p, B) of training patches (B, P, d), at a slice of p positions."""
        n = self.images
        q = ((self.whitening[positions] @ self.residuals(patches, positions)) ** 2).sum(1)
        rest = (1 - q * (n / (n - 1) / (n - 2))).clamp_(min=_LEAST_REST)  # 1 − c·q
        return q * (n / (n - 1)) ** 2 / rest


def fitter(settings: Mapping[str, Any], *, seed: int) -> GaussianFitter:
    """The fitter of a config's section `model`; the projection is drawn by the seed."""
    return GaussianFitter(settings["dimensions"], settings["regularisation"], seed)


@dataclass(frozen=True)
class GaussianFitter(Fitter[PatchGaussian]):
    """Settings of PaDiM.

    Attributes:
        dimensions: number d of channels that the embeddings' D are projected to.
        regularisation: ε, added to the diagonal of each covariance (PaDiM, eq. 1).
        seed: seed of the projection.
        projection: (D, d) float32; None before `prepared`.
        base: the Gaussians that `fit` adds to; None where it makes new ones.
        learned: number of images that `base` was learned from.
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
        """The function from feature maps to the projected embeddings to learn from."""
        return partial(projected, self._projection)

    @property
    def _projection(self) -> Tensor:
        """The projection (D, d); raises ValueError before `prepared`."""
        if self.projection is None:
            raise ValueError("no projection is drawn yet; use the fitter that prepared() returns")
        return self.projection

    def prepared(self, channels: int, device: torch.device) -> GaussianFitter:
        """The fitter for a network, with its projection drawn by the seed alone.

        Drawn on the CPU, so that every device gets the same one: the Q factor of a Gaussian matrix,
        uniform over all semi-orthogonal ones (Kim et al. 2021, "Semi-orthogonal embedding"). More
        accurate than d of the channels (Defard et al. 2020, section 3.2), and it depends less on
        the seed. With d = D channels are kept as they are: rotating them changes no distance.

        Raises:
            ConfigError: `dimensions` is outside 1 to D, the number of `channels`.
        """
        import torch

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
            progress: not called, because this takes a second or two.

        Raises:
            ConfigError: a regularisation that is too small.
            DataError: fewer than two images, more than one grid, or NaN or infinite patches.
        """
        sums, grid = self._sums(batches)
        exact = sums.whitened(self.regularisation)
        whitening = exact.float()
        scale = whitening[..., 0].clone()  # (P, d), set below

        def round_block(block: slice) -> None:
            """Round each row to 16-bit integers times a scale, which halves the saved model.

            Distances agree with float64 within 1e-4 on ResNet-50 features; the error grows with the
            root of the largest variance over ε, which is 3000 there.
            """
            scale[block] = whitening[block].abs().amax(2) / 32767
            steps = scale[block][..., None]
            whitening[block] = (whitening[block] / steps).round_().mul_(steps)

        _by_block(exact, round_block)
        return PatchGaussian(self._projection, grid, sums.mean.clone(), whitening, scale)

    def _sums(self, batches: Iterable[PatchBatch]) -> tuple[Gaussians, tuple[int, int]]:
        """The Gaussians of all patches, those of `base` included, and their grid (h, w)."""
        import torch

        sums, grid = None, None
        # Batches that are made in inference mode switch it on between them, but not at the end;
        # what is written to all along has to live in one mode.
        with torch.inference_mode():
            if (base := self.base) is not None:
                sums, grid = Gaussians.of_model(base, self.learned, self.regularisation), base.grid
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

        The result is that of a fit on all images, up to the 16 bits of the learned whitening.
        """
        return replace(self, projection=scorer.projection, base=scorer, learned=learned)

    def held_out(
        self, scorer: PatchGaussian, patches: PatchSet, folds: Sequence[Fold], *, grouped: bool
    ) -> Iterator[tuple[Fold, Scorer]]:
        """Scorers for cross-fitting: leave-one-out in closed form; where grouped, refits.

        Raises:
            DataError: fewer than three images to leave out one by one.
        """
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
        # S/(N−2) is the covariance of N − 1 samples with this scatter.
        whitening = replace(sums, count=sums.count - 1).whitened(self.regularisation)
        parts = scorer.projection, grid, sums.mean, whitening, scorer.scale, sums.count
        yield everything, LeaveOneOut(*parts)
