"""`anomaly sample-data`: two generated products in MVTec AD layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from anomaly.cli.logging_setup import ProgressLine
from anomaly.files.outputs import locked
from anomaly.sample_data import PRODUCTS, write_sample_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--output", type=Path, default=Path("data/sample"), help="where the products go"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other images")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier set there")


def run(options: argparse.Namespace) -> int:
    """Generate the data set."""
    with locked(options.output), ProgressLine() as progress:
        write_sample_data(
            options.output,
            seed=options.seed,
            overwrite=options.overwrite,
            progress=lambda done, total: progress("images", done, total),
        )
    print(f"{', '.join(PRODUCTS)} in {options.output}")
    return 0
