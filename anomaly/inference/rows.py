"""Rows of results: for each image, each marked region and each part."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from anomaly.files.tables import csv_text
from anomaly.imaging.loading import UnusableImage
from anomaly.maps.anomaly_map import MarkedRegion
from anomaly.runtime import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from anomaly.scoring.model import Model
    from anomaly.scoring.prediction import Prediction


@dataclass(frozen=True)
class Row:
    """One image's line in results.csv and results.jsonl; the fields are the columns, in order.

    Attributes:
        path: the file's path.
        image_sha256: of the file's bytes; empty where they couldn't be read.
        status: `ok`, `unreadable`, `unsupported`, or `failed` when the file took the processes down
            that tried to decode it, or when its score isn't a finite number.
        image_score: higher is more anomalous; None unless `ok`.
        calibrated_score: how rare such a score is among good parts, in powers of ten; None
            without a score or a threshold.
        review_threshold: a higher score needs a second look; None where the model has none.
        threshold: a higher score is rejected; None where the model has none.
        verdict: `good`, `review` (a person has to look) or `reject`; empty without a score or a
            threshold.
        heatmap: picture, relative to the output folder; empty where there is none.
        model_id: the model that scored it.
        software_version: of this program.
        threshold_label: how the thresholds were found: `calibrated` or `by hand`.
        reason: why there is no score, or why the part isn't good whatever its score.
        model_name: the model's name in its config.
        time: when it was scored, in UTC (ISO 8601).
        milliseconds: from reading the file until its pictures were on disk, including waiting for
            its batch.
        engine: that computed: `torch`, or the engine that the model was exported for.
        group: the part that the image shows; empty where unknown.
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

    Args:
        result: its prediction, or why it is unusable.
        model: that scored it.
        path: the image's path in the row.
        begun: start of its scoring, by `time.perf_counter`.
        heatmap: picture, relative to the output folder; empty where there is none.
        group: the part that the image shows; empty where unknown.
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
class RegionRow:
    """A marked region's line in regions.csv; the fields are the columns, in order.

    Attributes:
        path: the image, as in results.csv.
        region: 1 for the one with the image's highest peak, and so on.
        x: the bounding box's first column in original pixels.
        y: its first row.
        width: of the bounding box, in original pixels.
        height: of the bounding box, in original pixels.
        area: marked pixels.
        peak_score: the anomaly map's highest value in it.
        peak_x: column of that pixel.
        peak_y: row of that pixel.
        width_uncertainty: a patch's width in original pixels: the width is about as uncertain.
        height_uncertainty: likewise.
        width_mm: of the bounding box; None where the model doesn't know `image.mm_per_pixel`.
        height_mm: of the bounding box, or None.
        area_mm2: of the marked pixels, or None.
        width_uncertainty_mm: as `width_uncertainty`, or None.
        height_uncertainty_mm: as `height_uncertainty`, or None.
        length: longer side of the narrowest rotated box around it, in pixels.
        thickness: that box's shorter side.
    """

    path: str
    region: int
    x: int
    y: int
    width: int
    height: int
    area: int
    peak_score: float
    peak_x: int
    peak_y: int
    width_uncertainty: float
    height_uncertainty: float
    width_mm: float | None
    height_mm: float | None
    area_mm2: float | None
    width_uncertainty_mm: float | None
    height_uncertainty_mm: float | None
    length: float
    thickness: float


def region_rows(
    path: str, regions: Iterable[MarkedRegion], mm_per_pixel: float | None
) -> list[RegionRow]:
    """The lines of one image."""

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
        group: the part.
        verdict: `reject` where any view is, else `review` where any view is for review or has no
            score, else `good`; empty where the model has no threshold.
        views: how many images it has.
        scored: how many of them have a score.
        image_score: the highest of its views; None without any.
        path: the view that decides: the rejected one with the highest score, else the first one
            for review, else the one with the highest score.
        reason: that view's; empty where it has none.
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
        rows: one for each image.
        groups: the part of each image, by its path; images without one are left out.
    """
    views: dict[str, list[Row]] = {}
    for row in rows:
        if row.path in groups:
            views.setdefault(groups[row.path], []).append(row)
    expected = Counter(groups.values())
    return [_judge(g, views[g]) for g in sorted(views) if len(views[g]) == expected[g]]


def _judge(group: str, views: Sequence[Row]) -> Part:
    rejected = [row for row in views if row.verdict == "reject"]
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
    return -math.inf if row.image_score is None else row.image_score


def as_csv(rows: Iterable[DataclassInstance], kind: type[DataclassInstance]) -> str:
    """Rows of one kind as CSV with a header; floats have all their digits."""
    return csv_header(kind) + csv_lines(rows)


def csv_header(kind: type[DataclassInstance]) -> str:
    """The header line of column names."""
    return csv_text([[field.name for field in fields(kind)]])


def csv_lines(rows: Iterable[DataclassInstance]) -> str:
    """The other lines."""
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
        counts: by status and by verdict.
        learned: images that the model was trained on.
        flagged: of new images without a reason for review, whether they aren't called good. What
            is flagged whatever its score says nothing of the promise.

    Args:
        model: scores the images.
        rows: of images, to begin with.
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
        """0 if all images were scored, 3 if some were, 2 if none was."""
        scored = self.counts["ok"]
        return 0 if scored == self.images else 3 if scored else 2

    def line(self, images: int | None = None) -> str:
        """A line on how many images were scored, with which verdicts.

        Args:
            images: number of images, if not all have a row.
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
    """sha256 of a model's training images."""
    return frozenset(model.manifest["training_images"].values())
