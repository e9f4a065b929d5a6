"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.backbones.weights import check_weights
from anomaly.cli import annex
from anomaly.cli.common_options import device_and_threads, joined_cluster
from anomaly.cli.train_report import TrainOptions, train_and_report, train_products
from anomaly.config.load import load_config
from anomaly.config.schema import by_product
from anomaly.datasets import open_dataset
from anomaly.files.outputs import locked


def run(options: argparse.Namespace) -> int:
    """Train one model, or one for each of several products."""
    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    data = config.data
    several = isinstance(data.category, tuple)
    with locked(output):
        # Before torch is imported, which takes seconds.
        configs = list(by_product(config).values()) or [config]
        datasets = [open_dataset(data.format, data.root, one.data.category) for one in configs]
        if not several:  # of several all may be trained
            check_weights(config.backbone.weights)
        device, threads = device_and_threads(options)
        with joined_cluster(options) as cluster:
            shared = None if cluster is None else annex("cluster.cache").computed_by(cluster)
            train = TrainOptions(
                device, threads, not options.no_calibrate, options.overwrite, shared
            )
            if several:
                return train_products(config, datasets, output, train)
            return train_and_report(config, datasets[0], output, train)
