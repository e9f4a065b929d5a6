"""Means and covariances of samples at P positions, and how their triangles are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from anomaly.scorers.padim.layout import panel_rows

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
