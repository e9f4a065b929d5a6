"""`anomaly manifest`: the images of a large job, listed for `infer --manifest`."""

from __future__ import annotations

import argparse
import logging
from pathlib import PurePosixPath

from anomaly.cli.logging_setup import NOTE
from anomaly.cluster.listing import Listing
from anomaly.datasets.image_manifest import read_manifest, write_manifest
from anomaly.datasets.inputs import say_passed_over
from anomaly.errors import DataError, OutputError
from anomaly.files import storage

log = logging.getLogger(__name__)

# What somebody who names a file so would take it for.
_TABLES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        default=[],
        help="image files, folders of them and quoted patterns ('*', '?', '**'); local, or URLs of "
        "whatever fsspec opens (s3://, gs://, file://, …)",
    )
    parser.add_argument(
        "--list",
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE",
        help="CSV or Parquet files with the column path, or text files that name an image on each "
        "line; local, or URLs",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the manifest, a Parquet file or its URL"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=1000,
        metavar="N",
        help="images whose rows are written together; what a process that dies has to do again "
        "(1000)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier manifest")


def run(options: argparse.Namespace) -> int:
    """List images."""
    if not (options.input or options.list):
        raise DataError("give --input, --list, or both")
    if PurePosixPath(options.output).suffix.lower() in _TABLES:
        raise OutputError(
            f"--output {options.output}: a manifest is a Parquet file; name it so, with .parquet"
        )
    if storage.exists(options.output) and not options.overwrite:
        raise OutputError(f"{options.output} exists already; add --overwrite")
    listing = Listing(options.input, options.list)
    images, doubles = write_manifest(listing, options.output, options.chunk)
    if listing.passed_over:
        log.log(NOTE, say_passed_over(listing.passed_over))
    again = f", {doubles} named more than once" if doubles else ""
    chunks = len(read_manifest(options.output).sizes)
    listed = f"{images} image{'' if images == 1 else 's'}{again}"
    print(f"{listed} in {chunks} chunk{'' if chunks == 1 else 's'}: {options.output}")
    return 0
