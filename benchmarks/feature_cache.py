"""Feature maps of a data set's images, computed once and kept: what `benchmarks.accuracy` tries on.

Maps are those of the extractor in fp32, kept in half precision, which moves no figure's third
digit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.extractor import Embedder
from anomaly.backbones.registry import build, default_layers, normalisation
from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.datasets import Sample, ground_truth, open_dataset
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import UnusableImage, by_shape
from anomaly.methods.patchcore.embedding import patchcore_concat
from anomaly.runtime.parallel import cores
from anomaly.scoring.build import backbone, loading_of


@dataclass(frozen=True)
class Network:
    """A network and the layers whose maps are kept.

    Attributes:
        name: as `backbone.name`.
        weights: as `backbone.weights`.
        layers: as `backbone.layers`; none for the defaults at strides 4, 8 and 16.
    """

    name: str
    weights: str
    layers: tuple[str, ...] = ()

    @property
    def hooked(self) -> tuple[str, ...]:
        """The layers by their paths, the finest first."""
        return self.layers or default_layers(self.name, build(self.name), 3)


@dataclass(frozen=True, eq=False)
class ImageMaps:
    """One image of a data set, as the network sees it.

    Attributes:
        name: its path below the data set's root.
        defect: its type of defect; `good` without one.
        size: (H, W) of the network's input.
        maps: (C_i, h_i, w_i) float16 of each hooked layer.
        mask: (H, W) bool at the smaller of the image's own and the network's size; None for a
            training image, and for a defect that nobody has marked.
    """

    name: str
    defect: str
    size: tuple[int, int]
    maps: tuple[Tensor, ...]
    mask: NDArray[np.bool_] | None


@dataclass(frozen=True, eq=False)
class SetMaps:
    """A data set's training and test images."""

    name: str
    train: list[ImageMaps]
    test: list[ImageMaps]


def feature_maps(
    data: Path, network: Network, cache: Path, device: torch.device, settings: str = "area=256"
) -> SetMaps:
    """A data set's feature maps, from the cache where they are there.

    Args:
        data: a folder in MVTec AD layout.
        network: whose maps.
        cache: folder of the cache.
        device: where the network runs.
        settings: one of the config's section `image`, `area=256` or `resize=256`.
    """
    layers = "".join(f"-{layer}" for layer in network.layers)
    name = f"{data.name}-{network.name}{layers}-{settings}.pt".replace("/", "-").replace("=", "")
    if not (file := cache / name).exists():
        cache.mkdir(parents=True, exist_ok=True)
        key, value = settings.split("=")
        config = parse_config(
            {
                "image": {key: int(value)},
                "backbone": {
                    "name": network.name,
                    "weights": network.weights,
                    "layers": network.hooked,
                },
                "precision": "fp32",
            },
            "benchmark",
        )
        dataset = open_dataset("mvtec", data)
        parts = [
            list(_computed(config, samples, device, test))
            for samples, test in ((dataset.train, False), (dataset.test, True))
        ]
        torch.save(parts, partial := file.with_suffix(".part"))
        partial.rename(file)
    train, test = torch.load(file, weights_only=False, mmap=True)
    return SetMaps(data.name, train, test)


def _computed(
    config: Config, samples: Sequence[Sample], device: torch.device, test: bool
) -> Iterator[ImageMaps]:
    extractor, _ = backbone(config, device)
    embed = Embedder(extractor, normalisation(config.backbone.name), patchcore_concat, device)
    loading = loading_of(config, extractor.coarsest_stride, None, None)
    done: dict[int, ImageMaps] = {}
    with Decoders(cores(), Task(loading)) as decoders, torch.inference_mode():
        loaded = decoders.load_all((i, s.path) for i, s in enumerate(samples))
        for batch in by_shape(loaded, 8):
            if isinstance(batch, UnusableImage):
                sys.exit(batch.reason)
            maps = [m.half().cpu() for m in embed.maps(batch)]
            for row, item in enumerate(batch):
                sample = samples[item.index]
                size = item.view.size
                mask = _mask(sample, item.view.source, size) if test else None
                defect = sample.defect_type if sample.is_defect else "good"
                own = tuple(m[row].clone() for m in maps)
                done[item.index] = ImageMaps(str(sample.path), defect, size, own, mask)
            print(f"\r{config.backbone.name} {len(done)}/{len(samples)}", end="", file=sys.stderr)
    yield from (done[i] for i in sorted(done))


def _mask(
    sample: Sample, source: tuple[int, int], size: tuple[int, int]
) -> NDArray[np.bool_] | None:
    if sample.is_defect and sample.mask_path is None:
        return None
    mask = ground_truth(sample, source)
    if source[0] * source[1] <= size[0] * size[1]:
        return mask
    small = cv2.resize(mask.astype(np.uint8), size[::-1], interpolation=cv2.INTER_NEAREST)
    return np.asarray(small, bool)
