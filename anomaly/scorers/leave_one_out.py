"""Mahalanobis distances of training images to the Gaussians that were fitted without them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anomaly.errors import DataError
from anomaly.scorers.base import PatchScores
from anomaly.scorers.gaussian import PatchGaussian

# Leverages are below 1; rounding must not carry them over.
_MOST = 1 - 1e-6


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """Scores a training image as the Gaussians would that hadn't seen it. Nothing is fitted again.

    Taking one sample x out of N changes the mean and the scatter S of its position by rank one.
    With r = x − mean and q = rᵀ(S/(N−1) + εI)⁻¹r, the squared distance under all samples, the
    Sherman–Morrison formula gives the one without x:

        M² = q · (N/(N−1))² · (N−2)/(N−1) / (1 − N·q/(N−1)²).

    That is exact for a regularisation of ε(N−1)/(N−2), so M is below that of a refit with ε by a
    factor of √((N−2)/(N−1)) at most: 0.25 % for 200 images. With fewer images than dimensions the
    denominator is about ε over the features' variance, and multiplies single precision's rounding:
    for features whose variance is a thousand times ε, scores are good to a few percent only.

    Attributes:
        scorer: the Gaussians.
        images: N, how many images they were fitted on.

    Raises:
        DataError: fewer than three images.
    """

    scorer: PatchGaussian
    images: int

    def __post_init__(self) -> None:
        if self.images < 3:
            raise DataError(
                f"{self.images} training images can't be scored without themselves: what is left "
                "has no covariance; add images, or train with --no-calibrate"
            )

    def score(self, embeddings: Tensor) -> PatchScores:
        """Scores of training images (B, h, w, D), each without itself."""
        n = self.images
        squared = self.scorer.score(embeddings).scores.double().square()
        leverage = (squared * (n / (n - 1) ** 2)).clamp_(max=_MOST)
        left_out = squared * ((n / (n - 1)) ** 2 * (n - 2) / (n - 1)) / (1 - leverage)
        return PatchScores(left_out.sqrt().float())

    def to(self, target: torch.device | str) -> LeaveOneOut:
        """The same on another device."""
        return LeaveOneOut(self.scorer.to(target), self.images)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the Gaussians."""
        return self.scorer.tensors()
