"""`anomaly infer --manifest`: one shard of a job that many processes and machines share."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli.common_options import check_cluster, device_and_threads, wanted_threads
from anomaly.cli.logging_setup import ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.cluster.parts import Shard, begin_job, chunks_done
from anomaly.cluster.shards import infer_shard, shard_outputs
from anomaly.datasets.image_manifest import read_manifest
from anomaly.errors import DataError, OutputError
from anomaly.imaging.decoder_pool import Decoders
from anomaly.inference.rows import say_counts, total_of
from anomaly.storage.load import load

if TYPE_CHECKING:
    from anomaly.datasets.image_manifest import ImageManifest
    from anomaly.inference.outputs import OutputOptions

_OTHERS = ("input", "list", "watch", "overwrite", "regions", "parquet")


def check(options: argparse.Namespace) -> None:
    """See that options go together with --manifest.

    Raises:
        DataError: they don't.
    """
    if others := [f"--{name}" for name in _OTHERS if getattr(options, name)]:
        raise DataError(f"{', '.join(others)} can't be given with --manifest")
    check_cluster(options)


def run(options: argparse.Namespace, wanted: OutputOptions) -> int:
    """Score a shard; 0 once each of its images has a row, be it one that says what is wrong."""
    shard = Shard.of("0/1" if options.shard is None else options.shard)
    manifest = read_manifest(options.manifest)
    if not shard.chunks(manifest):
        chunks = f"{len(manifest.sizes)} chunks for {shard.count} shards"
        print(f"shard {shard.index}/{shard.count}: nothing to do, the manifest has {chunks}")
        return 0
    with Decoders(wanted_threads(options)) as decoders:
        return _run(options, wanted, shard, manifest, decoders)


def _run(
    options: argparse.Namespace,
    wanted: OutputOptions,
    shard: Shard,
    manifest: ImageManifest,
    decoders: Decoders,
) -> int:
    dest = options.output
    with Stopping() as stop, tempfile.TemporaryDirectory(prefix="anomaly-out-") as folder:
        device, _ = device_and_threads(options)
        model = load(options.model, device, options.precision, options.product)
        outputs = shard_outputs(wanted, model, dest, Path(folder))
        about = outputs.about(model, manifest.id)
        begin_job(dest, about)
        mine, done = shard.chunks(manifest), chunks_done(dest)
        left = [chunk for chunk in mine if chunk not in done]
        if len(left) < len(mine) and not options.resume:
            raise OutputError(
                f"{dest} holds {len(mine) - len(left)} of this shard's {len(mine)} chunks already; "
                "add --resume to go on with the others, or give another --output"
            )
        with ProgressLine() as progress:
            counts = infer_shard(
                model,
                manifest,
                left,
                dest,
                outputs,
                about,
                decoders,
                stopped=lambda: stop.signal is not None,
                progress=lambda done, total: progress("scoring", done, total),
            )
        said = f"shard {shard.index}/{shard.count} of {len(mine)} chunks"
        print(f"{said}: {say_counts(counts)}; parts in {dest}")
        if total_of(counts) < sum(manifest.sizes[chunk] for chunk in left):
            print("stopped; go on with --resume")
            return stop.exit_code
    return 0
