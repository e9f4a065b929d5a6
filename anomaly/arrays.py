"""Torch tensors and numpy arrays alike, where one line of code serves both. Imports no torch.

A model that torch computes has tensors, an exported one has arrays. What is done with the scores of
either is written once, with `module_of(values)` for what both name alike.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any  # a torch.Tensor or an np.ndarray


def module_of(values: Array) -> Any:
    """`numpy` for an array, `torch` for a tensor."""
    return np if isinstance(values, np.ndarray) else import_module("torch")


def like(values: NDArray[Any], other: Array) -> Array:
    """An array as what `other` is: an array, or a tensor on its device. Keeps its dtype."""
    if isinstance(other, np.ndarray):
        return values
    return import_module("torch").from_numpy(values).to(other.device)


def as_numpy(values: Array) -> NDArray[Any]:
    """An array, or a tensor from whichever device, as an array."""
    return cast(
        NDArray[Any], values if isinstance(values, np.ndarray) else values.numpy(force=True)
    )


def as_float32(values: Array) -> Array:
    """An array, or a tensor, in float32."""
    return values.astype(np.float32) if isinstance(values, np.ndarray) else values.float()
