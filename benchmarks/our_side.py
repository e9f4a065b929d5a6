"""Our side of `fit` and `infer`, as one process. Prints one line `RESULT {json}`."""

from __future__ import annotations

import anomaly  # isort: skip  # noqa: F401, before torch, which reads once what it sets

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import cv2
import torch

from anomaly.cli import main
from anomaly.config.load import parse_config
from anomaly.datasets.layouts import open_dataset
from anomaly.imaging.pool import Decoders
from anomaly.scoring.model import Model
from anomaly.storage.models import load_model, save
from anomaly.training.fit import train as learn


def train(args: argparse.Namespace) -> dict[str, Any]:
    model = {
        "kind": args.kind,
        "coreset_ratio": args.ratio,
        "dimensions": args.dimensions,
    }
    settings = {
        "image": {"resize": args.size},
        "backbone": {"name": args.backbone, "weights": args.weights},
        "model": model,
        "precision": args.precision,
        "batch_size": args.batch,
    }
    start = time.perf_counter()
    config = parse_config(settings, "benchmark")
    samples = open_dataset("folder", args.images, None).train
    device = torch.device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    training = learn(
        config,
        samples,
        device=device,
        scratch=args.output,
        calibrate=False,
    )
    save(training.model, args.checkpoint, overwrite=True)
    scorer = training.model.scorer
    return {
        "seconds": time.perf_counter() - start,
        "stages": training.seconds,
        "precision": training.model.config.precision,
        "model_bytes": sum(f.stat().st_size for f in args.checkpoint.iterdir()),
        "covering_radius": getattr(scorer, "covering_radius", None),
        "exact": getattr(scorer, "exact", None),
    }


def infer(args: argparse.Namespace) -> dict[str, Any]:
    files = sorted(args.images.rglob("*.png"))
    command = ["infer", "--model", args.checkpoint, "--input", args.images, "--overwrite"]
    command += ["--output", args.output, "--device", args.device]
    start = time.perf_counter()
    code = main(list(map(str, command)))
    seconds = time.perf_counter() - start
    if code:
        raise SystemExit(f"infer ended with {code}")
    detector = load_model(args.checkpoint, torch.device(args.device))
    return {"seconds": seconds, "images": len(files), **latency(detector, files[: args.singles])}


def latency(detector: Model, files: list[Path]) -> dict[str, float]:
    """From file to score and map, an image at a time."""
    times = []
    decoders = Decoders(detector.loading)
    for file in files:
        start = time.perf_counter()
        item = decoders.load(file)
        for result in detector.predict_batches([[item]]):  # type: ignore[list-item]
            result.source_map()  # type: ignore[union-attr]
        times.append(time.perf_counter() - start)
    times = sorted(times[2:])
    return {"p50": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("fit", "infer"))
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--backbone", default="resnet50_v1")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--kind", default="patchcore")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--dimensions", type=int, default=100)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--singles", type=int, default=60)
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    if arguments.task == "infer":
        shutil.rmtree(arguments.output, ignore_errors=True)
    result = train(arguments) if arguments.task == "fit" else infer(arguments)
    print("RESULT " + json.dumps(result), flush=True)
