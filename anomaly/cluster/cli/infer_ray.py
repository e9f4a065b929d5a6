"""`anomaly infer --manifest --ray`: a job shared out among the workers of a Ray cluster."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from anomaly.cli.common_options import joined_cluster
from anomaly.cli.logging_setup import ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.cluster.actors import dispatch
from anomaly.cluster.parts import begin_job, chunks_done
from anomaly.cluster.ray_workers import RayJob, RayWorkers
from anomaly.datasets.image_manifest import read_manifest
from anomaly.errors import DataError, OutputError
from anomaly.files import storage
from anomaly.inference.rows import say_counts

if TYPE_CHECKING:
    from anomaly.cluster.ray_workers import RayWorkers
    from anomaly.datasets.image_manifest import ImageManifest
    from anomaly.inference.outputs import OutputOptions


def run(options: argparse.Namespace, outputs: OutputOptions) -> int:
    """Score a manifest; 0 once each image has a row, be it one that says what is wrong."""
    if options.shard is not None:
        raise DataError("--shard can't be given with --ray, which shares out all chunks")
    manifest = read_manifest(options.manifest)
    with Stopping() as stop, joined_cluster(options) as cluster:
        assert cluster is not None  # without --ray there is another command
        job = RayJob(
            model=_everywhere(str(options.model)),
            manifest=_everywhere(options.manifest),
            dest=_everywhere(options.output),
            device=options.device,
            precision=options.precision,
            product=options.product,
            threads=cluster.threads,
            outputs=outputs,
        )
        counts = _run(options, manifest, RayWorkers(cluster, job), cluster.room, stop)
        if stop.signal is not None:
            print("stopped; go on with --resume")
            return stop.exit_code
    print(f"{say_counts(counts)}; parts in {options.output}")
    return 0


def _run(
    options: argparse.Namespace,
    manifest: ImageManifest,
    workers: RayWorkers,
    room: Callable[[], int],
    stop: Stopping,
) -> Counter[str]:
    def stopped() -> bool:
        return stop.signal is not None

    if (about := workers.about(stopped)) is None:
        return Counter()
    begin_job(options.output, about)
    done = chunks_done(options.output)
    if done and not options.resume:
        raise OutputError(
            f"{options.output} holds {len(done)} of {len(manifest.sizes)} chunks already; add "
            "--resume to go on with the others, or give another --output"
        )
    left = (chunk for chunk in range(len(manifest.sizes)) if chunk not in done)
    with ProgressLine() as progress:
        return dispatch(
            left,
            manifest.sizes,
            workers.hire,
            room,
            stopped=stopped,
            progress=lambda done, total: progress("scoring", done, total),
        )


def _everywhere(place: str) -> str:
    """A local path whatever folder a worker starts in."""
    path = storage.local(place)
    return place if path is None else str(Path(path).resolve())
