"""A model in int8: its network is quantised, and the model trained again with that network.

Post-training static quantisation (Jacob et al. 2018): weights are rounded to whole numbers channel
by channel, activations tensor by tensor within the range that they have on training images. That
moves every embedding by several per cent, and all of them alike, so that a bank, Gaussians and
thresholds of the same network fit again.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anomaly.backbones.engine import ENGINES, ExportedNetwork, Graph
from anomaly.calibration import Thresholds, thresholds_from
from anomaly.datasets import Sample
from anomaly.datasets.inputs import find_inputs
from anomaly.errors import DataError, ModelError, some
from anomaly.evaluation.splits import TrainingImages, dataset_images
from anomaly.export.graph import write_graph
from anomaly.export.int8_graph import quantise
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape, tile_by_tile
from anomaly.methods.base import Fitter
from anomaly.runtime.parallel import get_threads
from anomaly.scoring.build import fitter_of
from anomaly.scoring.image_statistics import TrainingStatistics
from anomaly.scoring.pipeline import Model
from anomaly.storage.folder import BACKBONE
from anomaly.storage.save import save_rest
from anomaly.storage.thresholds import change
from anomaly.training.cross_fitting import cross_fit
from anomaly.training.feature_cache import CachedFeatures, FeatureCache
from anomaly.training.fit import StageProgress

CALIBRATED_ON = 100  # training images that determine ranges of activations
_COMPARED_ON = 16  # training images whose embeddings are compared with the unquantised network's
_TILES = 3  # mean number of patches an image
# Largest error of the worst 1 % of patches, as a share of the patches' distance from their # mean.
# ResNet-50 0.2, MobileNetV2 0.6; from 1 on a patch is hardly nearer to itself than to others.
_FARTHEST = 1.0


def training_images(
    detector: Model, folder: Path, data_root: Path | None, further: Sequence[Path]
) -> dict[int, Sample]:
    """The unchanged training images of a model, by their numbers.

    They are recognised by content, in any split of the data set and any further folder.

    Args:
        detector: the model.
        folder: the run, or the model folder, that it was loaded from.
        data_root: the data sets' folder, if it has moved since training.
        further: folders of images.

    Raises:
        DataError: some are missing or have changed.
    """
    given: list[Sample] = []
    try:
        given += dataset_images(detector, folder, data_root)
    except DataError:
        if not further:
            raise
    if further:
        paths = find_inputs(further, option="--training-images").paths
        given += [Sample(path, path.name) for path in paths]
    wanted = detector.manifest["training_images"]
    samples, missing = TrainingImages(wanted, given, renamed=given).numbered(detector.manifest)
    if missing:
        changed = sum(why != "not found" for why in missing.values())
        raise DataError(
            f"{len(missing)} of {len(wanted)} training images have changed ({changed}) or "
            f"weren't found ({len(missing) - changed}) ({some([*missing])}). Give --data-root, "
            "where the data sets are now, or --training-images with folders that hold them"
        )
    return samples


def quantised(
    parent: Model,
    samples: Mapping[int, Sample],
    draft: Path,
    engine: str,
    *,
    workers: int,
    progress: StageProgress,
) -> tuple[Model, dict[str, Any], int]:
    """Write the model with the quantised network.

    Args:
        parent: the model, on the CPU.
        samples: its training images by their numbers.
        draft: an empty folder.
        engine: a key of `anomaly.backbones.engine.ENGINES`.
        workers: decoding processes.
        progress: called with (stage, done, total).

    Returns:
        The new model, which computes scores with torch after the network; its graph's facts for
        export.json; and the number of calibration inputs.

    Raises:
        ModelError: the network has nothing that int8 speeds up, or int8 changes its embeddings too
            much.
        DataError: a training image can no longer be used.
    """
    count = 0

    def inputs(stage: str) -> Iterator[NDArray[np.float32]]:
        nonlocal count
        count = 0
        for images in _inputs(parent, samples, CALIBRATED_ON, workers):
            count += 1
            progress(stage, count, max(count, min(len(samples), CALIBRATED_ON)))
            yield images

    entry = write_graph(
        parent, draft, engine, quantise=lambda file: quantise(file, inputs, parent.normalise)
    )
    own = parent.extractor
    graph = Graph(draft / entry["file"], engine, "int8", get_threads())
    _check_embeddings(parent, graph, _inputs(parent, samples, _COMPARED_ON, workers))
    network: Any = _Embedding(graph, own.layers, own.channels, own.strides, own.patch)
    changed = replace(parent, extractor=network)
    return learned_again(changed, samples, draft, "int8", workers, progress), entry, count


class _Embedding(ExportedNetwork):
    """An exported network whose embeddings are tensors, for training."""

    device = torch.device("cpu")

    def __call__(self, batch: Sequence[NetworkInput]) -> Tensor:  # type: ignore[override]
        return torch.from_numpy(super().__call__(batch))

    def maps(self, batch: Sequence[NetworkInput]) -> list[Tensor]:
        """The embeddings: alignment is in the graph."""
        return [self(batch)]

    def align(self, maps: Sequence[Tensor]) -> Tensor:
        """They are aligned."""
        return maps[0]

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A `torch.inference_mode` context, in which nothing is recorded for gradients."""
        return torch.inference_mode()


def _check_embeddings(parent: Model, graph: Graph, inputs: Iterable[NDArray[np.float32]]) -> None:
    """Check that a quantised network's patch embeddings are near the original network's.

    Raises:
        ModelError: the error of 1 % of the patches is above the limit.
    """
    off, seen = [], []
    with torch.inference_mode():
        for images in inputs:
            maps = parent.extractor(parent.normalise(torch.from_numpy(images)))
            wanted = parent.scorer.align(maps).numpy()
            off.append(np.square(graph(images)[0] - wanted).sum(-1).ravel())
            patches = wanted.reshape(-1, wanted.shape[-1]).astype(np.float64)
            seen.append((len(patches), patches.sum(0), np.square(patches).sum()))
    count, total, squares = (sum(parts) for parts in zip(*seen, strict=True))
    spread = squares / count - np.square(total / count).sum()  # E‖x‖² − ‖E x‖²
    share = math.sqrt(np.quantile(np.concatenate(off), 0.99) / max(spread, 1e-12))
    if not share <= _FARTHEST:
        name, other = (
            ENGINES[graph.engine][0],
            next(engine for engine in ENGINES if engine != graph.engine),
        )
        raise ModelError(
            f"int8 changes this network too much in {name} {graph.version}: 1 % of the patches are "
            f"off by {share:.2g} of the patches' distance from their mean (allowed: "
            f"{_FARTHEST:g}). Nothing was exported; use --precision fp32, or try --to {other}"
        )


def _inputs(
    detector: Model, samples: Mapping[int, Sample], count: int, workers: int
) -> Iterator[NDArray[np.float32]]:
    """Network inputs (1, 3, H, W) of training images drawn with the seed, up to a number."""
    numbers = sorted(samples)
    drawn = random.Random(detector.config.seed).sample(numbers, min(len(numbers), count))
    with Decoders(min(workers, len(drawn)), Task(detector.loading)) as decoders:
        loaded = decoders.load_all((i, samples[i].source) for i in sorted(drawn))
        batches = tile_by_tile(by_shape(detector.fitting(loaded), 1), 1)
        used = (batch for batch in batches if not isinstance(batch, UnusableImage))
        for batch in islice(used, _TILES * count):
            yield np.ascontiguousarray(batch[0].pixels.transpose(2, 0, 1)[None])


def learned_again(
    detector: Model,
    samples: Mapping[int, Sample],
    draft: Path,
    precision: str,
    workers: int,
    progress: StageProgress,
) -> Model:
    """Train the same model with another network: same images, patches, settings and rates.

    Args:
        detector: already with the new network or number format.
        samples: its training images by their numbers.
        draft: a folder that holds the network's files; gets the rest of the model.
        precision: the number format that the network computes in.
        workers: decoding processes.
        progress: called with (stage, done, total).

    Raises:
        DataError: a training image can no longer be used.
    """
    network = detector.extractor
    fitter = fitter_of(detector.config).prepared(sum(network.channels), detector.device)
    seen = partial(progress, "features")
    with (
        tempfile.TemporaryDirectory(prefix=".patches-", dir=draft) as scratch,
        Decoders(min(workers, len(samples)), Task(detector.loading, looks=True)) as decoders,
        closing(FeatureCache(detector, fitter, decoders, Path(scratch), seen)) as cache,
    ):
        images = {i: sample.source for i, sample in samples.items()}
        patches = cache.build(images).checked()
        scorer = fitter.refit_embeddings(detector.scorer, patches)
        if patches.refused:
            why = patches.refused[0].reason
            raise DataError(f"a training image can no longer be used: {why}")
        looks = TrainingStatistics.of([patches.statistics[i] for i in samples])
        new = replace(
            detector, scorer=scorer, training_statistics=detector.training_statistics and looks
        )
        thresholds = _thresholds(new, fitter, samples, patches, progress)
    made = change({"learned again in": precision}, detector.thresholds, thresholds, {})
    again = replace(
        new,
        thresholds=thresholds,
        manifest={**detector.manifest, "parent": detector.model_id},
        changes=(*detector.changes, made | {"model_before": detector.model_id}),
        model_id="",
        folder=None,
    )
    return replace(again, model_id=save_rest(again, draft, detector.manifest["files"][BACKBONE]))


def _thresholds(
    detector: Model,
    fitter: Fitter[Any],
    samples: Mapping[int, Sample],
    patches: CachedFeatures,
    progress: StageProgress,
) -> Thresholds | None:
    if detector.thresholds is None:
        return None
    names = detector.manifest["training_images"]
    good = cross_fit(
        detector,
        patches,
        fitter,
        dict(zip(samples, names, strict=True)),
        patches.pictures(),
        folds=detector.config.calibration.folds,
        groups={i: sample.group for i, sample in samples.items() if sample.group},
        progress=partial(progress, "calibration"),
    )
    return thresholds_from(good, *detector.rates())
