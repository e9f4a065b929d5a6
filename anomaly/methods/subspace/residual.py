"""The distance of patches to a subspace, on torch tensors and numpy arrays. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.arrays import Array, module_of
from anomaly.errors import DataError, ModelError
from anomaly.methods.base import ArrayScorer, PatchScores, check_fits, check_tensors, leading


class Subspace(ArrayScorer):
    """Good patches lie near a plane through their mean: its distance is the score.

    Attributes:
        mean: (D,) float32.
        basis: (D, k) float32, orthonormal columns: the leading principal axes.
    """

    mean: Array
    basis: Array
    unit = "distance to the subspace"

    @property
    def dimensions(self) -> int:
        """D, the channels of the embeddings that `score` takes."""
        return int(self.basis.shape[0])

    def score(self, embeddings: Array) -> PatchScores:
        """‖r − U·Uᵀr‖ with r = x − μ: what the subspace leaves of each patch.

        Differentiable in the embeddings, where they are tensors.

        Args:
            embeddings: (B, h, w, D) float32.

        Raises:
            DataError: another number of channels than was learned.
        """
        if embeddings.shape[-1] != self.dimensions:
            raise DataError(
                f"embeddings have {embeddings.shape[-1]} channels where the subspace has "
                f"{self.dimensions}; use the backbone and layers it was made with"
            )
        return PatchScores(residual_norms(embeddings, self.mean, self.basis))

    def check_origin(self, channels: int, images: int) -> None:
        """See that the subspace can come from a network's embeddings.

        Args:
            channels: of all hooked layers together.
            images: training images; any number.

        Raises:
            ModelError: it can't; the message says what doesn't fit.
        """
        check_fits(channels, self.dimensions)


class ArraySubspace(Subspace):
    """A subspace of numpy arrays, for exported models; attributes as those of `Subspace`."""

    def __init__(self, mean: NDArray[np.float32], basis: NDArray[np.float32]) -> None:
        self.mean, self.basis = mean, basis


def scorer(tensors: dict[str, NDArray[Any]], settings: Mapping[str, Any]) -> ArraySubspace:
    """The subspace that was saved.

    Args:
        tensors: as `PatchSubspace.tensors` gave them.
        settings: the config's section `model`, by key; not used.

    Raises:
        ModelError: they aren't those of a subspace.
    """
    check_subspace(tensors)
    return ArraySubspace(tensors["mean"].astype(np.float32), tensors["basis"])


def residual_norms(embeddings: Array, mean: Array, basis: Array) -> Array:
    """(B, h, w) float32: norms of what is left of embeddings (B, h, w, D) beside a subspace."""
    centred = embeddings - mean
    left = centred - (centred @ basis) @ basis.T
    return module_of(left).linalg.norm(left, None, -1)


def check_subspace(tensors: Mapping[str, Array]) -> None:
    """See that saved tensors are those of a subspace and the sums it comes from.

    Raises:
        ModelError: they aren't.
    """
    channels = leading(tensors, "mean")
    check_tensors(
        tensors,
        {
            "count": ("int64", ()),
            "mean": ("float64", (-1,)),
            "scatter": ("float64", (channels * (channels + 1) // 2,)),
            "basis": ("float32", (channels, -1)),
        },
    )
    kept = leading(tensors, "basis", 1)
    if int(tensors["count"]) < 1 or kept >= channels:
        raise ModelError(
            f"the scorer's subspace has {kept} of {channels} dimensions and comes from "
            f"{int(tensors['count'])} patches, which can't be"
        )
    norms = (tensors["basis"] * tensors["basis"]).sum(0)
    if not math.isclose(float(norms.min()), 1, abs_tol=1e-3) or float(norms.max()) > 1 + 1e-3:
        raise ModelError("the scorer's tensor basis isn't made of unit vectors")
