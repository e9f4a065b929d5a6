"""How a hooked output becomes a feature map (B, C, h, w): maps, maps in Swin's order, and tokens.

A transformer's block puts out (B, N, C): class and register tokens, then the patches row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from anomaly.errors import ConfigError

_LARGEST_PATCH = 64
_MOST_PREFIX = 16  # class and register tokens; networks have up to 5


@dataclass(frozen=True)
class Layout:
    """How a layer's output lies, and what it stands for.

    Attributes:
        axes: of its outputs: `map` (B, C, h, w), `channels_last` (B, h, w, C) or `tokens`
            (B, N, C).
        channels: C.
        stride: network pixels between neighbouring positions.
    """

    axes: str
    channels: int
    stride: int

    @property
    def patch(self) -> int | None:
        """The side of the squares that images are cut into, of which sides are multiples."""
        return self.stride if self.axes == "tokens" else None

    def map_of(self, output: Tensor, size: Sequence[int]) -> Tensor:
        """An output as a feature map (B, C, h, w).

        Args:
            output: of the layer.
            size: (H, W) of the network's input.
        """
        if self.axes == "map":
            return output
        if self.axes == "tokens":
            height, width = size[0] // self.stride, size[1] // self.stride
            patches = output[:, output.shape[1] - height * width :]
            # Its length as a shape's, which stays free in a traced graph; len() is a plain number.
            output = patches.reshape(patches.shape[0], height, width, -1).contiguous()
        return output.permute(0, 3, 1, 2)


def layout_of(shape: Sequence[int], size: Sequence[int]) -> Layout | None:
    """How a layer's output lies, told by that of one image; None where it is no grid of positions.

    What may be both is taken for a map (B, C, h, w): of a square image, as many channels as rows.

    Args:
        shape: of the output.
        size: (H, W) of the image.
    """
    height, width = size
    if len(shape) == 3 and (stride := token_stride(shape[1], size)):
        return Layout("tokens", shape[2], stride)
    if len(shape) == 4:
        _, a, b, c = shape
        slack = 0 if height == width else 2 * max(height, width)  # strides and borders round
        if abs(b * width - c * height) <= slack:
            return Layout("map", a, max(1, round(width / c)))
        if abs(a * width - b * height) <= slack:
            return Layout("channels_last", c, max(1, round(width / b)))
    return None


def token_stride(count: int, size: Sequence[int]) -> int | None:
    """The side of the patches that N tokens stand for, few others before them; None for none.

    Args:
        count: N.
        size: (H, W) of the network's input.
    """
    height, width = size
    for stride in range(2, _LARGEST_PATCH + 1):
        if height % stride == width % stride == 0:
            others = count - height * width // stride**2
            if others >= 0:
                return stride if others <= min(_MOST_PREFIX, count // 2) else None
    return None


def check_side(key: str, side: int, layouts: Sequence[Layout]) -> None:
    """See that images of a given side can be cut into a network's patches.

    Raises:
        ConfigError: they can't.
    """
    for patch in {layout.patch for layout in layouts} - {None}:
        if patch and side % patch:
            low = side // patch * patch
            raise ConfigError(
                f"{key} is {side}, but the network cuts images into patches of {patch} pixels; "
                f"choose {f'{low} or ' if low else ''}{low + patch}"
            )
