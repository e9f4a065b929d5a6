"""Images -> rows and pictures, of a list, of watched folders, and in the service.

A journal notes a run's progress on disk, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from anomaly.datasets.inputs import picture_names
from anomaly.errors import DataError, OutputError, why
from anomaly.files.writing import (
    DONE,
    HEATMAPS,
    JOURNAL,
    WATCHED,
    GrowingFile,
    as_json,
    from_json,
    write,
)
from anomaly.imaging.loading import NetworkInput, UnusableImage, by_shape
from anomaly.imaging.pool import Decoders
from anomaly.imaging.read import is_image, list_files
from anomaly.inference.results import (
    LINES,
    REGIONS,
    RESULTS,
    Outputs,
    Part,
    Pictures,
    RegionRow,
    Row,
    as_jsonl,
    csv_header,
    csv_lines,
    judge_parts,
    region_rows,
    row_of,
)
from anomaly.maps.heatmap import Thumbnails
from anomaly.runtime import Progress, StoppedError
from anomaly.scoring.model import Model, Prediction
from anomaly.storage.folder import MANIFEST, model_id

log = logging.getLogger(__name__)

# Scores batches, as `Model.predict_batches` does.
Predict: TypeAlias = Callable[
    [Iterable[list[NetworkInput] | UnusableImage]], Iterator[Prediction | UnusableImage]
]

_BEHIND = 16  # most scored images that wait for their pictures, in complete batches
_LAST_SECONDS = 5.0  # time for these pictures after a stop
_POLL_SECONDS = 0.5  # pause between two lists of the watched folders
_POLL_SHARE = 0.2  # largest share of the time spent on listing the folders
SETTLE = 0.5  # seconds without a change after which a file counts as complete


class Drawn(NamedTuple):
    """A scored image whose pictures are being drawn.

    Attributes:
        result: the prediction, or the reason why the image is unusable.
        pictures: the pictures to come; `UnusableImage` if the image can't be scored or drawn. The
            future raises OutputError if they can't be written.
    """

    result: Prediction | UnusableImage
    pictures: Future[Pictures | UnusableImage]


@dataclass(frozen=True)
class Pipeline:
    """Scores decoded images in batches; the decoding processes then draw them.

    Attributes:
        model: the model that scores the images.
        decoders: decoding processes that the images come from.
        to_draw: prediction -> the image's file or bytes, the kinds of pictures to draw, and their
            path in the folders of pictures.
        predict: function that scores batches; None for the model, in this process.
    """

    model: Model
    decoders: Decoders
    to_draw: Callable[[Prediction], tuple[Path | bytes, Set[str], str]]
    predict: Predict | None = None

    def run(
        self, loaded: Iterable[NetworkInput | UnusableImage], batch_size: int | None = None
    ) -> Iterator[list[Drawn]]:
        """Score images batch by batch, and begin to draw each.

        Args:
            loaded: network inputs and unusable images from the decoders.
            batch_size: images in a batch; by default the model's.

        Yields:
            The images of a batch, or a single unusable image, in the order of the batches.
        """
        batches = by_shape(self.model.fitting(loaded), batch_size or self.model.batch_size)
        # Number of images in each batch that the model has taken and that isn't complete yet.
        lengths: deque[int] = deque()

        def counted() -> Iterator[list[NetworkInput] | UnusableImage]:
            for batch in batches:
                lengths.append(1 if isinstance(batch, UnusableImage) else len(batch))
                yield batch

        drawn: list[Drawn] = []
        for result in (self.predict or self.model.predict_batches)(counted()):
            drawn.append(Drawn(result, self._drawing(result)))
            if len(drawn) == lengths[0]:
                yield drawn
                lengths.popleft()
                drawn = []

    def _drawing(self, result: Prediction | UnusableImage) -> Future[Pictures | UnusableImage]:
        """The pictures that the image's decoding process now draws; none of an unusable image."""
        if isinstance(result, Prediction):
            source, kinds, name = self.to_draw(result)
            return self.decoders.finish(
                result.index, source, result.source_map, kinds, name, result.verdict
            )
        self.decoders.forget(result.index)  # else its process keeps the image to draw it
        unusable: Future[Pictures | UnusableImage] = Future()
        unusable.set_result(result)
        return unusable


@dataclass(frozen=True)
class Finished:
    """A finished image: its row is final and its pictures are on disk.

    Attributes:
        index: place in the list of files.
        row: row of results.csv.
        regions: rows of regions.csv; empty if they aren't wanted.
    """

    index: int
    row: Row
    regions: tuple[RegionRow, ...] = ()


_HEADERS = {RESULTS: csv_header(Row), LINES: "", REGIONS: csv_header(RegionRow)}


def _table_lines(images: Sequence[Finished]) -> dict[str, str]:
    """The lines of finished images in each table, by the table's file name."""
    rows = [image.row for image in images]
    regions = (region for image in images for region in image.regions)
    return {RESULTS: csv_lines(rows), LINES: as_jsonl(rows), REGIONS: csv_lines(regions)}


class Journal:
    """A file of JSON lines: the first describes the run, each further one finished images.

    An incomplete last line, of a killed process, is dropped. Use it in a `with` statement.

    Args:
        file: the journal; created if missing.
        about: facts that the results depend on; a journal with other facts can't be continued.

    Attributes:
        done: finished images by index.

    Raises:
        OutputError: the file is of another run, isn't a journal, or can't be read or written.
    """

    def __init__(self, file: Path, about: Mapping[str, object]) -> None:
        self.file = file
        self.done: dict[int, Finished] = {}
        # As it is read back from a file, where tuples have become lists.
        self.about: dict[str, object] = json.loads(json.dumps(about))
        self._end = 0
        if file.exists():
            try:
                with file.open("rb") as stream:
                    self._read(stream)
            except OSError as error:
                raise OutputError(f"{file} can't be read: {error.strerror}") from None
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{file} is damaged ({why(error)}); start again with --overwrite"
                ) from None
        self._lines = GrowingFile(file, self._end)
        if not self._end:
            self.commit({"about": self.about})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def commit(self, line: Mapping[str, object]) -> None:
        """Write one more line; it is in the file when this returns.

        Raises:
            OutputError: it can't be written.
        """
        # ASCII escapes, so that file names that aren't UTF-8 survive.
        text = json.dumps(line, ensure_ascii=True, allow_nan=False)
        self._lines.append(text.encode() + b"\n")

    def add(self, batch: Sequence[Finished]) -> None:
        """Write the images of a batch; they are saved when this returns.

        Raises:
            OutputError: they can't be written.
        """
        raise NotImplementedError

    def restore(self, line: dict[str, Any]) -> None:
        """Restore finished images from an earlier run's line; by default none."""

    def _read(self, lines: Iterator[bytes]) -> None:
        """Restore finished images from the whole lines of an earlier run's journal.

        Raises:
            OutputError: the journal is of another run.
        """
        for text in lines:
            if not text.endswith(b"\n"):  # the last line, cut short
                return
            line = from_json(text)
            if self._end:
                self.restore(line)
            else:
                _check_same(self.file.parent, line["about"], self.about)
            self._end += len(text)


class RunJournal(Journal):
    """The journal of a run over a list of files: a line for each batch.

    The tables are written from it at the end of the `with` block, even after an error.

    Args:
        outputs: output folder, and the kinds of files written there.
        about: facts that the rows depend on.
        groups: name of the part that each image shows, by the image's path.
    """

    def __init__(
        self, outputs: Outputs, about: Mapping[str, object], groups: Mapping[str, str] | None = None
    ) -> None:
        self._tables, self._groups = outputs.tables, groups or {}
        super().__init__(outputs.folder / JOURNAL, about)

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        try:
            self._write_tables()
        except OutputError:
            if error == (None, None, None):  # else the block's own error matters more
                raise

    def add(self, batch: Sequence[Finished]) -> None:
        """Write the images of a batch as one line."""
        self.commit({"images": [asdict(image) for image in batch]})
        self.done |= {image.index: image for image in batch}

    def restore(self, line: dict[str, Any]) -> None:
        """Restore a batch from its line."""
        for image in line["images"]:
            regions = tuple(RegionRow(**region) for region in image["regions"])
            self.done[image["index"]] = Finished(image["index"], Row(**image["row"]), regions)

    def _write_tables(self) -> None:
        """Write the tables, rows in order of the files; none if no image is finished."""
        images, folder = [self.done[index] for index in sorted(self.done)], self.file.parent
        if not images:
            return
        lines = _table_lines(images)
        for name in self._tables:
            write(folder / name, _HEADERS[name] + lines[name])
        if self._groups:
            parts = judge_parts([image.row for image in images], self._groups)
            write(folder / "parts.csv", csv_header(Part) + csv_lines(parts))

    def finish(self, exit_code: int) -> None:
        """Write the file that marks the run as complete, and delete the journal.

        Raises:
            OutputError: the file can't be written.
        """
        about = {"about": self.about, "exit_code": exit_code}
        write(self.file.with_name(DONE), as_json(about))
        self.file.unlink(missing_ok=True)

    @staticmethod
    def exit_code_of_complete(folder: Path, about: Mapping[str, object]) -> int:
        """Exit code of a complete run, after a check that it is the run to resume.

        Args:
            folder: the run's output folder.
            about: facts that the rows of the run to resume depend on.

        Raises:
            OutputError: the folder holds another run, or the file that `finish` writes is missing
                or damaged.
        """
        try:
            record = from_json((folder / DONE).read_bytes())
            earlier, code = dict(record["about"]), int(record["exit_code"])
        except (OSError, ValueError, KeyError, TypeError):
            raise OutputError(
                f"{folder} holds results, but {DONE}, which describes the run, is missing or "
                "damaged; give another --output, or add --overwrite to start again"
            ) from None
        _check_same(folder, earlier, json.loads(json.dumps(about)))  # tuples are lists in JSON
        return code


def _check_same(output: Path, earlier: Mapping[str, object], about: Mapping[str, object]) -> None:
    """Refuse to resume a run that depends on other facts than the earlier run in the folder.

    Raises:
        OutputError: the facts differ; the message names those that do.
    """
    if earlier != about:
        # An earlier run with further facts is another version's, so none of these may differ.
        differing = ", ".join(key for key in about if earlier.get(key) != about[key])
        raise OutputError(
            f"{output} holds a run with another {differing or 'program'}, which can't be "
            "continued with this one; give another --output, or --overwrite to start again"
        )


@dataclass(frozen=True)
class Inputs:
    """The images to score.

    Attributes:
        paths: image files, sorted.
        pictures: path of each image's pictures inside the folders of heatmaps, masks and maps.
        groups: name of the part that each image shows, by the image's path.
        begun: time at which the reading of each file began, by `time.perf_counter`.
    """

    paths: Sequence[Path]
    pictures: Sequence[str]
    groups: Mapping[str, str] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)

    def begin(self, done: Container[int]) -> Iterator[tuple[int, Path]]:
        """Index and file of each image that isn't done; notes when its reading begins."""
        for index, path in enumerate(self.paths):
            if index not in done:
                self.begun[index] = time.perf_counter()
                yield index, path


@dataclass(frozen=True)
class Run:
    """A run of `infer`, which scores images until it is stopped.

    The record gets whole batches: a score's last digits may depend on its batch, and a resumed
    run, which has the same batches, must write the same bytes as an uninterrupted one.

    Attributes:
        model: the model that scores the images.
        outputs: output folder, and the kinds of files written there.
        record: the open journal; it gets each batch once the batch's pictures are on disk.
        decoders: decoding processes with the model's preprocessing and the outputs' pictures.
        stopped: returns True to stop; images already scored then have 5 seconds to be drawn.
        thumbnails: small heatmaps of the images that matter most.
        predict: function that scores batches; None for the model, in this process.
    """

    model: Model
    outputs: Outputs
    record: Journal
    decoders: Decoders
    stopped: Callable[[], bool] = lambda: False
    thumbnails: Thumbnails = field(default_factory=Thumbnails)
    predict: Predict | None = None

    def score(self, inputs: Inputs, progress: Progress = lambda done, total: None) -> None:
        """Score the images that aren't in the record yet.

        Args:
            inputs: the images to score.
            progress: called with (images done in this call, images to do in this call).

        Raises:
            OutputError: results can't be written.
        """

        def to_draw(prediction: Prediction) -> tuple[Path, Set[str], str]:
            i = prediction.index
            return inputs.paths[i], self.outputs.pictures_of(prediction.verdict), inputs.pictures[i]

        done = self.record.done
        total = sum(index not in done for index in range(len(inputs.paths)))
        loaded = self.decoders.load_all(inputs.begin(done), self.stopped)
        pipeline = Pipeline(self.model, self.decoders, to_draw, self.predict)
        scored = 0
        behind: deque[list[Drawn]] = deque()  # scored batches that aren't in the record yet
        try:
            for batch in pipeline.run(loaded):
                behind.append(batch)
                scored += len(batch)
                progress(scored, total)
                # Waits for pictures, so that few images are in memory.
                while len(behind) > 1 and sum(map(len, behind)) > _BEHIND:
                    self._record(behind.popleft(), inputs)
                if self.stopped():
                    break
        except StoppedError:  # from `loaded` or `predict`; what is scored is recorded below
            pass
        finally:
            self._record_all(behind, inputs)

    def _record_all(self, batches: Iterable[list[Drawn]], inputs: Inputs) -> None:
        """Record scored batches as their pictures are finished, even after one couldn't be written.

        Once the run is stopped, batches that aren't finished in time are left out.

        Raises:
            OutputError: a picture or the record couldn't be written; the first such error.
        """
        failure: OutputError | None = None
        end = time.monotonic() + _LAST_SECONDS
        for batch in batches:
            left = end - time.monotonic() if self.stopped() else None
            if wait([drawn.pictures for drawn in batch], left).not_done:
                break  # a resumed run scores the batch again
            try:
                self._record(batch, inputs)
            except OutputError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _record(self, batch: Sequence[Drawn], inputs: Inputs) -> None:
        self.record.add([self._finished(drawn, inputs) for drawn in batch])

    def _finished(self, drawn: Drawn, inputs: Inputs) -> Finished:
        """The rows of an image, once its pictures are written or refused."""
        result, pictures = drawn.result, drawn.pictures.result()
        i = result.index
        path = str(inputs.paths[i])
        heatmap, regions = "", tuple[RegionRow, ...]()
        if isinstance(pictures, UnusableImage):
            result = pictures
        elif isinstance(result, Prediction):
            mm = self.model.config.image.mm_per_pixel
            regions = tuple(region_rows(path, pictures.regions, mm))
            if "heatmap" in self.outputs.pictures_of(result.verdict):
                heatmap = f"{HEATMAPS}/{inputs.pictures[i]}"
            if pictures.small:
                self.thumbnails.keep(heatmap, bool(result.reason), result.score, pictures.small)
        group, begun = inputs.groups.get(path, ""), inputs.begun.pop(i)
        return Finished(i, row_of(result, self.model, path, begun, heatmap, group), regions)


@contextmanager
def resumable(done: Callable[[], str]) -> Iterator[None]:
    """Add to a write error the number of images done, and how to continue.

    Args:
        done: returns the images done in words, such as `3 of 9 images`.

    Raises:
        OutputError: results can't be written; of the same class as the error caught.
    """
    try:
        yield
    except OutputError as error:
        raise type(error)(f"{error}; {done()} are done and kept; continue with --resume") from None


# A file's size in bytes and the time of its last change in nanoseconds.
Stamp: TypeAlias = tuple[int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Size and time of a file, which change when it is written to; None if it isn't accessible."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


class Arrivals:
    """New files in folders.

    It remembers the files that are in the folders now, so that memory doesn't grow with a long run,
    and the last files of a folder that has become empty.

    Args:
        folders: folders to list, with their subfolders.
        done: files that an earlier run has scored, with their stamps at that time.
        settle: seconds without a change after which a file counts as complete.
    """

    def __init__(
        self, folders: Sequence[Path], done: Mapping[Path, Stamp], settle: float = 0.0
    ) -> None:
        self._folders = folders
        self._returned = dict(done)
        self._settle = settle
        # Files that may still be written to: stamp, and the time at which the stamp was first seen.
        self._unsettled: dict[Path, tuple[Stamp, float]] = {}

    def poll(self, now: float = 0.0) -> dict[Path, Stamp]:
        """New image files that are complete: unchanged in two polls at least `settle` s apart.

        A file that changes after it was returned counts as new.

        Args:
            now: time in seconds, by a monotonic clock.

        Returns:
            Stamps by file, the oldest file first.

        Raises:
            DataError: a folder can't be listed; a later poll returns its new files.
        """
        files = {file for folder in self._folders for file in list_files(folder, warn=False)}
        images = filter(is_image, files)
        stamps = {path: stamp for path in images if (stamp := stamp_of(path)) is not None}
        unsettled, self._unsettled = self._unsettled, {}
        ready = {}
        for path, stamp in stamps.items():
            if self._returned.get(path) == stamp:
                continue
            earlier, since = unsettled.get(path, (None, now))
            if earlier == stamp and now - since >= self._settle:
                ready[path] = stamp
            else:
                self._unsettled[path] = stamp, since if earlier == stamp else now
        # A folder that is suddenly empty may be a drive that comes back: its files stay known.
        filled = [f for f in self._folders if any(path.is_relative_to(f) for path in stamps)]
        for path in self._returned.keys() - stamps.keys():
            if any(path.is_relative_to(folder) for folder in filled):
                del self._returned[path]
        self._returned.update(ready)
        return dict(sorted(ready.items(), key=lambda item: (item[1][1], item[0])))


class WatchJournal(Journal):
    """The journal of watched folders, and the tables that grow with it.

    A line holds finished files and the lengths of the tables. Rows beyond these lengths come from
    a killed process; they are dropped, and their files are scored again.

    Args:
        outputs: output folder, and the kinds of files written there.
        about: facts that the rows depend on; tables with other facts can't be continued.
        seen: called with each image, once its row is in the tables.

    Attributes:
        earlier: files of an earlier run that were unchanged or missing at the start, with stamps.
        arrived: files being scored, with their stamps; `Finished.index` is a place in this list.

    Raises:
        OutputError: the tables are of another run, or damaged.
    """

    def __init__(
        self,
        outputs: Outputs,
        about: Mapping[str, object],
        seen: Callable[[Finished], None],
    ) -> None:
        self._seen = seen
        # Before `super().__init__`, which calls `restore` for each line of an earlier run.
        self._ends = dict.fromkeys(outputs.tables, 0)
        self.earlier: dict[Path, Stamp] = {}
        self.arrived: list[tuple[Path, Stamp]] = []
        super().__init__(outputs.folder / WATCHED, about)
        self._tables = {
            name: GrowingFile(outputs.folder / name, end) for name, end in self._ends.items()
        }
        for name, table in self._tables.items():
            if not table.end:
                table.append(_HEADERS[name].encode())

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for table in self._tables.values():
            table.close()

    def add(self, batch: Sequence[Finished]) -> None:
        """Write rows and regions of a batch, from `arrived`, into the tables."""
        lines = _table_lines(batch)
        # Rows first, then the line that makes them final: a crash in between loses no file.
        for name, table in self._tables.items():
            table.append(lines[name].encode("utf-8", "surrogateescape"))
        stamps = {image.row.path: self.arrived[image.index][1] for image in batch}
        self.commit({"files": stamps, "ends": {n: t.end for n, t in self._tables.items()}})
        for image in batch:
            self._seen(image)

    def restore(self, line: dict[str, Any]) -> None:
        """Restore files and table lengths from a line of an earlier run."""
        for name, (size, changed) in line["files"].items():
            path, stamp = Path(name), (size, changed)
            if stamp_of(path) in (stamp, None):  # a missing file may come back
                self.earlier[path] = stamp
        self._ends.update(line["ends"])


def watch(run: Run, journal: WatchJournal, folders: list[Path]) -> None:
    """Score the files in folders, and new files as they arrive, until the run is stopped.

    Memory grows with the files now in the folders, not with all earlier ones. A folder that can't
    be listed, such as an interrupted network drive, is tried again; warnings tell when it can't be
    listed, and when it can again.

    Args:
        run: the run that scores the images.
        journal: the run's record.
        folders: folders to follow.

    Raises:
        OutputError: results can't be written.
    """
    arrivals, model_folder = Arrivals(folders, journal.earlier, SETTLE), run.model.folder
    assert model_folder is not None  # the model was loaded
    manifest = model_folder / MANIFEST
    known = stamp_of(manifest)
    complaint = reported = ""
    numbers: dict[str, int] = {}  # the last number given to pictures of each repeated name
    while not run.stopped():
        if (stamp := stamp_of(manifest)) not in (None, known):
            known = stamp
            _warn_of_change(run.model, model_folder)
        begun, before = time.monotonic(), complaint
        try:
            ready, complaint = arrivals.poll(begun), ""
        except DataError as error:
            ready, complaint = {}, str(error)
        # Reported if equal in two polls: a folder may vanish for a moment, while it is listed.
        if complaint == before != reported:
            log.warning("%s", complaint or "the folders can be listed again")
            reported = complaint
        polled = time.monotonic()
        if ready:
            journal.arrived = list(ready.items())
            names = picture_names(list(ready), folders, run.outputs.holds_picture, numbers)
            run.score(Inputs(list(ready), names))
        _pause(polled + max(_POLL_SECONDS, (polled - begun) / _POLL_SHARE), run.stopped)


def _pause(until: float, stopped: Callable[[], bool]) -> None:
    """Sleep in short steps, since a signal doesn't end a sleep."""
    while not stopped() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))


def _warn_of_change(model: Model, folder: Path) -> None:
    """Warn if a folder no longer holds the model that was loaded from it."""
    with suppress(OSError):  # the folder is being replaced; its next stamp is checked again
        if (current := model_id(folder)) != model.model_id:
            log.warning(
                "the model in %s has changed to %s. Images are still scored with model %s; to use "
                "the new one, stop this command and start it again with another --output",
                folder,
                current,
                model.model_id,
            )
