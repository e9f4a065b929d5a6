"""`anomaly merge-results`: the parts of all shards as one table, checked against the manifest."""

from __future__ import annotations

import argparse

from anomaly.cli.logging_setup import ProgressLine
from anomaly.cluster.parts import merge
from anomaly.datasets.image_manifest import read_manifest
from anomaly.errors import OutputError
from anomaly.files import storage
from anomaly.inference.rows import say_counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("manifest", help="what `anomaly manifest` has written")
    parser.add_argument("results", help="the --output of the shards")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the table: results.csv or results.parquet"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier table")


def run(options: argparse.Namespace) -> int:
    """Join parts; 3 where some images couldn't be used, 2 where none could."""
    if not options.output.lower().endswith((".csv", ".parquet")):
        raise OutputError(f"--output {options.output} must end with .csv or .parquet")
    if storage.is_same(options.output, options.manifest):
        raise OutputError(f"--output {options.output} is the manifest; give the table another name")
    if storage.exists(options.output) and not options.overwrite:
        raise OutputError(f"{options.output} exists already; add --overwrite")
    manifest = read_manifest(options.manifest)
    with ProgressLine() as progress:
        merged = merge(
            manifest,
            options.results,
            options.output,
            progress=lambda done, total: progress("joining", done, total),
        )
    print(f"{say_counts(merged.counts)}; one row for each image: {options.output}")
    scored = merged.counts["ok"]
    return 0 if scored == merged.images else 3 if scored else 2
