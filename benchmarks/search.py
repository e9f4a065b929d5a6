"""Nearest bank vectors: this package against faiss Flat and faiss IVF, in one run.

    python -m benchmarks.search [--features FILE.npy --queries FILE.npy]

`exact` is what a model does here: by a screen, or by a product of all dimensions. Each of these can
be named as a method of its own, `screen` or `product`.

Each round searches once with every method, so that a busy machine hits all alike; figures are
medians, in milliseconds for an image of 1,024 patches. A neighbour counts as exact when its
distance in float64 is the least there is, within a millionth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from anomaly.methods.patchcore.coreset import greedy_k_center, random_projection
from anomaly.methods.patchcore.search import ExactIndex, NearestNeighbors, is_screened
from benchmarks.coreset import PATCHES_AN_IMAGE, embeddings, generated, whole_images
from benchmarks.process import machine

# Seconds before each timed search: OpenMP's threads spin for a while after a product, in which they
# take the next method's cores.
_REST = 0.3
METHODS = ("exact", "faiss", "ivf")
WAYS = ("screen", "product")  # of `exact`


def coreset(features: Tensor, size: int) -> Tensor:
    """A bank as training makes it."""
    generator = torch.Generator().manual_seed(0)
    points = features @ random_projection(features.shape[1], 128, generator=generator)
    return features[greedy_k_center(points, size, generator=generator).picks]


def search_by(method: str, bank: Tensor) -> NearestNeighbors:
    """The search of a bank by one of its methods, or `exact` in a certain way."""
    if method in METHODS:
        return NearestNeighbors(bank, method)
    return NearestNeighbors(bank, index=ExactIndex(bank, method == "screen"))


def exact_share(bank: Tensor, queries: Tensor, found: Tensor) -> float:
    """Share of queries whose neighbour is a nearest one, by float64 distances."""
    hits = 0
    for rows, indices in zip(queries.double().split(128), found.split(128), strict=True):
        exact = torch.cdist(rows, bank.double(), compute_mode="donot_use_mm_for_euclid_dist")
        hits += int((exact.gather(1, indices)[:, 0] <= exact.amin(1) * (1 + 1e-6)).sum())
    return hits / len(queries)


def measure(bank: Tensor, queries: Tensor, args: argparse.Namespace) -> None:
    """The lines of one bank and one batch size."""
    indices: dict[str, NearestNeighbors] = {}
    built: dict[str, float] = {}
    methods = ["exact"] if args.device != "cpu" else args.methods
    for method in methods:
        start = time.perf_counter()
        indices[method] = search_by(method, bank.to(args.device))
        built[method] = time.perf_counter() - start
    queries = queries.to(args.device)
    times: dict[str, list[float]] = {method: [] for method in methods}
    found: dict[str, Tensor] = {}
    for round_ in range(args.runs + 1):
        for method in methods:
            time.sleep(_REST)
            start = time.perf_counter()
            found[method] = indices[method].search(queries)[1].cpu()
            if round_:  # the first warms up
                times[method].append(time.perf_counter() - start)
    images = len(queries) / PATCHES_AN_IMAGE
    base = statistics.median(times["faiss"]) if "faiss" in times else float("nan")
    some = queries[:: max(1, len(queries) // args.checked)].cpu()
    for method in methods:
        seconds = statistics.median(times[method])
        share = exact_share(bank, some, found[method][:: max(1, len(queries) // args.checked)])
        way = "screen" if is_screened(bank.to(args.device)) else "product"
        name = f"exact ({way})" if method == "exact" else method
        print(
            f"| {len(bank):,} | {len(queries):,} | {name} | {1000 * seconds / images:.1f} ms "
            f"| {seconds / base:.2f}× | {share:.2%} | {built[method]:.2f} s |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--features", type=Path, help=".npy of (N, D) float32, for the banks")
    parser.add_argument("--queries", type=Path, help=".npy of (Q, D) float32, of other images")
    parser.add_argument("--banks", type=int, nargs="+", default=[2_140, 21_401, 85_606])
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--points", type=int, default=214_016, help="that banks are chosen from")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*METHODS, *WAYS],
        default=["exact", "product", "faiss", "ivf"],
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--checked", type=int, default=512, help="queries checked in float64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine() + "\n")
    print("| bank | queries | method | an image | of faiss Flat | exact | index built in |")
    print("|---|---|---|---|---|---|---|")
    most = max(args.batches)
    if args.queries is not None:
        features = embeddings(args.features, args.points)
        queries = {batch: whole_images(args.queries, batch) for batch in args.batches}
    else:
        both = generated(args.points + most, 1536)
        features = both[most:]
        queries = {batch: both[:batch] for batch in args.batches}
    for size in args.banks:
        bank = coreset(features, size)
        for batch in args.batches:
            measure(bank, queries[batch], args)


if __name__ == "__main__":
    main()
