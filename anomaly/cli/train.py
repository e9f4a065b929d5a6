"""`anomaly train`: good images -> a model folder and train.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.cli import machine
from anomaly.cli.trained import train_and_say


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
    """Train one model."""
    from anomaly.config.files import load_config
    from anomaly.datasets import open_dataset
    from anomaly.files.output_lock import locked

    config = load_config(options.config, options.overrides)
    output: Path = options.output or Path("runs") / config.name
    with locked(output):
        # Before torch is imported, which takes seconds.
        dataset = open_dataset(config.data.format, config.data.root, config.data.category)
        device, threads = machine.device_and_threads(options)
        with machine.cluster(options) as cluster:
            return train_and_say(
                config,
                dataset,
                output,
                device=device,
                threads=threads,
                calibrate=not options.no_calibrate,
                overwrite=options.overwrite,
                cluster=cluster,
            )
