"""One vector an image out of what a layer puts out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

POOLINGS = ("mean", "max", "none")


def channel_axis(shape: Sequence[int]) -> int:
    """Which axis of a layer's output holds the channels, told by one square image.

    Args:
        shape: (1, C, h, h) is a feature map, (1, h, h, C) Swin's form of one, (1, tokens, C) a
            transformer's, (1, C) a vector.
    """
    channels_last = len(shape) == 4 and shape[1] == shape[2] != shape[3]
    return len(shape) - 1 if channels_last or len(shape) == 3 else 1


def pooled(values: Tensor, axis: int, how: str) -> Tensor:
    """Pool over positions or tokens.

    Args:
        values: (B, …) with the channels on `axis`.
        axis: see `channel_axis`.
        how: `mean`, `max`, or `none` to leave the values as they are.

    Returns:
        (B, C) for `mean` and `max`; vectors stay as they are.
    """
    positions = [i for i in range(1, values.ndim) if i != axis]
    if how == "none" or not positions:
        return values
    return values.mean(dim=positions) if how == "mean" else values.amax(dim=positions)
