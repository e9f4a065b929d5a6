"""The network alone, from images to patch embeddings, in each engine and for each batch size.

    python -m benchmarks.networks [--networks resnet50_v1 …] [--batches 1 8] [--size 256]

In turns, so that whatever else the machine does meets all alike; medians of second calls, in
milliseconds an image.
Weights are random: what an engine computes doesn't depend on them. *Published* is the network as
torchvision builds it, run up to the last hooked layer; *compiled* is that with torch.compile and
frozen weights; *anomaly* has batch norms folded, activations and sums fused, and channels last.
Compiled ones come last: once compiled code has run, hooks on the published network look for it,
and that search takes as long as a pass.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anomaly  # isort: skip  # before torch, which reads once what it sets

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torchvision.models.feature_extraction import create_feature_extractor

from anomaly.backbones.engine import ENGINES, Graph
from anomaly.backbones.registry import build
from anomaly.export.graph import write_graph
from benchmarks.inputs import machine

COMPILED = "compiled"
Side = Callable[[Tensor], object]
DEVICE = torch.device("cpu")
# Each engine has threads of its own, which wait for more work busily, and would take a core from
# the next one: seconds until they sleep.
RESTED = 0.5


def sides(network: str, size: int, engines: list[str], folder: Path) -> dict[str, Side]:
    """What is timed, by name: each is called with images (B, 3, H, W) from 0 to 1."""
    g = np.random.default_rng(0)
    images = [g.integers(0, 256, (size, size, 3), np.uint8) for _ in range(2)]
    settings = {
        "backbone": {"name": network, "weights": "random"},
        "image": {"resize": size},
        "model": {"coreset_size": 10},
        "precision": "fp32",
    }
    detector = anomaly.fit(images, settings, device=DEVICE, calibrate=False).model
    normalise, align = detector.normalise, detector.scorer.align
    layers = detector.extractor.layers

    def ours(precision: str) -> Side:
        extractor = detector.extractor.to(DEVICE, precision)
        return lambda x: align(extractor(normalise(x)))

    def by_name(module: nn.Module) -> Side:
        return lambda x: align([*module(normalise(x)).values()])

    whole = build(network).eval().to_empty(device=DEVICE)
    whole.load_state_dict(detector.extractor.network.state_dict(), strict=False)  # as far as hooked
    plain = create_feature_extractor(whole, {layer: layer for layer in layers})
    inductor.freezing = True
    found = {
        "published": by_name(plain),
        COMPILED: by_name(torch.compile(plain)),
        "anomaly, fp32": ours("fp32"),
        "anomaly, bf16": ours("bf16"),
    }
    for engine in engines:
        place = folder / network / engine
        place.mkdir(parents=True)
        file = place / write_graph(detector, place, engine)["file"]
        graph = Graph(file, engine, "fp32", torch.get_num_threads())
        found[f"{ENGINES[engine][0]}, fp32"] = lambda x, graph=graph: graph(x.numpy())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ["resnet50_v1", "wide_resnet50_2", "mobilenet_v2"]
    parser.add_argument("--networks", nargs="+", default=known)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--engines", nargs="*", default=[*ENGINES], choices=[*ENGINES])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("anomaly").setLevel(logging.ERROR)  # that the weights are random is said
    print(f"{machine()}, {args.size} × {args.size} pixels\n", flush=True)
    found: dict[tuple[str, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        every = {n: sides(n, args.size, args.engines, Path(folder)) for n in args.networks}
        compiled = {n: {COMPILED: every[n].pop(COMPILED)} for n in every}
        for part in (every, compiled):
            for network, some in part.items():
                for batch in args.batches:
                    images = torch.rand(batch, 3, args.size, args.size)
                    found.setdefault((network, batch), {}).update(measured(some, images, args.runs))
    names = [*next(iter(found.values()))]
    print(f"| network | batch | {' | '.join(names)} |")
    print("|---" * (len(names) + 2) + "|")
    for (network, batch), times in found.items():
        print(f"| {network} | {batch} | {' | '.join(f'{ms:.1f}' for ms in times.values())} |")


def measured(every: dict[str, Side], images: Tensor, runs: int) -> dict[str, float]:
    """Milliseconds an image of each side, for a batch (B, 3, H, W)."""
    times: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(runs):
        for name, side in every.items():
            time.sleep(RESTED)
            side(images)  # compiles, and wakes the threads
            start = time.perf_counter()
            side(images)
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(t) / len(images) for name, t in times.items()}


if __name__ == "__main__":
    main()
