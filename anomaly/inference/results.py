"""Results of images: rows, pictures, and the folder that they are written to. Imports no torch."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from anomaly.errors import OutputError
from anomaly.files.tables import csv_text
from anomaly.files.writing import (
    FOLDERS,
    HEATMAPS,
    INFER,
    JOURNAL,
    MAPS,
    MASKS,
    WATCHED,
    claim,
    clear,
    remove_drafts,
    write,
)
from anomaly.imaging.loading import UnusableImage
from anomaly.imaging.read import Image
from anomaly.maps.anomaly_map import MarkedRegion, SourceMap, marked_regions, predicted_mask
from anomaly.maps.heatmap import Thumbnail, encode_float32, encode_png, heatmap, shrunk, thumbnail
from anomaly.runtime import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from anomaly.scoring.model import Model, Prediction


RESULTS, LINES, REGIONS = "results.csv", "results.jsonl", "regions.csv"


@dataclass(frozen=True)
class Row:
    """One image's line in results.csv and results.jsonl; the fields are the columns, in order.

    Attributes:
        path: the file's path.
        image_sha256: SHA-256 of the file's bytes; empty if they couldn't be read.
        status: `ok`, `unreadable`, `unsupported`, or `failed` if the processes that tried to decode
            the file died, or if the score isn't a finite number.
        image_score: higher is more anomalous; None unless `ok`.
        calibrated_score: rarity of such a score among good parts, in powers of ten; None without a
            score or a threshold.
        review_threshold: a higher score needs a second look; None if the model has none.
        threshold: a higher score is rejected; None if the model has none.
        verdict: `good`, `review` (a person has to look) or `reject`; empty without a score or a
            threshold.
        heatmap: the heatmap's file, relative to the output folder; empty without one.
        model_id: id of the model that scored the image.
        software_version: version of this program.
        threshold_label: origin of the thresholds: `calibrated` or `by hand`.
        reason: reason why there is no score, or for review whatever the score.
        model_name: the model's name in its config.
        time: time of scoring in UTC (ISO 8601).
        milliseconds: time from reading the file until its pictures were on disk, including the
            wait for its batch.
        engine: engine that computed the score: `torch`, or the one that the model was exported for.
        group: name of the part that the image shows; empty if unknown.
    """

    path: str
    image_sha256: str
    status: str
    image_score: float | None
    calibrated_score: float | None
    review_threshold: float | None
    threshold: float | None
    verdict: str
    heatmap: str
    model_id: str
    software_version: str
    threshold_label: str
    reason: str
    model_name: str = ""
    time: str = ""
    milliseconds: float | None = None
    engine: str = "torch"
    group: str = ""


def row_of(
    result: Prediction | UnusableImage,
    model: Model,
    path: str,
    begun: float,
    heatmap: str = "",
    group: str = "",
) -> Row:
    """The row of an image that was scored, or couldn't be.

    Reading its file began at `begun`, by `time.perf_counter`. `Row` tells of path, heatmap, group.
    """
    scored = None if isinstance(result, UnusableImage) else result
    limits = model.thresholds
    return Row(
        path=path,
        image_sha256="" if scored is None else scored.sha256,
        status=result.status if isinstance(result, UnusableImage) else "ok",
        image_score=None if scored is None else scored.score,
        calibrated_score=None if scored is None else scored.calibrated_score,
        review_threshold=None if limits is None else limits.review,
        threshold=None if limits is None else limits.image,
        verdict="" if scored is None else scored.verdict,
        heatmap=heatmap,
        model_id=model.model_id,
        software_version=__version__,
        threshold_label="" if limits is None else limits.label,
        reason=result.reason,
        model_name=model.name,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        milliseconds=round(1000 * (time.perf_counter() - begun), 1),
        engine=model.extractor.engine,
        group=group,
    )


@dataclass(frozen=True)
class _Numbered:
    """The first columns of regions.csv.

    Attributes:
        path: the image's path, the same as in results.csv.
        region: number of the region, from 1 for the image's highest peak.
    """

    path: str
    region: int


# Fields of the last base class come first, so the columns begin with the path.
@dataclass(frozen=True)
class RegionRow(MarkedRegion, _Numbered):
    """A marked region's line in regions.csv; the fields are the columns, in order.

    Attributes:
        width_mm: width in mm; None if the model doesn't know `image.mm_per_pixel`.
        height_mm: height in mm, or None.
        area_mm2: area in mm², or None.
        width_uncertainty_mm: `width_uncertainty` in mm, or None.
        height_uncertainty_mm: `height_uncertainty` in mm, or None.
    """

    width_mm: float | None
    height_mm: float | None
    area_mm2: float | None
    width_uncertainty_mm: float | None
    height_uncertainty_mm: float | None


def region_rows(
    path: str, regions: Iterable[MarkedRegion], mm_per_pixel: float | None
) -> list[RegionRow]:
    """Rows of one image's regions, numbered from 1 in the order given; mm have six decimals."""

    def scaled(length: float, power: int = 1) -> float | None:
        return None if mm_per_pixel is None else round(length * mm_per_pixel**power, 6)

    return [
        RegionRow(
            path,
            number,
            **asdict(region),
            width_mm=scaled(region.width),
            height_mm=scaled(region.height),
            area_mm2=scaled(region.area, 2),
            width_uncertainty_mm=scaled(region.width_uncertainty),
            height_uncertainty_mm=scaled(region.height_uncertainty),
        )
        for number, region in enumerate(regions, 1)
    ]


@dataclass(frozen=True)
class Part:
    """One part's line in parts.csv; the fields are the columns, in order.

    Attributes:
        group: name of the part.
        verdict: `reject` if any view is rejected, else `review` if any view is for review or has
            no score, else `good`, or empty if the model has no threshold.
        views: number of images that show the part.
        scored: number of these images that have a score.
        image_score: the highest score of the views; None without any.
        path: the view that decides: the rejected view with the highest score, else the first view
            for review, else the view with the highest score.
        reason: the deciding view's reason; empty without one.
    """

    group: str
    verdict: str
    views: int
    scored: int
    image_score: float | None
    path: str
    reason: str


def judge_parts(rows: Sequence[Row], groups: Mapping[str, str]) -> list[Part]:
    """The parts whose views all have a row, in order of their names.

    Args:
        rows: one row for each image.
        groups: name of the part that each image shows, by the image's path; other images are
            left out.
    """
    views: dict[str, list[Row]] = {}
    for row in rows:
        if row.path in groups:
            views.setdefault(groups[row.path], []).append(row)
    expected = Counter(groups.values())
    return [_judge(g, views[g]) for g in sorted(views) if len(views[g]) == expected[g]]


def _judge(group: str, views: Sequence[Row]) -> Part:
    """The part that all `views` show; the view with the strictest verdict decides."""
    rejected = [row for row in views if row.verdict == "reject"]
    # A view without a score wasn't inspected, so its part can't be good.
    unsure = [row for row in views if row.verdict == "review" or row.image_score is None]
    if rejected:
        verdict, decisive = "reject", max(rejected, key=_score)
    elif unsure:
        verdict, decisive = "review", unsure[0]
    else:
        decisive = max(views, key=_score)
        verdict = decisive.verdict
    scores = [row.image_score for row in views if row.image_score is not None]
    highest = max(scores, default=None)
    return Part(group, verdict, len(views), len(scores), highest, decisive.path, decisive.reason)


def _score(row: Row) -> float:
    """The image score; -inf without one, so that any score is higher."""
    return -math.inf if row.image_score is None else row.image_score


def csv_header(kind: type[DataclassInstance]) -> str:
    """The header line of a CSV table: the names of the dataclass's fields."""
    return csv_text([[field.name for field in fields(kind)]])


def csv_lines(rows: Iterable[DataclassInstance]) -> str:
    """Rows as lines of CSV; floats have all their digits."""
    return csv_text(asdict(row).values() for row in rows)


def as_jsonl(rows: Iterable[Row]) -> str:
    """Rows as one JSON object a line."""
    lines = (json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in rows)
    text = "".join(line + "\n" for line in lines)
    # A file name that isn't UTF-8 becomes JSON's own escapes.
    return text.encode("utf-8", "backslashreplace").decode()


_UNUSABLE = ("unreadable", "unsupported", "failed")
_VERDICTS = {"good": "good", "review": "to review", "reject": "rejected"}


class Tally:
    """Numbers of a run's images by status and by verdict.

    Attributes:
        counts: number of images by status and by verdict.
        learned: number of images that the model was trained on.
        flagged: numbers of new images by verdict: True for review or reject, False for good.
            Images with a reason aren't counted: they are flagged whatever their score, so they
            say nothing of the thresholds' promise.
    """

    def __init__(self, model: Model, rows: Iterable[Row] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self.flagged: Counter[bool] = Counter()
        self.learned = 0
        self._known = learned_by(model)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Count one more image."""
        self.counts.update((row.status, row.verdict))
        if row.image_sha256 in self._known:
            self.learned += 1
        elif row.verdict and not row.reason:
            self.flagged[row.verdict != "good"] += 1

    @property
    def images(self) -> int:
        """Number of images, scored or not."""
        return sum(self.counts[status] for status in ("ok", *_UNUSABLE))

    @property
    def exit_code(self) -> int:
        """0 if all images were scored (or there are none), 3 if some were, 2 if none was."""
        scored = self.counts["ok"]
        return 0 if scored == self.images else 3 if scored else 2

    def line(self, images: int | None = None) -> str:
        """A line with the number of images scored, and of each verdict.

        Args:
            images: number of images in the run, if not all have a row.
        """
        counts = self.counts
        summary = f"{counts['ok']} of {self.images if images is None else images} images scored"
        verdicts = ""
        if any(counts[verdict] for verdict in _VERDICTS):
            verdicts = ", ".join(f"{counts[verdict]} {word}" for verdict, word in _VERDICTS.items())
        elif counts["ok"]:
            verdicts = "no verdicts, because the model has no thresholds"
        unusable = [f"{counts[status]} {status}" for status in _UNUSABLE if counts[status]]
        outcomes = ", ".join([word for word in (verdicts, *unusable) if word])
        return f"{summary}: {outcomes}" if outcomes else summary


def learned_by(model: Model) -> frozenset[str]:
    """SHA-256 of each of a model's training images."""
    return frozenset(model.manifest["training_images"].values())


@dataclass(frozen=True)
class Outputs:
    """The output folder of a run, and the kinds of files written there.

    Attributes:
        folder: the output folder.
        kinds: values of `--write`: `heatmaps` or `flagged-heatmaps` (only of images that aren't
            good), `page` (results.html), `masks` (marked areas as PNG), `regions` (regions.csv)
            and `maps` (anomaly maps as TIFF).
    """

    folder: Path
    kinds: Set[str] = frozenset({"heatmaps", "page"})

    @property
    def tables(self) -> list[str]:
        """File names of the tables with a row for each image or region."""
        return [RESULTS, LINES, *([REGIONS] if "regions" in self.kinds else [])]

    def begin(self, *, watch: bool, resume: bool, overwrite: bool) -> bool:
        """Make the folder, and check that a run can use it; deletes a killed run's drafts only.

        Args:
            watch: the run follows folders instead of scoring a list of files.
            resume: continue the earlier run in the folder.
            overwrite: allow `clear` to delete an earlier run.

        Returns:
            True if `resume` is set and the earlier run over a list of files is complete already.

        Raises:
            OutputError: it holds a run and neither `resume` nor `overwrite` is set, or without
                `overwrite` one of the other kind; or it can't be written to.
        """
        # A finished run has deleted its journal, so either file means an interrupted one.
        unfinished, watched = ((self.folder / name).exists() for name in (JOURNAL, WATCHED))
        same_kind, other_kind = (watched, unfinished) if watch else (unfinished, watched)
        if other_kind and not overwrite:
            option = "without --watch" if watch else "with --watch"
            raise OutputError(
                f"{self.folder} holds an interrupted run {option}; resume it {option}, give "
                "another --output, or add --overwrite to start again"
            )
        if same_kind and not (resume or overwrite):
            raise OutputError(
                f"{self.folder} holds an earlier run; add --resume to continue it, --overwrite to "
                "start again, or give another --output"
            )
        complete = not (watch or same_kind) and resume and (self.folder / RESULTS).exists()
        continues = resume and (same_kind or complete)
        claim(self.folder, () if continues else INFER, overwrite=overwrite)
        remove_drafts(self.folder, FOLDERS)
        return complete

    def clear(self, model: Model) -> None:
        """Delete an earlier run's files, unless `picture_writer` raises."""
        self.picture_writer(model)  # a refused run mustn't cost the earlier results
        clear(self.folder, INFER)

    def about(self, model: Model, inputs: Mapping[str, object]) -> dict[str, object]:
        """Facts that a run's rows depend on, `inputs` too; it is resumed with the same only."""
        outputs = sorted(self.kinds - {"page"})  # no row depends on the page
        return {**inputs, **about_model(model), "set of outputs": outputs}

    def picture_writer(self, model: Model, small: int = 0) -> PictureWriter:
        """The run's writer of pictures; a small heatmap has at most `small` pixels.

        Raises:
            OutputError: the model has no thresholds, which some pictures need.
        """
        needing = self.kinds & {"flagged-heatmaps", "masks", "regions"}
        if needing and model.thresholds is None:
            raise OutputError(
                f"--write {' '.join(sorted(needing))}: the model has no thresholds; train it "
                "without --no-calibrate"
            )
        return PictureWriter.of(model, small, self.folder)

    def pictures_of(self, verdict: str) -> Set[str]:
        """Kinds of pictures to draw of an image, by its verdict; an empty one counts as not good.

        Returns:
            Any of `heatmap`, `small` (a small heatmap), `mask`, `regions` and `maps`.
        """
        kinds = self.kinds & {"regions", "maps"}
        if "masks" in self.kinds:
            kinds |= {"mask"}
        if "heatmaps" in self.kinds or ("flagged-heatmaps" in self.kinds and verdict != "good"):
            kinds |= {"heatmap", "small"} if "page" in self.kinds else {"heatmap"}
        return kinds

    def holds_picture(self, name: str) -> bool:
        """True if the output folder holds a heatmap, mask or map of this name (`….png`)."""
        map_name = PurePosixPath(name).with_suffix(".tiff")
        files = (HEATMAPS, name), (MASKS, name), (MAPS, map_name)
        return any((self.folder / place / file).exists() for place, file in files)


def about_model(model: Model) -> dict[str, object]:
    """Facts that scores depend on: model, software version, device, engine and precision."""
    return {
        "model": model.model_id,
        "software version": __version__,
        "device": str(model.device),
        "engine": model.extractor.engine,
        "precision": model.extractor.precision,
    }


@dataclass(frozen=True)
class Pictures:
    """The pictures and regions of one image that weren't written to files.

    Attributes:
        heatmap: the heatmap as PNG; empty if it isn't wanted or was written to a file.
        mask: the mask as PNG; empty if it isn't wanted or was written to a file.
        regions: the marked regions; empty if they aren't wanted.
        small: a small copy of the heatmap; None if it isn't wanted.
    """

    heatmap: bytes = b""
    mask: bytes = b""
    regions: tuple[MarkedRegion, ...] = ()
    small: Thumbnail | None = None


@dataclass(frozen=True)
class PictureWriter:
    """Draws an image's pictures, into files or as bytes.

    A heatmap as bytes has the image's size; in a file, at most twice the network input's size.

    Attributes:
        limit: the anomaly map's value where marking starts; None for a model without thresholds:
            the image's own highest patch score.
        review: a lower value, where a heatmap's fainter outline starts; None for none.
        small: most pixels of a small heatmap.
        output: parent of the folders of heatmaps, masks and maps; None to return the bytes.
    """

    limit: float | None = None
    review: float | None = None
    small: int = 0
    output: Path | None = None

    @classmethod
    def of(cls, model: Model, small: int, output: Path | None = None) -> PictureWriter:
        """The writer of a model's pictures."""
        limits = model.thresholds
        if limits is None:
            return cls(small=small, output=output)
        return cls(limits.pixel, limits.review_pixel, small, output)

    def write(
        self,
        image: Image,
        anomaly_map: SourceMap,
        kinds: Set[str],
        name: str = "",
        verdict: str = "",
    ) -> Pictures:
        """Draw one image's pictures, and return those that aren't written to files.

        Args:
            image: the decoded file.
            anomaly_map: the image's anomaly map.
            kinds: the pictures to draw, as from `Outputs.pictures_of`.
            name: path of the pictures inside the folders of heatmaps, masks and maps.
            verdict: the image's verdict; a rejected image's heatmap outlines its peak at least.

        Raises:
            OutputError: the disk is full or not writable.
        """
        mask, regions = b"", tuple[MarkedRegion, ...]()
        limit = float(np.nanmax(anomaly_map.scores)) if self.limit is None else self.limit
        # The whole map is computed once; for a heatmap in a file a reduced map is enough.
        if self.output is None or kinds - {"heatmap", "small"}:
            anomaly_map = anomaly_map.held()
        # A separate method frees a large image's picture before the mask is encoded.
        heatmap, small = self._heatmap(image, anomaly_map, limit, kinds, name, verdict)
        if "maps" in kinds:
            tiff = str(PurePosixPath(name).with_suffix(".tiff"))
            self._put(MAPS, tiff, encode_float32(anomaly_map()))
        if kinds & {"mask", "regions"}:
            marked = predicted_mask(anomaly_map, limit)
            if "mask" in kinds:
                mask = self._put(MASKS, name, encode_png(marked))
            if "regions" in kinds:
                regions = marked_regions(marked, anomaly_map)
        return Pictures(heatmap, mask, regions, small)

    def _heatmap(
        self,
        image: Image,
        anomaly_map: SourceMap,
        limit: float,
        kinds: Set[str],
        name: str,
        verdict: str,
    ) -> tuple[bytes, Thumbnail | None]:
        """The heatmap as PNG, empty if unwanted or written to a file; its small copy, or None."""
        if not kinds & {"heatmap", "small"}:
            return b"", None
        anomaly_map = (anomaly_map if self.output is None else anomaly_map.shrunk()).held()
        image = shrunk(image, anomaly_map.view.source)
        picture = heatmap(image, anomaly_map, limit, self.review, rejected=verdict == "reject")
        png = self._put(HEATMAPS, name, encode_png(picture)) if "heatmap" in kinds else b""
        return png, thumbnail(picture, self.small) if "small" in kinds else None

    def _put(self, folder: str, name: str, data: bytes) -> bytes:
        """Write a file and return nothing, or return its bytes if there is no output folder."""
        if self.output is None:
            return data
        write(self.output / folder / name, data)
        return b""
