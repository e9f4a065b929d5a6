"""`anomaly infer --manifest`: a shard of a large job, or all of it on a Ray cluster."""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2

from anomaly.cli.common_options import (
    check_cluster,
    device_and_threads,
    joined_cluster,
    wanted_threads,
)
from anomaly.cli.logging_setup import ProgressLine
from anomaly.cli.stopping import Stopping
from anomaly.cluster.actors import Actor, Work, WorkerDied, dispatch
from anomaly.cluster.parts import Shard, begin_job, chunks_done
from anomaly.cluster.shards import ChunkScorer, shard_outputs
from anomaly.datasets.image_manifest import ImageManifest, read_manifest
from anomaly.errors import AnomalyError, DataError, OutputError
from anomaly.files import storage
from anomaly.imaging.decoder_pool import Decoders
from anomaly.inference.outputs import OutputOptions
from anomaly.inference.rows import say_counts, total_of
from anomaly.runtime.parallel import use_threads
from anomaly.storage.load import load

_OTHERS = ("input", "list", "watch", "overwrite", "regions", "parquet")


def run(options: argparse.Namespace, wanted: OutputOptions) -> int:
    """Score a manifest; returns 0 once each image has a row, with a score or the reason for none.

    Raises:
        DataError: options don't go together, or the manifest can't be read.
        OutputError: results of something else are there, or `--resume` is missing.
    """
    if others := [f"--{name}" for name in _OTHERS if getattr(options, name)]:
        raise DataError(f"{', '.join(others)} can't be given with --manifest")
    check_cluster(options)
    if options.ray is not None:
        return _run_on_ray(options, wanted)
    shard = Shard.of("0/1" if options.shard is None else options.shard)
    manifest = read_manifest(options.manifest)
    if not shard.chunks(manifest):
        chunks = f"{len(manifest.sizes)} chunks for {shard.count} shards"
        print(f"shard {shard.index}/{shard.count}: nothing to do, the manifest has {chunks}")
        return 0
    with Decoders(wanted_threads(options)) as decoders:
        return _run_shard(options, wanted, shard, manifest, decoders)


def _run_shard(
    options: argparse.Namespace,
    wanted: OutputOptions,
    shard: Shard,
    manifest: ImageManifest,
    decoders: Decoders,
) -> int:
    with Stopping() as stop, tempfile.TemporaryDirectory(prefix="anomaly-out-") as folder:
        device, _ = device_and_threads(options)
        model = load(options.model, device, options.precision, options.product)
        outputs = shard_outputs(wanted, model, options.output, Path(folder))
        about = outputs.about(model, manifest.id)
        begin_job(options.output, about)
        chunks = shard.chunks(manifest)
        left = _left(options, chunks, "this shard's ")
        scorer = ChunkScorer(model, manifest, options.output, outputs, about, decoders)
        with ProgressLine() as progress:
            counts = scorer.score(
                left,
                stopped=lambda: stop.signal is not None,
                progress=partial(progress, "scoring"),
            )
        shown = f"shard {shard.index}/{shard.count} of {len(chunks)} chunks"
        print(f"{shown}: {say_counts(counts)}; parts in {options.output}")
        if total_of(counts) < sum(manifest.sizes[chunk] for chunk in left):
            print("stopped; continue with --resume")
            return stop.exit_code
    return 0


def _left(options: argparse.Namespace, chunks: Sequence[int], whose: str = "") -> list[int]:
    """The chunks that have no part yet."""
    done = chunks_done(options.output)
    left = [chunk for chunk in chunks if chunk not in done]
    if len(left) < len(chunks) and not options.resume:
        raise OutputError(
            f"{options.output} holds {len(chunks) - len(left)} of {whose}{len(chunks)} chunks "
            "already; add --resume to score the others, or give another --output"
        )
    return left


@dataclass(frozen=True)
class RayJob:
    """What every worker on Ray has to know; paths as they are on all machines.

    Attributes:
        model: model or run folder.
        manifest: the list of images.
        dest: where parts and pictures go.
        device: as `--device`.
        precision: instead of the model's own; None for that.
        product: that all images show, where there are models of several; None tells each image's.
        threads: of each worker.
        outputs: what to write.
    """

    model: str
    manifest: str
    dest: str
    device: str = "auto"
    precision: str | None = None
    product: str | None = None
    threads: int = 1
    outputs: OutputOptions = field(default_factory=lambda: OutputOptions(heatmaps=None))


def _run_on_ray(options: argparse.Namespace, wanted: OutputOptions) -> int:
    if options.shard is not None:
        raise DataError("--shard can't be given with --ray, which shares out all chunks")
    manifest = read_manifest(options.manifest)
    counts: Counter[str] = Counter()
    with Stopping() as stop, joined_cluster(options) as cluster:
        assert cluster is not None  # --ray is given
        job = RayJob(
            model=_everywhere(str(options.model)),
            manifest=_everywhere(options.manifest),
            dest=_everywhere(options.output),
            device=options.device,
            precision=options.precision,
            product=options.product,
            threads=cluster.threads,
            outputs=wanted,
        )

        def stopped() -> bool:
            return stop.signal is not None

        hired = [cluster.start(_Scorer, job)]
        if (about := _about(hired[0], stopped)) is not None:
            begin_job(options.output, about)
            work = Work(
                hire=lambda: hired.pop() if hired else cluster.start(_Scorer, job),
                score=lambda actor, chunk, lost: actor.ask("score", chunk, about, lost),
                probe=lambda actor, chunk, images: actor.ask("probe", chunk, images),
                take=lambda chunk, scored: counts.update(scored),
            )
            left = _left(options, range(len(manifest.sizes)))
            with ProgressLine() as progress:
                dispatch(
                    left,
                    manifest.sizes,
                    work,
                    cluster.room,
                    stopped=stopped,
                    progress=partial(progress, "scoring"),
                )
        if stopped():
            print("stopped; continue with --resume")
            return stop.exit_code
    print(f"{say_counts(counts)}; parts in {options.output}")
    return 0


def _about(first: Actor, stopped: Callable[[], bool]) -> dict[str, Any] | None:
    """What the rows depend on, as the first worker says; None if it is stopped before.

    Raises:
        AnomalyError: it has met it, or has died.
    """
    asked: Future[dict[str, Any]] = first.ask("about")
    while not stopped():
        try:
            return asked.result(1.0)
        except TimeoutError:
            continue
        except WorkerDied as error:
            raise AnomalyError(
                f"the first worker died while it loaded the model ({error}); see why in Ray's logs"
            ) from None
    return None


def _everywhere(place: str) -> str:
    """A local path whatever folder a worker starts in."""
    path = storage.local(place)
    return place if path is None else str(Path(path).resolve())


class _Scorer:
    """The actor. Its model is loaded by the first call, so that errors come back as they are."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._decoders: Decoders | None = None

    def about(self) -> dict[str, Any]:
        """What its rows depend on."""
        self._begin()
        return self._about

    def score(self, chunk: int, about: Mapping[str, Any], lost: Mapping[int, str]) -> Counter[str]:
        """Score a chunk and write its part; counts its images by status and verdict.

        Raises:
            DataError: its model, version or device isn't that of the job.
        """
        decoders = self._begin()
        if other := [key for key in about if self._about.get(key) != about[key]]:
            raise DataError(
                f"the worker on {socket.gethostname()} has another {', '.join(other)} than the job "
                f"({self._about.get(other[0])!r}, not {about[other[0]]!r}); all machines need the "
                "same model folder, program and device"
            )
        with self._chunk_scorer(decoders) as scorer:
            return scorer.score([chunk], lost=lost)

    def probe(self, chunk: int, images: Sequence[int]) -> None:
        """Score some images of a chunk and keep nothing."""
        decoders = self._begin()
        with self._chunk_scorer(decoders) as scorer:
            scorer.probe(chunk, images)

    @contextmanager
    def _chunk_scorer(self, decoders: Decoders) -> Iterator[ChunkScorer]:
        # Of one chunk alone: a worker is ended without a word, and would leave its folder behind.
        with tempfile.TemporaryDirectory(prefix="anomaly-out-") as folder:
            job = self._job
            outputs = shard_outputs(job.outputs, self._model, job.dest, Path(folder))
            where = (self._model, self._manifest, job.dest)
            yield ChunkScorer(*where, outputs, self._about, decoders)

    def _begin(self) -> Decoders:
        if self._decoders is None:
            job = self._job
            use_threads(job.threads)
            cv2.setNumThreads(1)
            self._manifest = read_manifest(job.manifest)
            self._model = load(job.model, job.device, job.precision, job.product)
            outputs = shard_outputs(job.outputs, self._model, job.dest, Path())
            self._about = outputs.about(self._model, self._manifest.id)
            self._decoders = Decoders(job.threads).__enter__()
        return self._decoders
