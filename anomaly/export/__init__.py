"""Features and models as files for other programs and engines."""

from dataclasses import dataclass

VERDICTS = ("good", "review", "reject")  # as a graph from pixels counts them


@dataclass(frozen=True)
class Camera:
    """The images that a graph takes: 8 bits, three channels.

    Attributes:
        size: (H0, W0).
        bgr: whether blue comes first, as OpenCV reads files.
    """

    size: tuple[int, int]
    bgr: bool = False
