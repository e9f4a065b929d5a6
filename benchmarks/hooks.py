"""What hooking costs: a hooked forward pass against one cut by hand at the same layer.

    python benchmarks/hooks.py [--device cpu] [--threads 2] [--rounds 200]

Each is measured in alternation with the unhooked pass; a round gives one ratio, so that a drifting
clock or a busy machine hits both alike, and the median counts. `copied` is `capture` as it comes,
open around all passes; `hooked` is that with clone=False; `anew` opens and closes it in every pass,
as the feature extractor does, also without copies. `itself` is the unhooked pass again: what the
method sees where there is nothing to see.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import Tensor, nn

from anomaly.hooks import Capture, capture

CASES = {
    "wide_resnet50_2": ("layer2", "layer3"),
    "resnet18": ("layer1", "layer2", "layer3"),
    "mobilenet_v2": ("features.3", "features.6", "features.13"),
    "efficientnet_b0": ("features.3", "features.5"),
}

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--networks", nargs="+", default=list(CASES), choices=CASES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    images = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    for name in args.networks:
        network = torchvision.models.get_model(name, weights=None).eval().to(args.device)
        print(json.dumps({"network": name, **measure(network, CASES[name], images, args)}))


def measure(
    network: nn.Module, layers: tuple[str, ...], images: Tensor, args: argparse.Namespace
) -> dict[str, float]:
    cut = cut_after(copy.deepcopy(network), layers)  # the hooks of one don't run in the other
    seconds = Stopwatch(CLOCKS[args.clock])
    result: dict[str, float] = {"rounds": args.rounds}

    def compared(name: str, work: Callable[[], object]) -> None:
        times, ratios = alternated(lambda: cut(images), work, images, seconds, args.rounds)
        result[f"{name}_ms"] = round(statistics.median(times) * 1e3, 3)
        result[f"{name}_cost_percent"] = round((statistics.median(ratios) - 1) * 100, 2)

    with torch.inference_mode():
        check(network, cut, layers, images)
        itself = cut_after(network, layers)
        compared("itself", lambda: itself(images))
        for name, clone in (("hooked", False), ("copied", True)):
            with capture(network, layers, stop=True, clone=clone) as captured:
                compared(name, partial(read, captured, images))
        compared("anew", lambda: read_anew(network, layers, images))
    return result


def read(captured: Capture, images: Tensor) -> None:
    captured.run(images)
    captured.pop()


def read_anew(network: nn.Module, layers: tuple[str, ...], images: Tensor) -> None:
    with capture(network, layers, stop=True, clone=False) as captured:
        read(captured, images)


def alternated(
    unhooked: Callable[[], object],
    work: Callable[[], object],
    images: Tensor,
    seconds: Stopwatch,
    rounds: int,
) -> tuple[list[float], list[float]]:
    """Seconds of `work` in each round, and how many times the unhooked pass that is."""
    times, ratios = [], []
    for i in range(-5, rounds):
        # Who goes first changes, so that both find the same cache.
        if i % 2:
            plain = seconds(unhooked, images)
        spent = seconds(work, images)
        if not i % 2:
            plain = seconds(unhooked, images)
        if i >= 0:
            times.append(spent)
            ratios.append(spent / plain)
    return times, ratios


def cut_after(network: nn.Module, layers: tuple[str, ...]) -> Callable[[Tensor], list[Tensor]]:
    """The same work written by hand: run the children up to the last layer, keep the wanted."""
    if isinstance(network, torchvision.models.ResNet):
        steps = dict(network.named_children())
    else:
        steps = {f"features.{name}": step for name, step in network.features.named_children()}

    def run(x: Tensor) -> list[Tensor]:
        kept = []
        for name, step in steps.items():
            x = step(x)
            if name in layers:
                kept.append(x)
            if name == layers[-1]:
                break
        return kept

    return run


def check(
    network: nn.Module,
    cut: Callable[[Tensor], list[Tensor]],
    layers: tuple[str, ...],
    images: Tensor,
) -> None:
    with capture(network, layers, stop=True) as captured:
        captured.run(images)
        maps = captured.pop()
    for got, expected in zip(maps.values(), cut(images), strict=True):
        torch.testing.assert_close(got, expected)


class Stopwatch:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(self, work: Callable[[], object], images: Tensor) -> float:
        start = self.clock()
        work()
        if images.is_cuda:
            torch.cuda.synchronize()
        return self.clock() - start


if __name__ == "__main__":
    main()
