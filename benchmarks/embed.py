"""Write the patch embeddings of a folder of images, as PatchCore gets them, for other benchmarks.

python -m benchmarks.embed --images bottle/train/good --weights FILE.safetensors --output train.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from anomaly.backbones.extractor import Embedder
from anomaly.backbones.registry import normalisation
from anomaly.config.load import parse_config
from anomaly.datasets import open_dataset
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import by_shape
from anomaly.scoring.build import backbone, fitter_of, loading_of


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=Path, required=True, help="a folder of images")
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-50, .safetensors")
    parser.add_argument("--output", type=Path, required=True, help=".npy of (N, D) float32")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = {"name": "resnet50_v1", "weights": str(args.weights)}
    settings = {"image": {"resize": args.size}, "backbone": weights}
    config, device = parse_config(settings, "benchmark"), torch.device("cpu")
    extractor, _ = backbone(config, device)
    align = fitter_of(config).align
    embedder = Embedder(extractor, normalisation("resnet50_v1"), align, device)
    loading = loading_of(config, extractor.coarsest_stride, None, None)
    paths = [sample.path for sample in open_dataset("folder", args.images, None).train]
    with Decoders(args.threads, Task(loading)) as decoders:
        batches = by_shape(decoders.load_all(enumerate(paths)), 8)
        rows = [embedder(b).flatten(0, 2).float() for b in batches if isinstance(b, list)]
    np.save(args.output, torch.cat(rows).numpy())


if __name__ == "__main__":
    main()
