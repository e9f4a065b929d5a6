"""Images a second from memory to patch scores, stage by stage, and from files to heatmaps.

    python -m benchmarks.throughput [--device auto] [--size 224] [--batch 64] [--files 4000]

WideResNet50-2 with random weights (time doesn't depend on them), PatchCore with a bank as 209
images at 1 % give. Pictures are drawn. Each stage includes those before it; a *bound* is what the
device would reach with the operations of the network alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from anomaly.backbones.extractor import network_input
from anomaly.cli import main as command
from anomaly.config.load import parse_config
from anomaly.datasets.layouts import open_dataset
from anomaly.imaging.loading import NetworkInput, UnusableImage
from anomaly.imaging.pool import Decoders
from anomaly.runtime import device_of
from anomaly.scoring.image_statistics import statistics_of
from anomaly.scoring.model import Model
from anomaly.storage.models import save
from anomaly.training.fit import train
from benchmarks.process import machine

_LEARNED = 32
_BANK_IMAGES = 209  # MVTec AD's bottle
_RATIO = 0.01


def draw(folder: Path, count: int, size: int) -> None:
    """Write pictures of soft blobs, of which each has another noise; 64 of them are different."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    first = min(count, 64)
    for i in range(first):
        coarse = rng.uniform(0, 255, (8, 8, 3))
        blobs = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)
        pixels = np.clip(blobs + rng.normal(0, 8, blobs.shape), 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{i:05}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 92])
    for i in range(first, count):
        os.link(folder / f"{i % first:05}.jpg", folder / f"{i:05}.jpg")


def trained(folder: Path, args: argparse.Namespace, device: torch.device) -> Model:
    """A model of drawn pictures, with as many bank vectors as 209 images give."""
    samples = open_dataset("folder", folder, None).train
    settings = {
        "image": {"resize": args.size},
        "backbone": {"name": args.network, "weights": "random"},
        "model": {"coreset_ratio": min(1.0, _RATIO * _BANK_IMAGES / len(samples))},
        "precision": args.precision,
        "batch_size": args.batch,
    }
    config = parse_config(settings, "benchmark")
    options: dict[str, Any] = {"scratch": folder, "calibrate": False}
    return train(config, samples, device=device, **options).model


def rate(run: Callable[[], object], images: int, device: torch.device) -> float:
    """Images a second of a call that computes so many, the median of ten after three to warm up."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return images / statistics.median([seconds() for _ in range(13)][3:])


def stages(
    model: Model, batch: Sequence[NetworkInput], device: torch.device
) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each includes what it needs of those before it."""
    resident = network_input(batch, model.normalise, device)
    embedder = model.embedder
    rows = embedder(batch)
    return {
        "network": lambda: model.extractor(resident),
        "copied from memory, network": lambda: embedder.maps(batch),
        "… and embeddings": lambda: embedder(batch),
        "search alone": lambda: model.scorer.score(rows),
        "statistics alone": lambda: statistics_of(batch, rows, None),
        "from memory to patch scores": lambda: model.scorer.score(embedder(batch)),
        "from memory to predictions": lambda: model.score(batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--network", default="wide_resnet50_2")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--files", type=int, default=4000, help="that infer scores")
    parser.add_argument("--profile", action="store_true", help="also what takes the time")
    args = parser.parse_args()
    device = device_of(args.device)
    print(machine() + f", {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}\n")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw(root / "good", _LEARNED, args.size)
        model = trained(root / "good", args, device)
        paths = sorted((root / "good").iterdir())
        loaded = list(Decoders(model.loading).load_all(enumerate(paths)))
        batch = [item for item in loaded if not isinstance(item, UnusableImage)]
        batch = (batch * -(-args.batch // len(batch)))[: args.batch]
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model.extractor(torch.zeros(1, 3, args.size, args.size, device=device))
        print(f"network: {counter.get_total_flops() / 1e9:.1f} GFLOP an image, ", end="")
        print(f"{model.config.precision}; batches of {args.batch}\n")
        print("| stage | images a second |\n|---|---|")
        with torch.inference_mode():
            for name, run in stages(model, batch, device).items():
                print(f"| {name} | {rate(run, len(batch), device):.0f} |", flush=True)
            if args.profile:
                profile(stages(model, batch, device)["from memory to predictions"])
        if args.files:
            save(model, root / "model")
            draw(root / "files", args.files, args.size)
            whole = ["infer", "--model", root / "model", "--input", root / "files"]
            for heatmaps in ("none", "heatmaps"):
                output = root / f"out-{heatmaps}"
                start = time.perf_counter()
                options = ["--output", output, "--device", str(device), "--write", heatmaps]
                if command(list(map(str, [*whole, *options]))):
                    raise SystemExit("infer failed")
                seconds = time.perf_counter() - start
                print(f"| infer, written: {heatmaps}, from files | {args.files / seconds:.0f} |")
                shutil.rmtree(output)


def profile(run: Callable[[], object]) -> None:
    """Print what takes a call's time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    averages = found.key_averages()
    print(averages.table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))
    print(averages.table(sort_by="cpu_time_total", row_limit=12, max_name_column_width=60))


if __name__ == "__main__":
    main()
