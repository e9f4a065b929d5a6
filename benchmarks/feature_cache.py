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

from anomaly.config.parsing import parse_config
from anomaly.config.schema import Config
from anomaly.datasets import Sample, ground_truth, open_dataset
from anomaly.features.backbones import normalisation
from anomaly.features.embedder import Embedder
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.preprocessing import UnusableImage, by_shape
from anomaly.model.build import backbone
from anomaly.model.settings import loading_of
from anomaly.scorers.patchcore.aligner import patchcore_concat

LAYERS = ("layer1[-1]", "layer2[-1]", "layer3[-1]")


@dataclass(frozen=True, eq=False)
class Seen:
    """One image of a data set, as the network saw it.

    Attributes:
        name: its path below the data set's root.
        defect: its type of defect; `good` without one.
        size: (H, W) of the network's input.
        maps: (C_i, h_i, w_i) float16 of each of `LAYERS`.
        mask: (H, W) bool at the smaller of the image's own and the network's size; None for a
            training image.
    """

    name: str
    defect: str
    size: tuple[int, int]
    maps: tuple[Tensor, ...]
    mask: NDArray[np.bool_] | None


@dataclass(frozen=True, eq=False)
class SeenSet:
    """A data set's training and test images."""

    name: str
    train: list[Seen]
    test: list[Seen]


def seen(
    data: Path, weights: str, network: str, cache: Path, settings: str = "area=256"
) -> SeenSet:
    """A data set's feature maps, from the cache where they are there.

    Args:
        data: a folder in MVTec AD layout.
        weights: as `backbone.weights`.
        network: as `backbone.name`.
        cache: folder of the cache.
        settings: one of the config's section `image`, `area=256` or `resize=256`.
    """
    file = cache / f"{data.name}-{network}-{settings.replace('=', '')}.pt"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        key, value = settings.split("=")
        config = parse_config(
            {
                "image": {key: int(value)},
                "backbone": {"name": network, "weights": weights, "layers": LAYERS},
                "precision": "fp32",
            },
            "benchmark",
        )
        dataset = open_dataset("mvtec", data)
        parts = [
            list(_computed(config, samples, test))
            for samples, test in ((dataset.train, False), (dataset.test, True))
        ]
        torch.save(parts, partial := file.with_suffix(".part"))
        partial.rename(file)
    train, test = torch.load(file, weights_only=False, mmap=True)
    return SeenSet(data.name, train, test)


def _computed(config: Config, samples: Sequence[Sample], test: bool) -> Iterator[Seen]:
    extractor, _ = backbone(config, torch.device("cpu"))
    embed = Embedder(
        extractor, normalisation(config.backbone.name), patchcore_concat, torch.device("cpu")
    )
    loading = loading_of(config, extractor.coarsest_stride, None, None)
    found: dict[int, Seen] = {}
    with Decoders(2, Task(loading)) as decoders, torch.inference_mode():
        loaded = decoders.load_all((i, s.path) for i, s in enumerate(samples))
        for batch in by_shape(loaded, 8):
            if isinstance(batch, UnusableImage):
                sys.exit(batch.reason)
            maps = [m.half() for m in embed.maps(batch)]
            for row, item in enumerate(batch):
                sample = samples[item.index]
                size = item.view.size
                mask = _mask(sample, item.view.source, size) if test else None
                defect = sample.defect_type if sample.is_defect else "good"
                own = tuple(m[row].clone() for m in maps)
                found[item.index] = Seen(str(sample.path), defect, size, own, mask)
            print(f"\r{config.backbone.name} {len(found)}/{len(samples)}", end="", file=sys.stderr)
    yield from (found[i] for i in sorted(found))


def _mask(sample: Sample, source: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
    mask = ground_truth(sample, source)
    if source[0] * source[1] <= size[0] * size[1]:
        return mask
    small = cv2.resize(mask.astype(np.uint8), size[::-1], interpolation=cv2.INTER_NEAREST)
    return np.asarray(small, bool)
