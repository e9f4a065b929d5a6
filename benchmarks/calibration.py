"""Do thresholds from good images keep their word? Seeded splits of good images, nothing else.

    python -m benchmarks.calibration --config mvtec_bottle.yaml --set model.coreset_ratio=0.01 …

Each split learns from two thirds of the good training images and calibrates on these very images
as `train` does; the last third, which neither the model nor the thresholds have seen, is scored and
the rejects among it are counted. If calibration images and new ones are alike, the count follows a
beta-binomial distribution; 95 of 100 splits should fall inside its 95 % interval, or a few more,
for counts are whole. Features are computed once, for they hang on no split.

With --refits the cross-fitted scores of all images are compared with those of true refits, fold by
fold: models of the same kind and size, trained on the other folds from the beginning.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import betabinom

from anomaly.calibration import GoodScores, Threshold, thresholds_from
from anomaly.config.load import load_config
from anomaly.datasets import open_dataset
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.geometry import AnyView
from anomaly.imaging.loading import UnusableImage, by_shape, tile_by_tile
from anomaly.methods.base import Fitter, PatchBatch, PatchSet
from anomaly.methods.patchcore.fitter import MemoryBankFitter
from anomaly.scoring.build import fitter_of
from anomaly.scoring.image_score import inside_of
from anomaly.scoring.pipeline import Model
from anomaly.training.cross_fitting import cross_fit, scores_of, split
from anomaly.training.fit import train
from benchmarks.inputs import machine


@dataclass(frozen=True)
class Patches(PatchSet):
    """The patch embeddings of images, in memory; a stand-in for `CachedFeatures`."""

    batches: list[PatchBatch]
    views: dict[int, AnyView]

    @property
    def count(self) -> int:
        return sum(b.embeddings[..., 0].numel() for b in self.batches)

    def __iter__(self) -> Iterator[PatchBatch]:
        return iter(self.batches)

    def only(self, images: Container[int]) -> Patches:
        return Patches([b for b in (_some(b, images) for b in self.batches) if b], self.views)


def _some(batch: PatchBatch, images: Container[int]) -> PatchBatch | None:
    rows = [row for row, image in enumerate(batch.images) if image in images]
    if len(rows) in (0, len(batch.images)):
        return batch if rows else None
    return PatchBatch(
        batch.embeddings[rows],
        tuple(batch.images[row] for row in rows),
        None if batch.corners is None else tuple(batch.corners[row] for row in rows),
        None if batch.inside is None else batch.inside[rows],
    )


@dataclass(frozen=True)
class Bench:
    """Features of good images, and what is learned from some of them."""

    detector: Model
    fitter: Fitter[Any]
    patches: Patches
    folds: int

    @property
    def images(self) -> list[int]:
        return sorted(self.patches.views)

    def learn(self, images: Container[int]) -> Model:
        return replace(self.detector, scorer=self.fitter.fit(self.patches.only(images)))

    def cross_fit(self, detector: Model, images: list[int]) -> GoodScores:
        names = {i: str(i) for i in images}
        some = self.patches.only(frozenset(images))
        return cross_fit(detector, some, self.fitter, names, names, folds=self.folds, groups={})

    def scores(self, detector: Model, images: Container[int]) -> np.ndarray:
        found = scores_of(detector, self.patches.only(images), self.patches.views)
        return np.array([score for score, _ in found.values()])


def prepare(args: argparse.Namespace) -> Bench:
    """Train once, for the settled network, and keep the features of all training images."""
    config = load_config(args.config, args.overrides, [Path("configs")])
    samples = open_dataset(config.data.format, config.data.root, config.data.category).train
    with tempfile.TemporaryDirectory() as scratch:
        trained = train(
            config, samples, device=torch.device("cpu"), scratch=Path(scratch), calibrate=False
        )
    detector = trained.detector
    batches: list[PatchBatch] = []
    views: dict[int, AnyView] = {}
    with Decoders(2, Task(detector.loading)) as decoders:
        loaded = decoders.load_all(enumerate(s.path for s in samples))
        for batch in tile_by_tile(by_shape(loaded, config.batch_size), config.batch_size):
            if isinstance(batch, UnusableImage):
                continue
            embeddings = detector.embedder(batch)
            inside = inside_of(batch, embeddings, detector.region)
            batches.append(PatchBatch(embeddings, tuple(i.index for i in batch), None, inside))
            views.update((i.index, i.layout) for i in batch)
    patches = Patches(batches, views)
    channels = sum(detector.extractor.channels)
    fitter = fitter_of(config).prepared(channels, detector.device)
    return Bench(detector, fitter, patches, config.calibration.folds)


@dataclass
class Tally:
    """What one of the thresholds did over all splits."""

    inside: int = 0
    kept: int = 0
    promised: float = 0.0
    seen: float = 0.0

    def add(self, threshold: Threshold, held_out: np.ndarray) -> None:
        rate = threshold.false_rejects
        rejects = int((held_out > threshold.value).sum())
        k = rate.count + 1  # of `rate.images` scores the k-th highest is the threshold
        low, high = betabinom(len(held_out), k, rate.images - k + 1).ppf((0.025, 0.975))
        self.inside += low <= rejects <= high
        self.kept += rejects / len(held_out) <= rate.at_most
        self.promised += rate.expected
        self.seen += rejects / len(held_out)


def splits(bench: Bench, args: argparse.Namespace) -> None:
    """The table's rows: held-out rejects of every split."""
    tallies = {"review": Tally(), "reject": Tally()}
    learned = round(len(bench.images) * 2 / 3)
    rates = bench.detector.config.calibration
    for seed in range(args.splits):
        order = np.random.default_rng(seed).permutation(bench.images)
        known = sorted(order[:learned].tolist())
        detector = bench.learn(frozenset(known))
        good = bench.cross_fit(detector, known)
        calibration = thresholds_from(good, rates.review_rate, rates.reject_rate).calibration
        held_out = bench.scores(detector, frozenset(order[learned:].tolist()))
        tallies["review"].add(calibration.review, held_out)
        tallies["reject"].add(calibration.reject, held_out)
    for name, tally in tallies.items():
        config = bench.detector.config
        print(
            f"| {config.data.category or config.name}, {config.model.kind} "
            f"| {learned} / {len(bench.images) - learned} | {name} "
            f"| {tally.promised / args.splits:.1%} | {tally.seen / args.splits:.1%} "
            f"| {tally.seen / tally.promised:.1f} "
            f"| {tally.inside} of {args.splits} |",
            flush=True,
        )


def refits(bench: Bench) -> None:
    """Cross-fitted scores beside those of models that were trained anew without each fold."""
    started = time.perf_counter()
    quick = np.array(bench.cross_fit(bench.detector, bench.images).image)
    between = time.perf_counter()
    true = refitted(bench, 0)
    seconds = time.perf_counter() - between
    print(f"cross-fitting {between - started:.1f} s, refits {seconds:.1f} s")
    compare("shortcut / refits", quick, true)
    if isinstance(bench.fitter, MemoryBankFitter):
        compare("refits with another seed / refits", refitted(bench, 1), true)


def refitted(bench: Bench, seed: int) -> np.ndarray:
    """Scores of all images by true refits: as large a bank, or Gaussians, without each fold."""
    fitter = bench.fitter
    parts = [(i,) for i in bench.images]
    if isinstance(fitter, MemoryBankFitter):
        size = len(bench.detector.scorer.vectors)
        fitter = replace(fitter, coreset_ratio=None, coreset_size=size, seed=fitter.seed + seed)
        parts = split(bench.images, {}, bench.folds)
    anew = replace(bench, fitter=fitter)
    scores: dict[int, float] = {}
    for part in parts:
        detector = anew.learn(frozenset(bench.images) - frozenset(part))
        scores |= zip(part, anew.scores(detector, part).tolist(), strict=True)
    return np.array([scores[i] for i in bench.images])


def compare(what: str, some: np.ndarray, others: np.ndarray) -> None:
    ratio = some / others - 1
    ranks = np.corrcoef(some.argsort().argsort(), others.argsort().argsort())[0, 1]
    low, high = np.quantile(ratio, [0.05, 0.95])
    print(
        f"{what}, {len(some)} images: mean {ratio.mean():+.2%}, median {np.median(ratio):+.2%}, "
        f"5 % to 95 % {low:+.2%} to {high:+.2%}, "
        f"extremes {ratio.min():+.2%} to {ratio.max():+.2%}, "
        f"highest score {some.max() / others.max() - 1:+.2%}"
        f", rank correlation {ranks:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="a YAML file, or a name in configs/")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--splits", type=int, default=50, help="how many; 0 for none")
    parser.add_argument("--refits", action="store_true", help="compare with true refits, too")
    args = parser.parse_args()
    print(machine(), flush=True)
    with torch.inference_mode():
        bench = prepare(args)
        if args.refits:
            refits(bench)
        if args.splits:
            splits(bench, args)


if __name__ == "__main__":
    main()
