"""An exported graph in the place of a network and of the alignment behind it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ModelError
from anomaly.features.engine import Graph
from anomaly.imaging.loading import NetworkInput
from anomaly.runtime.threads import get_threads

# No engine gains by more, and eight take twice the memory.
_AT_ONCE = 2


def has_no_layers(folder: Path) -> ModelError:
    """What says that an exported model can't be asked for its network; for `raise`."""
    return ModelError(
        f"{folder} is an exported model, which has verdicts and no layers; "
        "use the model folder that it was exported from"
    )


class ExportedNetwork:
    """A graph from images to patch embeddings: `FeatureExtractor` and `Embedder` in one.

    Threads may share one.

    Args:
        graph: images (B, 3, H, W) in [0, 1] -> embeddings (B, h, w, D).
        layers: paths of the layers that are hooked in the network which the graph was made of.
        channels: C of each layer.
        strides: network pixels between neighbouring positions of each layer.
        patch: side of the patches that a transformer cuts images into; None for other networks.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[str],
        channels: Sequence[int],
        strides: Sequence[int],
        patch: int | None = None,
    ) -> None:
        self._graph = graph
        self.engine = graph.engine
        self.precision = graph.precision
        self.version = graph.version
        self.layers, self.channels, self.strides = tuple(layers), tuple(channels), tuple(strides)
        self.patch = patch

    @property
    def coarsest_stride(self) -> int:
        """The largest stride of the hooked layers."""
        return max(self.strides)

    @property
    def network(self) -> Any:
        """There is none.

        Raises:
            ModelError: always; says where there is one.
        """
        raise has_no_layers(self._graph.file.parent)

    def __call__(self, batch: Sequence[NetworkInput]) -> NDArray[np.float32]:
        """Patch embeddings (B, h, w, D) of images of one size."""
        return self._run(np.stack([item.pixels for item in batch]).transpose(0, 3, 1, 2))

    def at_once(self, wanted: int) -> int:
        """How many images to compute together, at most as many as are wanted."""
        return min(wanted, _AT_ONCE)

    def quietly(self) -> AbstractContextManager[Any]:
        """A context that does nothing: an exported network has no gradients."""
        return nullcontext()

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the patches of a network input of (H, W) pixels, by a dry run."""
        height, width = self._run(np.zeros((1, 3, *size), np.float32)).shape[1:3]
        return height, width

    def _run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        # A thread that computes alone is one of as many as the graph has threads. One image takes
        # as long alone as among several, and a fraction of their memory.
        together = get_threads() == 1
        parts = [self._graph(one[None], together=together)[0] for one in images]
        return np.concatenate(parts)
