"""Is another product told? Each data set's images, shown to the models of all others.

    python -m benchmarks.foreign --weights FILE.safetensors --data FOLDER FOLDER...
        [--network resnet50_v1] [--images 20]

Of each pair it says how many images of the column's product are for review, as another product
than the row's; and of each row how many good images are: training images held out by tenths in the
order of their names, and those of the test split; and defects.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anomaly.config.load import parse_config
from anomaly.config.schema import Config
from anomaly.datasets import open_dataset
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.loading import UnusableImage, by_shape
from anomaly.scoring.image_statistics import ImageStatistics, TrainingStatistics, statistics_of
from anomaly.training.fit import prepare
from benchmarks.inputs import machine

_FOLDS = 10


@dataclass(frozen=True)
class _Looks:
    """What a data set's images look like as a whole."""

    train: list[ImageStatistics]
    good: list[ImageStatistics]
    defects: list[ImageStatistics]

    def spread(self, count: int) -> list[ImageStatistics]:
        """So many of all images, evenly."""
        every = [*self.train, *self.good, *self.defects]
        return [every[i] for i in np.linspace(0, len(every) - 1, count).astype(int)]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="in MVTec AD layout")
    parser.add_argument("--network", default="resnet50_v1")
    parser.add_argument("--images", type=int, default=20, help="of each other product")
    options = parser.parse_args()
    print(machine())
    backbone = {"name": options.network, "weights": options.weights}
    settings = {"backbone": backbone, "model": {"embedding": "sharp"}, "precision": "fp32"}
    config = parse_config(settings, "benchmark")
    sets = {data.name: _looks(config, data) for data in options.data}
    print(f"| {options.network} | {' | '.join(sets)} | held out | good | defects |")
    print("|---" * (len(sets) + 4) + "|")
    for name, looks in sets.items():
        usual = TrainingStatistics.of(looks.train)
        pairs = [
            "–" if other == name else _told(usual, others.spread(options.images))
            for other, others in sets.items()
        ]
        own = [_held_out(looks.train), _told(usual, looks.good), _told(usual, looks.defects)]
        print(f"| {name} | {' | '.join([*pairs, *own])} |")


def _told(usual: TrainingStatistics, looks: Sequence[ImageStatistics]) -> str:
    """How many of some images are taken for another product."""
    return f"{_count(usual, looks)} of {len(looks)}"


def _count(usual: TrainingStatistics, looks: Sequence[ImageStatistics]) -> int:
    return sum("as a whole" in usual.deviation(one) for one in looks)


def _held_out(looks: Sequence[ImageStatistics]) -> str:
    count = 0
    for part in np.array_split(np.arange(len(looks)), _FOLDS):
        usual = TrainingStatistics.of([one for i, one in enumerate(looks) if i not in part])
        count += _count(usual, [looks[i] for i in part])
    return f"{count} of {len(looks)}"


def _looks(config: Config, data: Path) -> _Looks:
    dataset, device = open_dataset("mvtec", data), torch.device("cpu")
    samples = [*sorted(dataset.train, key=lambda sample: sample.name), *dataset.test]
    found: dict[int, ImageStatistics] = {}
    with Decoders(2) as decoders, torch.inference_mode():
        embed = prepare(config, samples, decoders, device).embedder
        loaded = decoders.load_all((i, sample.source) for i, sample in enumerate(samples))
        for batch in by_shape(loaded, 4):
            if isinstance(batch, UnusableImage):
                sys.exit(batch.reason)
            looks = statistics_of(batch, embed(batch), None)
            found |= {item.index: look for item, look in zip(batch, looks, strict=True)}
            print(f"\r{data.name} {len(found)}/{len(samples)} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    train = len(dataset.train)
    good = [i for i in range(train, len(samples)) if not samples[i].is_defect]
    defects = [i for i in range(train, len(samples)) if samples[i].is_defect]
    groups = ([found[i] for i in group] for group in (range(train), good, defects))
    return _Looks(*groups)


if __name__ == "__main__":
    main()
