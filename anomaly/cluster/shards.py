"""Manifest x model -> parts: one shard of a job that many processes and machines share.

A chunk of the manifest is what is scored and written together: no batch holds images of two, so
that a row doesn't depend on which process has scored its chunk. A part appears once the chunk's
pictures are there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from anomaly.cluster.parts import part_of
from anomaly.datasets.image_manifest import ImageManifest
from anomaly.errors import DataError
from anomaly.files import storage
from anomaly.files.outputs import HEATMAPS, MAPS, MASKS
from anomaly.files.writing import remove_drafts
from anomaly.imaging.decoder_pool import Decoders
from anomaly.imaging.decoder_worker import Task
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import most_bytes
from anomaly.inference.journal import Finished
from anomaly.inference.outputs import OutputOptions, Outputs, have_thresholds
from anomaly.inference.rows import Row, as_parquet, counts_of, row_of
from anomaly.inference.run import Inputs, infer
from anomaly.methods.base import Progress
from anomaly.runtime.parallel import prefetch
from anomaly.scoring.predictor import AnyModel

_FETCHING = 16  # objects on their way at once
_FETCHED = 48  # that may be ahead of the decoding processes
_SAMPLE = 20  # a chunk of so many images none of which can be had: that isn't the images' fault


def shard_outputs(options: OutputOptions, model: AnyModel, dest: str, folder: Path) -> Outputs:
    """What a process of a job writes.

    Args:
        options: of the job.
        model: says what is good.
        dest: where the job's results go.
        folder: a temporary one, for pictures on their way to object storage.
    """
    if options.heatmaps is None:
        options = replace(options, heatmaps="reject" if have_thresholds(model) else "none")
    return Outputs(storage.local(dest) or folder, options)


@dataclass(frozen=True)
class ChunkScorer:
    """Scores chunks of a manifest, each into a part.

    Attributes:
        model: says what is good.
        manifest: names the images.
        dest: where parts and pictures go; `begin_job` has seen to it.
        outputs: what is drawn. Its folder is `dest` if that is local, else a temporary one, from
            which pictures are sent to `dest`.
        about: what the rows depend on.
        decoders: started.
    """

    model: AnyModel
    manifest: ImageManifest
    dest: str
    outputs: Outputs
    about: Mapping[str, object]
    decoders: Decoders

    def score(
        self,
        chunks: Sequence[int],
        *,
        lost: Mapping[int, str] = MappingProxyType({}),
        stopped: Callable[[], bool] = lambda: False,
        progress: Progress = lambda done, total: None,
    ) -> Counter[str]:
        """Score chunks and write their parts.

        Args:
            chunks: those to score, in order.
            lost: images of the only chunk that aren't touched, by index: their rows say `failed`,
                and why.
            stopped: asked all the time; the chunk in hand is then given up.
            progress: called with images done, and how many there are to do.

        Returns:
            Counts of statuses and verdicts.

        Raises:
            OutputError: a part or a picture can't be written; the parts that exist remain.
            DataError: the storage of the images, or of the manifest, doesn't answer.
        """
        model, folder = self.model, self.outputs.folder
        self.decoders.begin(Task(model.reference_model.loading, self.outputs.pictures(model)))
        self.outputs.write_scale(model)
        counts: Counter[str] = Counter()
        total, before = sum(self.manifest.sizes[chunk] for chunk in chunks), 0
        with _fetching(stopped, model) as fetched:
            for chunk in chunks:
                images = fetched(self.manifest.chunk(chunk))
                for i, reason in lost.items():
                    unusable = UnusableImage(i, "failed", f"{images.names[i]}: {reason}")
                    images.rows[i] = row_of(unusable, model, images.names[i], time.perf_counter())
                _remove_drafts(folder, chunk)
                pictures = [f"{_name(chunk)}/{i:06}.png" for i in range(len(images.names))]
                inputs = Inputs(images.paths, pictures, self.outputs.options, images.brought)

                def report(done: int, _: int, before: int = before) -> None:
                    progress(before + done, total)

                infer(model, inputs, images, self.decoders, stopped=stopped, progress=report)
                if len(images.rows) < len(images.names):
                    break
                images.check(chunk)
                _remove_drafts(folder, chunk)
                _send_pictures(folder, self.dest, images.threads)
                rows = [images.rows[i] for i in range(len(images.names))]
                notes = {"anomaly": json.dumps({"job": self.about, "chunk": chunk})}
                storage.put(part_of(self.dest, chunk), as_parquet(rows, notes))
                counts += counts_of(rows)
                before += len(rows)
        return counts

    def probe(self, chunk: int, wanted: Sequence[int]) -> None:
        """Score some images of a chunk, and keep nothing: to see whether the process survives it.

        Raises:
            DataError: the storage of the images doesn't answer.
        """
        with _fetching(lambda: False, self.model) as fetched:
            names = self.manifest.chunk(chunk)
            images = fetched([names[i] for i in wanted])
            options = OutputOptions(heatmaps="none")
            nothing = Outputs(self.outputs.folder, options).pictures(self.model)
            self.decoders.begin(Task(self.model.reference_model.loading, nothing))
            pictures = [f"{i}.png" for i in wanted]
            inputs = Inputs(images.paths, pictures, options, images.brought)
            infer(self.model, inputs, images, self.decoders)


@contextmanager
def _fetching(
    stopped: Callable[[], bool], model: AnyModel
) -> Iterator[Callable[[Sequence[str]], _Images]]:
    """What brings the images of a chunk here, from wherever their names lead."""
    with (
        tempfile.TemporaryDirectory(prefix="anomaly-shard-") as spool,
        ThreadPoolExecutor(_FETCHING, "fetch") as threads,
    ):
        limit = most_bytes(model.reference_model.loading.max_pixels)
        yield lambda names: _Images(names, Path(spool), threads, limit, stopped)


def _name(chunk: int) -> str:
    return f"{chunk:09}"


def _remove_drafts(folder: Path, chunk: int) -> None:
    """Delete what processes that were killed have left of a chunk's pictures."""
    for kind in (HEATMAPS, MASKS, MAPS):
        remove_drafts(folder / kind, [_name(chunk)])


def _send_pictures(folder: Path, dest: str, threads: ThreadPoolExecutor) -> None:
    if storage.local(dest) == folder:
        return
    files = [file for file in folder.rglob("*") if file.is_file()]
    places = [storage.inside(dest, file.relative_to(folder).as_posix()) for file in files]
    for _ in threads.map(storage.put, places, files):
        pass
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class _Images:
    """The images of a chunk: brought here in order, and let go once they have their row.

    A file from elsewhere has a number for a name here, whatever its own name is.

    Attributes:
        names: as the manifest has them.
        paths: where they are, or will be, on this machine.
        rows: by index.
        threads: fetch and send files.
    """

    def __init__(
        self,
        names: Sequence[str],
        spool: Path,
        threads: ThreadPoolExecutor,
        limit: int,
        stopped: Callable[[], bool],
    ) -> None:
        self.names = names
        found = [storage.local(name) for name in names]
        self._remote = {i for i, path in enumerate(found) if path is None}
        self.paths = [path or spool / f"{i:06}" for i, path in enumerate(found)]
        self.rows: dict[int, Row] = {}
        self.threads = threads
        self._limit = limit
        self._stopped = stopped
        self._denied: dict[int, str] = {}
        self._fetched = ""  # one that could be had

    @property
    def done(self) -> Collection[int]:
        """Those that have a row."""
        return self.rows

    def brought(self, items: Iterator[tuple[int, Path]]) -> Iterator[tuple[int, Path]]:
        """Fetch what isn't here, a bounded number of files ahead."""
        return prefetch(self._bring, items, _FETCHED if self._remote else 0, self._stopped)

    def add(self, batch: Sequence[Finished]) -> None:
        """Take rows, and give them the names that the manifest has."""
        for one in batch:
            path, name = self.paths[one.index], self.names[one.index]
            reason = one.row.reason.replace(str(path), name)
            if why := self._denied.get(one.index):
                reason = f"{name}: it can't be read ({why})"
            self.rows[one.index] = replace(one.row, path=name, reason=reason)
            if one.index in self._remote:
                path.unlink(missing_ok=True)

    def check(self, chunk: int) -> None:
        """See that images without a row's score are missing, and not the storage as a whole.

        A chunk is a random sample of the job.

        Raises:
            DataError: no image of a large chunk can be had, or the storage has begun to refuse.
        """
        if not any(map(self._is_here, self.rows)) and len(self.rows) >= _SAMPLE:
            raise _unavailable(
                f"none of the {len(self.rows)} images of chunk {chunk} can be read: "
                f"{self.rows[0].reason}"
            )
        if "access is denied" in self._denied.values() and self._fetched:
            with tempfile.TemporaryDirectory(prefix="anomaly-") as folder:
                try:
                    storage.fetch(self._fetched, Path(folder) / "again", 0)
                except PermissionError:
                    raise _unavailable(
                        f"{self._fetched} could be read before, and now access is denied"
                    ) from None
                except FileNotFoundError:
                    pass

    def _is_here(self, index: int) -> bool:
        if index in self._remote:
            return index not in self._denied
        return os.path.exists(self.paths[index])  # noqa: PTH110, never raises

    def _bring(self, item: tuple[int, Path]) -> Future[tuple[int, Path]]:
        if item[0] in self._remote:
            return self.threads.submit(self._fetch, *item)
        future: Future[tuple[int, Path]] = Future()
        future.set_result(item)
        return future

    def _fetch(self, index: int, path: Path) -> tuple[int, Path]:
        try:
            storage.fetch(self.names[index], path, self._limit)
            self._fetched = self.names[index]
        except OSError as error:
            denied = isinstance(error, PermissionError)
            self._denied[index] = "access is denied" if denied else "it doesn't exist"
            with suppress(OSError):
                path.unlink()
        return index, path


def _unavailable(what: str) -> DataError:
    return DataError(
        f"{what}; check that the storage is reachable and readable. Nothing was written for this "
        "chunk; then continue with --resume"
    )
