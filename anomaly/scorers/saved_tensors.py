"""Checks of what scorers have learned. Imports no torch: an exported model's tensors are arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anomaly.arrays import Array
from anomaly.errors import ModelError


def check_tensors(
    tensors: Mapping[str, Array], wanted: Mapping[str, tuple[object, tuple[int, ...]]]
) -> None:
    """See that saved tensors are those of a scorer.

    Args:
        tensors: by name; arrays, too.
        wanted: dtype (`float32`, say, or torch's) and shape of each; -1 takes any length but 0.

    Raises:
        ModelError: one is missing, unknown, of another dtype or shape, or holds NaN or infinity.
    """
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        raise ModelError(f"the scorer's tensors {', '.join(odd)} are missing or unknown")
    for name, (dtype, shape) in wanted.items():
        tensor = tensors[name]
        same = _name(tensor.dtype) == _name(dtype)
        fits = len(shape) == tensor.ndim and all(
            length == size or (length == -1 and size)
            for length, size in zip(shape, tensor.shape, strict=True)
        )
        if not (same and fits):
            raise ModelError(
                f"the scorer's tensor {name} is {tuple(tensor.shape)} of {_name(tensor.dtype)}, "
                "which doesn't go with the others"
            )
        if not is_finite(tensor):
            raise ModelError(f"the scorer's tensor {name} holds NaN or infinite values")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def check_fits(channels: int, learned: int) -> None:
    """See that a scorer was learned from embeddings of a network's channels.

    Raises:
        ModelError: it wasn't.
    """
    if channels != learned:
        raise ModelError(f"its network has {channels} channels where its scorer has {learned}")


def leading(tensors: Mapping[str, Array], name: str, axis: int = 0) -> int:
    """The length of one axis of a saved tensor, for `check_tensors`; -1 where it has no such."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else -1


def is_finite(values: Array) -> bool:
    """Whether no value is NaN or infinite; reads a tensor once and makes no other."""
    if "float" not in str(values.dtype) or 0 in values.shape:
        return True
    return bool(np.isfinite([float(values.min()), float(values.max())]).all())


def check_apart(numbers: Sequence[Mapping[int, int]]) -> None:
    """Refuse to join sums of models that have learned from the same images.

    Args:
        numbers: as `Fitter.merged` takes them.

    Raises:
        ModelError: an image was learned from more than once.
    """
    several = sum(map(len, numbers)) - len({i for known in numbers for i in known.values()})
    if several:
        raise ModelError(
            f"{several} training images were learned from more than once, and would count so; "
            "merge models that share no images"
        )
