"""What models have to fulfil whose sums are joined. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anomaly.errors import ModelError


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
