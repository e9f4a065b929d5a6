"""The peer's side of `fit` and `infer`: runs in anomalib's own environment.

Prints one line `RESULT {json}`. The network is the same as ours, with the same weights:
torchvision's ResNet-50 with the stride in the first 1×1 convolution.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torchvision
from anomalib.data import Folder, PredictDataset
from anomalib.data.utils import read_image
from anomalib.engine import Engine
from anomalib.models import Padim, Patchcore
from anomalib.post_processing import PostProcessor
from anomalib.pre_processing import PreProcessor
from anomalib.visualization import ImageVisualizer
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms.v2 import Compose, Normalize, Resize


def network(weights: str) -> nn.Module:
    model = torchvision.models.resnet50(weights=None)
    for stage in (model.layer2, model.layer3):
        stage[0].conv1.stride, stage[0].conv2.stride = stage[0].conv2.stride, stage[0].conv1.stride
    state = {k: v.float() for k, v in load_file(weights).items()}
    foreign = model.load_state_dict(state, strict=False).unexpected_keys
    if foreign:
        raise SystemExit(f"{weights} holds unknown keys: {foreign[:3]}")
    return model


def detector(args: argparse.Namespace) -> nn.Module:
    transform = Compose(
        [
            Resize((args.size, args.size), antialias=True),
            Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    common = {
        "pre_trained": False,
        "pre_processor": PreProcessor(transform=transform),
        "post_processor": PostProcessor(),
        "evaluator": False,
        "visualizer": ImageVisualizer(
            fields=["image"], overlay_fields=[("image", ["anomaly_map"])], output_dir=args.output
        )
        if args.task == "infer"
        else False,
    }
    if args.kind == "patchcore":
        layers = ["layer2", "layer3"]
        return Patchcore(network(args.weights), layers, coreset_sampling_ratio=args.ratio, **common)
    layers = ["layer1", "layer2", "layer3"]
    return Padim(network(args.weights), layers, n_features=args.dimensions, **common)


def engine(args: argparse.Namespace) -> Engine:
    return Engine(
        default_root_dir=args.output,
        accelerator="cpu",
        devices=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        barebones=False,
    )


def fit(args: argparse.Namespace) -> dict[str, float]:
    start = time.perf_counter()
    data = Folder(
        name="benchmark",
        normal_dir=args.images,
        train_batch_size=args.batch,
        num_workers=args.workers,
        test_split_mode="none",
        val_split_mode="none",
    )
    model, run = detector(args), engine(args)
    run.fit(model=model, datamodule=data)
    run.trainer.save_checkpoint(args.checkpoint)
    return {"seconds": time.perf_counter() - start}


def infer(args: argparse.Namespace) -> dict[str, float]:
    run, model = engine(args), detector(args)
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    model.load_state_dict(state, strict=False)
    if args.kind == "patchcore" and not len(model.model.memory_bank):
        model.model.memory_bank = state["model.memory_bank"]
    folder = Path(args.images)
    count = sum(1 for _ in folder.rglob("*.png"))
    start = time.perf_counter()
    loader = torch.utils.data.DataLoader(
        PredictDataset(folder),
        batch_size=args.batch,
        num_workers=args.workers,
        collate_fn=PredictDataset(folder).collate_fn,
    )
    run.predict(model=model, dataloaders=loader, return_predictions=False)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "images": count, **(latency(args, model) if args.singles else {})}


def latency(args: argparse.Namespace, model: nn.Module) -> dict[str, float]:
    model.eval()
    files = sorted(Path(args.images).rglob("*.png"))[: args.singles]
    times = []
    for file in files:
        start = time.perf_counter()
        with torch.inference_mode():
            model(read_image(file, as_tensor=True)[None])
        times.append(time.perf_counter() - start)
    times = sorted(times[2:])
    return {"p50": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("fit", "infer"))
    parser.add_argument("--images", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--kind", default="patchcore")
    parser.add_argument("--ratio", type=float, default=0.01)
    parser.add_argument("--dimensions", type=int, default=100)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--singles", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = fit(arguments) if arguments.task == "fit" else infer(arguments)
    print("RESULT " + json.dumps(result), flush=True)
