"""An exported graph in the place of a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anomaly.errors import ModelError
from anomaly.features.backbones import Normalisation
from anomaly.features.engine import Graph
from anomaly.features.extractor import FeatureExtractor, FeatureMap

# A graph normalises by itself.
PLAIN = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


class ExportedNetwork(FeatureExtractor):
    """A graph from images to patch embeddings, read like the network that it was made of.

    What it puts out is one map, of patch embeddings, which `align` has only to turn. Threads may
    share one.

    Args:
        graph: images (B, 3, H, W) in [0, 1] -> embeddings (B, h, w, D).
        layers: that are hooked in the network it was made of; channels and strides are theirs.
        channels: likewise.
        strides: likewise.
    """

    def __init__(
        self, graph: Graph, layers: Sequence[str], channels: Sequence[int], strides: Sequence[int]
    ) -> None:
        self._graph = graph
        self.engine = graph.engine
        self.precision = graph.precision
        self.version = graph.version
        self.layers, self.channels, self.strides = tuple(layers), tuple(channels), tuple(strides)

    @property
    def network(self) -> nn.Module:  # type: ignore[override]
        """There is none.

        Raises:
            ModelError: always; says where there is one.
        """
        raise ModelError(
            f"{self._graph.file.parent} is an exported model, which has verdicts and no layers; "
            "use the model folder that it was exported from"
        )

    def __call__(self, images: Tensor) -> list[FeatureMap]:
        """Run the graph.

        Args:
            images: (B, 3, H, W) RGB in [0, 1].

        Returns:
            One map (B, D, h, w) float32, the embeddings.
        """
        # A thread that torch computes alone in is one of as many as the graph has threads.
        (values,) = self._graph(images.numpy(), together=torch.get_num_threads() == 1)
        return [
            FeatureMap("embeddings", torch.from_numpy(values).permute(0, 3, 1, 2), self.strides[0])
        ]

    @staticmethod
    def align(maps: Sequence[Tensor]) -> Tensor:
        """The map (B, D, h, w) as embeddings (B, h, w, D)."""
        return maps[0].permute(0, 2, 3, 1)
