"""Greedy k-center: this package against the textbook's loop and anomalib's, in one run.

    python -m benchmarks.coreset [--features FILE.npy] [--anomalib-python .venv-anomalib/bin/python]

The peers are timed on their first steps only, whose number is stated, and scaled up: each step of
theirs costs the same; with --anomalib-steps of as many as there are picks its covering radius is
measured, too. Runs alternate; figures are medians. `--true-dimensions 12 --points 60000`
measures on generated numbers, 128 a point, that lie in so many dimensions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anomaly.methods.patchcore.coreset import (
    distances_to_nearest,
    greedy_k_center,
    random_projection,
)
from benchmarks.process import machine

PATCHES_AN_IMAGE = 1024
# Prints the seconds that the given numbers of steps take, its random projection included, each at
# its quickest of three, and keeps the picks of the last.
ANOMALIB = """
import sys, time, numpy, torch
from anomalib.models.components import KCenterGreedy
torch.set_num_threads(int(sys.argv[2]))
points = torch.from_numpy(numpy.load(sys.argv[1]))
for steps in map(int, sys.argv[3:]):
    seconds = []
    for _ in range(3):
        sampler = KCenterGreedy(embedding=points, sampling_ratio=(steps + 0.5) / len(points))
        start = time.perf_counter()
        picks = sampler.select_coreset_idxs()
        seconds.append(time.perf_counter() - start)
    print("SECONDS", min(seconds))
numpy.save(sys.argv[1], numpy.array([int(pick) for pick in picks]))
"""


def embeddings(file: Path | None, count: int, dim: int = 1536) -> Tensor:
    """The first `count` rows of a .npy of (N, D) float32, or as many generated ones."""
    if file is None:
        return generated(count, dim)
    rows = np.load(file, mmap_mode="r")
    if len(rows) < count:
        raise SystemExit(f"{file} holds {len(rows)} embeddings; {count} are needed")
    return torch.from_numpy(np.array(rows[:count]))


def whole_images(file: Path, count: int) -> Tensor:
    """`count` rows of a .npy of (N, D) float32: whole images, evenly spread over the file."""
    rows = np.load(file, mmap_mode="r")
    images, wanted = len(rows) // PATCHES_AN_IMAGE, count // PATCHES_AN_IMAGE
    if images < wanted:
        raise SystemExit(f"{file} holds {images} images' embeddings; {wanted} are needed")
    grouped = rows[: images * PATCHES_AN_IMAGE].reshape(images, PATCHES_AN_IMAGE, -1)
    chosen = [(2 * i + 1) * images // (2 * wanted) for i in range(wanted)]
    return torch.from_numpy(grouped[chosen].reshape(wanted * PATCHES_AN_IMAGE, -1))


def generated(count: int, dim: int, seed: int = 0) -> Tensor:
    """Clusters with a falling spectrum, neighbours alike: most variance in some 50 dimensions."""
    g = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, dim + 1, dtype=torch.float32).pow(-0.75)
    axes = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    centres = 6 * torch.randn(200, dim, generator=g) * spectrum
    blocks = []
    for start in range(0, count, 16384):
        n = min(16384, count - start)
        which = torch.randint(len(centres), (n,), generator=g)
        spread = 0.5 + 2 * torch.rand(n, 1, generator=g)
        noise = torch.randn(n, dim, generator=g) * spectrum
        blocks.append((centres[which] + spread * noise) @ axes.T)
    return torch.cat(blocks)


def of_few_dimensions(count: int, dim: int, true: int, seed: int = 0) -> Tensor:
    """Normal numbers (count, dim) that lie in a subspace of `true` dimensions."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, true, generator=g) @ torch.randn(true, dim, generator=g)


def textbook(points: Tensor, steps: int, first: int) -> tuple[list[int], float]:
    """Gonzalez with cached norms: one matrix-vector product a pick; picks and seconds."""
    start = time.perf_counter()
    norms = points.square().sum(1)
    nearest = torch.full((len(points),), float("inf"), device=points.device)
    picks = [first]
    for _ in range(steps):
        pick = picks[-1]
        squared = torch.addmv(norms, points, points[pick], alpha=-2).add_(norms[pick])
        nearest = torch.minimum(nearest, squared)
        nearest[pick] = -1
        picks.append(int(nearest.argmax()))
    return picks[:steps], time.perf_counter() - start


def anomalib(python: Path, features: Tensor, size: int, steps: int) -> tuple[float, Tensor]:
    """Seconds that anomalib's sampler takes, or would take, for `size` picks; those it has made."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "features.npy"
        np.save(file, features.numpy())
        few = max(2, steps // 5)
        command = [python, "-c", ANOMALIB, file, torch.get_num_threads(), few, steps]
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        picks = torch.from_numpy(np.load(file))
    seconds = [float(x.split()[1]) for x in run.stdout.splitlines() if x.startswith("SECONDS")]
    if seconds[1] <= seconds[0]:
        sys.exit(f"anomalib's {steps} steps took no longer than {few}: give more --anomalib-steps")
    more = (size - steps) * (seconds[1] - seconds[0]) / (steps - few)
    return seconds[1] + more, picks


def measure(features: Tensor, ratio: float, args: argparse.Namespace) -> None:
    """One line of the table."""
    generator = torch.Generator().manual_seed(0)
    matrix = random_projection(features.shape[1], 128, generator=generator)
    points = (features @ matrix).to(args.device)
    size = int(len(points) * ratio)
    ours, theirs = [], []
    for _ in range(args.runs):
        start = time.perf_counter()
        chosen = greedy_k_center(points, size, generator=torch.Generator().manual_seed(0))
        picks = chosen.picks.tolist()
        ours.append(time.perf_counter() - start)
        steps, seconds = textbook(points, min(size, args.steps), picks[0])
        theirs.append(seconds * size / len(steps))
    seconds, loop = statistics.median(ours), statistics.median(theirs)
    same = len(set(steps) & set(picks[: len(steps)])) / len(steps)
    cells = [
        f"{len(points):,}",
        f"{size:,}",
        f"{seconds:.2f} s",
        f"{loop:.1f} s = {loop / seconds:.0f}× (on {len(steps)} steps; {same:.1%} same picks)",
    ]
    peers: Tensor | None = None
    if args.anomalib_python:
        few = min(size, args.anomalib_steps)
        peer, peers = anomalib(args.anomalib_python, features, size, few)
        cells.append(f"{peer:.0f} s = {peer / seconds:.0f}× (on {few} steps)")
    else:
        cells.append("not measured")
    cells.append(f"{chosen.covering_radius:.3f}")
    for some in (chosen.picks.cpu(), peers if peers is not None and len(peers) == size else None):
        measured = args.full_radius and some is not None
        full = float(distances_to_nearest(features, features[some]).max()) if measured else None
        cells.append("not measured" if full is None else f"{full:.3f}")
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--features", type=Path, help=".npy of (N, D) float32")
    parser.add_argument("--true-dimensions", type=int, help="of generated points, 128 numbers each")
    parser.add_argument("--points", type=int, nargs="+", default=[50_000, 214_016])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="of the textbook's loop")
    parser.add_argument("--anomalib-python", type=Path, help="an interpreter that has anomalib")
    parser.add_argument("--anomalib-steps", type=int, default=50)
    parser.add_argument("--no-full-radius", dest="full_radius", action="store_false")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine() + "\n")
    print("| points | picks | anomaly | textbook loop | anomalib | radius | full | anomalib's |")
    print("|---|---|---|---|---|---|---|---|")
    for count in args.points:
        if args.true_dimensions:
            features = of_few_dimensions(count, 128, args.true_dimensions)
        else:
            features = embeddings(args.features, count)
        for ratio in args.ratios:
            measure(features, ratio, args)


if __name__ == "__main__":
    main()
