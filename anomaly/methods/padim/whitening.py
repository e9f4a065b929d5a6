"""Inverse covariances of P positions, in the form that suits the number of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from anomaly.errors import ConfigError, DataError
from anomaly.methods.padim.layout import panel_rows

# The lower triangles of P matrices (d, d) as bands of rows, (P, rows, width) float32 each. They
# take little more than half of the square, and are multiplied without being unpacked.
Triangle: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class GaussianStatistics:
    """Moments of the samples at P positions; those of two halves merge to those of the whole.

    Attributes:
        count: N, samples at each position.
        mean: (P, d) float64.
        scatter: the lower triangle of the summed outer products of the centred samples.
    """

    count: int
    mean: Tensor
    scatter: Triangle

    @classmethod
    def of(cls, samples: Tensor) -> GaussianStatistics:
        """Statistics of samples (P, N, d) float32."""
        mean, centred = centre(samples)
        scatter = tuple(
            torch.bmm(centred[..., rows].mT, centred[..., : rows.stop])
            for rows in panel_rows(samples.shape[2])
        )
        return cls(samples.shape[1], mean, scatter)

    def update(self, samples: Tensor) -> GaussianStatistics:
        """These statistics with further samples (P, N, d)."""
        return self.merge(GaussianStatistics.of(samples))

    def merge(self, other: GaussianStatistics) -> GaussianStatistics:
        """Statistics of both sample sets together (Chan, Golub & LeVeque 1979, eq. 2.1)."""
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)
        between = (shift * (self.count * other.count / count) ** 0.5).float()
        scatter = tuple(
            (a + b).addcmul_(between[:, rows, None], between[:, None, : rows.stop])
            for rows, a, b in zip(
                panel_rows(mean.shape[1]), self.scatter, other.scatter, strict=True
            )
        )
        return GaussianStatistics(count, mean, scatter)

    def flat(self) -> Tensor:
        """Mean and scatter as one row for each position, (P, `flat_width`) float32."""
        panels = [panel.flatten(1) for panel in self.scatter]
        return torch.cat([self.mean.view(torch.float32), *panels], dim=1)

    @classmethod
    def from_flat(cls, count: int, flat: Tensor, dimensions: int) -> GaussianStatistics:
        """The way back from `flat`."""
        shapes = [(rows.stop - rows.start, rows.stop) for rows in panel_rows(dimensions)]
        sizes = [2 * dimensions, *(height * width for height, width in shapes)]
        mean, *panels = torch.split(flat, sizes, dim=1)
        scatter = tuple(p.reshape(-1, *s) for p, s in zip(panels, shapes, strict=True))
        return cls(count, mean.contiguous().view(torch.float64), scatter)

    def covariance(self) -> Tensor:
        """(P, d, d) float32, unbiased: divided by N − 1."""
        lower = unpack_triangle(self.scatter)
        return (lower + lower.tril(-1).mT) / (self.count - 1)


def centre(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Means (P, d) float64 and centred samples (P, N, d) of samples (P, N, d).

    The first sample is taken off before anything is summed, so that a common offset of any size
    costs no digits.
    """
    origin = samples[:, :1]
    centred = samples - origin
    shift = centred.mean(dim=1, keepdim=True)
    return (origin.double() + shift.double())[:, 0], centred.sub_(shift)


def flat_width(dimensions: int) -> int:
    """Numbers of one position in `GaussianStatistics.flat`: about d²/2 for large d."""
    sizes: list[int] = [(r.stop - r.start) * r.stop for r in panel_rows(dimensions)]
    return 2 * dimensions + sum(sizes)


def pack_triangle(lower: Tensor) -> Triangle:
    """Pack lower triangles (P, d, d)."""
    rows = panel_rows(lower.shape[1])
    return tuple(lower[:, r, : r.stop].clone(memory_format=torch.contiguous_format) for r in rows)


def unpack_triangle(triangle: Triangle) -> Tensor:
    """Lower triangles (P, d, d) with zeros above the diagonal."""
    positions, _, dimensions = triangle[-1].shape
    lower = triangle[-1].new_zeros(positions, dimensions, dimensions)
    for rows, panel in zip(panel_rows(dimensions), triangle, strict=True):
        lower[:, rows, : rows.stop] = panel
    return lower.tril_()


_INT16_MAX = 32767.0
_SUBSTITUTED = 32  # rows of a triangle that isn't halved any more
# The least regularisation, as a share of the summed variances; see `_least_regularisation`.
_SHARE = 8 * 2.0**-24


@dataclass(frozen=True, eq=False)
class CholeskyWhitening:
    """W = L⁻¹ of Σ + ε·I = L·Lᵀ, for more samples than dimensions: M = ‖W·r‖.

    Inverting the triangular factor is as stable as solving with it (measured: the same 3e-6
    against float64), unlike inverting Σ, and turns scoring into matrix products.

    Attributes:
        factor: W in 16 bits, each row divided by its scale; see `rounded`.
        scale: (P, d) float32, the rows' scales.
    """

    factor: Triangle
    scale: Tensor

    @classmethod
    def empty(cls, positions: int, dimensions: int, device: torch.device) -> CholeskyWhitening:
        """Room for all positions, to be filled block by block."""
        factor = tuple(
            torch.empty(positions, r.stop - r.start, r.stop, dtype=torch.int16, device=device)
            for r in panel_rows(dimensions)
        )
        return cls(factor, torch.empty(positions, dimensions, device=device))

    @classmethod
    def of(cls, statistics: GaussianStatistics, regularisation: float) -> CholeskyWhitening:
        """Factorise covariance + `regularisation`·I.

        Raises:
            ConfigError: `regularisation` vanishes in float32 beside the variances.
            DataError: samples were NaN or infinite.
        """
        covariance = unpack_triangle(statistics.scatter).div_(statistics.count - 1)
        least = _least_regularisation(covariance)
        if not math.isfinite(least):
            raise DataError("training patches hold NaN or infinite values; check the backbone")
        if regularisation < least:
            raise ConfigError(
                f"model.regularisation {regularisation:g} is too small: beside variances that sum "
                f"to {least / _SHARE:.3g} single precision can't tell it from rounding; raise it "
                f"to {least * 1.1:.2g} or more"
            )
        covariance.diagonal(dim1=1, dim2=2).add_(regularisation)
        factor, scale = rounded(_inverse(torch.linalg.cholesky(covariance)))
        return cls(pack_triangle(factor), scale)

    def __setitem__(self, positions: slice, part: CholeskyWhitening) -> None:
        """Fill in some of the positions."""
        for whole, panel in zip(self.factor, part.factor, strict=True):
            whole[positions] = panel
        self.scale[positions] = part.scale

    @property
    def numbers(self) -> int:
        """What one position works on."""
        return sum(panel[0].numel() for panel in self.factor)

    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved, by name."""
        factor = {f"factor.{i}": panel for i, panel in enumerate(self.factor)}
        return {**factor, "scale": self.scale}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> CholeskyWhitening:
        """The way back from `tensors`."""
        count = sum(name.startswith("factor.") for name in tensors)
        return cls(tuple(tensors[f"factor.{i}"] for i in range(count)), tensors["scale"])

    def scatter(self, images: int, regularisation: float, positions: slice) -> Triangle:
        """The samples' summed outer products that this comes from, but for its 16 bits.

        Args:
            images: N.
            regularisation: ε.
            positions: whose.
        """
        whole = (panel[positions] for panel in self.factor)
        factor = unpack_triangle(tuple(panel.float() for panel in whole))
        factor *= self.scale[positions, :, None]
        lower = _inverse(factor)
        covariance = lower @ lower.mT
        covariance.diagonal(dim1=1, dim2=2).sub_(regularisation)
        return pack_triangle(covariance.mul_(images - 1))

    def squared_distances(self, residuals: Tensor, positions: slice) -> Tensor:
        """Squared Mahalanobis norms (p, B) of residuals (p, B, d) at a slice of the positions."""
        squared = residuals.new_zeros(residuals.shape[:2])
        for rows, panel in zip(panel_rows(self.scale.shape[1]), self.factor, strict=True):
            # The panel on the left: for a single image, a product by a vector at twice the speed.
            whitened = torch.bmm(panel[positions].float(), residuals[..., : rows.stop].mT)
            squared += (whitened.square_() * self.scale[positions, rows, None].square()).sum(dim=1)
        return squared


@dataclass(frozen=True, eq=False)
class LowRankWhitening:
    """The same distance from the N − 1 directions in which N ≤ d samples vary.

    With Σ = U·Λ·Uᵀ the textbook form M² = (‖r‖² − ‖G·r‖²)/ε, G = Λ^½(Λ+ε)^−½·Uᵀ, loses its
    digits where r lies within the samples' span. Split into what G explains and what it doesn't,
    it is a sum of squares,

        M² = ‖r − Gᵀ·G·r‖²/ε + Σᵢ (G·r)ᵢ²/(λᵢ+ε),

    and well conditioned.

    Attributes:
        basis: (P, k, d) int16, G with each row divided by its scale; see `rounded`.
        scale: (P, k) float32, the rows' scales.
        precision: (P, k) float32, 1/(λ+ε).
        regularisation: ε.
    """

    basis: Tensor
    scale: Tensor
    precision: Tensor
    regularisation: float

    @classmethod
    def of(cls, centred: Tensor, regularisation: float) -> LowRankWhitening:
        """From centred samples (P, N, d) with 2 ≤ N."""
        degrees = centred.shape[1] - 1
        variances, vectors = torch.linalg.eigh(centred @ centred.mT / degrees)
        # Centring leaves one direction without variance.
        precision = 1 / (variances[:, 1:].clamp_min(0) + regularisation)
        directions = vectors[:, :, 1:] * (precision / degrees).sqrt()[:, None]
        basis = directions.mT @ centred
        return cls(*rounded(basis), precision, regularisation)

    def __setitem__(self, positions: slice, part: LowRankWhitening) -> None:
        """Fill in some of the positions."""
        self.basis[positions] = part.basis
        self.scale[positions] = part.scale
        self.precision[positions] = part.precision

    @classmethod
    def empty(
        cls,
        positions: int,
        dimensions: int,
        rank: int,
        *,
        regularisation: float,
        device: torch.device,
    ) -> LowRankWhitening:
        """Room for all positions, to be filled block by block."""
        return cls(
            torch.empty(positions, rank, dimensions, dtype=torch.int16, device=device),
            torch.empty(positions, rank, device=device),
            torch.empty(positions, rank, device=device),
            regularisation,
        )

    @property
    def numbers(self) -> int:
        """What one position works on."""
        return self.basis.shape[1] * self.basis.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved, by name."""
        regularisation = torch.tensor(self.regularisation, dtype=torch.float64)
        return {
            "basis": self.basis,
            "scale": self.scale,
            "precision": self.precision,
            "regularisation": regularisation,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> LowRankWhitening:
        """The way back from `tensors`."""
        regularisation = float(tensors["regularisation"])
        return cls(tensors["basis"], tensors["scale"], tensors["precision"], regularisation)

    def samples(self, mean: Tensor, positions: slice) -> Tensor:
        """N samples (p, N, d) with the mean (p, d) and the covariance that this comes from.

        They stand for the real ones, but for the basis's 16 bits: whatever a Gaussian learns from
        these and others it would learn from the real ones and others.
        """
        scale = (self.scale[positions].square() / self.precision[positions]).sqrt()
        degrees = scale.shape[1]
        directions = self.basis[positions].float() * (scale * degrees**0.5)[..., None]
        # Helmert's matrix (N, N − 1): orthonormal columns that sum to 0.
        k = torch.arange(1, degrees + 1, device=scale.device, dtype=torch.float32)
        rows = torch.arange(degrees + 1, device=scale.device)[:, None]
        helmert = torch.where(rows < k, 1.0, torch.where(rows == k, -k, 0.0))
        helmert /= (k * (k + 1)).sqrt()
        samples: Tensor = mean[:, None] + helmert @ directions
        return samples.float()

    def squared_distances(self, residuals: Tensor, positions: slice) -> Tensor:
        """Squared Mahalanobis norms (p, B) of residuals (p, B, d) at a slice of the positions."""
        basis = self.basis[positions].float()
        scale = self.scale[positions, None]
        explained = torch.bmm(residuals, basis.mT).mul_(scale)
        inside = (explained.square() * self.precision[positions, None]).sum(dim=2)
        unexplained = torch.baddbmm(residuals, explained * scale, basis, alpha=-1)
        return inside + unexplained.square().sum(dim=2) / self.regularisation


def _inverse(lower: Tensor) -> Tensor:
    """Inverses (P, d, d) of lower triangles, by halves, so that most of the work are products.

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹·C·A⁻¹, B⁻¹]]. Two to three times as fast as substitution,
    and as exact: within 1e-7 of float64 for 100 dimensions, 2e-7 for 550.
    """
    inverse: Tensor
    size = lower.shape[1]
    if size <= _SUBSTITUTED:
        identity = torch.eye(size, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        return inverse
    first, last = slice(size // 2), slice(size // 2, None)
    inverse = torch.zeros_like(lower)
    inverse[:, first, first] = _inverse(lower[:, first, first])
    inverse[:, last, last] = _inverse(lower[:, last, last])
    mixed = torch.bmm(lower[:, last, first], inverse[:, first, first])
    inverse[:, last, first] = torch.bmm(inverse[:, last, last], mixed).neg_()
    return inverse


def _least_regularisation(covariances: Tensor) -> float:
    """The least ε at which float32 can factorise Σ + ε·I for certain, whatever the processor.

    Rounding makes the factorisation that of Σ + ε·I + E, with ‖E‖ a small multiple of u·‖Σ‖,
    u = 2⁻²⁴ (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 10.1). Below
    ‖E‖ it is luck whether it succeeds, and what the distances are. tr(Σ) bounds ‖Σ‖; singular
    covariances of 4 to 550 dimensions, with equal, repeated or mixed channels, failed up to
    ε = 4.2·u·tr(Σ), with SSE4.2 and with AVX-512 alike. Twice that is asked for.

    Args:
        covariances: (P, d, d), of which the diagonal is read.
    """
    trace = covariances.diagonal(dim1=1, dim2=2).sum(1).amax()
    return _SHARE * float(trace)


def rounded(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices (P, n, d) as 16-bit integers, and a scale (P, n) for each row.

    Halves the model, and the memory traffic that scoring consists of. Distances agree with float64
    within 1e-4 (1e-5 for half of them) on ResNet-50 features, four times closer than with 16-bit
    floats; the error grows with the root of the largest variance over ε, which is 3000 there.
    """
    scale = matrices.abs().amax(dim=2).clamp_min(1e-30) / _INT16_MAX
    return (matrices / scale[..., None]).round_().to(torch.int16), scale
