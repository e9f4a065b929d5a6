"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.backbones.weights import check_weights
from anomaly.cli import common_options as machine
from anomaly.cli.config_runs import train_products
from anomaly.cli.train_report import TrainOptions, train_and_say
from anomaly.config.load import load_config
from anomaly.datasets import open_dataset
from anomaly.files.lock import locked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    machine.add_config(parser)
    parser.add_argument("--output", type=Path, help="the run's folder (default: runs/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run there")
    parser.add_argument(
        "--no-calibrate", action="store_true", help="find no thresholds; results have no verdicts"
    )
    machine.add_cluster(
        parser, "compute features and scores on the workers of this Ray cluster (docs/scale.md)"
    )
    machine.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train one model, or one for each of several products."""
    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    data = config.data
    with locked(output):
        # Before torch is imported, which takes seconds.
        listed = data.category if isinstance(data.category, tuple) else [data.category]
        datasets = [open_dataset(data.format, data.root, category) for category in listed]
        if not isinstance(data.category, tuple):  # of several all may be trained
            check_weights(config.backbone.weights)
        device, threads = machine.device_and_threads(options)
        with machine.cluster(options) as cluster:
            calibrate, overwrite = not options.no_calibrate, options.overwrite
            shared = (
                None if cluster is None else machine.annex("cluster.cache").computed_by(cluster)
            )
            how = TrainOptions(device, threads, calibrate, overwrite, shared)
            if isinstance(data.category, tuple):
                return train_products(config, datasets, output, how)
            return train_and_say(config, datasets[0], output, how)
