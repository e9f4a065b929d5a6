"""What hooking costs: a hooked forward pass against one cut by hand at the same layer.

    python benchmarks/hooks.py [--device cpu] [--threads 2] [--rounds 200]

They alternate, and each round gives one ratio, so that a drifting clock or a busy machine hits all
alike. `hooked` opens the capture anew in every pass and copies nothing, as the feature extractor
does where no later layer works in place; `copied` is the default of `capture`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

from anomaly.hooks import capture

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
    cut = cut_after(network, layers)

    def hooked(clone: bool) -> None:
        with capture(network, layers, stop=True, clone=clone) as captured:
            captured.run(images)
            captured.pop()

    variants = {
        "unhooked": lambda: cut(images),
        "hooked": lambda: hooked(clone=False),
        "copied": lambda: hooked(clone=True),
    }
    seconds = Stopwatch(CLOCKS[args.clock])
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        check(network, cut, layers, images)
        for i in range(-5, args.rounds):
            # Who goes first changes, so that nobody always finds the warmer cache.
            for name in sorted(variants, reverse=bool(i % 2)):
                spent = seconds(variants[name], images)
                if i >= 0:
                    times[name].append(spent)
    result = {f"{name}_ms": round(statistics.median(t) * 1e3, 3) for name, t in times.items()}
    for name in ("hooked", "copied"):
        ratios = [a / b for a, b in zip(times[name], times["unhooked"], strict=True)]
        result[f"{name}_cost_percent"] = round((statistics.median(ratios) - 1) * 100, 2)
    return {**result, "rounds": args.rounds}


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
