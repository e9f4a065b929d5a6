"""PaDiM's Gaussians against the textbook: numpy covariance and inverse, scipy Mahalanobis.

Both sides get the same projected embeddings, alternate, and are reported as medians. The textbook
loops over positions; it is timed on some of them and its time scaled, as stated in the table.

    python -m benchmarks.gaussian [--runs 3] [--threads 2] [--case 100|550] [--clock wall|cpu]

On a busy machine, `--clock cpu --threads 1` compares the processor time of one thread.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.distance import mahalanobis

from anomaly.methods.base import PatchBatch
from anomaly.methods.padim.fitter import GaussianFitter
from anomaly.methods.padim.gaussian import PatchGaussian
from benchmarks.inputs import machine

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

REGULARISATION = 0.01
BATCH = 8


@dataclass(frozen=True)
class Case:
    """A training set: images, side of the grid, dimensions, and positions the textbook is given."""

    images: int
    side: int
    dimensions: int
    sampled: int


CASES = {
    "100": Case(images=209, side=64, dimensions=100, sampled=256),
    "550": Case(images=209, side=56, dimensions=550, sampled=16),
}


class Embeddings:
    """Generated patch embeddings with a decaying spectrum, the same in each reading."""

    def __init__(self, case: Case, clock: Clock) -> None:
        generator = torch.Generator().manual_seed(0)
        d = case.dimensions
        spectrum = torch.logspace(0.5, -2, d)
        rotation = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
        shape = (2 * BATCH, case.side, case.side, d)
        self._pool = (torch.randn(shape, generator=generator) * spectrum) @ rotation + 0.7
        self._case = case
        self.clock = clock
        self.seconds = 0.0  # spent here, which isn't the fitter's

    def __iter__(self) -> Iterator[PatchBatch]:
        for first in range(0, self._case.images, BATCH):
            started = self.clock()
            images = tuple(range(first, min(first + BATCH, self._case.images)))
            batch = PatchBatch(self.of(images), images)
            self.seconds += self.clock() - started
            yield batch

    def of(self, images: tuple[int, ...]) -> torch.Tensor:
        """(B, h, w, d): images of the pool, moved by a different step each time it is used."""
        moved = [
            self._pool[i % len(self._pool)].roll((i // len(self._pool) * 5, i), (0, 1))
            for i in images
        ]
        return torch.stack(moved)

    def at(self, positions: list[int]) -> np.ndarray:
        """(p, N, d) of some positions, for the textbook."""
        side, images = self._case.side, range(self._case.images)
        parts = [self.of((i,)).view(side * side, -1)[positions] for i in images]
        return torch.stack(parts, dim=1).numpy()


def textbook_fit(samples: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Means and inverse covariances of samples (p, N, d), position by position."""
    ridge = REGULARISATION * np.eye(samples.shape[2])
    return [(x.mean(axis=0), np.linalg.inv(np.cov(x, rowvar=False) + ridge)) for x in samples]


def textbook_score(model: list[tuple[np.ndarray, np.ndarray]], patches: np.ndarray) -> np.ndarray:
    """Distances (B, p) of patches (B, p, d)."""
    return np.array(
        [
            [mahalanobis(v, mean, inverse) for v, (mean, inverse) in zip(row, model, strict=True)]
            for row in patches
        ]
    )


def ours_fit(case: Case, embeddings: Embeddings) -> tuple[PatchGaussian, float]:
    """The model, and seconds without those spent making embeddings."""
    embeddings.seconds = 0.0
    started = embeddings.clock()
    model = GaussianFitter(case.dimensions, regularisation=REGULARISATION).fit(embeddings)
    return model, embeddings.clock() - started - embeddings.seconds


def timed(clock, call, *arguments):  # type: ignore[no-untyped-def]
    started = clock()
    result = call(*arguments)
    return result, clock() - started


def run(case: Case, runs: int, clock: Clock) -> None:
    embeddings = Embeddings(case, clock)
    positions = np.linspace(0, case.side**2 - 1, case.sampled).astype(int).tolist()
    scale = case.side**2 / case.sampled
    samples = embeddings.at(positions)
    queries = embeddings.of(tuple(range(1000, 1000 + BATCH))) + 0.1
    some = queries.view(BATCH, -1, case.dimensions)[:, positions].double().numpy()
    seconds: dict[str, list[float]] = {
        name: [] for name in ("fit", "one", "batch", "textbook fit", "textbook one")
    }
    for _ in range(runs):
        model, fit = ours_fit(case, embeddings)
        reference, textbook = timed(clock, textbook_fit, samples)
        seconds["fit"].append(fit)
        seconds["textbook fit"].append(textbook * scale)
        for image in range(BATCH):
            seconds["one"].append(timed(clock, model.score, queries[image : image + 1])[1])
            _, each = timed(clock, textbook_score, reference, some[image : image + 1])
            seconds["textbook one"].append(each * scale)
        scores, batch = timed(clock, model.score, queries)
        seconds["batch"].append(batch / BATCH)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    found = scores.scores.view(BATCH, -1)[:, positions].numpy()
    error = np.abs(found / textbook_score(reference, some) - 1)
    size = sum(v.nbytes for v in model.tensors().values())
    inverses = case.side**2 * case.dimensions**2 * 8
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"\n{case.dimensions} dimensions, {case.side}×{case.side} positions, {case.images} images "
        f"({runs} runs; textbook timed on {case.sampled} positions, scaled by {scale:.0f})\n"
        f"  {'':24}{'here':>12}{'textbook':>12}{'ratio':>8}"
    )
    rows = [
        ("fit, s", "fit", "textbook fit", 1),
        ("score one image, ms", "one", "textbook one", 1000),
        (f"score in {BATCH}s, ms/image", "batch", "textbook one", 1000),
    ]
    for title, here, there, unit in rows:
        a, b = median[here] * unit, median[there] * unit
        print(f"  {title:24}{a:12.2f}{b:12.2f}{b / a:7.0f}×")
    print(f"  {'model, MB':24}{size / 1e6:12.0f}{inverses / 1e6:12.0f}{inverses / size:7.1f}×")
    print(f"  peak memory of this process {peak:.2f} GB")
    print(f"  relative difference: median {np.median(error):.1e}, largest {error.max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{machine()}, numpy {np.__version__}, {arguments.clock} clock")
    for name in arguments.case or CASES:
        run(CASES[name], arguments.runs, CLOCKS[arguments.clock])


if __name__ == "__main__":
    main()
